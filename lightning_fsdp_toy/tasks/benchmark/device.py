"""All that depends on the kind of device; the rest of the benchmark does not know it."""

from datetime import timedelta
from typing import Any, Protocol

import psutil
import torch
import torch.distributed as dist
from torch import nn

from lightning_fsdp_toy.tasks.benchmark.peak import TensorPeak

__all__ = ["KINDS", "Device", "PeakWatch"]

KINDS = ("cpu", "cuda")


class PeakWatch(Protocol):
    """Measures tensor bytes while it is entered."""

    @property
    def peak_bytes(self) -> int:
        """Largest sum since `restart`."""

    def __enter__(self) -> "PeakWatch": ...

    def __exit__(self, *error: Any) -> None: ...

    def restart(self, model: nn.Module) -> None:
        """Begin anew from what lives now; `model` has taken some steps."""


class Device:
    """The device of one rank.

    Args:
        kind: `cpu` or `cuda`.
        local_rank: Number of the GPU.
    """

    def __init__(self, kind: str, local_rank: int = 0) -> None:
        self.kind = kind
        self.torch = torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)
        self.ddp_ids = [local_rank] if kind == "cuda" else None
        self.counts_wire = kind == "cpu"  # NCCL moves bytes past the kernel

    def activate(self) -> None:
        """Make it the current one."""
        if self.kind == "cuda":
            torch.cuda.set_device(self.torch)

    def join(self, store: dist.Store, rank: int, world_size: int, timeout_s: float) -> None:
        """Start the default process group; a collective."""
        is_cuda = self.kind == "cuda"
        dist.init_process_group(
            "nccl" if is_cuda else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
            device_id=self.torch if is_cuda else None,
        )

    def synchronize(self) -> None:
        """Wait for work that the device still has; CPU work is done when its call returns."""
        if self.kind == "cuda":
            torch.cuda.synchronize(self.torch)

    def barrier(self) -> None:
        """Wait for all ranks and for all work of this one's device; a collective."""
        self.synchronize()
        dist.barrier(device_ids=self.ddp_ids)
        self.synchronize()

    def watch_peak(self) -> PeakWatch:
        """Return what measures the largest sum of tensor bytes."""
        return _AllocatorPeak(self.torch) if self.kind == "cuda" else TensorPeak()

    def free_bytes(self) -> int:
        """Memory that nobody uses: of the GPU, or of the machine."""
        if self.kind == "cuda":
            return int(torch.cuda.mem_get_info(self.torch)[0])
        return int(psutil.virtual_memory().available)


class _AllocatorPeak:
    """What the caching allocator of a GPU has counted."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __enter__(self) -> "_AllocatorPeak":
        return self

    def __exit__(self, *error: object) -> None: ...

    def restart(self, model: nn.Module) -> None:
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)

    @property
    def peak_bytes(self) -> int:
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device)
