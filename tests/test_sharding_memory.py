"""What a rank holds and sends: counted from live tensors and from the ledger (C24, C04)."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_fsdp_toy.models import GPT
from lightning_fsdp_toy.sharding import fully_shard, get_root
from lightning_fsdp_toy.sharding.state_dict import full_model_state, full_optimizer_state
from tests.ranks import run_ranks

WIDTH, NUM_BLOCKS = 128, 6
BLOCK_BYTES = 4 * WIDTH * WIDTH


def live_bytes(at_least: int = 4 * WIDTH) -> int:
    """Bytes of all storages that Python tensors of at least `at_least` bytes hold."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if isinstance(thing, Tensor) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            if storage.nbytes() >= at_least:
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _live_bytes_over_a_step(sharding_strategy):
    blocks = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_BLOCKS)]
    model = nn.Sequential(*blocks)
    del blocks
    x = torch.randn(1, WIDTH)
    before = live_bytes() - NUM_BLOCKS * BLOCK_BYTES
    fully_shard(model, sharding_strategy=sharding_strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = {}
    model[3].register_forward_pre_hook(lambda *_: seen.update(mid_forward=live_bytes() - before))
    for _ in range(2):
        seen["rest"] = live_bytes() - before
        loss = model(x).sum()
        seen["end_of_forward"] = live_bytes() - before
        loss.backward()
        del loss
        seen["end_of_backward"] = live_bytes() - before
        optimizer.step()
        optimizer.zero_grad()
        seen["after_step"] = live_bytes() - before
    memory = get_root(model).memory
    seen["unsharded_peak"] = memory.unsharded_peak_bytes
    return {key: value / BLOCK_BYTES for key, value in seen.items()}


def test_full_shard_holds_a_quarter_and_one_or_two_blocks():
    for seen in run_ranks(_live_bytes_over_a_step, 4, "FULL_SHARD"):
        shards = NUM_BLOCKS / 4
        slack = 0.1  # activations
        assert seen["rest"] == pytest.approx(shards, abs=slack)
        assert seen["mid_forward"] == pytest.approx(shards + 1, abs=slack)
        assert seen["end_of_forward"] == pytest.approx(shards + 1, abs=slack)  # the last block
        assert seen["end_of_backward"] == pytest.approx(2 * shards, abs=slack)
        assert seen["after_step"] == pytest.approx(shards, abs=slack)
        assert seen["unsharded_peak"] == 1


def test_shard_grad_op_keeps_weights_until_backward():
    for seen in run_ranks(_live_bytes_over_a_step, 4, "SHARD_GRAD_OP"):
        shards = NUM_BLOCKS / 4
        assert seen["rest"] == pytest.approx(shards, abs=0.1)
        assert seen["end_of_forward"] == pytest.approx(shards + NUM_BLOCKS, abs=0.1)
        assert seen["end_of_backward"] == pytest.approx(2 * shards, abs=0.1)


def _gpt_bytes():
    before = live_bytes(1)
    model = GPT(vocab_size=65)
    whole = live_bytes(1) - before
    fully_shard(model)
    return whole, live_bytes(1) - before, get_root(model).memory.shards_bytes


@pytest.mark.parametrize("world_size", [2, 4])
def test_gpt_shards_are_a_world_sizeth(world_size):
    for whole, shards, counted in run_ranks(_gpt_bytes, world_size):
        assert round(whole / 1e6, 2) == 3.18
        assert shards == counted
        assert shards / whole == pytest.approx(1 / world_size, rel=0.01)
        if world_size == 2:
            assert round(shards / 1e6, 2) == 1.59


def _bytes_sent(sharding_strategy):
    model = GPT(vocab_size=65)
    model_bytes = 4 * sum(p.numel() for p in model.parameters())
    fully_shard(model, sharding_strategy=sharding_strategy)
    ledger = get_root(model).ledger
    for _ in range(2):
        ledger.reset()
        model(torch.zeros(1, 8, dtype=torch.int64)).sum().backward()
    sent = ledger.bytes_by_operation()
    control = sent.pop("control")
    assert control < 100
    return {operation: count / model_bytes for operation, count in sent.items()}


@pytest.mark.parametrize(
    ("sharding_strategy", "at_most"),
    [("FULL_SHARD", 1.52), ("SHARD_GRAD_OP", 1.02), ("NO_SHARD", 1.02)],
)
def test_bytes_sent_per_step_at_two_ranks(sharding_strategy, at_most):
    for sent in run_ranks(_bytes_sent, 2, sharding_strategy):
        assert sum(sent.values()) <= at_most
        if sharding_strategy == "NO_SHARD":
            assert sent.keys() == {"all_reduce"}
        else:
            assert sent["reduce_scatter"] == pytest.approx(0.5, rel=0.01)


def _state_does_not_alias():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    fully_shard(model, auto_wrap_policy=["Linear"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(2):
        model(torch.randn(4, 8)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            state = full_model_state(get_root(model))
            moments = full_optimizer_state(get_root(model), optimizer)
            kept = {key: value.clone() for key, value in state.items()}
            kept_moments = {
                (i, key): value.clone()
                for i, entry in moments.get("state", {}).items()
                for key, value in entry.items()
                if key != "step"
            }
    if dist.get_rank() > 0:
        assert state == {}
        assert moments == {}
        return
    for key, value in kept.items():
        assert torch.equal(state[key], value)
    for (index, key), value in kept_moments.items():
        assert torch.equal(moments["state"][index][key], value)


@pytest.mark.parametrize("world_size", [1, 2])
def test_gathered_state_does_not_change_when_training_goes_on(world_size):  # C04
    run_ranks(_state_does_not_alias, world_size)
