"""Gathers of one flat parameter into memory that the ranks of a machine share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_fsdp_toy.sharding.buffers import swap_memory
from lightning_fsdp_toy.sharding.collectives import Work
from lightning_fsdp_toy.sharding.transports.pool import SharedPool

__all__ = ["SharedGather"]

_PLACE_BITS = 20  # of a choice, which is the number of a gather and a place


class SharedGather:
    """Gathers of one flat parameter, one after the other (see the note in ``shared_memory.py``).

    Args:
        pool: what the ranks share.
        index: of the flat parameter.
        collective: notes a gather of a buffer that its second argument begins.
    """

    def __init__(
        self,
        pool: SharedPool,
        index: int,
        collective: Callable[[Tensor, Callable[[], Work]], Work],
    ) -> None:
        self.pool = pool
        self.index = index
        self._collective = collective
        self.reservation = pool.plan.reservations[index]
        self._number = 0  # of the gather that has begun last
        self._shard: Tensor | None = None  # to be copied once the place is known
        self._place = self._use = -1
        self._held: torch.UntypedStorage | None = None  # has no memory while the buffer has it
        self._has_slot = False  # one of those that this rank may take

    def start(self, buffer: Tensor, shard: Tensor) -> Work:
        """Begin a gather (see ``Place``)."""
        self._count(1)

        def begin() -> Work:
            self._begin(shard)
            return Work(lambda: self._finish(buffer))

        return self._collective(buffer, begin)

    def _begin(self, shard: Tensor) -> None:
        """Copy this rank's shard to its part of the place, if that is known."""
        pool = self.pool
        self._shard = shard
        self._number += 1
        pool.tell(pool.row(pool.plan.arrived, self.index), self._number)
        pool.duties.append(self)
        pool.do_duties()
        if pool.is_debug:  # ranks that part after this are to meet in the next comparison
            pool.wait_for(lambda: self._chooser() if self in pool.duties else None)

    def try_it(self) -> bool:
        """Copy this rank's shard, if the place is known."""
        pool, plan, cells = self.pool, self.pool.plan, self.pool.segment.cells
        assert self._shard is not None, f"no gather of `{self.reservation.name}` has begun"
        choice = plan.choice + self.index
        if cells[choice] >> _PLACE_BITS < self._number and not (pool.rank == 0 and self._choose()):
            return False
        self._place = cells[choice] & ((1 << _PLACE_BITS) - 1)
        self._use = cells[plan.use + self.index]
        dtype = self.reservation.compute_dtype
        numel = self.reservation.numel // pool.num_ranks
        offset = plan.places[self._place] + numel * dtype.itemsize * pool.rank
        pool.segment.shared(offset, numel, dtype).copy_(self._shard)
        pool.held.add(self._place)
        self._shard = None
        pool.duties.remove(self)
        pool.tell(pool.row(plan.published, self.index), self._number)
        return True

    def _finish(self, buffer: Tensor) -> None:
        """Wait for all ranks' shards; give the memory to ``buffer``."""
        pool, row = self.pool, self.pool.row(self.pool.plan.published, self.index)

        def blocker() -> int | None:
            rank = pool.behind(row, self._number)
            return self._chooser() if rank == pool.rank else rank

        pool.wait_for(blocker)
        plan = pool.plan
        mapped = plan.places[self._place], plan.place_bytes[self._place]
        self._held = pool.segment.private(*mapped)
        swap_memory(buffer, self._held)

    def release(self, buffer: Tensor) -> None:
        """Take the memory from ``buffer``, if the gather came to an end; others may have it."""
        if self._held is not None:
            swap_memory(buffer, self._held)
        self._let_go()

    def leave(self, buffer: Tensor) -> None:
        """Leave the memory to ``buffer`` (see ``Place``); others may have the place."""
        plan = self.pool.plan
        self.pool.segment.leave(plan.places[self._place], buffer.untyped_storage())
        self._let_go()

    def _let_go(self) -> None:
        pool, self._held = self.pool, None
        self._count(-1)
        if self in pool.duties:  # the wait for it failed before there was a place
            pool.duties.remove(self)
            self._shard = None
            return
        pool.held.discard(self._place)
        pool.tell(pool.row(pool.plan.released, self._place), self._use)
        if pool.rank == 0 and pool.homes:
            pool.trim()

    def _count(self, sign: int) -> None:
        """Count this rank's gathers: as many as there are slots are in memory of the pool."""
        pool, is_root = self.pool, self.reservation.is_root
        kind = self.reservation.kind
        if sign > 0:
            self._has_slot = not is_root and pool.num_taken[kind] < len(pool.plan.slots[kind])
        pool.num_taken[kind] += sign * self._has_slot
        size = sign * self.reservation.gathered_bytes
        pooled = size if self._has_slot or is_root else 0
        pool.memory.move("pool", "unsharded", pooled, size)

    # -- rank 0 ---------------------------------------------------------------------------------

    def _choose(self) -> bool:
        """Choose the place, unless one may become free; return whether it is chosen."""
        pool, plan = self.pool, self.pool.plan
        place, may_become_free = None, False
        for slot in self._slots:
            holders = pool.holders(slot) if slot not in pool.held else [0]
            if not holders:
                place = slot
                break
            may_become_free |= any(r != 0 and not self._has_arrived(r) for r in holders)
        if place is None:
            place = self._home
            if (may_become_free and not pool.is_debug) or pool.holders(place):
                return False
            if not self.reservation.is_root:
                pool.segment.commit(plan.places[place], plan.place_bytes[place])
                pool.homes.add(place)
        pool.uses[place] += 1
        pool.segment.cells[plan.use + self.index] = pool.uses[place]
        pool.segment.cells[plan.choice + self.index] = self._number << _PLACE_BITS | place
        return True

    @property
    def _slots(self) -> range:
        is_root = self.reservation.is_root
        return range(0) if is_root else self.pool.plan.slots[self.reservation.kind]

    @property
    def _home(self) -> int:
        return self.pool.plan.num_slots + self.index

    def _has_arrived(self, rank: int) -> bool:
        pool = self.pool
        row = pool.row(pool.plan.arrived, self.index)
        return bool(pool.segment.cells[row + rank] >= self._number)

    def _chooser(self) -> int:
        """A rank whose news may bring the choice of the place."""
        pool = self.pool
        if pool.rank != 0:
            return 0
        for place in (*self._slots, self._home):
            for rank in pool.holders(place):
                if rank != 0 and not self._has_arrived(rank):
                    return rank
        return pool.num_ranks - 1
