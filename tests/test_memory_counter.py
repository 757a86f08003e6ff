"""The core's count of bytes: windows of peaks, activations."""

import pytest
import torch
from torch import nn

from lightning_fsdp_toy.models import GPT
from lightning_fsdp_toy.sharding import fully_shard, get_root
from lightning_fsdp_toy.sharding.memory import MemoryCounter, SavedBytes
from tests.ranks import run_ranks


def test_windows_keep_their_own_peaks():
    counter = MemoryCounter()
    first = counter.open_window()
    counter.add("unsharded", 100)
    second = counter.open_window()
    counter.add("unsharded", -60)
    counter.add("reduce", 30)
    assert (first.by_kind["unsharded"], first.by_kind["reduce"]) == (100, 30)
    assert first.total_bytes == 100
    assert second.by_kind["unsharded"] == 100  # held when it began
    second.restart()
    counter.add("reduce", -30)
    counter.add("reduce", 20)
    assert (second.by_kind["unsharded"], second.by_kind["reduce"]) == (40, 30)
    assert second.total_bytes == 70
    assert second.at_peak["reduce"] == 30
    counter.close_window(second)
    counter.add("gradients", 1000)
    assert second.total_bytes == 70
    assert first.total_bytes == 1060


def test_memory_saved_twice_counts_once_until_both_are_gone():
    counter = MemoryCounter()
    saved = SavedBytes(counter)
    for ptr, num_bytes in ((1, 10), (1, 10), (2, 5)):
        saved.hold(ptr, num_bytes)
    assert counter.held["activations"] == 15
    saved.free(1)
    assert counter.held["activations"] == 15
    saved.free(1)
    assert counter.held["activations"] == 5
    saved.free(2)
    assert counter.held["activations"] == 0


def _activations():
    torch.manual_seed(0)
    model = GPT(vocab_size=17, d_model=32, nhead=2, num_layers=2, max_seq_len=16, dropout=0.0)
    tokens = torch.randint(0, 17, (2, 16))
    plain = []

    def pack(tensor):
        plain.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(tokens).logsumexp(-1).sum()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in plain}
    expected = sum(size for ptr, size in storages.items() if ptr not in weights)
    plain.clear()
    del loss
    module = nn.Sequential(model, _Loss())
    fully_shard(module)
    memory = get_root(module).memory
    assert memory.held["activations"] == 0
    module(tokens)
    assert memory.held["activations"] == 0  # nobody asked
    memory.counts_activations = True
    window = memory.open_window()
    loss = module(tokens)
    held = memory.held["activations"]
    loss.backward()
    return expected, held, window.by_kind["activations"], memory.held["activations"]


class _Loss(nn.Module):
    def forward(self, logits):
        return logits.logsumexp(-1).sum()


@pytest.mark.parametrize("world_size", [1, 2])
def test_activations_are_what_autograd_saves(world_size):
    for expected, held, peak, after in run_ranks(_activations, world_size):
        assert held == peak == expected > 0
        assert after == 0


def _forward_without_backward():
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    fully_shard(module)
    memory = get_root(module).memory
    memory.counts_activations = True
    for _ in range(3):
        out = module(torch.ones(4, 8))
    held = memory.held["activations"]
    del out
    return held, memory.held["activations"]


def test_activations_of_a_forward_that_nobody_keeps_are_given_back():
    for held, after in run_ranks(_forward_without_backward, 2):
        assert held > 0
        assert after == 0
