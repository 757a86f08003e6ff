"""Which pages of a private mapping have been written to."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

import torch

__all__ = ["PageMap"]

_ENTRY_BYTES = 8
# The upper three bits of an entry (present, swapped, of a file) as a signed number; see the
# kernel's Documentation/admin-guide/mm/pagemap.rst.
_ABSENT, _OF_FILE = 0, -3


class PageMap:
    """What the kernel says of the pages of this process; nothing where it does not say.

    A private page of a file that was only read is the file's: what others write is seen in it. One
    that was written to is a copy, which has to be dropped. Pages that were only read are better
    left in place: to fault them in again costs as much as to copy what is in them.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._fd: int | None = None
        try:
            self._fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return
        weakref.finalize(self, os.close, self._fd)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        written = mmap.mmap(-1, mmap.PAGESIZE, flags=flags)  # must show as a copy, then
        written[0] = 1
        address = ctypes.addressof(ctypes.c_char.from_buffer(written))
        self._is_trusted = True
        self._is_trusted = self.may_have_copies(address, mmap.PAGESIZE)

    def may_have_copies(self, address: int, num_bytes: int) -> bool:
        """Whether pages of a private mapping, both page-aligned, may have been written to."""
        if self._fd is None or not self._is_trusted or os.getpid() != self._pid:
            return True
        num_pages = num_bytes // mmap.PAGESIZE
        entries = torch.empty(num_pages, dtype=torch.int64, device="cpu")
        view = (ctypes.c_char * (_ENTRY_BYTES * num_pages)).from_address(entries.data_ptr())
        try:
            length = os.preadv(self._fd, [view], _ENTRY_BYTES * (address // mmap.PAGESIZE))
        except OSError:
            return True
        if length != _ENTRY_BYTES * num_pages:
            return True
        kinds = entries >> 61
        return bool(((kinds != _ABSENT) & (kinds != _OF_FILE)).any())
