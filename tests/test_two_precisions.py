"""Mixed precision outside of plain steps: `unsharded` blocks, saved master weights, methods."""

import copy
import dataclasses

import pytest
import torch
from torch import Tensor, nn

from lightning_fsdp_toy.sharding import (
    MixedPrecisionPolicy,
    fully_shard,
    register_forward_method,
    unsharded,
)
from tests.core_helpers import Stack, full_gradients, full_parameters
from tests.ranks import run_ranks

BF16 = MixedPrecisionPolicy(param_dtype="bfloat16")


class Direct(nn.Module):
    """Uses a weight of its own after an inner module has run."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(5, 5)
        self.weight = nn.Parameter(torch.randn(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) @ self.weight

    def encode(self, x: Tensor) -> Tensor:
        return x @ self.weight


def _forward_in_block(make):
    torch.manual_seed(0)
    model = fully_shard(make(), mixed_precision=BF16)
    x = torch.randn(2, 5)
    before = model(x)
    with unsharded(model):
        inside = model(x)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        with torch.no_grad():
            next(model.parameters()).mul_(2)
        edited = model(x)
    assert torch.equal(inside, before)
    assert not torch.equal(edited, before)
    assert torch.equal(model(x), edited)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("make", [Direct, Stack])
def test_forward_inside_unsharded_computes_in_the_low_dtype(make, world_size):
    run_ranks(_forward_in_block, world_size, make)


def _backward_in_block(strategy):
    torch.manual_seed(0)
    model = Stack()
    reference = copy.deepcopy(model)
    fully_shard(model, mixed_precision=BF16, sharding_strategy=strategy)
    loss = model(torch.ones(2, 5)).sum()
    with unsharded(model):
        loss.backward()
        assert {p.dtype for p in model.parameters()} == {torch.float32}
    for name, value in full_parameters(model).items():  # not rounded to the low dtype
        assert torch.equal(value, reference.get_parameter(name)), name


@pytest.mark.parametrize(
    "world_size, strategy", [(1, "FULL_SHARD"), (2, "FULL_SHARD"), (2, "NO_SHARD")]
)
def test_a_backward_inside_unsharded_leaves_the_weights_as_they_are(world_size, strategy):
    run_ranks(_backward_in_block, world_size, strategy)


def _penalty(strategy):
    torch.manual_seed(0)
    model = Stack()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    fully_shard(model, mixed_precision=BF16, sharding_strategy=strategy)
    with unsharded(model):
        penalty = sum((p**2).sum() for p in model.parameters())
    (penalty + 0 * model(torch.ones(2, 5)).float().sum()).backward()
    for name, grad in full_gradients(model).items():
        assert torch.equal(grad, 2 * weights[name]), name


@pytest.mark.parametrize(
    "world_size, strategy", [(1, "FULL_SHARD"), (2, "FULL_SHARD"), (2, "NO_SHARD")]
)
def test_a_penalty_on_master_weights_survives_a_forward(world_size, strategy):
    run_ranks(_penalty, world_size, strategy)


def _method():
    model = fully_shard(Direct(), mixed_precision=BF16)
    register_forward_method(model, model, "encode")
    assert model.encode(torch.ones(2, 5)).dtype == torch.bfloat16


def test_arguments_of_registered_methods_are_cast():
    run_ranks(_method, 2)


@dataclasses.dataclass(frozen=True)
class _Example:
    x: torch.Tensor
    labels: torch.Tensor


class _Noting(nn.Module):
    """Puts losses in two precisions into a list that it is given, and counts in a dict."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(5, 5)

    def forward(self, example, losses, counts):
        assert example.x.dtype == self.lin.weight.dtype
        assert example.labels.dtype == torch.int64
        y = torch.tanh(self.lin(example.x))
        losses.append(y.square().mean())
        losses.append(y.float().square().mean())
        counts["calls"] = counts["calls"] + 1
        counts["last"] = y.detach()
        return dataclasses.replace(example, x=y)


def _notes():
    torch.manual_seed(0)
    model = nn.Module()
    model.blocks = nn.ModuleList(_Noting() for _ in range(3))
    reference = copy.deepcopy(model).bfloat16()
    fully_shard(model, mixed_precision=BF16)
    x = torch.randn(2, 5)
    for each, given in ((model, x), (reference, x.bfloat16())):
        example, counts = _Example(given, torch.zeros(2, dtype=torch.long)), {"calls": 0}
        losses = []
        for block in each.blocks:
            example = block(example, losses, counts=counts)
        assert len(losses) == 6
        assert counts["calls"] == 3 and torch.equal(counts["last"], example.x)
        sum(losses).backward()
    for name, grad in full_gradients(model).items():
        torch.testing.assert_close(grad, reference.get_parameter(name).grad.float())


@pytest.mark.parametrize("world_size", [1, 2])
def test_casting_copies_no_list_for_good_and_reaches_into_dataclasses(world_size):
    run_ranks(_notes, world_size)


def _normed():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    reference = copy.deepcopy(model).bfloat16()
    reference[1].float()
    fully_shard(model, mixed_precision=BF16)
    x = torch.randn(8, 5)
    for each, given in ((model, x), (reference, x.bfloat16())):
        each(given).sum().backward()
    assert torch.equal(model[1].running_var, reference[1].running_var)
    for name, grad in full_gradients(model).items():
        torch.testing.assert_close(grad, reference.get_parameter(name).grad.float())
    assert "forward" in model[1].__dict__


@pytest.mark.parametrize("world_size", [1, 2])
def test_batch_norms_see_fp32_beside_low_weights(world_size):
    run_ranks(_normed, world_size)
