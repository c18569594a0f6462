"""Imports without garbage collection leave the collector as it was; a process of inferc's own is set for them."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import pytest

from inferc.system.own_process import HUGE_PAGES, uncollected

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
    inside = "from inferc.system.own_process import own_imports\nwith own_imports(): import json\n"
    at_exit = LAST + "from inferc.system.own_process import exit_uncollected; exit_uncollected()"
    for code in (inside + "import gc; print(gc.get_freeze_count() > 0)", at_exit):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout == "True\n"


@pytest.mark.parametrize(("given", "found"), [(None, "1"), ("0", "0")])
def test_torch_of_a_process_of_inferc_has_huge_pages_unless_the_user_says_otherwise(
    given: str | None, found: str
) -> None:
    env = {name: value for name, value in os.environ.items() if name != HUGE_PAGES}
    code = "import os\nfrom inferc.system.own_process import own_imports\nwith own_imports(): "
    code += f"print(os.environ['{HUGE_PAGES}'])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=env if given is None else {**env, HUGE_PAGES: given},
    )
    assert done.stdout == f"{found}\n"
