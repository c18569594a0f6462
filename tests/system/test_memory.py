"""Free memory goes back to the system, also where a small piece behind it is in use."""

import ctypes
import subprocess
import sys

import pytest

FREED_BUT_KEPT = """
import psutil
from inferc.system.memory import give_back

# Each too large for Python's own allocator and too small for a mapping of its own, and one behind them all that stays.
blocks = [bytes(4000) for _ in range(50_000)]
last = bytes(4000)
full = psutil.Process().memory_info().rss
blocks.clear()
freed = psutil.Process().memory_info().rss
give_back()
print(full, freed, psutil.Process().memory_info().rss)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc")
def test_what_is_free_goes_back_to_the_system() -> None:
    said = subprocess.run([sys.executable, "-c", FREED_BUT_KEPT], capture_output=True, text=True, check=True).stdout
    full, freed, given_back = map(int, said.split())
    assert full - freed < 50e6, "the C library keeps it: there is something to give back"
    assert freed - given_back > 150e6
