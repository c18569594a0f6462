"""Measure what the prefix cache saves for prompts with a common prefix, and what it costs for prompts without one.

python benchmarks/prefix_cache.py [--shape qwen3-0.6b] [--quantize int8] [--tokens 1024] [--repeats 5] [--out FILE]

First it measures the time to first token of a prompt of which a share was computed before, in turn with and without the
cache; ideally only the tokens after the shared ones take time. Then come prompts that share nothing: prefill and decode
of a batch, in turn with and without the cache. Weights and ids are random.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from make_model import make_model
from measured import report
from rich.console import Console

from inferc.compiler.build import compile
from inferc.config import CompileConfig
from inferc.cost.machine import measure_read
from inferc.runtime.engine.engine import Engine
from inferc.runtime.engine.load import load_engine
from inferc.runtime.step.sampling_params import SamplingParams
from inferc.system.resources import available_cores

SHARES = (0.25, 0.5, 0.75, 0.9)
VOCAB_SIZE = 4000
BATCH, NEW_TOKENS = 8, 64


class Prompts:
    """A source of random token ids and of request ids."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)
        self.count = 0

    def ids(self, count: int) -> list[int]:
        return [int(each) for each in self._random.integers(10, VOCAB_SIZE, count)]

    def name(self) -> str:
        self.count += 1
        return str(self.count)


def run(engine: Engine, prompts: Prompts, each: list[list[int]], max_tokens: int) -> float:
    """Run prompts at once and return the seconds until all are done."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    started = time.perf_counter()
    for ids in each:
        engine.add_request(prompts.name(), ids, params)
    while engine.has_work:
        engine.step()
    return time.perf_counter() - started


def shared(engines: dict[str, Engine], prompts: Prompts, num_tokens: int, share: float, repeats: int) -> dict[str, Any]:
    """Measure the time to first token if this share of the prompt is the prefix of an earlier prompt."""
    common = int(num_tokens * share)
    times: dict[str, list[float]] = {name: [] for name in engines}
    found = []
    for _ in range(repeats):
        prefix = prompts.ids(common)
        first, second = ([*prefix, *prompts.ids(num_tokens - common)] for _ in range(2))
        for name, engine in engines.items():
            run(engine, prompts, [first], 1)
            before = engine.stats().cached_tokens
            times[name].append(run(engine, prompts, [second], 1))
            if name == "with":
                found.append(engine.stats().cached_tokens - before)
    medians = {name: statistics.median(each) for name, each in times.items()}
    return {
        "share": share,
        "cached_tokens": statistics.median(found),
        "ttft_ms": {name: round(1e3 * each, 1) for name, each in medians.items()},
        "all_ms": {name: [round(1e3 * one, 1) for one in each] for name, each in times.items()},
        "of_ttft": round(medians["with"] / medians["without"], 3),
        "ideal": round(1 - share, 3),
    }


def apart(engines: dict[str, Engine], prompts: Prompts, num_tokens: int, repeats: int) -> dict[str, Any]:
    """Measure a batch of prompts that share no prefix with any earlier prompt."""
    times: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(repeats):
        each = [prompts.ids(num_tokens // BATCH) for _ in range(BATCH)]
        for name in engines if turn % 2 else reversed(engines):
            times[name].append(run(engines[name], prompts, each, NEW_TOKENS))
    ratios = [one / other for one, other in zip(times["with"], times["without"], strict=True)]
    return {
        "batch": BATCH,
        "prompt": num_tokens // BATCH,
        "new_tokens": NEW_TOKENS,
        "all_s": {name: [round(one, 3) for one in each] for name, each in times.items()},
        "with_over_without": round(statistics.median(ratios), 4),
        "ratios": [round(each, 4) for each in ratios],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--shape", default="qwen3-0.6b", help="model shape of make_model.py")
    parser.add_argument("--quantize", default="int8")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    options = parser.parse_args()
    prompts = Prompts()
    with tempfile.TemporaryDirectory() as folder:
        model, artifact = Path(folder) / "model", Path(folder) / "artifact"
        make_model(options.shape, model, None, None, "bfloat16", Console(stderr=True))
        compile(model, artifact, CompileConfig(certify="none", quantize=options.quantize, max_model_len=4096))
        engines = {
            name: load_engine(artifact, max_num_seqs=BATCH, max_num_batched_tokens=512, prefix_cache=is_on)
            for name, is_on in (("with", True), ("without", False))
        }
        for engine in engines.values():  # brings the weights into memory
            run(engine, prompts, [prompts.ids(64)], 2)
        result = {
            "shape": options.shape,
            "quantize": options.quantize,
            "prompt_tokens": options.tokens,
            "threads": available_cores(),
            "read_gb_per_s": round(measure_read(available_cores()) / 1e9, 1),
            "shared": [shared(engines, prompts, options.tokens, share, options.repeats) for share in SHARES],
            "apart": apart(engines, prompts, options.tokens, 2 * options.repeats),
        }
        for engine in engines.values():
            engine.close()
    report(result, options.out)


if __name__ == "__main__":
    main()
