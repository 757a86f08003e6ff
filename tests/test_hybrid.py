"""HYBRID_SHARD: sharded inside groups of ranks, replicated across them."""

import pytest
import torch
import torch.distributed as dist

from lightning_fsdp_toy.sharding import full_state_dict, fully_shard, get_root
from tests.core_helpers import (
    Stack,
    assert_equal,
    make_batches,
    mse_loss,
    train_reference,
    train_sharded,
)
from tests.ranks import run_ranks


def _train(mesh, per_step, optimizer):
    torch.manual_seed(0)
    options = {"sharding_strategy": "HYBRID_SHARD", "device_mesh": mesh}
    return train_sharded(Stack(), make_batches(8), per_step, optimizer, **options)


@pytest.mark.parametrize("mesh", [(2, 2), (4, 1), (1, 4)])
def test_four_ranks_match_one_process(mesh):
    torch.manual_seed(0)
    expected = train_reference(Stack(), make_batches(8), 8, "sgd")
    results = run_ranks(_train, 4, mesh, 8, "sgd")
    for actual in results:
        assert_equal(actual, results[0])
        for name, value in expected.items():  # groups add before each other: rounding may differ
            torch.testing.assert_close(actual[name], value, rtol=1e-6, atol=1e-7)
    if mesh[0] * mesh[1] in mesh:  # one kind of group only: the same order of addition
        for actual in results:
            assert_equal(actual, expected)


def test_two_by_one_and_one_by_two_match_one_process_exactly():
    torch.manual_seed(0)
    expected = train_reference(Stack(), make_batches(8), 4, "adamw")
    for mesh in ((2, 1), (1, 2)):
        for actual in run_ranks(_train, 2, mesh, 4, "adamw"):
            assert_equal(actual, expected)


def _bytes():
    torch.manual_seed(0)
    model = fully_shard(Stack(num_blocks=4), sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2))
    root = get_root(model)
    for _ in range(2):
        root.ledger.reset()
        mse_loss(model, make_batches(1)[0]).backward()
    padded = {flat.name: flat.layout.padded_numel for flat in root.flats}
    sent = root.ledger.bytes_by_operation()
    return sent, padded, root.memory.held["shards"], len(full_state_dict(model))


def test_bytes_follow_the_formula_and_shards_are_half():
    for rank, (sent, padded, shards, num_tensors) in enumerate(run_ranks(_bytes, 4)):
        total = sum(padded.values())
        kept = padded["<root>"] + padded["blocks.3"]  # K: unsharded between forward and backward
        replicas, shards_of_group, b = 2, 2, 4
        inside = (shards_of_group - 1) / shards_of_group
        across = 2 * (replicas - 1) / replicas
        assert sent["all_gather"] == inside * (2 * total - kept) * b
        assert sent["reduce_scatter"] == inside * total * b
        assert sent["all_reduce"] == across * total / shards_of_group * b
        assert shards == total * b / 2
        assert num_tensors == (0 if rank else len(Stack(num_blocks=4).state_dict()))


def _default_mesh():
    model = fully_shard(Stack(), sharding_strategy="HYBRID_SHARD")
    mesh = get_root(model).mesh
    return mesh.shards.world_size, mesh.replicas is None, dist.get_world_size()


def test_without_a_mesh_a_shard_group_is_one_machine():
    assert run_ranks(_default_mesh, 2) == [(2, True, 2)] * 2
