"""The ledger: which collectives this rank took part in, how many bytes it sent, how long it waited.

Note: times of a collective
    ``start_s`` is when its first message was handed to the backend, ``end_s`` when this rank saw it
    complete, on the clock of ``time.perf_counter``. Nobody looks in between: a collective that was
    over before its result was wanted is seen to end when it is wanted. So ``end_s - start_s`` is an
    upper bound of the time it took, and ``waited_s`` (what the training thread spent in ``wait``, a
    reduction's additions included) is exact. On CUDA the host does not wait, the stream does: times
    are those of the stream, read from events after the fact.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch

__all__ = ["CollectiveRecord", "CollectiveTotal", "Ledger", "OpenCollective"]


class CollectiveRecord(NamedTuple):
    """One collective of this rank.

    Attributes:
        operation: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``broadcast``, ``control``.
        unit: whose parameters or gradients.
        payload_bytes: of the whole tensor that all ranks share or add up.
        sent_bytes: that other ranks got from this one, in whatever way.
        start_s: see the note on times.
        end_s: see the note on times.
        waited_s: how long the training thread (on CUDA: its stream) waited for it.
        wire_bytes: of ``sent_bytes``, what the process group carried; 0 in shared memory.
    """

    operation: str
    unit: str
    payload_bytes: int
    sent_bytes: int
    start_s: float
    end_s: float
    waited_s: float
    wire_bytes: int


@dataclass
class CollectiveTotal:
    """Collectives of one operation and unit, added up; fields as in ``CollectiveRecord``."""

    calls: int = 0
    payload_bytes: int = 0
    sent_bytes: int = 0
    in_flight_s: float = 0.0
    waited_s: float = 0.0
    wire_bytes: int = 0

    def __add__(self, other: CollectiveTotal) -> CollectiveTotal:
        """Return both, added up."""
        return CollectiveTotal(
            self.calls + other.calls,
            self.payload_bytes + other.payload_bytes,
            self.sent_bytes + other.sent_bytes,
            self.in_flight_s + other.in_flight_s,
            self.waited_s + other.waited_s,
            self.wire_bytes + other.wire_bytes,
        )

    def __sub__(self, other: CollectiveTotal) -> CollectiveTotal:
        """Return what came after ``other``, an earlier state of the same total."""
        return CollectiveTotal(
            self.calls - other.calls,
            self.payload_bytes - other.payload_bytes,
            self.sent_bytes - other.sent_bytes,
            self.in_flight_s - other.in_flight_s,
            self.waited_s - other.waited_s,
            self.wire_bytes - other.wire_bytes,
        )


class OpenCollective:
    """A collective that has been started; ``wait_begins`` and ``close`` are called in this order.

    Args:
        ledger: where it is noted once it is over.
        operation: see ``CollectiveRecord``, as all others.
        unit: whose.
        payload_bytes: of the whole tensor.
        sent_bytes: that this rank sends.
        wire_bytes: of these, what the process group carries.
    """

    def __init__(
        self,
        ledger: Ledger,
        operation: str,
        unit: str,
        payload_bytes: int,
        sent_bytes: int,
        wire_bytes: int,
    ) -> None:
        self.ledger = ledger
        self.what = (operation, unit, payload_bytes, sent_bytes)
        self.wire_bytes = wire_bytes
        self.start_s = time.perf_counter()
        self._wait_s = self.start_s

    def wait_begins(self) -> None:
        """The training thread wants the result."""
        self._wait_s = time.perf_counter()

    def close(self) -> None:
        """The result is there."""
        end_s = time.perf_counter()
        self.ledger.count(*self.what, self.wire_bytes)
        waited_s = end_s - self._wait_s
        self.ledger.note(
            CollectiveRecord(*self.what, self.start_s, end_s, waited_s, self.wire_bytes)
        )


class _OpenOnDevice(OpenCollective):
    """One whose times are those of the current CUDA stream."""

    def __init__(
        self,
        ledger: Ledger,
        operation: str,
        unit: str,
        payload_bytes: int,
        sent_bytes: int,
        wire_bytes: int,
        device: torch.device,
    ) -> None:
        super().__init__(ledger, operation, unit, payload_bytes, sent_bytes, wire_bytes)
        self._device = device
        self._started = self._wanted = self._mark()

    def wait_begins(self) -> None:
        self._wanted = self._mark()

    def close(self) -> None:
        self._ended = self._mark()
        self.ledger.count(*self.what, self.wire_bytes)
        self.ledger.note_later(self)

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    @property
    def is_over(self) -> bool:
        """Whether the stream has come past its end."""
        return bool(self._ended.query())

    def resolve(self) -> CollectiveRecord:
        """Read the times, once the stream has come past the end."""
        self._ended.synchronize()
        waited_s = self._wanted.elapsed_time(self._ended) / 1e3
        in_flight_s = self._started.elapsed_time(self._ended) / 1e3
        end_s = self.start_s + in_flight_s
        return CollectiveRecord(*self.what, self.start_s, end_s, waited_s, self.wire_bytes)


class Ledger:
    """Notes every collective of this rank: by operation and unit, calls, bytes and waits.

    Operations are ``all_gather``, ``reduce_scatter`` and ``all_reduce`` (parameters and gradients),
    ``broadcast`` (initial state and buffers) and ``control`` (agreements of a few bytes). The last
    ``max_records`` collectives are also kept in the order in which they ended, in ``records``.
    Bytes are counted when a collective has ended.

    Attributes:
        listeners: called with every record, once its times are known.
        num_counted: collectives that have ended, resets or not.
    """

    def __init__(self, max_records: int = 4096) -> None:
        self.listeners: list[Callable[[CollectiveRecord], None]] = []
        self.num_counted = 0
        self._records: deque[CollectiveRecord] = deque(maxlen=max_records)
        self._totals: dict[tuple[str, str], CollectiveTotal] = {}
        self._unresolved: deque[_OpenOnDevice] = deque()

    def open(
        self,
        operation: str,
        unit: str,
        payload_bytes: int,
        sent_bytes: int,
        wire_bytes: int,
        device: torch.device | None = None,
    ) -> OpenCollective:
        """Note that a collective starts now."""
        what = operation, unit, payload_bytes, sent_bytes, wire_bytes
        if device is not None and device.type == "cuda":
            return _OpenOnDevice(self, *what, device)
        return OpenCollective(self, *what)

    @contextmanager
    def blocking(
        self, operation: str, unit: str, payload_bytes: int, sent_bytes: int
    ) -> Iterator[None]:
        """A collective that the training thread waits for from start to end."""
        collective = self.open(operation, unit, payload_bytes, sent_bytes, sent_bytes)
        yield
        collective.close()

    def count(
        self, operation: str, unit: str, payload_bytes: int, sent_bytes: int, wire_bytes: int
    ) -> None:
        """Count a collective that is over."""
        self.num_counted += 1
        total = self._totals.get((operation, unit))
        if total is None:
            total = self._totals[operation, unit] = CollectiveTotal()
        total.calls += 1
        total.payload_bytes += payload_bytes
        total.sent_bytes += sent_bytes
        total.wire_bytes += wire_bytes

    def note(self, record: CollectiveRecord) -> None:
        """Note the times of a collective that has been counted."""
        self._records.append(record)
        for listener in self.listeners:
            listener(record)
        total = self._totals.get(record[:2])
        if total is not None:  # else there was a reset since
            total.in_flight_s += record.end_s - record.start_s
            total.waited_s += record.waited_s

    def note_later(self, collective: _OpenOnDevice) -> None:
        """Note one whose times a stream has still to write."""
        self._unresolved.append(collective)
        if len(self._unresolved) >= 256:
            self._resolve()

    @property
    def records(self) -> deque[CollectiveRecord]:
        """The last collectives, in the order in which they ended; see ``flush``."""
        self._resolve()
        return self._records

    def totals(self) -> dict[tuple[str, str], CollectiveTotal]:
        """Return the totals since the last reset by (operation, unit); see ``flush``."""
        self._resolve()
        nothing = CollectiveTotal()
        return {key: total + nothing for key, total in self._totals.items()}

    def flush(self) -> None:
        """Wait until the times of all collectives are known (on CUDA they follow later)."""
        while self._unresolved:
            self.note(self._unresolved.popleft().resolve())

    def bytes_by_operation(self) -> dict[str, int]:
        """Return bytes that others got of this rank since the last reset, by operation."""
        sent: dict[str, int] = {}
        for (operation, _), total in self._totals.items():
            sent[operation] = sent.get(operation, 0) + total.sent_bytes
        return sent

    def wire_bytes(self, *operations: str) -> int:
        """Return bytes of these operations that the process group carried since the last reset."""
        totals = self._totals.items()
        return sum(total.wire_bytes for (name, _), total in totals if name in operations)

    def calls_by_operation(self) -> dict[str, int]:
        """Return the number of collectives since the last reset, by operation."""
        calls: dict[str, int] = {}
        for (operation, _), total in self._totals.items():
            calls[operation] = calls.get(operation, 0) + total.calls
        return calls

    def calls(self, operation: str, unit: str) -> int:
        """Return how often ``operation`` ran for ``unit`` since the last reset."""
        total = self._totals.get((operation, unit))
        return 0 if total is None else total.calls

    def reset(self) -> None:
        """Forget everything noted so far."""
        self._unresolved.clear()
        self._records.clear()
        self._totals.clear()

    def _resolve(self) -> None:
        """Note the times that are known by now."""
        while self._unresolved and self._unresolved[0].is_over:
            self.note(self._unresolved.popleft().resolve())
