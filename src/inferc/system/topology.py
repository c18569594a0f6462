"""The processor cores that this process may use, and the memory (NUMA) nodes that they belong to."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from inferc.errors import ConfigError

log = logging.getLogger(__name__)

SYSTEM = Path("/sys/devices/system")
MAX_NODES = 1024
INTERLEAVE = 3  # MPOL_INTERLEAVE
# The numbers of the system calls (get_mempolicy, set_mempolicy), for which libc has no functions.
POLICY_CALLS = {"x86_64": (239, 238), "aarch64": (236, 237)}


@dataclass(frozen=True)
class Core:
    """A core, as the logical processors of it that this process may use: several, where it runs several threads.

    node: the memory node that is next to the core.
    """

    cpus: tuple[int, ...]
    node: int


def read_cores(system: Path = SYSTEM, allowed: Sequence[int] | None = None) -> tuple[Core, ...]:
    """Return the cores in this process's affinity, or of the processors `allowed`, sorted by node.

    Where the kernel says nothing of cores or nodes, each processor is a core, and there is one node.
    """
    if allowed is None:
        allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    nodes = {cpu: node for node in _nodes(system) for cpu in _read_list(system / f"node/node{node}/cpulist")}
    cores: dict[tuple[int, ...], list[int]] = {}
    for cpu in allowed:
        siblings = _read_list(system / f"cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.setdefault(siblings or (cpu,), []).append(cpu)
    found = [Core(tuple(cpus), nodes.get(cpus[0], 0)) for cpus in cores.values()]
    return tuple(sorted(found, key=lambda core: (core.node, core.cpus)))


def cores_to_pin(num_threads: int, first: int = 0) -> tuple[Core, ...]:
    """Return a core for each of `num_threads` threads, from core `first` on; raise ConfigError if there are too few."""
    cores = read_cores()
    if first + num_threads > len(cores):
        raise ConfigError(
            f"{first + num_threads} threads to pin, but this process may use {len(cores)} cores; lower --threads, or"
            " leave --pin out"
        )
    return cores[first : first + num_threads]


def nodes_of(cores: Sequence[Core], system: Path = SYSTEM) -> tuple[int, ...]:
    """Return the memory nodes of `cores`; empty where the machine has only one node."""
    return tuple(sorted({core.node for core in cores})) if len(_nodes(system)) > 1 else ()


@contextmanager
def memory_on(nodes: Sequence[int]) -> Iterator[None]:
    """Place memory pages on `nodes` in turn while the block runs.

    This holds for pages that this thread touches first, and for those of threads that it starts meanwhile. Nothing
    changes if `nodes` is empty, or if the kernel refuses, which is logged.
    """
    numbers = POLICY_CALLS.get(platform.machine())
    if not nodes or numbers is None:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    before, mode = (ctypes.c_ulong * (MAX_NODES // 64))(), ctypes.c_int()
    mask = (ctypes.c_ulong * (MAX_NODES // 64))()
    for node in nodes:
        mask[node // 64] |= 1 << node % 64
    get, put = numbers
    failed = libc.syscall(get, ctypes.byref(mode), before, MAX_NODES, None, 0)
    failed = failed or libc.syscall(put, INTERLEAVE, mask, MAX_NODES)
    if failed:
        log.warning("memory is not shared out over nodes %s: %s", nodes, os.strerror(ctypes.get_errno()))
    else:
        log.info("memory is shared out over nodes %s", ", ".join(map(str, nodes)))
    try:
        yield
    finally:
        if not failed:
            libc.syscall(put, mode, before if any(before) else None, MAX_NODES)


def _nodes(system: Path) -> tuple[int, ...]:
    return _read_list(system / "node/online") or (0,)


def _read_list(path: Path) -> tuple[int, ...]:
    """Return the numbers in a list of the kernel's form `0-3,8`; empty if there is no such file."""
    try:
        text = path.read_text().strip()
    except OSError:
        return ()
    ranges = [part.partition("-") for part in text.split(",") if part]
    return tuple(number for low, _, high in ranges for number in range(int(low), int(high or low) + 1))
