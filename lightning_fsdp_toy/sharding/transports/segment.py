"""Memory that the ranks of one machine share, and how they wait for each other in it.

Note: a segment
    One file without a name in ``/dev/shm`` (``O_TMPFILE``, mode 600): the ranks open it through the
    process that made it, so there is nothing to unlink and no crash can leave one behind. What a
    rank has for others it writes through a *shared* mapping; gathered weights it reads through a
    *private* (copy-on-write) one, so that whoever edits weights in place edits the copy of this
    rank alone, as if it had gathered into memory of its own.

Note: cells and bells
    Ranks tell each other how far they are in *cells*: 64-bit counters, each written by one rank
    only and only ever raised. A rank that changes cells rings its *bell*, a 32-bit word, and one
    that all share. Whoever waits for a cell looks at it for a while (not where there are more ranks
    than cores) and then sleeps in the kernel until the bell of its writer, or the shared one,
    changes (Linux ``futex``): the kernel compares the bell with what the sleeper last saw, so no
    ring is missed. In the shared bell no two ranks ever write the same value.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import weakref

import torch
from torch import Tensor

from lightning_fsdp_toy.sharding.transports.page_map import PageMap

__all__ = ["Segment", "SharedMemoryError", "can_share", "control_bytes", "pages"]

PAGE_BYTES = mmap.PAGESIZE  # offsets are multiples
_DIRECTORY = "/dev/shm"
# Elsewhere stores may be seen out of order: a cell before the data that it speaks of.
_SYS_FUTEX = {"x86_64": 202}.get(platform.machine())
_FUTEX_WAIT, _FUTEX_WAKE, _ALL = 0, 1, 0x7FFFFFFF
_FALLOC_PUNCH_HOLE = 3  # and keep the size
_MAP_FIXED = 0x10
_CELL, _BELL = 8, 64  # bytes; a bell has a cache line of its own
_LIBC = ctypes.CDLL(None, use_errno=True)  # gives up the GIL
_QUICK_LIBC = ctypes.PyDLL(None)  # keeps it
_LIBC.mmap.restype = ctypes.c_void_p


class SharedMemoryError(RuntimeError):
    """Memory cannot be shared; the text says why."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Segment:
    """A nameless file of this machine, mapped (see the notes).

    Args:
        num_bytes: its length, a multiple of a page.
        num_cells: counters at its beginning.
        num_ranks: each has a bell, after the cells.
        path: where another process has it open; None: make it.

    Attributes:
        cells: the counters; index and assign.

    Raises:
        SharedMemoryError: there is no such memory here.
    """

    def __init__(
        self, num_bytes: int, num_cells: int, num_ranks: int, path: str | None = None
    ) -> None:
        self.num_bytes = num_bytes
        self.num_ranks = num_ranks
        try:
            self._fd = _make(num_bytes) if path is None else os.open(path, os.O_RDWR | os.O_CLOEXEC)
            self._shared = mmap.mmap(self._fd, num_bytes)
        except OSError as error:
            what = path or _DIRECTORY
            raise SharedMemoryError(f"{what}: {os.strerror(error.errno or 0)}") from error
        weakref.finalize(self, os.close, self._fd)
        self._page_map = PageMap()
        # By offset, with the address: torch may give a storage other memory (`share_memory_`).
        self._private: dict[int, tuple[torch.UntypedStorage, int]] = {}
        control = memoryview(self._shared)[: _CELL * num_cells]
        self.cells = control.cast("q")
        self._bell_offset = _cell_bytes(num_cells)
        self._bells = [
            memoryview(self._shared)[at : at + 4].cast("i")
            for at in range(self._bell_offset, self._bell_offset + _BELL * (num_ranks + 1), _BELL)
        ]
        self._shared_address = ctypes.addressof(ctypes.c_char.from_buffer(self._shared))

    @property
    def path(self) -> str:
        """Where other processes of this user find it while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def shared(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a 1D tensor over the memory itself: what is written others see."""
        return torch.frombuffer(self._shared, dtype=dtype, count=numel, offset=offset)

    def private(self, offset: int, num_bytes: int) -> torch.UntypedStorage:
        """Return a storage over this rank's view of the memory, without earlier edits of its own.

        Call it when the others have written. What this rank writes stays with it.
        """
        storage, address = self._private.get(offset, (None, 0))
        if storage is None or storage.data_ptr() != address:
            storage = self._map_private(offset, num_bytes)
            self._private[offset] = storage, storage.data_ptr()
        elif self._page_map.may_have_copies(address, num_bytes):
            where = ctypes.c_void_p(address), ctypes.c_size_t(num_bytes)
            if _LIBC.madvise(*where, mmap.MADV_DONTNEED) != 0:  # not of locked memory
                self._map_over(address, offset, num_bytes)
        return storage

    def leave(self, offset: int, storage: torch.UntypedStorage) -> None:
        """Leave the view of the memory to ``storage``, as it is now; the next is another one."""
        del self._private[offset]
        memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
        for at in range(0, storage.nbytes(), PAGE_BYTES):
            memory[at] = memory[at]  # the kernel copies the page

    def _map_private(self, offset: int, num_bytes: int) -> torch.UntypedStorage:
        """Map this rank's view of the memory into a storage that torch unmaps.

        One that torch itself shares, by which it tells whether a numpy array uses the memory. Torch
        makes a file of its own for it, and writes to it; its addresses are mapped anew. Who sends
        such a tensor to another process would send that file: so that the receiver fails, and does
        not get zeros, something that cannot be mapped takes its place.
        """
        self.require(num_bytes)
        storage = torch.UntypedStorage(num_bytes)
        try:
            nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            raise SharedMemoryError(f"{os.devnull}, to map a unit: {reason}") from error
        descriptor, _ = storage._share_fd_cpu_()  # the storage's own
        self._map_over(storage.data_ptr(), offset, num_bytes)
        os.dup2(nothing, descriptor, inheritable=False)
        os.close(nothing)
        return storage

    def _map_over(self, address: int, offset: int, num_bytes: int) -> None:
        """Map this rank's view of the memory at some address, whatever is there."""
        access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
        where = ctypes.c_void_p(address), ctypes.c_size_t(num_bytes)
        mapped = _LIBC.mmap(*where, access, flags, self._fd, ctypes.c_long(offset))
        if mapped != address:
            raise SharedMemoryError(f"mmap: {os.strerror(ctypes.get_errno())}")

    @property
    def held_bytes(self) -> int:
        """Bytes of it that have memory, by the kernel's count."""
        return 512 * os.fstat(self._fd).st_blocks

    def mapped_at(self) -> list[tuple[int, int]]:
        """Return which addresses of this process are it: first, and one past the last."""
        inode, found = str(os.fstat(self._fd).st_ino), []
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
            for addresses, _, _, _, of, *_ in (line.split() for line in lines):
                if of == inode:
                    first, _, end = addresses.partition("-")
                    found.append((int(first, 16), int(end, 16)))
        return found

    def commit(self, offset: int, num_bytes: int) -> None:
        """Take memory now, so that writing cannot fail later.

        Raises:
            SharedMemoryError: there is too little.
        """
        try:
            os.posix_fallocate(self._fd, offset, num_bytes)
        except OSError as error:
            mib = max(num_bytes / 2**20, 0.1)
            reason = os.strerror(error.errno or errno.ENOSPC)
            raise SharedMemoryError(
                f"{mib:.1f} MiB in {_DIRECTORY}: {reason} (make it larger, in Docker with "
                f"--shm-size, or set transport='pairwise')"
            ) from error

    def require(self, num_bytes: int) -> None:
        """Refuse to go on without this much free memory: writing to a full file system crashes.

        Raises:
            SharedMemoryError: there is too little.
        """
        status = os.statvfs(_DIRECTORY)
        free = status.f_bavail * status.f_frsize
        if free < num_bytes:
            raise SharedMemoryError(
                f"{num_bytes / 2**20:.1f} MiB in {_DIRECTORY} to map a unit, where "
                f"{free / 2**20:.1f} MiB are free (make it larger, in Docker with --shm-size, or "
                f"set transport='pairwise')"
            )

    def punch(self, offset: int, num_bytes: int) -> None:
        """Give the memory back; the place stays usable, filled with zeros."""
        args = ctypes.c_long(offset), ctypes.c_long(num_bytes)
        _LIBC.fallocate(self._fd, _FALLOC_PUNCH_HOLE, *args)

    # -- bells ----------------------------------------------------------------------------------

    def bell(self, rank: int | None) -> int:
        """Return what a bell shows (None: the shared one); give it to ``sleep``."""
        return int(self._bells[self.num_ranks if rank is None else rank][0])

    def ring(self, rank: int) -> None:
        """Wake all that sleep until this rank has news. Only that rank calls it."""
        own = self._bells[rank]
        own[0] = (own[0] + 1) & 0x3FFFFF
        self._bells[self.num_ranks][0] = own[0] << 8 | (rank & 0xFF)
        if _SYS_FUTEX is not None:
            for bell in (rank, self.num_ranks):
                address = ctypes.c_void_p(self._bell_address(bell))
                _QUICK_LIBC.syscall(_SYS_FUTEX, address, _FUTEX_WAKE, _ALL, None, None, 0)

    def sleep(self, rank: int | None, seen: int, seconds: float) -> None:
        """Sleep until a bell shows something else than ``seen``, or the time is up."""
        if _SYS_FUTEX is None:
            return
        limit = _Timespec(0, int(seconds * 1e9))
        address = ctypes.c_void_p(self._bell_address(self.num_ranks if rank is None else rank))
        _LIBC.syscall(_SYS_FUTEX, address, _FUTEX_WAIT, seen, ctypes.byref(limit), None, 0)

    def _bell_address(self, rank: int) -> int:
        return self._shared_address + self._bell_offset + _BELL * rank


def can_share() -> bool:
    """Whether this system has what a segment is made of, and torch what buffers are."""
    is_linux = hasattr(os, "O_TMPFILE") and hasattr(mmap, "MADV_DONTNEED")
    return is_linux and _SYS_FUTEX is not None and hasattr(torch.UntypedStorage, "_swap_data_ptr_")


def _make(num_bytes: int) -> int:
    fd = os.open(_DIRECTORY, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    os.ftruncate(fd, num_bytes)
    return fd


def control_bytes(num_cells: int, num_ranks: int) -> int:
    """Bytes of cells and bells, bells on cache lines."""
    return _cell_bytes(num_cells) + _BELL * (num_ranks + 1)


def _cell_bytes(num_cells: int) -> int:
    return -(-_CELL * num_cells // _BELL) * _BELL


def pages(num_bytes: int) -> int:
    """Round up to whole pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
