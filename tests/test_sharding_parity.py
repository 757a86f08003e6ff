"""Sharded training gives the bits of one process that accumulates the same micro-batches."""

import pytest
import torch

from lightning_fsdp_toy.sharding import SHARDING_STRATEGIES
from tests.core_helpers import (
    OPTIMIZERS,
    Stack,
    assert_equal,
    make_batches,
    train_reference,
    train_sharded,
)
from tests.ranks import run_ranks


def _train(per_step, optimizer, options):
    torch.manual_seed(0)
    return train_sharded(Stack(), make_batches(12), per_step, optimizer, **options)


def _reference(per_step, optimizer):
    torch.manual_seed(0)
    return train_reference(Stack(), make_batches(12), per_step, optimizer)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_full_shard_gives_the_bits_of_one_process(world_size, optimizer):
    expected = _reference(4, optimizer)
    for actual in run_ranks(_train, world_size, 4, optimizer, {}):
        assert_equal(actual, expected)


@pytest.mark.parametrize("sharding_strategy", SHARDING_STRATEGIES)
@pytest.mark.parametrize("policy", ["auto", None, ["Block", "Linear"]])
def test_every_strategy_and_wrapping_gives_the_same_bits(sharding_strategy, policy):
    expected = _reference(4, "adamw")
    options = {"sharding_strategy": sharding_strategy, "auto_wrap_policy": policy}
    for actual in run_ranks(_train, 2, 4, "adamw", options):
        assert_equal(actual, expected)


@pytest.mark.parametrize("transport", ["native", "pairwise"])
def test_three_ranks_match_within_rounding(transport):
    expected = _reference(3, "sgd")
    for actual in run_ranks(_train, 3, 3, "sgd", {"transport": transport}):
        for name, value in expected.items():
            torch.testing.assert_close(actual[name], value, rtol=1e-5, atol=1e-6)
