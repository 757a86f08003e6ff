"""Reductions of gradients that lie in memory that the ranks of a machine share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fsdp_toy.sharding.stalls import StallError
from lightning_fsdp_toy.sharding.transports import pairwise
from lightning_fsdp_toy.sharding.transports.pool import SharedPool
from lightning_fsdp_toy.sharding.transports.segment import pages

__all__ = ["ReduceBuffers", "SharedReduction"]

_RING_BITS = 8  # of what a rank tells: the number of a reduction and the buffer it is in
_HOME = (1 << _RING_BITS) - 1  # the flat parameter's own


@dataclass
class _Taken:
    """A buffer that gradients are collected in, until it is closed."""

    buffer: Tensor
    index: int  # of the flat parameter
    ring: int
    pooled_bytes: int  # that are counted as the pool's otherwise
    is_filling: bool = True


class ReduceBuffers:
    """This rank's reduce buffers (see the note in ``shared_memory.py``).

    Args:
        pool: what the ranks share.
    """

    def __init__(self, pool: SharedPool) -> None:
        self.pool = pool
        self._free = list(range(len(pool.plan.ring_kinds)))
        self._full: list[tuple[int, int, int]] = []  # buffer, whose reduction, its number
        self._taken: dict[int, _Taken] = {}  # by identity: a buffer may be taken again meanwhile
        self._numbers = [0] * len(pool.plan.reservations)  # of reductions of each flat parameter
        self._homes: set[int] = set()  # those that may have memory

    def take(self, index: int) -> Tensor:
        """Return a buffer for the gradients of a flat parameter, once one is free."""
        taken = self._take(index)
        self._taken[id(taken.buffer)] = taken
        return taken.buffer

    def pooled_bytes(self, buffer: Tensor) -> int:
        """Return how many bytes of a buffer that was taken are counted as the pool's otherwise."""
        taken = self._taken.get(id(buffer))
        return 0 if taken is None else taken.pooled_bytes

    def _take(self, index: int) -> _Taken:
        pool, reservation = self.pool, self.pool.plan.reservations[index]
        ring = _HOME if reservation.is_root else self._take_ring(index)
        if ring == _HOME:
            self._wait_for_readers(index, index, self._numbers[index])
        offset = self._offset(pool.rank, index, ring)
        is_pooled = ring != _HOME or pool.plan.keeps_reduce_home(index)
        if not is_pooled:
            pool.segment.commit(offset, reservation.reduced_bytes)
            self._homes.add(index)
        buffer = pool.segment.shared(offset, reservation.numel, reservation.reduce_dtype)
        return _Taken(buffer, index, ring, reservation.reduced_bytes if is_pooled else 0)

    def _take_ring(self, index: int) -> int:
        """Return a buffer that is reused, its own place if all that fit are being filled."""
        plan, reservation = self.pool.plan, self.pool.plan.reservations[index]
        fitting = {  # those of units that were frozen once may be too small
            ring
            for ring, (kind, size) in enumerate(zip(plan.ring_kinds, plan.ring_bytes, strict=True))
            if kind == reservation.kind and size >= reservation.reduced_bytes
        }
        for each in [each for each in self._full if self._reader(*each[1:]) is None]:
            self._full.remove(each)
            self._free.append(each[0])
        free = [ring for ring in self._free if ring in fitting]
        full = [each for each in self._full if each[0] in fitting]
        if not free and full and not self.pool.is_debug:
            ring, whose, number = full[0]
            self._wait_for_readers(index, whose, number)
            self._full.remove(full[0])
            return ring
        if not free:
            return _HOME
        self._free.remove(free[0])
        return free[0]

    def _wait_for_readers(self, index: int, whose: int, number: int) -> None:
        """Wait until all have added up a buffer that is to be filled anew.

        The stall detector does not know of this wait: it does not wait for ranks to come to the
        same place, and they come to it at different times, or not at all (without gradients).
        """
        pool, reservations = self.pool, self.pool.plan.reservations
        try:
            pool.wait_for(lambda: self._reader(whose, number))
        except RuntimeError as error:
            raise StallError(
                f"rank {pool.rank} of {pool.num_ranks}: no reduce buffer for unit "
                f"`{reservations[index].name}`, because not all ranks have added up that of unit "
                f"`{reservations[whose].name}`: {error}"
            ) from error

    def close(self, buffer: Tensor) -> None:
        """A buffer has been reduced, or will not be."""
        taken = self._taken.pop(id(buffer), None)
        if taken is not None:
            if taken.is_filling and taken.ring != _HOME:
                self._free.append(taken.ring)

    def start(self, index: int, buffer: Tensor, out: Tensor, accumulate: bool) -> SharedReduction:
        """Tell the others that ``buffer`` is full; see ``Transport.start_reduce_scatter``."""
        pool = self.pool
        # What is told about a reduction stands until all have read it.
        self._wait_for_readers(index, index, self._numbers[index])
        taken = self._taken.get(id(buffer))
        if taken is None:  # kept over micro-batches in memory of its own, which counts as before
            taken = self._taken[id(buffer)] = self._take(index)
            taken.buffer.copy_(buffer)
            taken.pooled_bytes = 0
        ring, taken.is_filling = taken.ring, False
        number = self._numbers[index] = self._numbers[index] + 1
        if ring != _HOME:
            self._full.append((ring, index, number))
        pool.tell(pool.row(pool.plan.ready, index), number << _RING_BITS | ring)
        reduction = SharedReduction(self, index, number, out, accumulate)
        pool.duties.append(reduction)
        return reduction

    def trim(self) -> None:
        """Give back the memory of homes; all ranks have read what was in them."""
        pool = self.pool
        filling = {each.index for each in self._taken.values() if each.is_filling}
        for index in self._homes - filling:
            size = pages(pool.plan.reservations[index].reduced_bytes)
            pool.segment.punch(self._offset(pool.rank, index, _HOME), size)
            self._homes.discard(index)

    def part(self, rank: int, index: int, number: int, numel: int) -> Tensor:
        """Return this rank's part of another's buffer, which is full, in a reduction."""
        pool = self.pool
        row = pool.row(pool.plan.ready, index)
        told = pool.segment.cells[row + rank]
        assert told >> _RING_BITS == number, f"rank {rank} told of another reduction"
        ring = told & _HOME
        dtype = pool.plan.reservations[index].reduce_dtype
        start = numel * dtype.itemsize * pool.rank
        return pool.segment.shared(self._offset(rank, index, ring) + start, numel, dtype)

    def _offset(self, rank: int, index: int, ring: int) -> int:
        plan = self.pool.plan
        return plan.reduce_homes[rank][index] if ring == _HOME else plan.rings[rank][ring]

    def _reader(self, index: int, number: int) -> int | None:
        """A rank that has not added up this rank's buffer of a reduction."""
        return self.pool.behind(self.pool.row(self.pool.plan.consumed, index), number)


class SharedReduction:
    """One reduction that has begun: this rank's buffer is full.

    Args:
        buffers: this rank's.
        index: of the flat parameter.
        number: how many reductions of it there were, with this one.
        out: gets the sum of this rank's part, 1D.
        accumulate: whether what it holds is added, too.
    """

    def __init__(
        self, buffers: ReduceBuffers, index: int, number: int, out: Tensor, accumulate: bool
    ) -> None:
        self.buffers = buffers
        self.index = index
        self.number = number
        self.out = out
        self.accumulate = accumulate
        self._is_done = False

    def finish(self) -> None:
        """Add up this rank's part of all ranks' buffers when they are full."""
        self.buffers.pool.wait_for(self._blocker)
        self.try_it()

    def _blocker(self) -> int | None:
        pool = self.buffers.pool
        row = pool.row(pool.plan.ready, self.index)
        return None if self._is_done else pool.behind(row, self.number << _RING_BITS)

    @torch.no_grad()
    def try_it(self) -> bool:
        """Add up, if they are full and it has not been done."""
        if self._is_done or self._blocker() is not None:
            return False
        pool, numel = self.buffers.pool, self.out.numel()
        which = self.index, self.number, numel
        parts = [self.buffers.part(rank, *which) for rank in range(pool.num_ranks)]
        pairwise.add_in_order(self.out, parts, self.accumulate)
        self._is_done = True
        pool.duties.remove(self)
        pool.tell(pool.row(pool.plan.consumed, self.index), self.number)
        return True
