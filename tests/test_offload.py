"""What offloading and gloo on GPUs do, made visible on the CPU; `tests/gpu` runs the real thing."""

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_fsdp_toy.sharding import fully_shard, get_root, mesh
from lightning_fsdp_toy.sharding.groups import backend_for, timeout_of
from lightning_fsdp_toy.sharding.transports.native import NativeTransport
from lightning_fsdp_toy.sharding.transports.pairwise import StagedTransport
from tests.core_helpers import (
    Stack,
    assert_equal,
    full_parameters,
    make_batches,
    mse_loss,
    train_reference,
    train_sharded,
)
from tests.ranks import run_ranks


def _train(options, is_staged):
    if is_staged:
        mesh.PairwiseTransport = StagedTransport
    torch.manual_seed(0)
    return train_sharded(Stack(), make_batches(12), 4, "adamw", **options)


@pytest.mark.parametrize("sharding_strategy", ["FULL_SHARD", "NO_SHARD"])
def test_messages_by_way_of_cpu_memory_change_no_bit(sharding_strategy):
    options = {"sharding_strategy": sharding_strategy}
    expected = run_ranks(_train, 2, options, False)[0]
    for actual in run_ranks(_train, 2, options, True):
        assert_equal(actual, expected)


class LateCopies(TorchDispatchMode):
    """Lets what is copied to gradient shards without waiting arrive at `synchronize` only."""

    def __init__(self, root):
        super().__init__()
        self.root = root
        self.late = []
        self.num_copies = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default and len(args) == 3 and args[2]:
            shards = [flat.gradient._reduced for flat in self.root.flats]
            if any(s is not None and s.data_ptr() == args[0].data_ptr() for s in shards):
                self.late.append((args[0], args[1].clone()))
                self.num_copies += 1
                return args[0]
            self.synchronize()  # the device does one after the other
        return func(*args, **(kwargs or {}))

    def synchronize(self, _device=None):
        late, self.late = self.late, []
        for target, source in late:
            target.copy_(source)


def _train_offloaded(options):
    torch.manual_seed(0)
    model = fully_shard(Stack(), **options)
    root = get_root(model)
    for flat in root.flats:
        flat.gradient.is_offloaded = True  # as if buffers were on a GPU
    copies = LateCopies(root)
    torch.cuda.synchronize = copies.synchronize
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    batches = make_batches(12)[dist.get_rank() :: 2]
    for step in range(3):
        for batch in batches[2 * step : 2 * step + 2]:
            with copies:
                (mse_loss(model, batch) / 2).backward()
        assert not copies.late
        optimizer.step()
        optimizer.zero_grad()
    assert copies.num_copies == 6 * len(list(root.flats))
    assert root.memory.held["reduce"] == root.memory.held["gradients"] == 0
    return full_parameters(model)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sharding_strategy": "NO_SHARD"},
        {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 1)},
    ],
)
def test_offloaded_gradients_have_arrived_when_the_optimizer_steps(options):
    torch.manual_seed(0)
    expected = train_reference(Stack(), make_batches(12), 4, "adamw")
    for actual in run_ranks(_train_offloaded, 2, options):
        assert_equal(actual, expected)


def _groups():
    world = dist.group.WORLD
    only_cpu = dist.new_group(backend="cpu:gloo")
    with pytest.raises(ValueError, match=r"'cuda', whose memory .*\(cpu:gloo\) does not move"):
        mesh.make_transport("auto", only_cpu, torch.device("cuda", 0), None)
    kind = type(mesh.make_transport("auto", world, torch.device("cuda", 0), None))
    with pytest.raises(ValueError, match="`transport='pairwise'` needs the gloo backend"):
        mesh.backend_for = lambda group, device_type: "nccl"
        mesh.make_transport("pairwise", world, torch.device("cuda", 0), None)
    return kind, [backend_for(world, "cuda"), backend_for(only_cpu, "cuda")], timeout_of(only_cpu)


def test_transports_follow_what_the_process_group_can_move():
    for kind, backends, timeout in run_ranks(_groups, 2):
        assert kind is StagedTransport and not issubclass(kind, NativeTransport)
        assert backends == ["gloo", None]
        assert timeout.total_seconds() > 0
