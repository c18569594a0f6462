"""The garbage collector, kept away from the hundreds of thousands of objects that importing torch makes."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected(*, freeze: bool = False) -> Iterator[None]:
    """Collect no garbage while large packages are imported.

    A collection looks at every object. During the imports of torch and transformers that takes a quarter of their time,
    and nothing of it is garbage. freeze: leave the objects that there are out of later collections too, for a process
    that is inferc's own.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if freeze:
            gc.freeze()
        if was_enabled:
            gc.enable()


def exit_uncollected() -> None:
    """Leave out, when the process ends, the collections of what ends with it anyway."""
    atexit.register(gc.freeze)
