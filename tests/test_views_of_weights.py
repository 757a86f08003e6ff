"""Units that return views of their weights."""

import copy
import dataclasses

import torch
from torch import nn

from lightning_fsdp_toy.sharding import fully_shard
from tests.core_helpers import full_gradients
from tests.ranks import run_ranks


@dataclasses.dataclass
class _Result:
    y: torch.Tensor
    codes: torch.Tensor
    parent: object = None


class _Quantizer(nn.Linear):
    def forward(self, x):
        result = _Result(super().forward(x), self.weight.t())
        result.parent = [result]
        return result


class _WithCodes(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(_Quantizer(5, 5) for _ in range(3))

    def forward(self, x):
        penalty = 0
        for block in self.blocks:
            result = block(x)
            x, penalty = result.y, penalty + result.codes.square().sum()
        return x.sum() + penalty


def _views_in_dataclasses():
    model = _WithCodes()
    reference = copy.deepcopy(model)
    fully_shard(model)
    for each in (model, reference):
        each(torch.ones(2, 5)).backward()
    for name, grad in full_gradients(model).items():
        torch.testing.assert_close(grad, reference.get_parameter(name).grad)


def test_units_may_return_views_of_their_weights_in_dataclasses():
    run_ranks(_views_in_dataclasses, 2)


class _Position(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, 8, 5))

    def forward(self, x):
        return self.weight[:, : x.shape[1]]


class _WithPositions(nn.Module):
    def __init__(self):
        super().__init__()
        self.positions = nn.ModuleList([_Position(), _Position()])
        self.lin = nn.Linear(5, 5)

    def forward(self, x):
        first, second = (position(x) for position in self.positions)
        return self.lin(x * first + second)


def _views_of_weights():
    torch.manual_seed(0)
    model = _WithPositions()
    reference = copy.deepcopy(model)
    fully_shard(model)
    x = torch.randn(2, 4, 5)
    with torch.no_grad():
        assert torch.equal(model(x), reference(x))
    model(x).sum().backward()
    reference(x).sum().backward()
    for name, grad in full_gradients(model).items():
        torch.testing.assert_close(grad, reference.get_parameter(name).grad)


def test_units_may_return_views_of_their_weights():
    run_ranks(_views_of_weights, 2)
