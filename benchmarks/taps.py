"""Measure what a tapped request costs the others: the same batch with one request tapped and with none, in turn.

    python benchmarks/taps.py OUT [--tap 'layers.*.attention.out'] [--requests 8] [--input-len 64] [--output-len 64]
                                  [--turns 7] [--threads N] [--out FILE]

There is one engine, started with --tap. A turn runs `--requests` concurrent greedy requests twice; the second time the
last request asks for its values. Only decode steps of all requests count: the result is the median seconds per step of
each run, and the median of the turns' ratios; the first turn warms up. The 20 % that a tap may cost other requests
(docs/debugging.md) are a ratio of 1.2.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from measured import report

from inferc.runtime.artifact.load import load_artifact
from inferc.runtime.engine.engine import Engine
from inferc.runtime.engine.load import load_engine
from inferc.runtime.step.sampling_params import SamplingParams
from inferc.system.resources import available_cores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path, metavar="OUT", help="a folder that `inferc compile` wrote")
    parser.add_argument(
        "--tap", action="append", metavar="NAME", help="values to tap (default: layers.*.attention.out)"
    )
    parser.add_argument("--requests", type=int, default=8, help="number of concurrent requests, one of them tapped")
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--out", type=Path, help="a JSON file for all numbers")
    options = parser.parse_args()
    if options.turns < 1 or options.requests < 1 or options.output_len < 4:
        parser.error("expected at least one turn, one request and four new tokens")
    names = options.tap or ["layers.*.attention.out"]
    lengths = (options.input_len, options.output_len)
    report(compare(options.artifact, names, options.requests, lengths, options.turns, options.threads), options.out)


def compare(
    path: Path, names: list[str], requests: int, lengths: tuple[int, int], turns: int, threads: int
) -> dict[str, Any]:
    """Measure the seconds of a decode step with no request tapped and with one, for each turn, and their ratios."""
    artifact = load_artifact(path)
    engine = load_engine(artifact, tap=tuple(names), max_num_seqs=requests, num_threads=threads, prefix_cache=False)
    generator = np.random.default_rng(0)
    vocab_size = artifact.vocab_size
    runs: list[tuple[float, float]] = []
    try:
        for _ in range(turns + 1):
            prompts = generator.integers(0, vocab_size, (requests, lengths[0])).tolist()
            runs.append((run_once(engine, prompts, lengths[1], False), run_once(engine, prompts, lengths[1], True)))
    finally:
        engine.close()
    counted = runs[1:]
    return {
        "artifact": path.name,
        "taps": names,
        "requests": requests,
        "input_len": lengths[0],
        "output_len": lengths[1],
        "untapped_ms": [round(1e3 * run[0], 4) for run in counted],
        "tapped_ms": [round(1e3 * run[1], 4) for run in counted],
        "ratio": round(statistics.median(tapped / untapped for untapped, tapped in counted), 4),
    }


def run_once(engine: Engine, prompts: list[list[int]], output_len: int, is_tapped: bool) -> float:
    """Return the median seconds of the steps in which every request decodes."""
    for number, prompt in enumerate(prompts):
        tap = is_tapped and number == len(prompts) - 1
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, tap=tap)
        engine.add_request(str(number), prompt, params)
    seconds: list[float] = []
    while engine.has_work:
        start = time.perf_counter()
        outputs = list(engine.step())
        if len(outputs) == len(prompts) and not any(output.finish_reason for output in outputs):
            seconds.append(time.perf_counter() - start)
    while engine.taps is not None and not engine.taps.ended.empty():
        engine.taps.ended.get()
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
