"""The settings of a process that is inferc's own, such as a command's: a library may not change them for others."""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

# Read by torch when it first allocates memory: blocks of some megabytes are backed by huge pages, where the system has
# them for those who ask.
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"


@contextmanager
def own_imports() -> Iterator[None]:
    """Import torch and what needs it, fast, with memory in huge pages.

    A compile widens gigabytes of weights, each into new memory, and with pages of 4 KB it spends a third of that time
    on the pages. What was imported is left out of later garbage collections.
    """
    os.environ.setdefault(HUGE_PAGES, "1")
    with uncollected():
        yield
    gc.freeze()


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage while much is made that stays, as by the import of a large package or by a trace.

    A collection looks at every object. During the imports of torch and transformers that takes a quarter of their time,
    and nothing of it is garbage.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def exit_uncollected() -> None:
    """Leave out, when the process ends, the collections of what ends with it anyway."""
    atexit.register(gc.freeze)
