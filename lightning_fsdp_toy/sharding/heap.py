"""What the C library does with memory that was freed on the CPU.

Note: freed memory
    A step frees its activations and asks for the same amounts again. By default glibc returns most
    of that to the kernel in between, which then has to fault in and clear every page anew: a tenth
    of a step. While a model is sharded on the CPU, the heap keeps what is freed for the next step,
    up to a limit, and asks for huge pages. Whoever has told glibc otherwise is obeyed.
"""

from __future__ import annotations

import ctypes
import mmap
import os

__all__ = ["give_back_freed_memory", "keep_freed_memory"]

_LIBC = ctypes.CDLL(None)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 2**30  # at the top of the heap
_HUGE_BYTES = 2**29  # of it, in huge pages
_BLOCK_BYTES = 2**25  # that the heap holds, the most glibc takes; larger ones go back at once
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> None:
    """Let the C library keep freed memory (see the note); for the whole process.

    Nothing where the user has set this (``MALLOC_TRIM_THRESHOLD_``, ``MALLOC_MMAP_THRESHOLD_``,
    ``GLIBC_TUNABLES``), or where there is no such call.
    """
    set_option = getattr(_LIBC, "mallopt", None)
    if set_option is not None and not any(name in os.environ for name in _SETTINGS):
        set_option(_M_MMAP_THRESHOLD, _BLOCK_BYTES)
        set_option(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        _ask_for_huge_pages()


def _ask_for_huge_pages() -> None:
    """Let the heap grow, which takes addresses but no memory yet, and tell the kernel."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    _LIBC.malloc.restype = _LIBC.sbrk.restype = ctypes.c_void_p
    begin = _LIBC.sbrk(ctypes.c_long(0))
    size = ctypes.c_size_t(_BLOCK_BYTES - mmap.PAGESIZE)
    blocks = [_LIBC.malloc(size) for _ in range(_HUGE_BYTES // _BLOCK_BYTES)]
    for block in blocks:
        _LIBC.free(ctypes.c_void_p(block))
    begin, end = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, _LIBC.sbrk(ctypes.c_long(0))
    if end > begin:  # not so with another malloc
        _LIBC.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_HUGEPAGE)


def give_back_freed_memory() -> None:
    """Let the C library give the kernel what was freed between blocks that are still in use.

    glibc keeps it otherwise, and a process that never holds more than a unit beside its shards
    grows to the size of the whole model. Nothing where there is no such call.
    """
    trim = getattr(_LIBC, "malloc_trim", None)
    if trim is not None:
        trim(0)
