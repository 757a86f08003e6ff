"""Units that return views of their weights."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

from lightning_fsdp_toy.sharding import MixedPrecisionPolicy, fully_shard, get_root, unsharded
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


def _numpy_shares_memory(options):
    torch.manual_seed(0)
    model = _WithPositions()
    reference = copy.deepcopy(model)
    fully_shard(model, **options)
    root = get_root(model)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, reference)]
    x, kept = torch.randn(2, 4, 5), []
    for is_inference in (False, True, False):
        with torch.inference_mode(is_inference), unsharded(model):
            arrays = {name: param.detach().numpy() for name, param in model.named_parameters()}
        kept += [(array, array.copy()) for array in arrays.values()]
        for name, param in reference.named_parameters():
            torch.testing.assert_close(torch.from_numpy(arrays[name]), param.detach())
        assert root.memory.held["unsharded"] == 0
        for flat in root.flats:
            assert flat.master.tensor.untyped_storage().nbytes() == 0
            faces = [original.unsharded for original in flat.originals]
            assert all(face.untyped_storage().nbytes() == 0 for face in faces)
        for each, optimizer in zip((model, reference), optimizers, strict=True):
            each(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all((array == before).all() for array, before in kept)  # training does not reach them


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_numpy_may_share_the_memory_of_whole_weights(dtype):
    run_ranks(_numpy_shares_memory, 2, {"mixed_precision": MixedPrecisionPolicy(param_dtype=dtype)})
