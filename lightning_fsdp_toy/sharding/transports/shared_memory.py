"""The shared-memory transport: ranks of one machine, no messages.

Note: gathering in shared memory
    A unit is gathered once for all ranks of the machine. Each copies its own shard to its part of a
    *place* in the segment, and computes on it when all have::

                         place, one for all ranks
        rank 0  [##] -->  [##..]   [####]  <-- rank 0 computes
        rank 1  [##] -->  [..##]   [####]  <-- rank 1 computes

    There are ``1 + num_prefetch`` places for units (*slots*, reused), one for the root unit, and
    for every unit one that is used only where more have to be held at once (its *home*, which takes
    no memory otherwise): ``unsharded`` blocks, ``SHARD_GRAD_OP``. Rank 0 of the group chooses the
    place of each gather: a slot as soon as all ranks have let go of one, a home when waiting for
    that would be in vain. The others read its choice.

Note: reducing in shared memory
    Gradients are collected in a buffer of the segment (a rank has ``1 + m`` and one for the root,
    reused in order; homes, again, where more are filled at once). When all ranks have filled
    theirs, each adds up its own part of all of them in rank order. A buffer is filled anew when all
    ranks have done that.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fsdp_toy.sharding.collectives import Work
from lightning_fsdp_toy.sharding.groups import timeout_of
from lightning_fsdp_toy.sharding.ledger import Ledger
from lightning_fsdp_toy.sharding.transports.gathering import SharedGather
from lightning_fsdp_toy.sharding.transports.pairwise import PairwiseTransport
from lightning_fsdp_toy.sharding.transports.pool import Reservation, SegmentPlan, SharedPool
from lightning_fsdp_toy.sharding.transports.reducing import ReduceBuffers
from lightning_fsdp_toy.sharding.transports.segment import Segment, SharedMemoryError

if TYPE_CHECKING:
    from lightning_fsdp_toy.sharding.memory import MemoryCounter
    from lightning_fsdp_toy.sharding.root import RootState

__all__ = ["SharedMemoryTransport", "share_memory", "stop_sharing"]

logger = logging.getLogger(__name__)

_NOT_ONE_MACHINE = "the ranks are not on one machine, or may not look into each other's /proc"


class SharedMemoryTransport(PairwiseTransport):
    """Memory that all ranks of the group share (see the notes); messages for what is not reserved.

    Until ``reserve`` has been called, and where memory cannot be shared, this is the pairwise
    transport.

    Args:
        group: process group.
        ledger: where collectives are counted.
        is_wanted: it was asked for by name: say so, too, if the ranks are not on one machine.
    """

    def __init__(self, group: dist.ProcessGroup, ledger: Ledger, is_wanted: bool = True) -> None:
        super().__init__(group, ledger)
        self.pool: SharedPool | None = None  # None: messages
        self._is_wanted = is_wanted
        self._index: dict[str, int] = {}  # of flat parameters, by name

    def reserve(self, plan: SegmentPlan, memory: MemoryCounter, num_needed_bytes: int) -> None:
        """Make the segment, if that can be done; a collective.

        Args:
            plan: where everything lies in it, the same on all ranks.
            memory: where bytes are counted.
            num_needed_bytes: of the segment, which must be there.
        """
        segment, reason = self._open_segment(plan, num_needed_bytes)
        told = self.gather_objects((os.getpid(), reason), "<segment>")
        reasons = [reason for _, reason in told if reason]
        if segment is None or reasons:
            is_expected = reasons[0] == _NOT_ONE_MACHINE and not self._is_wanted
            level = logging.DEBUG if is_expected or self.rank else logging.WARNING
            logger.log(level, "transport: no shared memory, messages instead: %s", reasons[0])
            return
        assert self.group is not None, "a single rank shares nothing"
        timeout_s = timeout_of(self.group).total_seconds()
        pids = [pid for pid, _ in told]
        self.pool = SharedPool(segment, plan, self.rank, pids, self._stalls, timeout_s, memory)
        self.pool.is_debug = self.is_debug
        self._buffers = ReduceBuffers(self.pool)
        self._index = {each.name: at for at, each in enumerate(plan.reservations)}

    def _open_segment(self, plan: SegmentPlan, num_needed_bytes: int) -> tuple[Segment | None, str]:
        """Return the segment, or None; and why it cannot be used, or nothing."""
        sizes = plan.num_bytes, plan.num_cells, self.world_size
        segment, reason, path, token = None, "", "", secrets.randbits(62)
        if self.rank == 0:
            try:
                segment = Segment(*sizes)
                segment.commit(0, num_needed_bytes)
                segment.require(self.world_size * max(plan.place_bytes))  # all map at once
                segment.punch(plan.num_kept_bytes, plan.num_bytes - plan.num_kept_bytes)
                segment.cells[plan.token] = token
                path = segment.path
            except SharedMemoryError as error:
                segment, reason = None, str(error)
        path, token = self.gather_objects((path, token), "<segment>")[0]
        if self.rank > 0 and path:
            try:
                segment = Segment(*sizes, path=path)
            except (SharedMemoryError, ValueError):  # ValueError: another file, and shorter
                segment = None
            if segment is None or segment.cells[plan.token] != token:
                reason = _NOT_ONE_MACHINE
        return segment, reason

    # -- gathering ------------------------------------------------------------------------------

    def open_place(self, unit: str) -> SharedGather | None:
        """Return what gathers a flat parameter in shared memory; None: messages do."""
        if self.pool is None or unit not in self._index:
            return None

        def collective(buffer: Tensor, begin: Callable[[], Work]) -> Work:
            share = self._share(buffer)
            return self._start("all-gather", unit, buffer, share, begin, wire_bytes=0)

        return SharedGather(self.pool, self._index[unit], collective)

    # -- reducing -------------------------------------------------------------------------------

    def shares_memory_of(self, unit: str) -> bool:
        """Whether a unit's buffers are in the segment."""
        return self.pool is not None and unit in self._index

    def scratch_bytes(self, buffer: Tensor, out: Tensor, accumulate: bool) -> int:
        """Nothing in shared memory: each rank reads the others' buffers where they are."""
        return 0 if self.pool is not None else super().scratch_bytes(buffer, out, accumulate)

    def open_reduce_buffer(
        self, unit: str, numel: int, dtype: torch.dtype, device: torch.device, is_kept: bool
    ) -> Tensor:
        """Return a buffer of the segment, once one is free; not for what is kept for long."""
        if is_kept or not self.shares_memory_of(unit):
            return super().open_reduce_buffer(unit, numel, dtype, device, is_kept)
        return self._buffers.take(self._index[unit])

    def pooled_bytes(self, buffer: Tensor) -> int:
        """All bytes of one that is reused, and of one of the root's."""
        return 0 if self.pool is None else self._buffers.pooled_bytes(buffer)

    def close_reduce_buffer(self, buffer: Tensor) -> None:
        """A buffer has been reduced, or will not be."""
        if self.pool is not None:
            self._buffers.close(buffer)

    def _start_reduce_scatter(
        self, buffer: Tensor, out: Tensor, accumulate: bool, unit: str
    ) -> Work:
        if not self.shares_memory_of(unit):
            return super()._start_reduce_scatter(buffer, out, accumulate, unit)
        return Work(self._buffers.start(self._index[unit], buffer, out, accumulate).finish)

    # -- at rest --------------------------------------------------------------------------------

    def trim(self) -> None:
        """Give back homes; all ranks are at rest."""
        if self.pool is not None:
            self._buffers.trim()
            if self.rank == 0:
                self.pool.trim()

    def close(self) -> None:
        """Give the segment back; from now on messages."""
        if self.pool is not None:
            self.pool.close()
            self.pool = None
            del self._buffers


def share_memory(root: RootState) -> None:
    """Share the memory of the units' buffers among the ranks of a shard group; a collective.

    Nothing where the transport is another, or they do already.
    """
    transport, options = root.mesh.shards, root.options
    if not isinstance(transport, SharedMemoryTransport) or transport.pool is not None:
        return
    reservations = [
        Reservation(
            flat.name,
            flat.layout.padded_numel,
            flat.compute_dtype,
            flat.gradient.dtype,
            is_root=unit is root.root_unit,
            kind=kind,
            is_trainable=flat.is_trainable,
        )
        for unit in root.units
        for kind, flat in enumerate(unit.flats)
    ]
    is_bounded = options.sharding_strategy != "SHARD_GRAD_OP"
    num_slots = 1 + options.num_prefetch if is_bounded else 0
    num_rings = 2 if options.num_prefetch else 1
    plan = SegmentPlan(reservations, transport.world_size, num_slots, num_rings)
    num_needed = plan.num_kept_bytes
    if not is_bounded:  # a step needs a home for every unit
        num_needed += sum(
            plan.place_bytes[at] for at, r in enumerate(reservations) if not r.is_root
        )
    transport.reserve(plan, root.memory, num_needed)
    for flat in root.flats:
        flat.compute.place = transport.open_place(flat.name)


def stop_sharing(root: RootState) -> None:
    """Give the shared memory back, if no weights are gathered in it; then messages are used."""
    transport = root.mesh.shards
    if isinstance(transport, SharedMemoryTransport) and transport.pool is not None:
        if not transport.pool.held:
            transport.close()
            for flat in root.flats:
                flat.compute.place = None
