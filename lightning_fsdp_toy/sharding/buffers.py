"""Full-size buffers that have memory for a while."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_fsdp_toy.sharding.collectives import Place, Transport, Work
from lightning_fsdp_toy.sharding.memory import MemoryCounter

__all__ = ["GatheredBuffer", "num_bytes", "swap_memory"]


class GatheredBuffer:
    """A flat parameter's unsharded data in one dtype: memory comes with a gather and goes again.

    One tensor for good, whose storage is given memory and loses it. Every view ever made of it is
    valid again after the next gather; in between it has no memory, and no operation may read it
    (torch checks that in some, others crash). One whose memory a numpy array or another process
    shares is replaced when it should lose it.

    Args:
        tensor: 1D, padded_numel, with memory.
        transport: gathers, and owns the memory.
        memory: where bytes are counted.
        name: for the ledger and messages.
        is_permanent: it is the shard itself, never gathered and never released.

    Attributes:
        on_replaced: called with the old and the new ``tensor`` while both have memory: views of the
            one have to become views of the other.
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
        self.on_replaced: Callable[[Tensor, Tensor], None] = lambda old, new: None
        self._has_memory = True
        self._work: Work | None = None
        self.place: Place | None = None  # of the transport's, where it is gathered
        self._is_placed = False  # and it has that memory, once it has been waited for
        if not is_permanent:
            memory.add("unsharded", num_bytes(tensor))

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
            self.memory.add("unsharded", num_bytes(self.tensor))
            self._has_memory = True

    @torch.no_grad()
    def start_gather(self, shard: Tensor) -> None:
        """Begin to fill it from every rank's ``shard`` (1D, any floating dtype, any device)."""
        if self.is_permanent:
            return
        if self.place is not None:
            self._has_memory = self._is_placed = True
            self._work = self.place.start(self.tensor, shard)
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
        if not self._has_memory or self.is_permanent:
            return
        if self._is_used_elsewhere():
            self._leave_memory()
        elif self._is_placed:
            assert self.place is not None
            self.place.release(self.tensor)
        else:
            self.transport.release_(self.tensor)
            self.memory.add("unsharded", -num_bytes(self.tensor))
        self._has_memory = self._is_placed = False

    def _is_used_elsewhere(self) -> bool:
        """Whether a numpy array or (``share_memory_``) a process shares the memory.

        Torch never takes it away then, or crashes.
        """
        storage = self.tensor.untyped_storage()
        is_sent = storage.device.type == "cpu" and not self._is_placed and storage.is_shared()
        return is_sent or not storage.resizable()

    def _leave_memory(self) -> None:
        """Leave its memory to who else shares it; have other memory from now on."""
        with torch.inference_mode(False):
            old, self.tensor = self.tensor, torch.empty_like(self.tensor)
        self.on_replaced(old, self.tensor)
        self.transport.release_(self.tensor)
        if self._is_placed:
            assert self.place is not None
            self.place.leave(old)
        else:
            self.memory.add("unsharded", -num_bytes(self.tensor))

    @torch.no_grad()
    def keep_apart(self) -> None:
        """Move its contents to memory of its own, which may live on in a numpy array."""
        if self._is_placed:
            assert self.place is not None
            own = self.tensor.clone()
            self.place.release(self.tensor)
            swap_memory(self.tensor, own.untyped_storage())
            self.memory.add("unsharded", num_bytes(self.tensor))
            self._is_placed = False


def swap_memory(buffer: Tensor, storage: torch.UntypedStorage) -> None:
    """Exchange the memory of a buffer, all views of it included, and of a storage."""
    buffer.untyped_storage()._swap_data_ptr_(storage)  # type: ignore[attr-defined]


def num_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()
