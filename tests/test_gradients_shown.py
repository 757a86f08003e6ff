"""Modules show the pieces that hold gradients wherever a user may look for them."""

import copy

import pytest
import torch
import torch.distributed as dist

from lightning_fsdp_toy.sharding import fully_shard
from tests.core_helpers import (
    Stack,
    assert_equal,
    full_gradients,
    full_parameters,
    make_batches,
    mse_loss,
)
from tests.ranks import run_ranks


def _x():
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(dist.get_rank()))


def _frozen_before_backward(options):
    model = Stack()
    reference = copy.deepcopy(model)
    fully_shard(model, **options)
    for each in (model, reference):
        loss = each(torch.ones(2, 5)).sum()
        each.blocks[1].requires_grad_(False)
        each.inp.weight.requires_grad_(False)
        loss.backward()
        each.requires_grad_(True)
    for name, grad in full_gradients(model).items():
        expected = reference.get_parameter(name).grad
        assert grad is expected is None or torch.equal(grad, expected), name


@pytest.mark.parametrize("options", [{}, {"sharding_strategy": "NO_SHARD"}], ids=str)
def test_freezing_between_forward_and_backward_drops_gradients(options):
    run_ranks(_frozen_before_backward, 2, options)


def _cleared_after_a_failed_backward():
    model = Stack()
    reference = copy.deepcopy(model)
    fully_shard(model)
    model(_x()).sum().backward()
    handle = model.inp.register_full_backward_hook(lambda *_: {}["fails"])
    with pytest.raises(KeyError):
        model(_x()).sum().backward()
    handle.remove()
    for param in model.parameters():  # as loops do that go on after an error
        param.grad = None
    model(torch.ones(2, 5)).sum().backward()
    reference(torch.ones(2, 5)).sum().backward()
    for name, grad in full_gradients(model).items():
        assert torch.equal(grad, reference.get_parameter(name).grad), name


def test_gradients_cleared_after_a_failed_backward_are_gone():
    run_ranks(_cleared_after_a_failed_backward, 2)


CLEARED = {  # between forward and backward, in ways that never ask the optimizer
    "module": lambda model: model.zero_grad(),
    "in place": lambda model: model.zero_grad(set_to_none=False),
    "submodules": lambda model: [sub.zero_grad() for sub in model.children()],
    "compiled": lambda model: torch.compile(model, backend="eager").zero_grad(),
    "loop": lambda model: [setattr(param, "grad", None) for param in model.parameters()],
}


def _train_with(model, clear, is_late):
    """Three steps; the optimizer may be built when a forward has already run."""
    batches = make_batches(3)
    if is_late:
        mse_loss(model, batches[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for batch in batches:
        loss = mse_loss(model, batch)
        clear(model)
        assert all(param.grad is None or not param.grad.any() for param in model.parameters())
        loss.backward()
        optimizer.step()


def _clear_between(how, is_late, options):
    model = Stack()
    reference = copy.deepcopy(model)
    _train_with(reference, CLEARED[how], is_late)
    _train_with(fully_shard(model, **options), CLEARED[how], is_late)
    assert_equal(full_parameters(model), dict(reference.named_parameters()))


@pytest.mark.parametrize("how", CLEARED)
def test_gradients_cleared_between_forward_and_backward_are_gone(how):
    run_ranks(_clear_between, 2, how, False, {})


@pytest.mark.parametrize(
    "options",
    [{}, {"auto_wrap_policy": None}]
    + [{"sharding_strategy": name} for name in ("SHARD_GRAD_OP", "NO_SHARD")]
    + [{"num_prefetch": 0}],
    ids=str,
)
def test_an_optimizer_built_after_a_forward_trains_every_parameter(options):
    run_ranks(_clear_between, 2, "module", True, options)
