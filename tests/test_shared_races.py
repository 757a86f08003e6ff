"""Ranks that share memory and come to places late, in another order, or with other buffers."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_fsdp_toy.sharding import full_state_dict, fully_shard
from lightning_fsdp_toy.sharding.stalls import stall_detector
from lightning_fsdp_toy.sharding.transports import segment
from tests.ranks import run_ranks

WIDTH = 16


class Late(torch.autograd.Function):
    """Does something in backward."""

    @staticmethod
    def forward(ctx, x, act):
        ctx.act = act
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.act()
        return grad, None


class Block(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)
        self.in_forward = self.in_backward = lambda: None
        self.gets_gradients = True

    def forward(self, x):
        self.in_forward()
        with torch.set_grad_enabled(self.gets_gradients and torch.is_grad_enabled()):
            y = self.down(torch.tanh(self.up(x)))
        return x + Late.apply(y, lambda: self.in_backward())


class Chain(nn.Module):
    """Blocks, each called as often as `order` says, in re-entrant checkpoints if wanted."""

    def __init__(self, hidden, order, checkpoints=False):
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(size) for size in hidden)
        self.order, self.checkpoints = order, checkpoints

    def forward(self, x):
        x = self.inp(x)
        for index in self.order:
            block = self.blocks[index]
            x = checkpoint(block, x, use_reentrant=True) if self.checkpoints else block(x)
        return x


def train(model, steps, before_step=lambda number: None):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for number in range(steps):
        before_step(number)
        loss = model(torch.randn(8, WIDTH, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.tolist() for name, value in full_state_dict(model).items()}


def equals_pairwise(function, world_size, *args):
    expected = run_ranks(function, world_size, "pairwise", *args, timeout=60)
    assert run_ranks(function, world_size, "shared_memory", *args, timeout=60) == expected


def _unfreeze(transport, hidden, frozen):
    torch.manual_seed(0)
    model = Chain(hidden, range(len(hidden)))
    model.blocks[frozen].requires_grad_(False)
    fully_shard(model, transport=transport, auto_wrap_policy={Block})

    def before_step(number):
        model.blocks[frozen].requires_grad_(number >= 2)

    return train(model, 4, before_step)


@pytest.mark.parametrize(("hidden", "frozen"), [((8, 8, 256, 8), 2), ((256, 8, 8), 0)])
def test_a_unit_that_was_frozen_may_be_larger_than_all_that_were_not(hidden, frozen):
    equals_pairwise(_unfreeze, 2, hidden, frozen)


def _reduce_twice(transport):
    torch.manual_seed(0)
    model = Chain((32, 32), (0, 0, 0, 1), checkpoints=True)
    fully_shard(model, transport=transport, auto_wrap_policy={Block})
    rank, calls = dist.get_rank(), 0

    def in_forward():  # the two ranks take turns at being slow
        nonlocal calls
        calls += torch.is_grad_enabled()
        time.sleep(0.03 * (torch.is_grad_enabled() and (calls + rank) % 2 == 0))

    for block in model.blocks:
        block.in_forward = in_forward
    sleep = segment.Segment.sleep

    def wake_late(self, *args):
        sleep(self, *args)
        time.sleep(0.03)

    segment.Segment.sleep = wake_late
    return train(model, 5)


def test_a_unit_that_is_reduced_twice_in_a_backward_while_ranks_are_late():
    equals_pairwise(_reduce_twice, 2)


def _wait_for_a_slow_rank(transport):
    torch.manual_seed(0)
    model = Chain([16] * 5, range(5))
    fully_shard(model, transport=transport, auto_wrap_policy={Block}, num_prefetch=2)
    stall_detector().after_s = 0.3
    rank = dist.get_rank()
    model.blocks[2].gets_gradients = rank != 1

    def before_step(number):
        is_slow = number == 2 and rank == 2
        model.blocks[3].in_backward = lambda: time.sleep(2.0 * is_slow)

    return train(model, 4, before_step)


def test_a_slow_rank_is_waited_for_whoever_has_no_gradients():
    equals_pairwise(_wait_for_a_slow_rank, 3)
