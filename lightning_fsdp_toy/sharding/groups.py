"""What a process group can move, how long it waits, and others of the same ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

__all__ = ["backend_for", "new_group_like", "timeout_of"]


def new_group_like(group: dist.ProcessGroup, backend: str) -> dist.ProcessGroup:
    """Return another process group of the same ranks and timeout; a collective."""
    ranks = dist.get_process_group_ranks(group)
    made = dist.new_group(
        ranks, backend=backend, timeout=timeout_of(group), use_local_synchronization=True
    )
    assert isinstance(made, dist.ProcessGroup), "this rank is not in the group"
    return made


def backend_for(group: dist.ProcessGroup, device_type: str) -> str | None:
    """Return which backend of a group moves tensors of a kind of device; None if none does."""
    pairs = dist.get_backend_config(group).split(",")  # such as cpu:gloo,cuda:nccl
    return dict(pair.split(":", 1) for pair in pairs).get(device_type)


def timeout_of(group: dist.ProcessGroup) -> Any:
    """Return the longest wait of a process group."""
    device = torch.device("cpu" if backend_for(group, "cpu") is not None else "cuda")
    return group._get_backend(device).options._timeout
