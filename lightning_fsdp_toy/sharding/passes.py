"""Forward passes: which unit calls a backward may still come back to.

Note: passes
    The starts of one forward belong to its ``ForwardPass``. The graph keeps its pass alive (through
    the handles and output hooks), ``LivePasses`` knows it weakly: a forward that never sees a
    backward is forgotten when its graph is gone on all ranks. Two forwards before one backward are
    two live passes, and a unit's start is the earlier one, so that it is reduced once. A second
    backward through a retained graph brings its pass back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from lightning_fsdp_toy.sharding.unit import Unit

__all__ = ["ForwardPass", "KnownPass", "LivePasses"]

_MAX_PASSES = 16  # known one by one; older ones count as one


class ForwardPass:
    """The unit calls of one forward.

    Attributes:
        starts: tick at which each unit was first called.
        awaited: units some output of which required a gradient.
        gaps: ticks at which a unit ran without gradients. Re-entrant checkpointing
            may run it again in backward, so nothing is gathered ahead across a gap.
        is_consumed: a backward through it has ended.
    """

    def __init__(self) -> None:
        self.starts: dict[Unit, int] = {}
        self.awaited: set[Unit] = set()
        self.gaps: list[int] = []
        self.is_consumed = False


class KnownPass(NamedTuple):
    """What is known of a pass, or of several old ones, whose graphs may be gone.

    Graphs live as long as somebody holds them, which one rank may do and another not (for its log,
    say). So passes are not forgotten with their graphs but when all ranks agree on it.
    """

    refs: list[weakref.ref[ForwardPass]]
    starts: dict[Unit, int]
    awaited: set[Unit]
    gaps: list[int]


class LivePasses:
    """The passes that no backward has gone through, oldest first; the same on all ranks."""

    def __init__(self) -> None:
        self._known: list[KnownPass] = []

    def __iter__(self) -> Iterator[KnownPass]:
        return iter(self._known)

    def note(self, forward_pass: ForwardPass) -> None:
        """A forward begins."""
        ref, starts = weakref.ref(forward_pass), forward_pass.starts
        self._known.append(KnownPass([ref], starts, forward_pass.awaited, forward_pass.gaps))
        if len(self._known) > _MAX_PASSES:  # forwards without `no_grad`, and no backward
            first, second = self._known[:2]
            refs = [ref for ref in first.refs + second.refs if ref() is not None]
            starts = {**second.starts, **first.starts}  # the first was earlier
            gaps = [*first.gaps, *second.gaps]
            self._known[:2] = [KnownPass(refs, starts, first.awaited | second.awaited, gaps)]

    def forget_dead(self, any_rank: Callable[[list[bool]], list[bool]]) -> None:
        """Drop passes whose graph no rank has any more.

        Args:
            any_rank: returns which flags are true on any rank; called on all ranks or on none.
        """
        if len(self._known) < 2:  # the one there is has just run
            return
        alive = any_rank([any(ref() is not None for ref in known.refs) for known in self._known])
        self._known = [k for k, is_alive in zip(self._known, alive, strict=True) if is_alive]

    def touched_by(self, touched: set[ForwardPass]) -> list[bool]:
        """Return for each pass whether this rank's backward came to it; empty if there is one."""
        if len(self._known) < 2:  # no question for the ranks to agree on
            return []
        return [any(ref() in touched for ref in known.refs) for known in self._known]

    def consume(self, touched: list[bool]) -> None:
        """A backward has ended that came, on any rank, to these passes (see ``touched_by``)."""
        touched = touched or [True] * len(self._known)
        pairs = list(zip(self._known, touched, strict=True))
        for forward_pass in (
            ref() for known, is_touched in pairs if is_touched for ref in known.refs
        ):
            if forward_pass is not None:
                forward_pass.is_consumed = True
        self._known = [known for known, is_touched in pairs if not is_touched]
