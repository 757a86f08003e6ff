"""Which forward passes are live, agreed by all ranks."""

import torch
import torch.distributed as dist
from torch import nn

from lightning_fsdp_toy.sharding import fully_shard
from tests.core_helpers import Stack, full_gradients
from tests.ranks import run_ranks


def _graph_held_on_one_rank():
    model = fully_shard(Stack(num_blocks=6))
    held = []
    for _ in range(20):
        loss = model(torch.ones(2, 5)).sum()  # an evaluation without `no_grad`
        if dist.get_rank() == 0:
            held.append(loss)  # for its log
        del loss
    model(torch.ones(2, 5)).sum().backward()


def test_a_graph_that_one_rank_holds_changes_no_order():
    run_ranks(_graph_held_on_one_rank, 2)


class _ByRank(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(6))

    def forward(self, x):
        for index, block in enumerate(self.blocks):
            y = block(x)
            x = x + (y if index % 2 == dist.get_rank() else y.detach())
        return x


def _retained_by_rank():
    torch.manual_seed(0)
    model = fully_shard(_ByRank())
    loss = model(torch.ones(2, 5, requires_grad=True)).sum()
    loss.backward(retain_graph=True)
    first = full_gradients(model)
    loss.backward()
    for name, grad in full_gradients(model).items():
        assert torch.equal(grad, 2 * first[name]), name


def test_a_second_backward_of_ranks_that_use_different_parameters():
    run_ranks(_retained_by_rank, 2)
