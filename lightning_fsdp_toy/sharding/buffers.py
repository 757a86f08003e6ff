"""Full-size buffers that have memory for a while, and the count of bytes held."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fsdp_toy.sharding.collectives import Transport, Work

__all__ = ["GatheredBuffer", "MemoryCounter", "give_back_freed_memory", "num_bytes"]

_LIBC = ctypes.CDLL(None)


@dataclass
class MemoryCounter:
    """Tensor bytes the core holds on this rank, now and at most since ``reset_peak``.

    Attributes:
        shards_bytes: master shards; constant after setup.
        unsharded_bytes: unsharded buffers (none where the shard is the whole).
        reduce_bytes: reduce buffers, and what a reduction receives into.
        gradients_bytes: gradient shards made by the last backward.
        unsharded_peak_bytes: largest ``unsharded_bytes``.
        peak_bytes: largest sum of the four.
    """

    shards_bytes: int = 0
    unsharded_bytes: int = 0
    reduce_bytes: int = 0
    gradients_bytes: int = 0
    unsharded_peak_bytes: int = 0
    peak_bytes: int = 0

    def add(self, kind: str, num_bytes: int) -> None:
        """Note that ``num_bytes`` more (or, negative, fewer) bytes of ``kind`` are held."""
        setattr(self, kind, getattr(self, kind) + num_bytes)
        self.unsharded_peak_bytes = max(self.unsharded_peak_bytes, self.unsharded_bytes)
        total = self.shards_bytes + self.unsharded_bytes + self.reduce_bytes + self.gradients_bytes
        self.peak_bytes = max(self.peak_bytes, total)

    def reset_peak(self) -> None:
        """Start measuring peaks anew from what is held now."""
        self.unsharded_peak_bytes = self.peak_bytes = 0
        self.add("unsharded_bytes", 0)


class GatheredBuffer:
    """A flat parameter's unsharded data in one dtype: memory comes with a gather and goes again.

    One tensor for good, whose storage is given memory and loses it. Every view ever made of it is
    valid again after the next gather; in between it has no memory, and no operation may read it
    (torch checks that in most operations, not in all).

    Args:
        tensor: 1D, padded_numel, with memory.
        transport: gathers, and owns the memory.
        memory: where bytes are counted.
        name: for the ledger and messages.
        is_permanent: it is the shard itself, never gathered and never released.
    """

    def __init__(
        self,
        tensor: Tensor,
        transport: Transport,
        memory: MemoryCounter,
        name: str,
        is_permanent: bool,
    ) -> None:
        self.tensor = tensor
        self.transport = transport
        self.memory = memory
        self.name = name
        self.is_permanent = is_permanent
        self._has_memory = True
        self._work: Work | None = None
        if not is_permanent:
            memory.add("unsharded_bytes", num_bytes(tensor))

    @property
    def has_memory(self) -> bool:
        """Whether views of it may be read (once ``wait`` has returned)."""
        return self._has_memory

    @property
    def own(self) -> Tensor:
        """This rank's part, 1D."""
        return self.tensor.chunk(self.transport.world_size)[self.transport.rank]

    @property
    def ptr(self) -> int:
        """Address of its memory."""
        return self.tensor.untyped_storage().data_ptr()

    def allocate(self) -> None:
        """Give it memory; the contents are undefined."""
        if not self._has_memory:
            self.transport.allocate_(self.tensor)
            self.memory.add("unsharded_bytes", num_bytes(self.tensor))
            self._has_memory = True

    @torch.no_grad()
    def start_gather(self, shard: Tensor) -> None:
        """Begin to fill it from every rank's ``shard`` (1D, any floating dtype, any device)."""
        if self.is_permanent:
            return
        self.allocate()
        own, read = shard, None
        if shard.device != self.tensor.device:
            own, read = self.own, self._fetch(shard)
        elif shard.dtype != self.tensor.dtype:
            own = self.own  # the gather sends it from here
            own.copy_(shard)
        work = self.transport.start_all_gather_(self.tensor, own, self.name)

        def finish() -> None:
            work.wait()
            if read is not None:
                read.synchronize()  # from now on the optimizer may change the shard

        self._work = Work(finish)

    def _fetch(self, shard: Tensor) -> torch.cuda.Event:
        """Queue a copy of an offloaded shard to its place; the event is past when it was read."""
        device = self.tensor.device
        if shard.dtype != self.tensor.dtype:
            shard = shard.to(device, non_blocking=True)  # converted there, not by the CPU
        self.own.copy_(shard, non_blocking=True)
        read = torch.cuda.Event()
        read.record(torch.cuda.current_stream(device))
        return read

    def wait(self) -> None:
        """Return when it is complete."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()

    def release(self) -> None:
        """Take its memory away."""
        self.wait()  # messages under way still write to it
        if self._has_memory and not self.is_permanent:
            self.transport.release_(self.tensor)
            self.memory.add("unsharded_bytes", -num_bytes(self.tensor))
            self._has_memory = False


def give_back_freed_memory() -> None:
    """Let the C library give the kernel what was freed between blocks that are still in use.

    glibc keeps it otherwise, and a process that never holds more than a unit beside its shards
    grows to the size of the whole model. Nothing where there is no such call.
    """
    trim = getattr(_LIBC, "malloc_trim", None)
    if trim is not None:
        trim(0)


def num_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()
