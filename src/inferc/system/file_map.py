"""The preparation of memory before it is used: mapped files, pages read at once or ahead, and backed pages."""

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
    """Map `size` bytes of a file over memory of this process at `address`, for reading.

    address: a multiple of the page size, in memory that this process owns. Raises OSError.
    """
    found = _libc.mmap(address, size, mmap.PROT_READ, mmap.MAP_SHARED | MAP_FIXED, file, 0)
    if found != address:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def read_whole(address: int, size: int) -> str | None:
    """Read all pages of a range of mapped memory; return why it fails, or None.

    Without this, touching a page that the disk cannot deliver ends the process.
    """
    # An older kernel, without MADV_POPULATE_READ, returns EINVAL.
    if _advise(address, size, MADV_POPULATE_READ) and (code := ctypes.get_errno()) != EINVAL:
        return os.strerror(code)
    return None


def back(address: int, size: int) -> str | None:
    """Back a range of memory by physical pages, without changing its contents; return why it fails, or None."""
    return os.strerror(ctypes.get_errno()) if _advise(address, size, MADV_POPULATE_WRITE) else None


def _advise(address: int, size: int, advice: int) -> int:
    begin = address // mmap.PAGESIZE * mmap.PAGESIZE
    code: int = _libc.madvise(begin, address + size - begin, advice)
    return code


class ReadAhead:
    """A thread that asks the kernel to read pages ahead; a new request replaces what is left of earlier ones."""

    def __init__(self) -> None:
        self._num_faults = 0
        self._turn = 0
        self._asked: queue.SimpleQueue[tuple[int, list[tuple[int, int]]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def is_needed(self) -> bool:
        """Return whether pages had to be read from a disk since the last call."""
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
