"""Measure how long `inferc compile` takes with its default certificate, cold and warm, and where the time goes.

    python benchmarks/compile_time.py [MODEL …] [--runs 3] [--out benchmarks/results/compile-time.json]

MODEL: folders of Hugging Face models; by default the shipped tiny-llama and the shape of Qwen3-0.6B with random
weights. A cold compile has an empty INFERC_CACHE, so that kernels are compiled and the model is traced; a warm one has
the cache of the one before it. Each compile is a process of its own. Times are medians; CPU seconds are those of the
process and of all that it starts; memory is the largest resident size of a process.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measured import ROOT, report

from inferc.cost.machine import measure_read
from inferc.system.own_process import exit_uncollected, own_imports
from inferc.system.resources import available_cores

SHIPPED, SHAPE = ROOT / "examples" / "models" / "tiny-llama", "qwen3-0.6b"
GB = 1e9


def compile_here(model: str, out: str, options: dict[str, Any]) -> dict[str, float]:
    """Compile in this process as `inferc compile` does; return the seconds of each stage, in order."""
    start = time.perf_counter()
    with own_imports():
        from inferc.compiler.build import compile
        from inferc.config import CompileConfig

    marks = [("import", start)]

    def note(stage: str, _done: int, _total: int) -> None:
        stage = re.split("[,:]", stage)[0]  # without the details
        if stage != marks[-1][0]:
            marks.append((stage, time.perf_counter()))

    compile(model, out, CompileConfig(**options), progress=note)
    ends = [at for _, at in marks[1:]] + [time.perf_counter()]
    seconds: dict[str, float] = {}
    for (stage, begin), end in zip(marks, ends, strict=True):
        seconds[stage] = round(seconds.get(stage, 0.0) + end - begin, 2)
    return seconds


def measured(model: Path, out: Path, cache: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Compile in a process of its own; return its seconds, CPU seconds, memory and stages."""
    command = [sys.executable, __file__, "--worker", str(model), str(out), json.dumps(options)]
    start = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, "INFERC_CACHE": str(cache)}
    )
    assert process.stdout is not None
    with process.stdout as stream:
        stages = stream.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed with status {process.returncode}")
    return {
        "seconds": round(time.perf_counter() - start, 2),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 2),
        "max_rss_gb": round(1024 * usage.ru_maxrss / GB, 2),
        "stages": json.loads(stages),
    }


def median_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the run whose seconds are the median, and the seconds of all."""
    ordered = sorted(runs, key=lambda run: run["seconds"])
    middle = ordered[len(ordered) // 2]
    seconds = [run["seconds"] for run in runs]
    return {**middle, "cpu_seconds": statistics.median(run["cpu_seconds"] for run in runs), "all_seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("models", nargs="*", type=Path, metavar="MODEL")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument(
        "--options", type=json.loads, default={}, help='fields of CompileConfig as JSON: {"quantize": "int8"}'
    )
    parser.add_argument("--work", type=Path, help="folder for models and artifacts (the default: the system's)")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        exit_uncollected()
        model, out, config = options.worker
        print(json.dumps(compile_here(model, out, json.loads(config))))
        return
    result: dict[str, Any] = {"options": options.options, "models": {}}
    with tempfile.TemporaryDirectory(dir=options.work) as scratch:
        models = options.models
        if not models:
            made = Path(scratch) / SHAPE
            script = str(ROOT / "benchmarks" / "make_model.py")
            subprocess.run([sys.executable, script, SHAPE, str(made)], check=True, stdout=subprocess.DEVNULL)
            models = [SHIPPED, made]
        for model in models:
            cold, warm = [], []
            for index in range(options.runs):
                cache, out = Path(scratch) / f"cache-{model.name}-{index}", Path(scratch) / "artifact"
                cold.append(measured(model, out, cache, options.options))
                warm.append(measured(model, out, cache, options.options))
            result["models"][model.name] = {"cold": median_of(cold), "warm": median_of(warm)}
    result["read_gb_per_s"] = round(measure_read(available_cores()) / GB, 1)
    report(result, options.out)


if __name__ == "__main__":
    main()
