"""Memory that is there before it is used: a file's, mapped, read at once, or asked for ahead, and zeroed pages."""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import resource
import threading

MAP_FIXED = 0x10
MADV_POPULATE_READ, MADV_POPULATE_WRITE = 22, 23  # Linux 5.14
EINVAL = 22

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_int64)
_libc.mmap.restype = ctypes.c_void_p


def map_file(address: int, file: int, size: int) -> None:
    """Let `size` bytes of memory from `address` on, a multiple of the page's size and this process's own, be a file's, to
    be read. Raises OSError."""
    found = _libc.mmap(address, size, mmap.PROT_READ, mmap.MAP_SHARED | MAP_FIXED, file, 0)
    if found != address:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def read_whole(address: int, size: int) -> str | None:
    """Have all pages of a stretch of memory read; why it cannot be, or None. Without this, to touch a page that the disk does
    not give ends the process."""
    if _advise(address, size, MADV_POPULATE_READ) and (code := ctypes.get_errno()) != EINVAL:  # of an older kernel
        return os.strerror(code)
    return None


def back(address: int, size: int) -> str | None:
    """Have a stretch of memory backed by pages, as if it were written, but with what is in it; why it cannot be, or None."""
    return os.strerror(ctypes.get_errno()) if _advise(address, size, MADV_POPULATE_WRITE) else None


def _advise(address: int, size: int, advice: int) -> int:
    begin = address // mmap.PAGESIZE * mmap.PAGESIZE
    code: int = _libc.madvise(begin, address + size - begin, advice)
    return code


class ReadAhead:
    """A thread that asks the kernel for pages; what was asked before is given up for what is asked now."""

    def __init__(self) -> None:
        self._num_faults = 0
        self._turn = 0
        self._asked: queue.SimpleQueue[tuple[int, list[tuple[int, int]]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def is_needed(self) -> bool:
        """Whether pages had to be read from a disk since this was asked last."""
        before, self._num_faults = self._num_faults, resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        return self._num_faults > before

    def read(self, spans: list[tuple[int, int]]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="inferc-kv-ahead", daemon=True)
            self._thread.start()
        self._turn += 1
        self._asked.put((self._turn, spans))

    def close(self) -> None:
        self._turn += 1
        if self._thread is not None:
            self._asked.put(None)
            self._thread.join()

    def _work(self) -> None:
        while (asked := self._asked.get()) is not None:
            turn, spans = asked
            for address, size in spans:
                if turn != self._turn:
                    break
                _advise(address, size, mmap.MADV_WILLNEED)
