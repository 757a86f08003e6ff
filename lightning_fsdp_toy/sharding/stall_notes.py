"""What stuck ranks write down about themselves, what follows from it, and how it is told.

Note: when a wait is certain to be in vain
    A collective needs every rank of its group. When ranks run different modules, branches or
    numbers of batches, each waits for the others in another collective, and would do so until the
    process group's timeout. A rank whose wait lasts writes down where it waits and how often it has
    entered each kind of wait so far::

        rank 0   all-gather number 7 of unit `blocks.1`     entered so far: {barrier: 2, ...}
        rank 1   barrier number 3                           entered so far: {blocks.1: 6, ...}

    Rank r waits *for* rank s if s is in another wait and has not yet entered the one r is in. If
    all ranks run the same sequence of waits, s is then earlier in that sequence than r; following
    "waits for" always leads backwards and ends at a rank that computes, loads data or writes a
    file. Only ranks that left the common sequence can form a circle: it is a proof, however late
    notes are read and however many messages were posted ahead. A rank that has left the run is
    waited for in vain, too. Everything else waits on until the timeout.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["Note", "key_of", "ranks_in_vain", "tell_departure", "tell_place", "tell_places"]

_MAX_RANKS_NAMED = 8


class Note(NamedTuple):
    """What a rank has written down about itself."""

    run: int  # see `begin_run`
    operation: str  # empty: it does not wait
    unit: str
    number: int  # how often it has entered this wait
    members: list[int]  # ranks of the wait's group
    entered: dict[str, int]  # how often it has entered each wait, by `key_of`
    progress: str  # where its run is
    handling: str  # exception during whose handling it waits
    left: str  # why it has ended; empty if it has not

    @property
    def key(self) -> str:
        """The wait it is in."""
        return key_of(self.operation, self.unit, self.members)


def ranks_in_vain(stuck: dict[int, Note], gone: set[int]) -> set[int]:
    """Return the stuck ranks that wait for a circle of ranks, or for one that is gone."""
    keys = {rank: note.key for rank, note in stuck.items()}

    def waits_for(rank: int, other: int) -> bool:
        if other in gone:
            return True
        is_elsewhere = keys[other] != keys[rank]
        return is_elsewhere and stuck[other].entered.get(keys[rank], 0) < stuck[rank].number

    doomed = set(stuck)
    while True:
        bad = doomed | gone
        freed = {
            rank
            for rank in doomed
            if not any(waits_for(rank, other) for other in stuck[rank].members if other in bad)
        }
        if not freed:
            return doomed
        doomed -= freed


def key_of(operation: str, unit: str, members: list[int]) -> str:
    """Return what is equal for two ranks that are in the same wait, and for them alone."""
    return f"{operation}|{unit}|{members}"


def tell_place(operation: str, unit: str, number: int) -> str:
    """Say which wait it is."""
    return f"{operation} number {number}" + (f" of unit `{unit}`" if unit else "")


def tell_places(stuck: dict[int, Note], gone: dict[int, Note], others: set[int]) -> str:
    """Say where every rank is, equal ranks together."""
    places: dict[str, list[int]] = {}
    for rank, note in sorted(stuck.items()):
        place = f"waits in {tell_place(note.operation, note.unit, note.number)}"
        place += f", {note.progress}" if note.progress else ""
        place += f", while handling {note.handling}" if note.handling else ""
        places.setdefault(place, []).append(rank)
    told = [f"{_name_ranks(ranks)} {place}" for place, ranks in places.items()]
    told += [f"{_name_ranks(others)} does not wait"] if others else []
    if gone:
        return f"{tell_departure(gone)}; {'; '.join(told)}"
    return (
        f"the ranks wait for each other in different places: {'; '.join(told)}. They ran unequal "
        f"numbers of batches, or a module, a branch or an `unsharded` block that not all ranks ran."
    )


def tell_departure(gone: dict[int, Note]) -> str:
    """Say which ranks have left, and why."""
    reasons: dict[str, list[int]] = {}
    for rank, note in sorted(gone.items()):
        where = f" ({note.progress})" if note.progress else ""
        reasons.setdefault(f"{note.left}{where}", []).append(rank)
    return "; ".join(f"{_name_ranks(ranks)} has left: {why}" for why, ranks in reasons.items())


def _name_ranks(ranks: Iterable[int]) -> str:
    ordered = sorted(ranks)
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    names = ", ".join(str(rank) for rank in ordered[:_MAX_RANKS_NAMED])
    more = len(ordered) - _MAX_RANKS_NAMED
    return f"each of ranks {names}" + (f" and {more} more" if more > 0 else "")
