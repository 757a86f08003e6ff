"""What units do, with times: for a timeline of a few steps.

Off, it costs one comparison for each phase of a unit; on, less than a microsecond for each event.
Times are those of ``time.perf_counter`` on this rank's host thread. On CUDA that is when work was
queued; the ledger has the stream's times of collectives.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from lightning_fsdp_toy.sharding.memory import MemoryCounter

__all__ = ["MemorySample", "Observer", "UnitEvent"]


class UnitEvent(NamedTuple):
    """A change of one unit.

    Attributes:
        time_s: when.
        unit: fully qualified name.
        what: ``gather`` (an all-gather begins), ``unsharded``, ``sharded``; ``forward`` and
            ``backward`` (it begins to compute), ``end_forward`` and ``end_backward``; ``collect``
            (its first gradient has arrived).
    """

    time_s: float
    unit: str
    what: str


class MemorySample(NamedTuple):
    """Bytes held of each kind (in the order of ``KINDS``) from a time on."""

    time_s: float
    held: tuple[int, ...]


class Observer:
    """Collects events of units and of the memory they hold, while it is on.

    Args:
        memory: whose changes are collected, too.
    """

    def __init__(self, memory: MemoryCounter) -> None:
        self.memory = memory
        self.events: list[UnitEvent] = []
        self.samples: list[MemorySample] = []
        self._sample(time.perf_counter())
        memory.listeners.append(self._sample)

    def note(self, unit: str, what: str) -> None:
        """Something happens now."""
        self.events.append(UnitEvent(time.perf_counter(), unit, what))

    def _sample(self, time_s: float) -> None:
        self.samples.append(MemorySample(time_s, tuple(self.memory.held.values())))

    def close(self) -> None:
        """Stop to collect changes of memory."""
        self.memory.listeners.remove(self._sample)
