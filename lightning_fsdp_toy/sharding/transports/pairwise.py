"""The pairwise transport, for gloo: messages from rank to rank and addition in rank order."""

from __future__ import annotations

import zlib

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fsdp_toy.sharding.collectives import Transport, Work, copy_unless_same_
from lightning_fsdp_toy.sharding.ledger import Ledger

__all__ = ["PairwiseTransport", "StagedTransport"]

_GATHER, _REDUCE = "gather", "reduce"


class PairwiseTransport(Transport):
    """Point-to-point messages and addition in rank order (see the note on three transports).

    Every message of a collective is posted when it starts; gloo's own threads move the bytes while
    the rank computes. A reduction adds when it is waited for.

    Args:
        group: process group.
        ledger: where collectives are counted.
        segment_bytes: length of one message of a reduction, so that the first are added while the
            last travel.
    """

    def __init__(
        self, group: dist.ProcessGroup, ledger: Ledger, segment_bytes: int = 2 << 20
    ) -> None:
        super().__init__(group, ledger)
        self.segment_bytes = segment_bytes
        # In a different order on every rank, so that no rank is everyone's first.
        self._peers = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]

    def scratch_bytes(self, buffer: Tensor, out: Tensor, accumulate: bool) -> int:
        """Every peer's part arrives beside the buffer: (N - 1) / N of its bytes."""
        return (self.world_size - 1) * out.numel() * buffer.element_size()

    def _start_all_gather_(self, buffer: Tensor, own: Tensor, unit: str) -> Work:
        shards = buffer.chunk(self.world_size)
        tag = _message_tag(_GATHER, unit)
        works = []
        for peer in self._peers:
            works.append(self._receive(shards[peer], peer, tag))
            works.append(self._send(own, peer, tag))
        copy_unless_same_(shards[self.rank], own)  # while messages travel

        def finish() -> None:
            for work in works:
                work.wait()

        return Work(finish)

    def _start_reduce_scatter(
        self, buffer: Tensor, out: Tensor, accumulate: bool, unit: str
    ) -> Work:
        tag = _message_tag(_REDUCE, unit)
        parts = buffer.chunk(self.world_size)
        received = [
            buffer.new_empty(out.numel()) if peer != self.rank else parts[peer]
            for peer in range(self.world_size)
        ]
        length = max(1, self.segment_bytes // buffer.element_size())
        segments = [slice(start, start + length) for start in range(0, out.numel(), length)]
        arriving = []
        leaving = []
        for segment in segments:
            arriving.append(
                [self._receive(received[peer][segment], peer, tag) for peer in self._peers]
            )
            leaving += [self._send(parts[peer][segment], peer, tag) for peer in self._peers]

        def finish() -> None:
            for segment, works in zip(segments, arriving, strict=True):
                for work in works:
                    work.wait()
                add_in_order(out[segment], [part[segment] for part in received], accumulate)
            for work in leaving:
                work.wait()

        return Work(finish)

    def _send(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        work = dist.isend(tensor, group=self.group, tag=tag, group_dst=peer)
        assert work is not None, "this rank is not in the group"
        return work

    def _receive(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        work = dist.irecv(tensor, group=self.group, tag=tag, group_src=peer)
        assert work is not None, "this rank is not in the group"
        return work


class StagedTransport(PairwiseTransport):
    """Pairwise messages of tensors on a GPU, by way of CPU memory: gloo sends from nowhere else.

    For tests and for GPUs that NCCL cannot join (two ranks on one). Every copy waits for the
    device, so nothing overlaps.
    """

    def scratch_bytes(self, buffer: Tensor, out: Tensor, accumulate: bool) -> int:
        """Nothing on the device."""
        return 0

    def _start_all_gather_(self, buffer: Tensor, own: Tensor, unit: str) -> Work:
        whole = torch.empty_like(buffer, device="cpu")
        part = whole.chunk(self.world_size)[self.rank]
        part.copy_(own)
        work = super()._start_all_gather_(whole, part, unit)

        def finish() -> None:
            work.wait()
            buffer.copy_(whole)

        return Work(finish)

    def _start_reduce_scatter(
        self, buffer: Tensor, out: Tensor, accumulate: bool, unit: str
    ) -> Work:
        total = out.to("cpu", copy=True)
        work = super()._start_reduce_scatter(buffer.to("cpu", copy=True), total, accumulate, unit)

        def finish() -> None:
            work.wait()
            out.copy_(total)

        return Work(finish)


def _message_tag(kind: str, unit: str) -> int:
    """Tag of a unit's messages: those of another unit or kind are never taken for them.

    Ranks that run different units then wait for each other until the timeout, whose error names the
    unit; without it, units of equal size would exchange weights without a word.
    """
    return zlib.crc32(f"{kind} {unit}".encode()) & 0x7FFFFFF


def add_in_order(out: Tensor, contributions: list[Tensor], accumulate: bool) -> None:
    """Add in the dtype of ``out``, which may be a wider one than that of the messages."""
    if not accumulate:
        first, second, *contributions = contributions
        if first.dtype == out.dtype:
            torch.add(first, second, out=out)
        else:
            out.copy_(first)
            out.add_(second)
    for contribution in contributions:
        out.add_(contribution)
