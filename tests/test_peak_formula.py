"""The largest sum of live tensors in a step, against the closed form with measured activations."""

from __future__ import annotations

import gc
import mmap
import time

import pytest
import torch
from torch import nn

from lightning_fsdp_toy.models import GPT, Transformer
from lightning_fsdp_toy.monitors import count_tensor_bytes
from lightning_fsdp_toy.monitors.live_tensors import LiveTensors
from lightning_fsdp_toy.planner import read_sizes
from lightning_fsdp_toy.sharding import MixedPrecisionPolicy, fully_shard, get_root
from lightning_fsdp_toy.tasks.benchmark.peak import Phases
from tests.ranks import run_ranks

VOCABULARY, WIDTH, LAYERS, LENGTH = 64, 96, 4, 32
NETS = {
    "gpt": lambda: GPT(VOCABULARY, WIDTH, 4, LAYERS, LENGTH),
    # Its norms come last in a block: their gradients arrive before other weights are needed.
    "transformer": lambda: Transformer(VOCABULARY, WIDTH, 4, LAYERS, 4 * WIDTH),
}


class Loss(nn.Module):
    """The model with its loss, so that all operations are inside the root."""

    def __init__(self, net):
        super().__init__()
        self.net = NETS[net]()

    def forward(self, tokens):
        logits = self.net(tokens[:, :-1]).flatten(0, 1)
        return nn.functional.cross_entropy(logits.float(), tokens[:, 1:].flatten())


class Held(LiveTensors):
    """The core counts what it has made when the operation is over; all its buffers begin empty."""

    is_buffer = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.is_buffer = str(func).startswith(("aten.empty", "aten.new_empty"))
        return super().__torch_dispatch__(func, types, args, kwargs)


def _step(options, precision, batch_size, micro_batches=1, transport="pairwise", net="gpt"):
    """A rank's third step: bytes at rest, the largest sum, activations by phase, the sizes."""
    torch.manual_seed(0)
    model = Loss(net)
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, precision) if precision else None)
    fully_shard(model, mixed_precision=policy, transport=transport, **options)
    root = get_root(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    tokens = torch.randint(VOCABULARY, (batch_size, LENGTH + 1))

    def step():
        for _ in range(micro_batches):
            phases.phase = ("forward", 0)
            loss = model(tokens)
            loss.backward()
            del loss
        phases.phase = ("step", 0)
        optimizer.step()
        optimizer.zero_grad()

    is_serial = options.get("num_prefetch") == 0
    phases = Phases(root.memory, [unit.fqn for unit in root.units], is_serial)
    for _ in range(2):
        step()
    sizes = read_sizes(root)
    rest = count_tensor_bytes(model, [optimizer])
    num_params = len(list(model.parameters()))
    assert rest.parameters == sizes.shards_bytes
    assert rest.optimizer == sizes.optimizer_bytes(2, 4 * num_params)
    assert rest.gradients == 0
    peak, activations = 0, {}

    def look(live, is_before):
        nonlocal peak
        peak = max(peak, live)
        if not is_before and held.is_buffer:
            return
        known = root.memory.total_bytes + rest.optimizer
        before = activations.get(phases.phase, 0)
        activations[phases.phase] = max(before, live - known)

    state = [v for e in optimizer.state.values() for v in e.values() if isinstance(v, torch.Tensor)]
    known = [tokens, *(flat.shard for flat in root.flats), *state]
    root.observers.append(phases)
    held = Held(known, look)
    pool = getattr(root.mesh.shards, "pool", None)
    if pool is not None:
        held.follow(pool)
    with held:
        step()
    gc.collect()
    at_rest = held.bytes
    for _ in range(20):  # gloo's threads hold what ranks have agreed on for a moment longer
        time.sleep(0.02)
        at_rest = min(at_rest, held.bytes)
    at_rest -= tokens.untyped_storage().nbytes()  # what the step left, too
    return at_rest, peak, activations, sizes, rest.optimizer


OPTIONS = [
    {},
    {"num_prefetch": 0},
    {"auto_wrap_policy": None},
    {"sharding_strategy": "SHARD_GRAD_OP"},
    {"sharding_strategy": "NO_SHARD"},
]


@pytest.mark.parametrize("precision", [None, "bfloat16"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_peak_is_that_of_the_closed_form(options, precision):
    [(_, _, activations, _, _)] = run_ranks(_step, 1, options, precision, 2, timeout=60)
    for world_size in (2, 4):
        for at_rest, peak, _, sizes, optimizer in run_ranks(
            _step, world_size, options, precision, 2, timeout=60
        ):
            assert at_rest == sizes.shards_bytes + optimizer
            planned = sizes.peak_bytes(optimizer, activations)
            assert peak == pytest.approx(planned, rel=0.02)


@pytest.mark.parametrize("precision", [None, "bfloat16"])
@pytest.mark.parametrize("options", OPTIONS[:4], ids=str)
def test_peak_in_shared_memory_is_that_of_the_closed_form(options, precision):
    """What is held is the segment, as the kernel counts it, and what is outside it."""
    [(_, _, activations, _, _)] = run_ranks(_step, 1, options, precision, 2, timeout=60)
    args = options, precision, 2, 1, "shared_memory"
    for world_size in (2, 4):
        for at_rest, peak, _, sizes, optimizer in run_ranks(_step, world_size, *args, timeout=60):
            kept = sizes.shards_bytes + optimizer + sizes.pool_bytes
            assert kept <= at_rest <= kept + 50 * mmap.PAGESIZE  # whole pages, and cells
            planned = sizes.peak_bytes(optimizer, activations)
            assert peak == pytest.approx(planned, rel=0.02)


@pytest.mark.parametrize("transport", ["pairwise", "shared_memory"])
def test_peak_of_a_block_that_ends_with_a_norm(transport):
    args = {}, "bfloat16", 2, 1, transport, "transformer"
    [(_, _, activations, _, _)] = run_ranks(_step, 1, *args, timeout=60)
    for _, peak, _, sizes, optimizer in run_ranks(_step, 4, *args, timeout=60):
        assert peak == pytest.approx(sizes.peak_bytes(optimizer, activations), rel=0.02)


@pytest.mark.parametrize("precision", [None, "bfloat16"])
def test_peak_with_accumulation_is_that_of_the_closed_form(precision):
    [(_, _, activations, _, _)] = run_ranks(_step, 1, {}, precision, 2, 2, timeout=60)
    for _, peak, _, sizes, optimizer in run_ranks(_step, 2, {}, precision, 2, 2, timeout=60):
        planned = sizes.peak_bytes(optimizer, activations, accumulates=True)
        assert peak == pytest.approx(planned, rel=0.02)
        # Gradients of the first micro-batch live through the second.
        assert planned > sizes.peak_bytes(optimizer, activations)
