"""The native transport, for NCCL: the group's own collectives. And that of a single rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fsdp_toy.sharding.collectives import Transport, Work, copy_unless_same_
from lightning_fsdp_toy.sharding.groups import new_group_like
from lightning_fsdp_toy.sharding.ledger import Ledger

__all__ = ["LocalTransport", "NativeTransport"]

# torch 2.13 renamed these and warns on the old names.
_all_gather_single: Callable[..., Any] = getattr(
    dist, "all_gather_single", dist.all_gather_into_tensor
)
_reduce_scatter_single: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)


class LocalTransport(Transport):
    """One rank: nothing to move."""

    def _start_all_gather_(self, buffer: Tensor, own: Tensor, unit: str) -> Work:
        copy_unless_same_(buffer, own)
        return Work()

    def _start_reduce_scatter(
        self, buffer: Tensor, out: Tensor, accumulate: bool, unit: str
    ) -> Work:
        out.add_(buffer) if accumulate else out.copy_(buffer)
        return Work()


class NativeTransport(Transport):
    """The process group's own collectives (see the note on three transports).

    Args:
        group: process group.
        ledger: where collectives are counted.
        backend: the one of the group's that moves the tensors.
    """

    def __init__(self, group: dist.ProcessGroup, ledger: Ledger, backend: str) -> None:
        super().__init__(group, ledger)
        self._reduce_group = new_group_like(group, backend) if backend == "nccl" else group

    def scratch_bytes(self, buffer: Tensor, out: Tensor, accumulate: bool) -> int:
        """One more shard, where the sum arrives before it is added or converted."""
        is_direct = self._is_direct(buffer, out, accumulate)
        return 0 if is_direct else out.numel() * buffer.element_size()

    @staticmethod
    def _is_direct(buffer: Tensor, out: Tensor, accumulate: bool) -> bool:
        return not accumulate and buffer.dtype == out.dtype

    def _start_all_gather_(self, buffer: Tensor, own: Tensor, unit: str) -> Work:
        part = buffer.chunk(self.world_size)[self.rank]
        copy_unless_same_(part, own)
        work = _all_gather_single(buffer, part, group=self.group, async_op=True)  # in place
        return Work(work.wait)

    def _start_reduce_scatter(
        self, buffer: Tensor, out: Tensor, accumulate: bool, unit: str
    ) -> Work:
        is_direct = self._is_direct(buffer, out, accumulate)
        total = out if is_direct else buffer.new_empty(out.numel())
        work = _reduce_scatter_single(
            _real(total), _real(buffer), group=self._reduce_group, async_op=True
        )

        def finish() -> None:
            work.wait()
            if accumulate:
                out.add_(total)
            elif not is_direct:
                out.copy_(total)

        return Work(finish)


def _real(tensor: Tensor) -> Tensor:
    """Show complex numbers as pairs of real ones, which every backend can add."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor
