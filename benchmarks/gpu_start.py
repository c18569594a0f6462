"""The row of gpu.py that measures process start to first token, with the artifact's files in the page cache."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from make_model import make_model
from rich.console import Console

from inferc.compiler.build import compile
from inferc.config import CompileConfig
from inferc.runtime.runners.cuda.driver import Driver

TARGET_S = 2.0
REPEATS = 3
COPY_BYTES = 256 << 20


def write_model(shape: str, folder: Path) -> None:
    """Write a model of zeros in sparse files that take no disk space."""
    make_model(shape, folder, None, None, "bfloat16", Console(stderr=True))


def inferc(artifact: Path) -> list[str]:
    """Return the command line that runs an artifact."""
    del artifact
    return [sys.executable, "-m", "inferc"]


def first_token(artifact: Path, *options: str) -> float:
    """Return the seconds of a whole `inferc generate` process that makes one token."""
    command = [*inferc(artifact), "generate", str(artifact), "--prompt", "def add", "--max-tokens", "1", *options]
    started = time.perf_counter()
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    spent = time.perf_counter() - started
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return spent


def copy_bytes_per_s(driver: Driver, num_bytes: int) -> float:
    """Measure the bytes per second of a copy from pinned host memory to the device."""
    stream, here, there = driver.new_stream(), driver.allocate_host(num_bytes), driver.allocate(num_bytes)
    times = []
    for _ in range(5):
        driver.wait(stream)
        started = time.perf_counter()
        driver.copy_in(there, here.ctypes.data, num_bytes, stream)
        driver.wait(stream)
        times.append(time.perf_counter() - started)
    driver.free(there)
    driver.free_host(here)
    return num_bytes / statistics.median(times)


def row(driver: Driver, shape: str, *options: str) -> dict[str, Any]:
    """Measure the start of a model; the limit is the time to copy the weights to the device.

    The first run is not counted. options: options of `inferc generate`.
    """
    with tempfile.TemporaryDirectory() as folder:
        model, artifact = Path(folder) / "model", Path(folder) / "artifact"
        write_model(shape, model)
        started = time.perf_counter()
        compile(model, artifact, CompileConfig(target=f"cuda:{driver.arch}", certify="none"))
        compiled = time.perf_counter() - started
        num_bytes = sum(path.stat().st_size for path in artifact.glob("*.safetensors"))
        times = [first_token(artifact, *options) for _ in range(1 + REPEATS)][1:]
    rate = copy_bytes_per_s(driver, COPY_BYTES)
    return {
        "first_token_s": round(statistics.median(times), 3),
        "all_s": [round(each, 3) for each in times],
        "target_s": TARGET_S,
        "limit_s": round(num_bytes / rate, 3),
        "copy_gb_per_s": round(rate / 1e9, 1),
        "compile_s": round(compiled, 1),
    }
