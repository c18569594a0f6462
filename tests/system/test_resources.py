"""The cores and the memory that a process may use, and how busy the machine is."""

import os

import psutil
import pytest

from inferc.system import resources
from inferc.system.resources import available_cores, available_memory_bytes, busy_cpu_seconds, total_memory_bytes
from inferc.system.topology import Core

GIB = 1 << 30
CGROUP = "/sys/fs/cgroup/"


def files(monkeypatch: pytest.MonkeyPatch, **texts: str) -> None:
    """Let the system have these files and no others: `stat`, `meminfo`, and those of the container."""
    paths = {"stat": "/proc/stat", "meminfo": "/proc/meminfo", "max": f"{CGROUP}memory.max"}
    paths |= {"current": f"{CGROUP}memory.current"}
    found = {paths[name]: text for name, text in texts.items()}
    monkeypatch.setattr(resources, "_read_words", lambda path: found.get(path, "").split())


def test_default_threads_are_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferc.system.resources.read_cores", lambda: (Core((0, 2), 0),))
    assert available_cores() == 1


def test_a_processor_is_busy_with_all_but_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    times = [1, 2, 4, 1000, 2000, 8, 16, 4000, 1, 0]  # user, nice, system, idle, iowait, irq, softirq, steal, of guests
    files(monkeypatch, stat=f"cpu  {' '.join(str(each * ticks) for each in times)}\ncpu0 1 1 1 1 1 1 1 1 0 0\n")
    assert busy_cpu_seconds() == 31


def test_where_nothing_is_known_nothing_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    files(monkeypatch)
    assert busy_cpu_seconds() == 0


@pytest.mark.parametrize(
    ("limit", "total", "available"),
    [("max", None, 3 * GIB), (str(GIB), GIB, GIB // 4), (str(GIB // 2), GIB // 2, 0)],
)
def test_memory_is_that_of_the_container(
    monkeypatch: pytest.MonkeyPatch, limit: str, total: int | None, available: int
) -> None:
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    files(monkeypatch, meminfo=f"MemAvailable: {3 << 20} kB", max=limit, current=str(3 * GIB // 4))
    assert (total_memory_bytes(), available_memory_bytes()) == (total or machine, available)


def test_this_machine_tells_the_same_as_elsewhere() -> None:
    assert 0 < available_memory_bytes() <= total_memory_bytes() <= psutil.virtual_memory().total
    before = busy_cpu_seconds()
    assert 0 < before <= busy_cpu_seconds()
