"""Measure a prompt of 200,000 tokens: its memory beside a formula, its time to first token, and the next turn's.

    python benchmarks/long_context.py [--tokens 200000] [--turns 5] [--work DIR] [--out FOLDER]

The model is a Llama with random weights, 4 layers, 4 heads and 2 KV heads of 64. It is small, because the cost of
attention grows with the square of the prompt, but large enough to have 2 KB of K and V per token. One process loads the
artifact, computes the prompt in chunks and answers with a few tokens. Then comes the second turn, --turns times: the
same prompt and answer with some new tokens, which are all that the prefix cache leaves to compute. The first turn runs
once.

Resident memory is read after every step. The formula sums the memory of the process with the prompt but without an
engine, the weights, the arena (by the artifact's own formula), and K and V; nothing else may grow with the prompt.
Limits: for the prompt, its operations at the processor's peak; for the second turn, its share of these; for a decode
step, its bytes at memory bandwidth. The files long_context.json and long_context.png go into the folder --out, and the
tables are printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from measured import ROOT, save
from rich.console import Console
from tables import COLORS, Grid, markdown, picture

from inferc.cost.machine import cpuinfo, measure_read, peak_flops
from inferc.runtime.artifact.load import load_artifact
from inferc.runtime.engine.engine import Engine
from inferc.runtime.engine.load import load_engine
from inferc.runtime.measure.bench import model_cost
from inferc.runtime.step.sampling_params import SamplingParams
from inferc.system.resources import available_cores

SIZES = (256, 768, 4, 4, 2)  # hidden, intermediate, layers, heads, KV heads
ANSWER, NEW_TOKENS = 16, 32  # tokens of the first turn's answer, and new tokens of the second turn's prompt
TOKEN_BUDGET = 512


def resident(name: str = "VmRSS") -> int:
    """Return the resident bytes of this process (VmRSS), or their peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


def operations(start: int, count: int, sizes: tuple[int, int, int, int, int] = SIZES) -> float:
    """Return the operations for tokens [start, start + count): matrix products, and attention to all tokens before."""
    hidden, intermediate, layers, heads, kv_heads = sizes
    weights = 2 * hidden * hidden + 2 * hidden * kv_heads * (hidden // heads) + 3 * hidden * intermediate
    return layers * count * (2.0 * weights + 4.0 * hidden * (start + count / 2))


def first_turn(engine: Engine, prompt: list[int]) -> dict[str, Any]:
    """Run the prompt and its answer; record for each step the tokens computed so far, seconds and resident bytes."""
    engine.add_request("first", prompt, SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True))
    answer: list[int] = []
    times, steps, computed = [], [], 0
    begun = before = time.perf_counter()
    while engine.has_work:
        outputs = list(engine.step())
        now = time.perf_counter()
        computed = max(computed, min(len(prompt), engine.stats().scheduled_tokens))
        if not answer:
            steps.append((computed, now - before, resident()))
        before = now
        for output in outputs:
            answer += output.token_ids
            times.append(now)
    return {
        "ttft_s": times[0] - begun,
        "decode_s": statistics.median(np.diff(times)),
        "answer": answer,
        "steps": steps,
    }


def second_turn(engine: Engine, history: list[int], seed: int) -> tuple[float, int]:
    """Run a turn that continues `history`; return the seconds to its first token and the number of cached tokens."""
    new = np.random.default_rng(1 + seed).integers(10, engine.model.vocab_size, NEW_TOKENS).tolist()
    before, begun = engine.stats().cached_tokens, time.perf_counter()
    engine.add_request("second", [*history, *new], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    while not list(engine.step()):
        pass
    seconds = time.perf_counter() - begun
    return seconds, engine.stats().cached_tokens - before


def measure(path: Path, num_tokens: int, turns: int) -> dict[str, Any]:
    """Measure both turns in this process, which should have loaded nothing else."""
    artifact = load_artifact(path)
    vocab_size = artifact.vocab_size
    prompt = np.random.default_rng(0).integers(10, vocab_size, num_tokens).tolist()
    before = resident()
    cost, threads = model_cost(artifact), available_cores()
    blocks = 2 + -(-(num_tokens + ANSWER + NEW_TOKENS) // artifact.block_size)
    kv_bytes = blocks * artifact.block_size * artifact.kv_bytes_per_token
    engine = load_engine(
        artifact, max_num_seqs=1, max_num_batched_tokens=TOKEN_BUDGET, kv_memory_bytes=kv_bytes, num_threads=threads
    )
    first = first_turn(engine, prompt)
    history = [*prompt, *first.pop("answer")]
    second = [second_turn(engine, history, seed) for seed in range(turns)]
    peak = resident("VmHWM")
    engine.close()
    formula = {
        "before": before,
        "weights": sum(weight.num_bytes for weight in artifact.weights),
        "arena": artifact.memory.arena_bytes(TOKEN_BUDGET, TOKEN_BUDGET, 1, threads),
        "kv": kv_bytes,
    }
    return {
        "tokens": num_tokens,
        "first": first,
        "second_s": [seconds for seconds, _ in second],
        "cached_tokens": second[0][1],
        "peak_bytes": peak,
        "formula_bytes": {**formula, "all": sum(formula.values())},
        "kv_bytes_per_token": artifact.kv_bytes_per_token,
        "decode_bytes": cost.weights_bytes + cost.kv_bytes(num_tokens + ANSWER // 2),
        "threads": threads,
    }


def limits(result: dict[str, Any], read: float) -> dict[str, float]:
    """Return lower bounds in seconds: both turns by operations (if the clock is known), a decode step by bytes."""
    count, left = result["tokens"], ANSWER + NEW_TOKENS
    flops = peak_flops(result["threads"], "bfloat16", cpuinfo())
    own = [operations(*span) for span in ((0, count), (count, left))]
    found = {"decode_s": result["decode_bytes"] / read, "second_over_first": own[1] / own[0]}
    return found if flops is None else {**found, "ttft_s": own[0] / flops}


def tables(result: dict[str, Any]) -> list[Grid]:
    first, limit, formula = result["first"], result["limits"], result["formula_bytes"]
    second = statistics.median(result["second_s"])
    time_rows = [
        [f"{result['tokens']:,} tokens", "found", "limit"],
        ["TTFT", f"{first['ttft_s']:.1f} s", f"{limit['ttft_s']:.1f} s" if "ttft_s" in limit else ""],
        [f"TTFT of the second turn, {result['cached_tokens']:,} tokens cached", f"{1e3 * second:.0f} ms",
         f"{1e3 * limit['second_over_first'] * first['ttft_s']:.0f} ms"],
        ["a decode step", f"{1e3 * first['decode_s']:.1f} ms", f"{1e3 * limit['decode_s']:.1f} ms"],
    ]  # fmt: skip
    parts = ("before", "weights", "arena", "kv", "all")
    memory_rows = [
        ["memory, MB", "process without engine", "weights", "arena", "K and V", "formula", "peak", "of the formula"],
        ["", *(f"{formula[name] / 1e6:.0f}" for name in parts), f"{result['peak_bytes'] / 1e6:.0f}",
         f"{result['peak_bytes'] / formula['all']:.3f}"],
    ]  # fmt: skip
    return [time_rows, memory_rows]


def draw(result: dict[str, Any], path: Path) -> None:
    second = statistics.median(result["second_s"])
    title = (
        f"A prompt of {result['tokens']:,} tokens on {result['threads']} cores: first token after"
        f" {result['first']['ttft_s']:.1f} s, of the second turn after {1e3 * second:.0f} ms"
    )
    computed, seconds, sizes = (np.array(each, np.float64) for each in zip(*result["first"]["steps"], strict=True))
    formula = result["formula_bytes"]
    line = formula["all"] - formula["kv"] + result["kv_bytes_per_token"] * computed
    with picture(path, title, (10.5, 3.8), columns=2) as ((memory, speed),):
        memory.plot(computed / 1000, sizes / 1e6, color=COLORS[0], linewidth=1.8, label="resident")
        memory.plot(computed / 1000, line / 1e6, color="black", linewidth=1.0, linestyle="--", label="formula")
        memory.set(title="Memory of the process", ylabel="MB")
        memory.legend(fontsize=8, frameon=False)
        speed.plot(computed[1:-1] / 1000, 1e3 * seconds[1:-1], ".", color=COLORS[0], markersize=3)
        speed.set(title=f"A step of {TOKEN_BUDGET} tokens", ylabel="ms")
        for axis in (memory, speed):
            axis.set_xlabel("thousands of tokens computed")
            axis.set_xlim(left=0)
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.25)


def in_own_process(path: Path, num_tokens: int, turns: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--worker", str(path), "--tokens", str(num_tokens), "--turns", str(turns)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"long_context: the measuring process ended with status {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=200_000, help="length of the prompt")
    parser.add_argument("--turns", type=int, default=5, help="number of second turns")
    parser.add_argument("--work", type=Path, default=ROOT / "out/bench", help="folder where models are kept")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", help="folder for the results")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if min(options.tokens, options.turns) < 1:
        parser.error("expected at least one token and one second turn")
    if options.worker is not None:
        print(json.dumps(measure(options.worker, options.tokens, options.turns)))
        return
    from own_model import Llama  # imported late, because it loads torch, which takes memory

    for folder in (options.work, options.out):
        folder.mkdir(parents=True, exist_ok=True)
    console, model = Console(stderr=True), Llama(*SIZES)
    max_model_len = -(-(options.tokens + ANSWER + NEW_TOKENS) // 1024) * 1024
    with console.status("compiling"):
        path = model.compiled("bfloat16", options.work, max_model_len)
    with console.status(f"a prompt of {options.tokens:,} tokens"):
        result = {**model.facts(max_model_len), **in_own_process(path, options.tokens, options.turns)}
    read = measure_read(result["threads"])
    result |= {"read_gb_per_s": read / 1e9, "token_budget": TOKEN_BUDGET, "limits": limits(result, read)}
    save(result, options.out / "long_context.json")
    draw(result, options.out / "long_context.png")
    print("\n\n".join(map(markdown, tables(result))))


if __name__ == "__main__":
    main()
