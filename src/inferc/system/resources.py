"""Read the cores and the memory that this process may use, by the kernel and the container's limits."""

from __future__ import annotations

import os
from pathlib import Path

from inferc.system.topology import read_cores


def available_cores() -> int:
    """Return the number of cores that this process may use, by its affinity and the container's quota.

    Further hardware threads of a core are not counted.
    """
    cores = len(read_cores())
    quota = _read_words("/sys/fs/cgroup/cpu.max")
    if len(quota) == 2 and quota[0].isdigit():
        cores = min(cores, max(1, int(quota[0]) // int(quota[1])))
    return cores


def available_memory_bytes() -> int:
    """Return the memory that can be taken without swapping, by the kernel's estimate and the container's limit."""
    available = 2**62
    if hasattr(os, "sysconf"):
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    words = _read_words("/proc/meminfo")
    if "MemAvailable:" in words:
        available = int(words[words.index("MemAvailable:") + 1]) * 1024
    limit, used = _read_words("/sys/fs/cgroup/memory.max"), _read_words("/sys/fs/cgroup/memory.current")
    if limit and used and limit[0].isdigit():
        available = min(available, max(0, int(limit[0]) - int(used[0])))
    return available


def total_memory_bytes() -> int:
    """Return the memory of the machine, or the container's limit where that is less."""
    total = 2**62
    if hasattr(os, "sysconf"):
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _read_words("/sys/fs/cgroup/memory.max")
    return min(total, int(limit[0])) if limit and limit[0].isdigit() else total


def busy_cpu_seconds() -> float:
    """Return the seconds that the machine's processors were busy since it started, summed over them; 0 if unknown."""
    words = _read_words("/proc/stat")[1:9]  # user, nice, system, idle, iowait, irq, softirq, steal
    if len(words) < 8 or not hasattr(os, "sysconf"):
        return 0.0
    user, nice, system, _idle, _iowait, irq, softirq, _steal = map(int, words)
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _read_words(path: str) -> list[str]:
    try:
        return Path(path).read_text().split()
    except OSError:  # another operating system, or no cgroup: there is no such limit
        return []
