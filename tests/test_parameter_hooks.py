"""Gradient hooks of the user on parameters, registered before and after sharding."""

import copy

import torch
import torch.distributed as dist

from lightning_fsdp_toy.sharding import build_optimizer, fully_shard, get_root
from lightning_fsdp_toy.sharding.whole import restore
from tests.core_helpers import Stack, assert_equal, full_gradients, full_parameters
from tests.ranks import run_ranks


def _x():
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(dist.get_rank()))


def _hooks_move():
    torch.manual_seed(0)
    model = Stack()
    reference = copy.deepcopy(model)
    for module in (model, reference):
        module.inp.weight.register_hook(lambda grad: 3 * grad)
    fully_shard(model)
    for rank in range(2):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))
        (reference(x).sum() / 2).backward()
    model(_x()).sum().backward()
    assert torch.equal(full_gradients(model)["inp.weight"], reference.inp.weight.grad)


def test_hooks_on_parameters_move_with_them():
    run_ranks(_hooks_move, 2)


def _hooks_after_sharding():
    model = Stack()
    reference = copy.deepcopy(model)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for module in (model, reference):
        module.inp.weight.register_hook(lambda grad: 3 * grad)
        module.inp.weight.register_hook(lambda grad: 0 * grad).remove()
    for rank in range(2):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))
        (reference(x).sum() / 2).backward()
    model(_x()).sum().backward()
    assert torch.equal(full_gradients(model)["inp.weight"], reference.inp.weight.grad)
    torch.optim.SGD(reference.parameters(), lr=0.1).step()

    def step(param):  # a step in backward: no gradient lives longer than it must
        assert param.grad is not None and param.shape == param.grad.shape
        torch.optim.SGD([param], lr=0.1).step()
        param.grad = None

    optimizer.zero_grad()
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    model(_x()).sum().backward()
    assert get_root(model).memory.held["gradients"] == 0
    assert_equal(full_parameters(model), dict(reference.state_dict()))
    restore(get_root(model))
    (first,) = model.inp.weight._backward_hooks.values()
    assert torch.equal(first(torch.ones(2)), torch.full((2,), 3.0))
    assert len(model.inp.weight._post_accumulate_grad_hooks) == 1


def test_hooks_registered_after_sharding_are_called():
    run_ranks(_hooks_after_sharding, 2)


def _hooks_while_building():
    model = Stack()
    reference = copy.deepcopy(model)
    fully_shard(model)
    calls = []

    def make(module):
        module.inp.weight.register_hook(lambda grad: 3 * grad)
        module.inp.weight.register_post_accumulate_grad_hook(calls.append)
        return torch.optim.SGD(module.parameters(), lr=0.1)

    build_optimizer(model, make)
    make(reference)
    for module in (model, reference):
        module(torch.ones(2, 5)).sum().backward()
    assert torch.equal(full_gradients(model)["inp.weight"], reference.inp.weight.grad)
    assert [id(param) for param in calls] == [id(model.inp.weight), id(reference.inp.weight)]


def test_hooks_registered_where_the_optimizer_is_built_are_called():
    run_ranks(_hooks_while_building, 2)
