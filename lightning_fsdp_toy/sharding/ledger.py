"""The ledger: which collectives this rank took part in, and how many bytes it sent."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import NamedTuple

__all__ = ["CollectiveRecord", "Ledger"]


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
