"""Free memory that the C library keeps, returned to the system."""

from __future__ import annotations

import ctypes


def give_back() -> None:
    """Return free memory to the system.

    This takes tenths of a second if gigabytes are free, without holding the interpreter's lock. Each thread has a
    heap of its own in glibc, which keeps free memory that is not at the end of a heap: hundreds of megabytes after a
    text of four million characters was tokenized once, if a small last piece is in use. Other C libraries keep
    little.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
