"""The count of tensor bytes that the core holds on this rank, by kind, now and at most.

Note: kinds of memory
    =============  ============================================================================
    shards         master shards; constant after setup
    unsharded      unsharded buffers (none where the shard is the whole)
    reduce         reduce buffers, and what a reduction receives into
    gradients      gradient shards made by the last backward
    optimizer      optimizer state; whoever has counted it says so (``set``)
    activations    what autograd saved inside sharded forwards, while ``counts_activations``; not
                   what ``torch.utils.checkpoint`` keeps or computes again
    =============  ============================================================================

    Nothing is sampled: the count changes when memory is taken or given back, so a peak is the peak.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable

__all__ = ["KINDS", "MemoryCounter", "PeakWindow", "SavedBytes"]

KINDS = ("shards", "unsharded", "reduce", "gradients", "optimizer", "activations")


class PeakWindow:
    """Largest bytes since ``restart``, of every kind and of their sum.

    Attributes:
        total_bytes: largest sum over kinds.
        at_peak: bytes of each kind at that moment.
        by_kind: largest bytes of each kind, each at its own moment.
    """

    def __init__(self, counter: MemoryCounter) -> None:
        self._counter = counter
        self.restart()

    def restart(self) -> None:
        """Begin anew from what is held now."""
        self.total_bytes = self._counter.total_bytes
        self.at_peak = dict(self._counter.held)
        self.by_kind = dict(self._counter.held)

    def note(self, kind: str) -> None:
        """The count of ``kind`` has changed."""
        counter = self._counter
        if counter.held[kind] > self.by_kind[kind]:
            self.by_kind[kind] = counter.held[kind]
        if counter.total_bytes > self.total_bytes:
            self.total_bytes = counter.total_bytes
            self.at_peak = dict(counter.held)


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
        self._own = self.open_window()

    def add(self, kind: str, num_bytes: int) -> None:
        """Note that ``num_bytes`` more (or, negative, fewer) bytes of ``kind`` are held."""
        self.held[kind] += num_bytes
        self.total_bytes += num_bytes
        if num_bytes > 0:
            for window in self._windows:
                window.note(kind)
        for listener in self.listeners:
            listener(time.perf_counter())

    def set(self, kind: str, num_bytes: int) -> None:
        """Note how many bytes of ``kind`` are held."""
        self.add(kind, num_bytes - self.held[kind])

    def open_window(self) -> PeakWindow:
        """Return a new window of peaks, which begins now."""
        window = PeakWindow(self)
        self._windows.append(window)
        return window

    def reopen_window(self, window: PeakWindow) -> None:
        """Go on to keep a closed window up to date; what was held meanwhile is left out."""
        self._windows.append(window)

    def close_window(self, window: PeakWindow) -> None:
        """Stop to keep a window up to date."""
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
        self._live: dict[int, weakref.ref[_SavedMemory]] = {}  # by address

    def hold(self, ptr: int, num_bytes: int) -> object:
        """Count a memory; it counts until the last object returned for it is gone."""
        ref = self._live.get(ptr)
        saved = None if ref is None else ref()
        if saved is None:
            saved = _SavedMemory(self, ptr, num_bytes)
            self._live[ptr] = weakref.ref(saved)
            self._memory.add("activations", num_bytes)
        return saved

    def free(self, ptr: int, num_bytes: int) -> None:
        """A memory is no longer saved."""
        self._live.pop(ptr, None)
        self._memory.add("activations", -num_bytes)


class _SavedMemory:
    __slots__ = ("__weakref__", "_bytes", "_num_bytes", "_ptr")

    def __init__(self, counter: SavedBytes, ptr: int, num_bytes: int) -> None:
        self._bytes, self._ptr, self._num_bytes = counter, ptr, num_bytes

    def __del__(self) -> None:
        self._bytes.free(self._ptr, self._num_bytes)
