"""The count of tensor bytes that the core holds on this rank, by kind, now and at most.

Note: kinds of memory
    =============  ============================================================================
    shards         master shards; constant after setup
    unsharded      unsharded buffers (none where the shard is the whole)
    reduce         reduce buffers, and what a reduction receives into
    pool           memory that the shared-memory transport keeps for these two and nothing is in
    gradients      gradient shards made by the last backward
    optimizer      optimizer state; whoever has counted it says so (``set``)
    activations    what autograd saved inside sharded forwards, while ``counts_activations``; not
                   what ``torch.utils.checkpoint`` keeps or computes again
    =============  ============================================================================

    Nothing is sampled: the count changes when memory is taken or given back, so a peak is the peak.
"""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["KINDS", "MemoryCounter", "PeakWindow", "SavedBytes"]

KINDS = ("shards", "unsharded", "reduce", "pool", "gradients", "optimizer", "activations")


class PeakWindow:
    """Largest bytes since ``restart``, of every kind and of their sum."""

    def __init__(self, counter: MemoryCounter) -> None:
        self._counter = counter
        self.restart()

    def restart(self) -> None:
        """Begin anew from what is held now."""
        self._total_bytes = self._counter.total_bytes
        self._at_peak = dict(self._counter.held)
        self._by_kind = dict(self._counter.held)

    @property
    def total_bytes(self) -> int:
        """Largest sum over kinds."""
        self._counter.settle()
        return self._total_bytes

    @property
    def at_peak(self) -> dict[str, int]:
        """Bytes of each kind at that moment."""
        self._counter.settle()
        return self._at_peak

    @property
    def by_kind(self) -> dict[str, int]:
        """Largest bytes of each kind, each at its own moment."""
        self._counter.settle()
        return self._by_kind

    def note(self) -> None:
        """The count is about to fall, or somebody wants to know."""
        counter, by_kind = self._counter, self._by_kind
        if counter.total_bytes > self._total_bytes:
            held = dict(counter.held)  # may collect garbage, which is counted before it goes
            if sum(held.values()) > self._total_bytes:
                self._total_bytes, self._at_peak = sum(held.values()), held
        for kind, num_bytes in counter.held.items():
            if num_bytes > by_kind[kind]:
                by_kind[kind] = num_bytes


class MemoryCounter:
    """Tensor bytes the core holds on this rank; see the note on kinds of memory.

    Attributes:
        held: bytes of each kind now.
        total_bytes: their sum.
        counts_activations: whether tensors that autograd saves are counted.
        listeners: called with the time (``time.perf_counter``) after every change.
    """

    def __init__(self) -> None:
        self.held = dict.fromkeys(KINDS, 0)
        self.total_bytes = 0
        self.counts_activations = False
        self.listeners: list[Callable[[float], None]] = []
        self._windows: list[PeakWindow] = []
        self._has_risen = False  # since windows were told: they need only know where it turns
        self._own = self.open_window()

    def add(self, kind: str, num_bytes: int) -> None:
        """Note that ``num_bytes`` more (or, negative, fewer) bytes of ``kind`` are held."""
        if num_bytes > 0:
            self._has_risen = True
        elif self._has_risen:
            self.settle()
        self.held[kind] += num_bytes
        self.total_bytes += num_bytes
        for listener in self.listeners:
            listener(time.perf_counter())

    def move(self, source: str, target: str, num_bytes: int, total_bytes: int) -> None:
        """Note that ``total_bytes`` more of ``target`` are held, some of which were of ``source``.

        All at once: neither is the sum lower in between, nor is a peak found that never was.

        Args:
            source: kind of what was held already.
            target: kind of what is held now.
            num_bytes: that change their kind (or, negative, change it back).
            total_bytes: of ``target``, these included.
        """
        self.settle()
        self.held[source] -= num_bytes
        self.held[target] += total_bytes
        self.total_bytes += total_bytes - num_bytes
        self._has_risen = True
        for listener in self.listeners:
            listener(time.perf_counter())

    def set(self, kind: str, num_bytes: int) -> None:
        """Note how many bytes of ``kind`` are held."""
        self.add(kind, num_bytes - self.held[kind])

    def settle(self) -> None:
        """Bring all windows up to date."""
        if self._has_risen:
            for window in self._windows:
                window.note()
            self._has_risen = False

    def open_window(self) -> PeakWindow:
        """Return a new window of peaks, which begins now."""
        window = PeakWindow(self)
        self._windows.append(window)
        return window

    def reopen_window(self, window: PeakWindow) -> None:
        """Go on to keep a closed window up to date; what was held meanwhile is left out."""
        self.settle()
        self._windows.append(window)

    def close_window(self, window: PeakWindow) -> None:
        """Stop to keep a window up to date."""
        self.settle()
        if window in self._windows:
            self._windows.remove(window)

    @property
    def unsharded_peak_bytes(self) -> int:
        """Largest bytes of unsharded buffers since ``reset_peak``."""
        return self._own.by_kind["unsharded"]

    @property
    def peak_bytes(self) -> int:
        """Largest sum over kinds since ``reset_peak``."""
        return self._own.total_bytes

    def reset_peak(self) -> None:
        """Start measuring these two anew from what is held now; windows go on."""
        self._own.restart()


class SavedBytes:
    """Counts the memory behind tensors that autograd saved, each memory once."""

    def __init__(self, memory: MemoryCounter) -> None:
        self._memory = memory
        self._live: dict[int, list[int]] = {}  # by address: how many hold it, its bytes

    def hold(self, ptr: int, num_bytes: int) -> None:
        """Count a memory; it counts until ``free`` has been called as often as this."""
        live = self._live.get(ptr)
        if live is None:
            self._live[ptr] = [1, num_bytes]
            self._memory.add("activations", num_bytes)
        else:
            live[0] += 1

    def free(self, ptr: int) -> None:
        """One that held a memory is gone."""
        live = self._live[ptr]
        live[0] -= 1
        if not live[0]:
            del self._live[ptr]
            self._memory.add("activations", -live[1])
