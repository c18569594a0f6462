"""Measure one engine on the CPU in its own process, and print a JSON object with its cases.

    cd benchmarks; python -m peers.worker ENGINE MODEL --format bfloat16 --threads 2 --cases '{"decode": [1, 128, 64]}'

A case is [requests, input_len, output_len]: all requests are there at the start, their prompts are random ids, and each
generates output_len tokens. With a fourth element, true, another process keeps one of the cores busy meanwhile. One run
warms up and the next one counts (for a single request: the median of three). This file and the engines run in the
peers' environments: they need numpy and the engine, but not inferc.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from peers.recorder import Prompts

REPEATS = 3


class Engine(Protocol):
    vocab_size: int

    def run(self, prompts: Prompts, output_len: int) -> list[list[float]]:
        """Generate `output_len` tokens greedily for all prompts at once; return the perf_counter time of each token."""


def random_prompts(seed: int, count: int, length: int, vocab_size: int) -> list[list[int]]:
    return np.random.default_rng(seed).integers(10, vocab_size, (count, length)).tolist()  # type: ignore[no-any-return]


def run_once(engine: Engine, seed: int, requests: int, input_len: int, output_len: int) -> dict[str, float]:
    """Return tokens per second: `prefill` until the first token, `decode` from first to last, `output` overall."""
    prompts = random_prompts(seed, requests, input_len, engine.vocab_size)
    start = time.perf_counter()
    arrivals = engine.run(prompts, output_len)
    counts = {len(each) for each in arrivals}
    if counts != {output_len}:
        raise SystemExit(f"expected {output_len} tokens of each request, found {sorted(counts)}")
    last = max(each[-1] for each in arrivals)
    first = statistics.median(each[0] for each in arrivals)
    return {
        "prefill": input_len / (first - start),
        "decode": (output_len - 1) / (arrivals[0][-1] - arrivals[0][0]) if output_len > 1 else 0.0,
        "output": requests * output_len / (last - start),
    }


def measure(engine: Engine, requests: int, input_len: int, output_len: int) -> dict[str, float]:
    """Return the medians of the numbers of `run_once`, after a warm-up run.

    Several requests warm up at full length. Only then do as many sequences hold as many KV blocks at once, and the
    system has handed out the memory of K and V, which on a virtual machine may take longer than computing them.
    """
    run_once(engine, 0, requests, input_len, output_len if requests > 1 else min(output_len, 8))
    seeds = range(1, 1 + (REPEATS if requests == 1 else 1))
    runs = [run_once(engine, seed, requests, input_len, output_len) for seed in seeds]
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def peak_rss_gb() -> float:
    """Return the peak resident memory of this program in GB.

    getrusage would also count the process that started it, which may have been larger.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024 / 1e9


@contextmanager
def neighbour() -> Iterator[None]:
    """Run another process that keeps the last of the allowed cores busy while the context is active."""
    core = max(os.sched_getaffinity(0))
    spin = f"import os\nos.sched_setaffinity(0, {{{core}}})\nprint(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()  # the process is running
            yield
        finally:
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", help="a module of engines/")
    parser.add_argument("model", type=Path, help="the model in the engine's own format")
    parser.add_argument("--format", default="bfloat16", help="precision of the weights, as the engine names it")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--cases", type=json.loads, required=True, help="JSON: name -> [requests, input_len, output_len]"
    )
    options = parser.parse_args()
    cases: dict[str, list[int]] = options.cases
    module: Any = importlib.import_module(f"peers.engines.{options.engine}_engine")
    max_requests = max(case[0] for case in cases.values())
    max_len = max(sum(case[1:3]) for case in cases.values())
    start = time.perf_counter()
    engine: Engine = module.load(options.model, options.format, options.threads, max_requests, max_len)
    engine.run(random_prompts(9, 1, 4, engine.vocab_size), 1)
    load_seconds = time.perf_counter() - start
    result = {}
    for name, case in cases.items():
        with neighbour() if case[3:] == [True] else nullcontext():
            result[name] = measure(engine, *case[:3])
    print(json.dumps({"load_seconds": load_seconds, "peak_rss_gb": peak_rss_gb(), "cases": result}), flush=True)
    sys.stdout.close()


if __name__ == "__main__":
    main()
