"""All-gather, reduce-scatter and all-reduce over flat tensors.

Note: three transports
    One file each in ``transports/``. **Native** hands a whole buffer to the process group (NCCL
    does it in place and well).
    **Pairwise** is for gloo, whose reduce-scatter is an all-reduce and a copy (twice the bytes) and
    whose all-gather goes through a full-size temporary. Every rank sends each peer exactly what
    that peer needs, straight out of the buffer, and receives in place::

        all-gather        rank r sends its shard to every peer; receives peer p's at p's place
        reduce-scatter    rank r sends peer p the part of its gradients that p keeps, in segments;
                          receives its own part from every peer, adds them **in rank order**

    No byte is sent twice and none is copied on the way. The order of addition does not depend on
    which message came first, so the same ranks give the same bits in every run.

    **Shared memory** is for ranks of one machine, on CPU. Nothing
    is sent: each rank copies its shard to where all read it, and adds up its part of every rank's
    gradients, in the same order.

Note: one order of summation
    A reduction adds rank 0, 1, 2, ... to what the gradient shard already holds from earlier
    micro-batches. Micro-batch ``m`` belongs to rank ``m % world_size``, so contributions are added
    in global micro-batch order, whichever number of ranks shares the work.

Note: start and wait
    A collective is started and returns a ``Work``; its tensors belong to it until ``wait()`` has
    returned. Bytes travel in between: gloo moves them in threads of its own, NCCL on streams of its
    own (reductions have a second communicator there, so that a gather need not queue behind them).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fsdp_toy.sharding.debug import disagreement
from lightning_fsdp_toy.sharding.groups import backend_for, new_group_like
from lightning_fsdp_toy.sharding.ledger import Ledger, OpenCollective
from lightning_fsdp_toy.sharding.stalls import StallError, stall_detector

__all__ = [
    "Place",
    "RanksDisagreeError",
    "Transport",
    "Work",
    "copy_unless_same_",
]


class Work:
    """A collective under way. Owns its tensors until ``wait`` has returned.

    Args:
        finish: waits for the messages and does what is left to do; None if nothing is.
    """

    def __init__(self, finish: Callable[[], None] | None = None) -> None:
        self._finish = finish

    def wait(self) -> None:
        """Return when the result is complete (on CUDA: for work queued from now on)."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


class Place(Protocol):
    """Memory of a transport's that a buffer has from the end of a gather to its release."""

    def start(self, buffer: Tensor, shard: Tensor) -> Work:
        """Begin a gather; when the work has been waited for, ``buffer`` has the memory.

        Args:
            buffer: 1D, without memory.
            shard: 1D, this rank's part, of any floating dtype. Must not change before the work is
                waited for.
        """
        ...

    def release(self, buffer: Tensor) -> None:
        """Take the memory back."""
        ...

    def leave(self, buffer: Tensor) -> None:
        """Leave the memory to ``buffer``, as it is now; use other memory from now on."""
        ...


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
        self.is_debug = False  # compare every collective with the other ranks' before it starts
        self.place = "setup"  # where in training this rank is, for debug mode's messages
        self._control = group
        if group is not None and backend_for(group, "cpu") is None:
            # Agreements stay off the device, so that they never wait for its queue.
            self._control = new_group_like(group, "gloo")
        self._stalls = stall_detector() if self.world_size > 1 else None

    def allocate_(self, buffer: Tensor) -> None:
        """Give ``buffer`` (1D) its memory; the contents are undefined."""
        buffer.untyped_storage().resize_(buffer.numel() * buffer.element_size())

    def release_(self, buffer: Tensor) -> None:
        """Take the memory of ``buffer`` away; reading a view of it now raises."""
        buffer.untyped_storage().resize_(0)

    def start_all_gather_(self, buffer: Tensor, own: Tensor, unit: str) -> Work:
        """Begin to fill ``buffer`` (1D) with every rank's ``own`` (1D), in rank order.

        Args:
            buffer: 1D, any dtype.
            own: 1D, ``buffer.numel() / world_size``, of the same dtype and device; may be this
                rank's part of ``buffer`` itself. Must not change before the work is waited for.
            unit: name for the ledger and for errors.
        """
        as_bytes = buffer.view(torch.uint8), own.view(torch.uint8)
        return self._start(
            *("all-gather", unit, buffer, self._share(buffer)),
            lambda: self._start_all_gather_(*as_bytes, unit),
        )

    def all_gather_(self, buffer: Tensor, own: Tensor, unit: str) -> None:
        """Fill ``buffer`` (1D) with every rank's ``own`` (1D), in rank order."""
        self.start_all_gather_(buffer, own, unit).wait()

    def start_reduce_scatter(
        self, buffer: Tensor, out: Tensor, accumulate: bool, unit: str
    ) -> Work:
        """Begin to add every rank's part ``self.rank`` of ``buffer`` into ``out``.

        Args:
            buffer: 1D, this rank's contributions to every shard. Its contents are undefined
                afterwards.
            out: 1D, ``buffer.numel() / world_size``, on the same device; may have a wider dtype.
            accumulate: keep what ``out`` holds and add to it; otherwise it is overwritten.
            unit: name for the ledger and for errors.
        """
        return self._start(
            *("reduce-scatter", unit, buffer, self._share(buffer)),
            lambda: self._start_reduce_scatter(buffer, out, accumulate, unit),
            wire_bytes=0 if self.shares_memory_of(unit) else None,
        )

    def start_all_reduce(self, buffer: Tensor, out: Tensor, accumulate: bool, unit: str) -> Work:
        """Begin to add every rank's ``buffer`` into ``out`` (1D, same numel), in rank order."""
        part = out.chunk(self.world_size)[self.rank]

        def begin() -> Work:
            work = self._start_reduce_scatter(buffer, part, accumulate, unit)

            def finish() -> None:
                work.wait()
                self._start_all_gather_(out.view(torch.uint8), part.view(torch.uint8), unit).wait()

            return Work(finish)

        sent = self._share(buffer) + self._share(out)
        return self._start("all-reduce", unit, buffer, sent, begin)

    def broadcast_(self, tensor: Tensor, unit: str) -> None:
        """Overwrite ``tensor`` (1D, any dtype) with rank 0's."""
        if self.group is None or self.world_size == 1:
            return
        self._compare("broadcast", unit, f"{tensor.numel()} x {tensor.dtype}")
        size = tensor.numel() * tensor.element_size()
        sent = size if self.rank == 0 else 0
        with self._named("broadcast", unit), self.ledger.blocking("broadcast", unit, size, sent):
            dist.broadcast(tensor.view(torch.uint8), group=self.group, group_src=0)

    def any_rank(self, flags: list[bool], unit: str) -> list[bool]:
        """Return for each flag whether any rank has it set (a few bytes, never on the device)."""
        if self._control is None or self.world_size == 1 or not flags:
            return flags
        tensor = torch.tensor(flags, dtype=torch.uint8, device="cpu")
        self._compare("agreement", unit, f"{len(flags)} flags")
        named = self._named("agreement on used parameters", unit, self._control)
        with named, self.ledger.blocking("control", unit, len(flags), len(flags)):
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._control)
        return [bool(flag) for flag in tensor.tolist()]

    def gather_objects(self, value: Any, unit: str) -> list[Any]:
        """Return every rank's ``value`` (picklable, small), in rank order."""
        if self._control is None or self.world_size == 1:
            return [value]
        gathered: list[Any] = [None] * self.world_size
        self._compare("agreement", unit, "objects")
        with self._named("agreement", unit, self._control):
            dist.all_gather_object(gathered, value, group=self._control)
        return gathered

    def collect_objects(self, value: Any, unit: str) -> list[Any] | None:
        """Return every rank's ``value`` (picklable), in rank order, on rank 0; None elsewhere."""
        if self._control is None or self.world_size == 1:
            return [value]
        collected: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        self._compare("collection", unit, "objects")
        with self._named("collection", unit, self._control):
            dist.gather_object(value, collected, group=self._control, group_dst=0)
        return collected

    def scratch_bytes(self, buffer: Tensor, out: Tensor, accumulate: bool) -> int:
        """Return the bytes that reducing ``buffer`` into ``out`` holds beside the two."""
        return 0

    def shares_memory_of(self, unit: str) -> bool:
        """Whether gradients of ``unit`` are reduced where they lie, and nothing is sent."""
        return False

    def open_reduce_buffer(
        self, unit: str, numel: int, dtype: torch.dtype, device: torch.device, is_kept: bool
    ) -> Tensor:
        """Return a buffer (1D) to collect gradients in; the contents are undefined.

        Args:
            unit: whose gradients.
            numel: its elements, as the next two.
            dtype: of gradients as they are reduced.
            device: where they are computed.
            is_kept: it is not reduced in this backward (``no_sync``), others are opened meanwhile.
        """
        return torch.empty(numel, dtype=dtype, device=device)

    def pooled_bytes(self, buffer: Tensor) -> int:
        """Return how many bytes of a buffer of ``open_reduce_buffer`` are in the pool otherwise."""
        return 0

    def close_reduce_buffer(self, buffer: Tensor) -> None:  # noqa: B027
        """A buffer of ``open_reduce_buffer`` has been reduced (waited for), or will not be."""

    def trim(self) -> None:  # noqa: B027
        """Give back what is only needed in a step; all ranks are at rest."""

    def close(self) -> None:  # noqa: B027
        """Give back all memory; from now on every buffer has memory of its own."""

    @abstractmethod
    def _start_all_gather_(self, buffer: Tensor, own: Tensor, unit: str) -> Work: ...

    @abstractmethod
    def _start_reduce_scatter(
        self, buffer: Tensor, out: Tensor, accumulate: bool, unit: str
    ) -> Work: ...

    def _share(self, buffer: Tensor) -> int:
        """Bytes of all shards of ``buffer`` but one: what a rank sends to bring them to all."""
        share = buffer.numel() * buffer.element_size() // self.world_size
        return share * (self.world_size - 1)

    def _start(
        self,
        operation: str,
        unit: str,
        buffer: Tensor,
        sent_bytes: int,
        begin: Callable[[], Work],
        wire_bytes: int | None = None,
    ) -> Work:
        """Begin a collective; its work names it to the stall detector while it waits."""
        self._compare(operation, unit, f"{buffer.numel()} x {buffer.dtype}")
        wire_bytes = sent_bytes if wire_bytes is None else wire_bytes
        entry = self._open(operation.replace("-", "_"), unit, buffer, sent_bytes, wire_bytes)
        try:
            work = begin()
        except RuntimeError:  # a lost peer
            with self._named(operation, unit):
                raise

        def finish() -> None:
            with self._named(operation, unit):
                if entry is None:
                    work.wait()
                    return
                entry.wait_begins()
                work.wait()
                entry.close()

        return Work(finish)

    def _open(
        self, operation: str, unit: str, buffer: Tensor, sent_bytes: int, wire_bytes: int
    ) -> OpenCollective | None:
        if self.world_size == 1:
            return None
        payload_bytes = buffer.numel() * buffer.element_size()
        what = operation, unit, payload_bytes, sent_bytes, wire_bytes
        return self.ledger.open(*what, buffer.device)

    @contextmanager
    def _named(
        self, operation: str, unit: str, group: dist.ProcessGroup | None = None
    ) -> Iterator[None]:
        """Wait inside: tell the stall detector where, and add it to an error of the group.

        Entered once for every collective, by all ranks in the same order, whether or not there is
        anything left to wait for: what the stall detector concludes rests on that.
        """
        if self._stalls is None:
            yield
            return
        try:
            with self._stalls.waiting(operation, unit, self.group if group is None else group):
                yield
        except (StallError, RanksDisagreeError):
            raise  # they name all ranks
        except RuntimeError as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(". ")
            raise RuntimeError(
                f"rank {self.rank} of {self.world_size}: {operation} of unit `{unit}` failed: "
                f"{reason}. Either another rank ended or raised (look for its error first), or "
                f"the ranks ran different modules or numbers of batches."
            ) from error

    def _compare(self, operation: str, unit: str, detail: str) -> None:
        """Debug mode: raise on every rank where the ranks are about to do different things."""
        if not self.is_debug or self._control is None or self.world_size == 1:
            return
        mine = (f"{operation} of unit `{unit}` ({detail})", self.place)
        theirs: list[Any] = [None] * self.world_size
        with self._named("comparison", "<debug>", self._control):
            dist.all_gather_object(theirs, mine, group=self._control)
        if len({what for what, _ in theirs}) > 1:
            raise RanksDisagreeError(
                disagreement(dist.get_process_group_ranks(self._control), theirs)
            )


class RanksDisagreeError(RuntimeError):
    """Debug mode found ranks at different collectives."""


def copy_unless_same_(target: Tensor, source: Tensor) -> None:
    """Copy ``source`` to ``target`` unless they are the same memory."""
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)
