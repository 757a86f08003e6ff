"""The ledger: what is recorded of every collective, and totals that equal the formulas."""

import time

import pytest
import torch
import torch.distributed as dist

from lightning_fsdp_toy.models import GPT
from lightning_fsdp_toy.planner import read_sizes
from lightning_fsdp_toy.sharding import MixedPrecisionPolicy, fully_shard, get_root, no_sync
from tests.core_helpers import Stack, make_batches, mse_loss
from tests.ranks import run_ranks

OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce")


def _train(model, options, micro_batches=1, last_only=False, steps=3):
    """Return bytes by operation of the last step, and what the formulas say of it."""
    fully_shard(model, **options)
    root = get_root(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = make_batches(micro_batches, seed=dist.get_rank())
    for _ in range(steps):
        root.ledger.reset()
        for number, batch in enumerate(batches):
            if last_only and number < micro_batches - 1:
                with no_sync(model):
                    mse_loss(model, batch).backward()
            else:
                mse_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    counted = root.ledger.bytes_by_operation()
    planned = read_sizes(root).sent_bytes(micro_batches, 1 if last_only else micro_batches)
    return {name: counted.get(name, 0) for name in OPERATIONS}, planned


def _all_cases(micro_batches, last_only):
    results = {}
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        for policy in ("auto", None, ["Linear"]):
            for precision in (None, torch.bfloat16) if policy == "auto" else (None,):
                options = {
                    "sharding_strategy": strategy,
                    "auto_wrap_policy": policy,
                    "mixed_precision": MixedPrecisionPolicy(param_dtype=precision),
                }
                case = _train(Stack(), options, micro_batches, last_only)
                results[strategy, str(policy), str(precision)] = case
    return results


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batches, last_only", [(1, False), (3, False), (3, True)])
def test_bytes_are_those_of_the_formulas(world_size, micro_batches, last_only):
    for results in run_ranks(_all_cases, world_size, micro_batches, last_only, timeout=90):
        for case, (counted, planned) in results.items():
            assert counted == planned, case
        if world_size > 1:
            assert results["FULL_SHARD", "auto", "None"][0]["all_gather"] > 0


def _hybrid():
    options = {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2)}
    return _train(Stack(), options)


def test_bytes_of_hybrid_shard_are_those_of_the_formulas():
    for counted, planned in run_ranks(_hybrid, 4):
        assert counted == planned
        assert min(counted.values()) > 0


def _records(transport):
    torch.manual_seed(0)
    model = GPT(vocab_size=17, d_model=16, nhead=2, num_layers=2, max_seq_len=8)
    fully_shard(model, transport=transport)
    root = get_root(model)
    tokens = torch.randint(0, 17, (2, 8))
    model(tokens).sum().backward()
    root.ledger.reset()
    before = time.perf_counter()
    model(tokens).sum().backward()
    after = time.perf_counter()
    sizes = {f.name: f.padded_numel for f in read_sizes(root).flats}
    return [tuple(r) for r in root.ledger.records], sizes, before, after


@pytest.mark.parametrize("transport", ["pairwise", "shared_memory"])
def test_every_collective_is_recorded_with_its_bytes_and_times(transport):
    for records, sizes, before, after in run_ranks(_records, 2, transport):
        gathers = [record for record in records if record[0] == "all_gather"]
        reductions = [record for record in records if record[0] == "reduce_scatter"]
        assert {record[1] for record in reductions} == set(sizes)
        assert len(gathers) == 2 * len(sizes) - 2  # root and last unit are gathered once
        for operation, unit, payload, sent, start, end, waited, wire in records:
            if operation in ("all_gather", "reduce_scatter"):
                assert payload == 4 * sizes[unit] == 2 * sent
                assert wire == (sent if transport == "pairwise" else 0)
            assert before <= start <= end <= after
            assert 0 <= waited <= end - start


def _slow_peer():
    """Rank 1 comes late to a collective: rank 0's wait is seen, and as whose."""
    model = Stack()
    fully_shard(model, num_prefetch=0)
    ledger = get_root(model).ledger
    ledger.reset()
    if dist.get_rank() == 1:
        model.blocks[1].register_forward_pre_hook(lambda *_: time.sleep(0.3), prepend=True)
    model(torch.ones(1, 5))
    waits = {unit: total.waited_s for (_, unit), total in ledger.totals().items()}
    return max(waits, key=lambda unit: waits[unit]), max(waits.values())


def test_waiting_for_a_late_rank_is_put_down_to_its_unit():
    (unit, waited), _ = run_ranks(_slow_peer, 2)
    assert unit == "blocks.1"
    assert waited > 0.1
