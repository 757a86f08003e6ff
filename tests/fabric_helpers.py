"""Fabric on given ranks, and the loop that is compared with one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import nn

from lightning_fsdp_toy import ToyFSDPFabricStrategy
from tests.core_helpers import mse_loss


def make_fabric(strategy: Any = "toy_fsdp", precision: Any = None, **options: Any) -> Fabric:
    """A launched Fabric on the ranks of the default group; options go to `toy_fsdp`."""
    if options:
        strategy = ToyFSDPFabricStrategy(**options)
    fabric = Fabric(
        accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, precision=precision
    )
    fabric.launch()
    return fabric


def train(
    fabric: Fabric,
    model: Any,
    optimizer: Any,
    batches: list[Any],
    per_step: int,
    sync_last_only: bool = False,
    before_step: Callable[[], Any] = lambda: None,
) -> None:
    """Micro-batch m belongs to rank m % world size; gradients of a step are averaged."""
    accumulation = per_step // fabric.world_size
    mine = batches[fabric.global_rank :: fabric.world_size]
    for index, batch in enumerate(mine, start=1):
        is_last = index % accumulation == 0
        context: AbstractContextManager[None] = nullcontext()
        if sync_last_only:
            context = fabric.no_backward_sync(model, enabled=not is_last)
        with context:
            fabric.backward(mse_loss(model, batch) / accumulation)
        if is_last:
            before_step()
            optimizer.step()
            optimizer.zero_grad()


def whole(fabric: Fabric, model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole parameters by name, on every rank."""
    with fabric.strategy.unsharded(model):
        return {name: p.detach().clone() for name, p in model.module.named_parameters()}
