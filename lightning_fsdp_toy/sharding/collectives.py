"""All-gather, reduce-scatter and all-reduce over flat tensors, and the ledger that counts them.

Note: two transports
    **Native** hands a whole buffer to the process group (NCCL does it in place and well).
    **Pairwise** is for gloo, whose reduce-scatter is an all-reduce and a copy (twice the bytes) and
    whose all-gather goes through a full-size temporary. Every rank sends each peer exactly what
    that peer needs, straight out of the buffer, and receives in place::

        all-gather        rank r sends its shard to every peer; receives peer p's at p's place
        reduce-scatter    rank r sends peer p the part of its gradients that p keeps, in segments;
                          receives its own part from every peer, adds them **in rank order**

    No byte is sent twice and none is copied on the way. The order of addition does not depend on
    which message came first, so the same ranks give the same bits in every run.

Note: one order of summation
    A reduction adds rank 0, 1, 2, ... to what the gradient shard already holds from earlier
    micro-batches. Micro-batch ``m`` belongs to rank ``m % world_size``, so contributions are added
    in global micro-batch order, whichever number of ranks shares the work.
"""

from __future__ import annotations

import logging
import zlib
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    "CollectiveRecord",
    "Ledger",
    "LocalTransport",
    "NativeTransport",
    "PairwiseTransport",
    "Transport",
    "make_transport",
]

logger = logging.getLogger(__name__)

# torch 2.13 renamed these and warns on the old names.
_all_gather_single: Callable[..., Any] = getattr(
    dist, "all_gather_single", dist.all_gather_into_tensor
)
_reduce_scatter_single: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)

_GATHER, _REDUCE = "gather", "reduce"


class CollectiveRecord(NamedTuple):
    """One collective: what, for which unit, how many bytes this rank sent."""

    operation: str
    unit: str
    sent_bytes: int


class Ledger:
    """Counts every collective of this rank: by operation and unit, calls and bytes sent.

    Operations are ``all_gather``, ``reduce_scatter`` and ``all_reduce`` (parameters and gradients),
    ``broadcast`` (initial state and buffers) and ``control`` (agreements of a few bytes). The last
    ``max_records`` collectives are also kept in order, in ``records``.
    """

    def __init__(self, max_records: int = 4096) -> None:
        self.records: deque[CollectiveRecord] = deque(maxlen=max_records)
        self._calls: dict[tuple[str, str], int] = defaultdict(int)
        self._bytes: dict[tuple[str, str], int] = defaultdict(int)

    def record(self, operation: str, unit: str, sent_bytes: int) -> None:
        """Note one collective."""
        self.records.append(CollectiveRecord(operation, unit, sent_bytes))
        self._calls[operation, unit] += 1
        self._bytes[operation, unit] += sent_bytes

    def bytes_by_operation(self) -> dict[str, int]:
        """Return bytes sent by this rank since the last reset, by operation."""
        return _by_operation(self._bytes)

    def calls_by_operation(self) -> dict[str, int]:
        """Return the number of collectives since the last reset, by operation."""
        return _by_operation(self._calls)

    def calls(self, operation: str, unit: str) -> int:
        """Return how often ``operation`` ran for ``unit`` since the last reset."""
        return self._calls.get((operation, unit), 0)

    def reset(self) -> None:
        """Forget everything counted so far."""
        self.records.clear()
        self._calls.clear()
        self._bytes.clear()


def _by_operation(counts: dict[tuple[str, str], int]) -> dict[str, int]:
    totals: dict[str, int] = defaultdict(int)
    for (operation, _), count in counts.items():
        totals[operation] += count
    return dict(totals)


class Transport(ABC):
    """Moves shards between the ranks of one process group, and owns the memory of unit buffers.

    Args:
        group: process group, or None where there is one rank and no group.
        ledger: where collectives are counted.
    """

    def __init__(self, group: dist.ProcessGroup | None, ledger: Ledger) -> None:
        self.group = group
        self.ledger = ledger
        self.rank = dist.get_rank(group) if group is not None else 0
        self.world_size = dist.get_world_size(group) if group is not None else 1
        self._control = group
        if group is not None and dist.get_backend(group) == "nccl":
            # Agreements stay off the device, so that they never wait for its queue.
            ranks = dist.get_process_group_ranks(group)
            self._control = dist.new_group(ranks, backend="gloo")

    def allocate_(self, buffer: Tensor) -> None:
        """Give ``buffer`` (1D) its memory; the contents are undefined."""
        buffer.untyped_storage().resize_(buffer.numel() * buffer.element_size())

    def release_(self, buffer: Tensor) -> None:
        """Take the memory of ``buffer`` away; reading a view of it now raises."""
        buffer.untyped_storage().resize_(0)

    def all_gather_(self, buffer: Tensor, own: Tensor, unit: str) -> None:
        """Fill ``buffer`` (1D) with every rank's ``own`` (1D, numel / world size), in rank order.

        ``own`` may be this rank's part of ``buffer`` itself.
        """
        with self._named("all-gather", unit):
            self._all_gather_(buffer, own, unit)
        self._record("all_gather", unit, buffer)

    def reduce_scatter(self, buffer: Tensor, out: Tensor, accumulate: bool, unit: str) -> None:
        """Add every rank's part ``self.rank`` of ``buffer`` into ``out``.

        Args:
            buffer: 1D, this rank's contributions to every shard. Its contents are undefined
                afterwards.
            out: 1D, ``buffer.numel() / world_size``.
            accumulate: keep what ``out`` holds and add to it; otherwise it is overwritten.
            unit: name for the ledger and for errors.
        """
        with self._named("reduce-scatter", unit):
            self._reduce_scatter(buffer, out, accumulate, unit)
        self._record("reduce_scatter", unit, buffer)

    def all_reduce(self, buffer: Tensor, out: Tensor, accumulate: bool, unit: str) -> None:
        """Add every rank's ``buffer`` into ``out`` (1D, same numel) on all ranks, in rank order."""
        with self._named("all-reduce", unit):
            part = out.chunk(self.world_size)[self.rank]
            self._reduce_scatter(buffer, part, accumulate, unit)
            self._all_gather_(out, part, unit)
        self._record("all_reduce", unit, buffer, times=2)

    def broadcast_(self, tensor: Tensor, unit: str) -> None:
        """Overwrite ``tensor`` with rank 0's."""
        if self.group is None or self.world_size == 1:
            return
        with self._named("broadcast", unit):
            dist.broadcast(tensor, group=self.group, group_src=0)
        sent = tensor.numel() * tensor.element_size() if self.rank == 0 else 0
        self.ledger.record("broadcast", unit, sent)

    def any_rank(self, flags: list[bool], unit: str) -> list[bool]:
        """Return for each flag whether any rank has it set (a few bytes, never on the device)."""
        if self._control is None or self.world_size == 1 or not flags:
            return flags
        tensor = torch.tensor(flags, dtype=torch.uint8)
        with self._named("agreement on used parameters", unit):
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._control)
        self.ledger.record("control", unit, tensor.numel())
        return [bool(flag) for flag in tensor.tolist()]

    def scratch_bytes(self, shard: Tensor) -> int:
        """Return the bytes that reducing into a ``shard`` holds beside it and the buffer."""
        return 0

    @abstractmethod
    def _all_gather_(self, buffer: Tensor, own: Tensor, unit: str) -> None: ...

    @abstractmethod
    def _reduce_scatter(self, buffer: Tensor, out: Tensor, accumulate: bool, unit: str) -> None: ...

    def _record(self, operation: str, unit: str, buffer: Tensor, times: int = 1) -> None:
        if self.world_size > 1:
            share = buffer.numel() * buffer.element_size() // self.world_size
            self.ledger.record(operation, unit, times * share * (self.world_size - 1))

    @contextmanager
    def _named(self, operation: str, unit: str) -> Iterator[None]:
        """Add rank, operation and unit to an error of the process group (timeout, lost peer)."""
        try:
            yield
        except RuntimeError as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(". ")
            raise RuntimeError(
                f"rank {self.rank} of {self.world_size}: {operation} of unit `{unit}` failed: "
                f"{reason}. Either another rank ended or raised (look for its error first), or "
                f"the ranks ran different modules or numbers of batches."
            ) from error


class LocalTransport(Transport):
    """One rank: nothing to move."""

    def _all_gather_(self, buffer: Tensor, own: Tensor, unit: str) -> None:
        _copy_unless_same_(buffer, own)

    def _reduce_scatter(self, buffer: Tensor, out: Tensor, accumulate: bool, unit: str) -> None:
        out.add_(buffer) if accumulate else out.copy_(buffer)


class NativeTransport(Transport):
    """The process group's own collectives (see the note on two transports)."""

    def scratch_bytes(self, shard: Tensor) -> int:
        """One more shard, where the sum arrives before it is added to earlier micro-batches."""
        return shard.numel() * shard.element_size()

    def _all_gather_(self, buffer: Tensor, own: Tensor, unit: str) -> None:
        part = buffer.chunk(self.world_size)[self.rank]
        _copy_unless_same_(part, own)
        _all_gather_single(buffer, part, group=self.group)  # in place

    def _reduce_scatter(self, buffer: Tensor, out: Tensor, accumulate: bool, unit: str) -> None:
        total = torch.empty_like(out) if accumulate else out
        _reduce_scatter_single(total, buffer, group=self.group)
        if accumulate:
            out.add_(total)


class PairwiseTransport(Transport):
    """Point-to-point messages and addition in rank order (see the note on two transports).

    Args:
        group: process group.
        ledger: where collectives are counted.
        segment_bytes: length of one message of a reduction; two segments of every peer are held
            at a time, so that one travels while the other is added.
    """

    def __init__(
        self, group: dist.ProcessGroup, ledger: Ledger, segment_bytes: int = 2 << 20
    ) -> None:
        super().__init__(group, ledger)
        self.segment_bytes = segment_bytes
        # In a different order on every rank, so that no rank is everyone's first.
        self._peers = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]

    def scratch_bytes(self, shard: Tensor) -> int:
        """Two segments of every rank."""
        return 2 * self.world_size * min(self.segment_bytes, shard.numel() * shard.element_size())

    def _all_gather_(self, buffer: Tensor, own: Tensor, unit: str) -> None:
        shards = buffer.chunk(self.world_size)
        tag = _message_tag(_GATHER, unit)
        works = []
        for peer in self._peers:
            works.append(self._receive(shards[peer], peer, tag))
            works.append(self._send(own, peer, tag))
        _copy_unless_same_(shards[self.rank], own)  # while messages travel
        for work in works:
            work.wait()

    def _reduce_scatter(self, buffer: Tensor, out: Tensor, accumulate: bool, unit: str) -> None:
        tag = _message_tag(_REDUCE, unit)
        parts = buffer.chunk(self.world_size)
        length = max(1, self.segment_bytes // buffer.element_size())
        starts = range(0, out.numel(), length)
        received = [buffer.new_empty(self.world_size, min(length, out.numel())) for _ in range(2)]

        def exchange(index: int) -> list[dist.Work]:
            start = starts[index]
            stop = min(start + length, out.numel())
            works = []
            for peer in self._peers:
                incoming = received[index % 2][peer, : stop - start]
                works.append(self._receive(incoming, peer, tag))
                works.append(self._send(parts[peer][start:stop], peer, tag))
            return works

        works = exchange(0)
        for index, start in enumerate(starts):
            ahead = exchange(index + 1) if index + 1 < len(starts) else []
            for work in works:
                work.wait()
            segment = out[start : start + length]
            contributions = [row[: segment.numel()] for row in received[index % 2]]
            contributions[self.rank] = parts[self.rank][start : start + length]
            _add_in_order(segment, contributions, accumulate)
            works = ahead

    def _send(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        work = dist.isend(tensor, group=self.group, tag=tag, group_dst=peer)
        assert work is not None, "this rank is not in the group"
        return work

    def _receive(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        work = dist.irecv(tensor, group=self.group, tag=tag, group_src=peer)
        assert work is not None, "this rank is not in the group"
        return work


def _message_tag(kind: str, unit: str) -> int:
    """Tag of a unit's messages: those of another unit or kind are never taken for them.

    Ranks that run different units then wait for each other until the timeout, whose error names the
    unit; without it, units of equal size would exchange weights without a word.
    """
    return zlib.crc32(f"{kind} {unit}".encode()) & 0x7FFFFFF


def _copy_unless_same_(target: Tensor, source: Tensor) -> None:
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)


def _add_in_order(out: Tensor, contributions: list[Tensor], accumulate: bool) -> None:
    if not accumulate:
        torch.add(contributions[0], contributions[1], out=out)
        contributions = contributions[2:]
    for contribution in contributions:
        out.add_(contribution)


def make_transport(
    name: str, group: dist.ProcessGroup | None, device: torch.device, ledger: Ledger
) -> Transport:
    """Return the transport called ``name`` for ``group``.

    Args:
        name: ``"native"``, ``"pairwise"`` or ``"auto"`` (native on NCCL, pairwise otherwise).
        group: process group, None for a single process.
        device: where parameters live.
        ledger: where collectives are counted.

    Raises:
        ValueError: unknown name, or pairwise with a backend that has no CPU messages.
    """
    if name not in ("auto", "native", "pairwise"):
        raise ValueError(f"`transport`: expected 'auto', 'native' or 'pairwise', got {name!r}.")
    if group is None or dist.get_world_size(group) == 1:
        return LocalTransport(group, ledger)
    backend = dist.get_backend(group)
    if name == "auto":
        name = "native" if backend == "nccl" else "pairwise"
    if name == "pairwise" and backend != "gloo":
        raise ValueError(
            f"`transport='pairwise'` needs the gloo backend, the process group uses {backend!r}. "
            f"Use transport='native' or 'auto'."
        )
    logger.debug("transport %s for %d ranks on %s", name, dist.get_world_size(group), device)
    return NativeTransport(group, ledger) if name == "native" else PairwiseTransport(group, ledger)
