"""What the ranks of one machine share: where everything lies, who is how far, how to wait.

Note: no rank waits for one that waits for it
    What others may be waiting for and cannot be done yet (a shard whose place is not chosen, a sum
    whose parts are not all there) is a *duty*. Every wait of a rank also does its duties.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from lightning_fsdp_toy.sharding.memory import MemoryCounter
from lightning_fsdp_toy.sharding.stalls import StallDetector
from lightning_fsdp_toy.sharding.transports.segment import Segment, control_bytes, pages

__all__ = ["Duty", "Reservation", "SegmentPlan", "SharedPool"]

_NUM_LOOKS = 200  # at a cell, before a rank sleeps
_SLICE_S = 0.1  # longest sleep: then timeouts and lost ranks are looked for


class Reservation(NamedTuple):
    """What a flat parameter needs in the segment.

    Attributes:
        name: of the flat parameter.
        numel: elements of its buffers, padding included.
        compute_dtype: of the gathered weights.
        reduce_dtype: of the reduce buffer.
        is_root: belongs to the root unit, which is held beside the others.
        kind: its number in its unit. Units reuse the memory of others' flat parameters of the same
            kind, which tend to be of equal size.
        is_trainable: gets gradients, so that reduce buffers are kept for it.
    """

    name: str
    numel: int
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype
    is_root: bool
    kind: int
    is_trainable: bool

    @property
    def gathered_bytes(self) -> int:
        """Of its gathered weights."""
        return self.numel * self.compute_dtype.itemsize

    @property
    def reduced_bytes(self) -> int:
        """Of its reduce buffer."""
        return self.numel * self.reduce_dtype.itemsize


class SegmentPlan:
    """Where everything lies in the segment; the same on all ranks.

    From the beginning: cells and bells; slots; the root's places; every rank's reduce buffers that
    are reused, and those of the root; then what is only used when these do not suffice, and takes
    no memory otherwise: for every flat parameter of the other units a *home* to be gathered in, and
    one in which each rank collects its gradients.

    Args:
        reservations: of all flat parameters.
        num_ranks: of the group.
        num_slots: places that units reuse, of each kind.
        num_rings: reduce buffers of a rank that units reuse, of each kind.

    Attributes:
        places: offsets of places: slots first, then one for each flat parameter.
        place_bytes: their lengths.
        slots: of each kind, which places are its slots.
        rings: offsets of each rank's reused reduce buffers.
        ring_kinds: of which kind each of them is.
        ring_bytes: their lengths.
        reduce_homes: for each rank, offset of a reduce buffer of each flat parameter alone.
        num_pool_bytes: what a rank keeps: slots, the root's places and its own reduce buffers.
        num_kept_bytes: the beginning of the segment, which always has memory.
        num_bytes: of the segment.
    """

    def __init__(
        self, reservations: Sequence[Reservation], num_ranks: int, num_slots: int, num_rings: int
    ) -> None:
        self.reservations = reservations
        outer = [at for at, each in enumerate(reservations) if each.is_root]
        inner = [at for at, each in enumerate(reservations) if not each.is_root]
        kinds = sorted({reservations[at].kind for at in inner})
        slot_sizes: list[int] = []
        ring_sizes: list[int] = []
        self.slots: dict[int, range] = {}
        self.ring_kinds: list[int] = []
        for kind in kinds:
            alike = [reservations[at] for at in inner if reservations[at].kind == kind]
            count, first = min(num_slots, len(alike)), len(slot_sizes)
            slot_sizes += count * [max(each.gathered_bytes for each in alike)]
            self.slots[kind] = range(first, first + count)
            trained = [each.reduced_bytes for each in alike if each.is_trainable]
            count = min(num_rings, len(trained))
            ring_sizes += count * [max(trained, default=0)]
            self.ring_kinds += count * [kind]
        self.ring_bytes = ring_sizes
        self.num_slots = len(slot_sizes)
        kept_homes = [at for at in outer if reservations[at].is_trainable]
        self.num_pool_bytes = sum(slot_sizes) + sum(ring_sizes)
        self.num_pool_bytes += sum(reservations[at].gathered_bytes for at in outer)
        self.num_pool_bytes += sum(reservations[at].reduced_bytes for at in kept_homes)
        self._lay_cells(len(reservations), num_ranks)
        self._end = pages(control_bytes(self.num_cells, num_ranks))
        sizes = slot_sizes + [each.gathered_bytes for each in reservations]
        self.place_bytes = [pages(size) for size in sizes]
        slots = [self._lay(size) for size in slot_sizes]
        homes = {at: self._lay(reservations[at].gathered_bytes) for at in outer}
        self.rings: list[list[int]] = []
        self.reduce_homes: list[dict[int, int]] = []
        for _ in range(num_ranks):
            self.rings.append([self._lay(size) for size in ring_sizes])
            self.reduce_homes.append(
                {at: self._lay(reservations[at].reduced_bytes) for at in kept_homes}
            )
        self.num_kept_bytes = self._end
        homes |= {at: self._lay(reservations[at].gathered_bytes) for at in inner}
        self.places = slots + [homes[at] for at in range(len(reservations))]
        for own in self.reduce_homes:
            others = [at for at in range(len(reservations)) if at not in own]
            own |= {at: self._lay(reservations[at].reduced_bytes) for at in others}
        self.num_bytes = self._end

    def keeps_reduce_home(self, index: int) -> bool:
        """Whether the reduce buffer of a flat parameter alone is in the pool."""
        return self.reservations[index].is_root and self.reservations[index].is_trainable

    def _lay_cells(self, count: int, num_ranks: int) -> None:
        """Number the cells: rows of one for each rank, and what rank 0 alone writes."""
        rows = count * num_ranks
        self.arrived, self.published = 0, rows
        self.ready, self.consumed = 2 * rows, 3 * rows
        self.released = 4 * rows
        self.choice = self.released + (self.num_slots + count) * num_ranks
        self.use = self.choice + count
        self.token = self.use + count
        self.num_cells = self.token + 1

    def _lay(self, num_bytes: int) -> int:
        """Lay something at the end; return its offset."""
        offset, self._end = self._end, self._end + pages(num_bytes)
        return offset


class Duty(Protocol):
    """Something that others may be waiting for and that cannot be done yet."""

    def try_it(self) -> bool:
        """Do it if it can be done; return whether it was."""
        ...


class SharedPool:
    """This rank's part in the segment.

    Args:
        segment: open on all ranks.
        plan: where everything lies.
        rank: of the group.
        pids: processes of its ranks.
        stalls: says when a wait is in vain.
        timeout_s: limit of every wait.
        memory: where bytes are counted: memory of the pool that nothing is in is kind ``pool``.
    """

    def __init__(
        self,
        segment: Segment,
        plan: SegmentPlan,
        rank: int,
        pids: list[int],
        stalls: StallDetector | None,
        timeout_s: float,
        memory: MemoryCounter,
    ) -> None:
        self.segment = segment
        self.plan = plan
        self.rank = rank
        self.num_ranks = len(pids)
        self.memory = memory
        self.is_debug = False  # nobody waits for a slot
        memory.add("pool", plan.num_pool_bytes)
        self.num_taken: Counter[int] = Counter()  # slots, by kind, by gathers of this rank
        self.duties: list[Duty] = []
        self.held: set[int] = set()  # places that this rank has not let go of
        self.uses = [0] * len(plan.places)  # rank 0: how often each place was chosen
        self.homes: set[int] = set()  # rank 0: those that may have memory
        self._pids = pids
        self._stalls = stalls
        self._timeout_s = timeout_s
        has_cores = len(os.sched_getaffinity(0)) >= self.num_ranks
        self._looks = _NUM_LOOKS if has_cores else 1

    def row(self, first: int, index: int) -> int:
        """Return the first cell of a row: of a flat parameter or place, one for each rank."""
        return first + index * self.num_ranks

    def tell(self, row: int, value: int) -> None:
        """Raise this rank's cell of a row, and wake who waits for it."""
        self.segment.cells[row + self.rank] = value
        self.segment.ring(self.rank)

    def behind(self, row: int, value: int) -> int | None:
        """Return a rank whose cell of a row is below ``value``; None if there is none."""
        cells = self.segment.cells
        for rank in range(self.num_ranks):
            if cells[row + rank] < value:
                return rank
        return None

    def do_duties(self) -> bool:
        """Do what can be done by now; return whether there was anything."""
        return any([duty.try_it() for duty in list(self.duties)]) if self.duties else False

    def wait_for(self, blocker: Callable[[], int | None]) -> None:
        """Return when ``blocker`` names no rank any more.

        Raises:
            RuntimeError: the time is up, a rank has ended, or the wait is in vain.
        """
        looks, deadline, next_check = 0, 0.0, 0.0
        while True:
            rank = blocker()
            if rank is None:
                return
            if self.do_duties():
                continue
            looks += 1
            if looks < self._looks:
                continue
            bell = None if self.duties else rank  # duties may depend on any rank
            seen = self.segment.bell(bell)
            if blocker() != rank or self.do_duties():
                continue
            self.segment.sleep(bell, seen, _SLICE_S)
            now = time.monotonic()
            deadline = deadline or now + self._timeout_s
            next_check = next_check or now + _SLICE_S
            if now >= next_check:
                next_check = now + _SLICE_S
                self._check(rank, blocker, now > deadline)

    def _check(self, rank: int, blocker: Callable[[], int | None], is_late: bool) -> None:
        stalls = self._stalls
        wait = None if stalls is None else stalls.current
        if wait is not None and wait.verdict is not None:
            raise RuntimeError("it was interrupted")
        if stalls is not None and wait is None:  # one that the detector does not know of
            reason = stalls.find_reason()
            if reason is not None:
                raise RuntimeError(reason)
        if is_late:
            raise RuntimeError(f"timed out after {self._timeout_s:g} s waiting for rank {rank}")
        if not _is_alive(self._pids[rank]) and blocker() == rank:
            raise RuntimeError(f"rank {rank} (process {self._pids[rank]}) has ended")

    @property
    def held_bytes(self) -> int:
        """Bytes of the segment that have memory, by the kernel's count.

        Without the reduce buffers that other ranks keep; homes that they use count.
        """
        plan = self.plan
        kept = [
            each.reduced_bytes
            for at, each in enumerate(plan.reservations)
            if plan.keeps_reduce_home(at)
        ]
        others = sum(pages(size) for size in (*plan.ring_bytes, *kept)) * (self.num_ranks - 1)
        return self.segment.held_bytes - others

    # -- places ---------------------------------------------------------------------------------

    def holders(self, place: int) -> list[int]:
        """Return the ranks that have not let go of a place (rank 0 asks)."""
        row, cells = self.row(self.plan.released, place), self.segment.cells
        return [r for r in range(self.num_ranks) if cells[row + r] < self.uses[place]]

    def trim(self) -> None:
        """Give back the memory of homes that nobody holds (rank 0 does it)."""
        for place in [place for place in self.homes if not self.holders(place)]:
            self.segment.punch(self.plan.places[place], self.plan.place_bytes[place])
            self.homes.discard(place)

    def close(self) -> None:
        """Count the pool no more; its memory goes with the last tensor in it."""
        self.memory.add("pool", -self.plan.num_pool_bytes)


def _is_alive(pid: int) -> bool:
    """Whether a process has not ended (a zombie has)."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
