"""Imports without garbage collection leave the collector as it was."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from inferc.system.collection import uncollected

LAST = "import gc, atexit; atexit.register(lambda: print(gc.get_freeze_count() > 0)); "


def test_the_collector_is_off_inside_and_as_before_outside() -> None:
    frozen = gc.get_freeze_count()
    assert gc.isenabled()
    with pytest.raises(ImportError), uncollected():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled() and gc.get_freeze_count() == frozen
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled(), "whoever turned it off wants it off"
    finally:
        gc.enable()


def test_a_process_of_inferc_freezes_what_it_imported_and_what_ends_with_it() -> None:
    inside = "from inferc.system.collection import uncollected\nwith uncollected(freeze=True): import json\n"
    at_exit = LAST + "from inferc.system.collection import exit_uncollected; exit_uncollected()"
    for code in (inside + "import gc; print(gc.get_freeze_count() > 0)", at_exit):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout == "True\n"
