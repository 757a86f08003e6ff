"""Row d: Lightning's stock DDP, and DDP under a communication hook that adds in rank order."""

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

__all__ = ["OrderedDDPStrategy", "add_in_rank_order"]


def add_in_rank_order(_state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket: every rank's gradients times 1/N, added as rank 0, 1, 2, ..."""
    world_size = dist.get_world_size()
    mine = bucket.buffer() * (1.0 / world_size)
    gathered = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(gathered, mine)
    total, *others = gathered
    for other in others:
        total.add_(other)
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(total)
    return future


class OrderedDDPStrategy(DDPStrategy):
    """DDP that adds in rank order. Lightning itself registers hooks on GPUs only."""

    @override
    def _register_ddp_hooks(self) -> None:
        assert isinstance(self.model, DistributedDataParallel)
        self.model.register_comm_hook(None, add_in_rank_order)
