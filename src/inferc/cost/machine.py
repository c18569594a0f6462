"""The limits of this machine's processor: its memory bandwidth, measured, and its peak arithmetic, computed."""

from __future__ import annotations

import platform
import threading
import time
from pathlib import Path

import numpy as np

from inferc.system.resources import available_memory_bytes

READ_BYTES = 1 << 30
REPEATS = 3


def measure_read(num_threads: int) -> float:
    """Measure the bytes per second that threads read from memory; return the best of three runs."""
    size = min(READ_BYTES, available_memory_bytes() // 4) // num_threads // 8
    # Too large for any cache. The arrays are written once, since all unwritten pages map to one page of zeros.
    arrays = [np.full(size, 1, np.int64) for _ in range(num_threads)]
    best = 0.0
    for _ in range(REPEATS):
        threads = [threading.Thread(target=array.sum) for array in arrays]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        best = max(best, 8 * size * num_threads / (time.perf_counter() - start))
    return best


def peak_flops(num_threads: int, dtype: str, cpuinfo: str) -> float | None:
    """Return the operations per second that `num_threads` cores can do in `dtype`.

    A core does two fused multiply-adds of full vector width per cycle; with AMX it does a product of tiles in 16 cycles
    for bfloat16 and int8.
    cpuinfo: the text of /proc/cpuinfo. Returns None where it names no clock, as on machines other than x86.
    """
    clocks = [float(line.split(":")[1]) for line in cpuinfo.splitlines() if line.startswith("cpu MHz")]
    flags = set(next((line for line in cpuinfo.splitlines() if line.startswith("flags")), "").split())
    if not clocks:
        return None
    lanes = 16 if "avx512f" in flags else 8
    if dtype == "bfloat16" and "avx512_bf16" in flags:
        lanes = 256 if "amx_bf16" in flags else 2 * lanes  # a tile product is 16 x 16 x 32 multiply-adds
    if dtype == "int8" and "avx512_vnni" in flags:
        lanes = 512 if "amx_int8" in flags else 4 * lanes
    return num_threads * max(clocks) * 1e6 * 2 * 2 * lanes


def cpuinfo() -> str:
    """Return the text of /proc/cpuinfo, empty where there is none."""
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""


def cpu_model() -> str:
    """Return the processor's name."""
    for line in cpuinfo().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
