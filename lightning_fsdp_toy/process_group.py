"""The process group of a run: what a strategy does to it, under the Trainer and under Fabric."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment

# Lightning keeps these to itself, but every strategy of its own is built from them.
from lightning.fabric.utilities.distributed import (
    _all_gather_ddp_if_available,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_only as utils_rank_zero_only
from torch import Tensor

from lightning_fsdp_toy.sharding.stalls import stall_detector

__all__ = ["all_gather", "barrier", "broadcast", "connect", "reduce", "tell_rank", "waiting"]

T = TypeVar("T")


def tell_rank(
    environment: ClusterEnvironment, local_rank: int, num_processes: int, num_nodes: int
) -> None:
    """Tell the cluster environment and Lightning's rank-zero helpers which rank this is.

    Args:
        environment: its node rank counts, its global rank and world size are set.
        local_rank: of this process on its node.
        num_processes: ranks on each node.
        num_nodes: nodes.
    """
    environment.set_global_rank(environment.node_rank() * num_processes + local_rank)
    environment.set_world_size(num_nodes * num_processes)
    for helper in (rank_zero_only, utils_rank_zero_only):
        helper.rank = environment.global_rank()  # type: ignore[attr-defined]


def connect(
    environment: ClusterEnvironment, backend: str | None, device: torch.device, timeout: timedelta
) -> str:
    """Start the default process group, unless there is one, and return its backend.

    Args:
        environment: where the ranks meet.
        backend: ``gloo`` or ``nccl``; by device if None.
        device: of this rank.
        timeout: longest wait for another rank, in any collective.
    """
    backend = backend or _get_default_process_group_backend_for_device(device)
    device_id = device if device.type != "cpu" else None
    _init_dist_connection(environment, backend, timeout=timeout, device_id=device_id)
    return backend


def waiting(operation: str, group: Any | None = None) -> AbstractContextManager[None]:
    """Return what a wait is done in: when it is in vain, it ends with a message.

    Args:
        operation: what is waited for.
        group: whose ranks are waited for; all ranks if None.
    """
    detector = stall_detector()
    return nullcontext() if detector is None else detector.waiting(operation, "", group)


def barrier(device: torch.device, name: str | None = None) -> None:
    """Wait for all ranks; nothing without a process group."""
    if not dist.is_initialized():
        return
    with waiting(f"barrier `{name}`" if name else "barrier"):
        if dist.get_backend() == "nccl":
            dist.barrier(device_ids=[device.index])
        else:
            dist.barrier()


def broadcast(value: T, src: int = 0) -> T:
    """Return the ``value`` of rank ``src``, any picklable object."""
    if not dist.is_initialized():
        return value
    box = [value]
    with waiting("broadcast of an object"):
        dist.broadcast_object_list(box, src)
    return box[0]


def reduce(value: Any, group: Any | None, operation: Any) -> Any:
    """Return the sum, mean, ... over ranks of a tensor; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    with waiting("reduction of a metric", group):
        return _sync_ddp_if_available(value, group, reduce_op=operation)


def all_gather(tensor: Tensor, group: Any | None, sync_grads: bool) -> Tensor:
    """Return the tensors of all ranks, stacked; a new first dimension."""
    with waiting("all-gather of a tensor", group):
        return _all_gather_ddp_if_available(tensor, group=group, sync_grads=sync_grads)
