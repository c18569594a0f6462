"""Measure the cuda target on one NVIDIA GPU: kernels and whole models beside the hardware's limit and PyTorch.

    python benchmarks/gpu.py [ROW …] [--out benchmarks/results/gpu.json]
    python benchmarks/gpu.py --list

Without names, all rows except those of peers are measured, which should take less than ten minutes on an H100. Each row
is merged into the results by its name, with GPU, versions, commit and date. Weights are random, in real shapes, and are
made on the GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import triton
import triton.language as tl
from gpu_model import RandomModel, random_model
from gpu_timing import elapsed_ms
from measured import circumstances

from inferc.codegen.triton.aot.build import build
from inferc.codegen.triton.aot.source import POINTERS, Source
from inferc.errors import InfercError
from inferc.runtime.engine.engine import Engine
from inferc.runtime.runners.cuda import shared_prefixes
from inferc.runtime.runners.cuda.driver import Driver
from inferc.runtime.step.plan import SampleRows, StepPlan
from inferc.runtime.step.sampling_params import SamplingParams

RESULTS = Path(__file__).parent / "results" / "gpu.json"
READ_BLOCK = 4096
IDLE_TARGET = 0.02
Row = dict[str, Any]


@triton.jit  # type: ignore[untyped-decorator]
def read_kernel(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, COUNT: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr
):
    total = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(tl.program_id(0) * BLOCK, COUNT, PROGRAMS * BLOCK, num_stages=4):
        total += tl.load(x_ptr + start + tl.arange(0, BLOCK), eviction_policy="evict_first").to(tl.float32)
    tl.store(out_ptr + tl.program_id(0), tl.sum(total))


@dataclass
class Bench:
    """The GPU, with the models and measurements that rows share."""

    driver: Driver
    scale: str = "real"  # or "tiny", to try out the benchmark itself
    models: dict[tuple[str, str | None, str], RandomModel] = field(default_factory=dict)
    bytes_per_s: float = 0.0

    def model(self, name: str, quantize: str | None = None, kv_dtype: str = "auto") -> RandomModel:
        key = name, quantize, kv_dtype
        if key not in self.models:
            shape: Any = TINY if self.scale == "tiny" else name
            longest = 256 if self.scale == "tiny" else 8192
            self.models[key] = random_model(
                shape, self.driver.arch, quantize=quantize, kv_dtype=kv_dtype, max_model_len=longest
            )
        return self.models[key]

    def of(self, real: int, tiny: int) -> int:
        return tiny if self.scale == "tiny" else real

    def read_bandwidth(self) -> float:
        """Measure the bytes per second of a kernel that only reads memory: the limit of all memory-bound work."""
        if self.bytes_per_s:
            return self.bytes_per_s
        driver, count, programs = self.driver, self.of(1 << 30, 1 << 16), 4 * self.driver.num_multiprocessors
        source = Source(
            function=read_kernel,
            signature={"x_ptr": POINTERS["bfloat16"], "out_ptr": POINTERS["float32"]},
            constants={"COUNT": count, "PROGRAMS": programs, "BLOCK": READ_BLOCK},
            grid=("PROGRAMS", "1", "1"),
            num_warps=8,
            num_stages=4,
        )
        cubin = build(source, "read", "read_kernel", driver.arch)
        kernel, stream = driver.load(cubin.data, cubin.record), driver.new_stream()
        x, out = driver.allocate(2 * count), driver.allocate(4 * programs)
        driver.fill(x, 0x3C, 2 * count, stream)
        bound = kernel.bind({"x_ptr": x, "out_ptr": out})
        times = []
        for _ in range(20):
            driver.fill(out, 0, 4 * programs, stream)  # keeps the GPU busy, so that the launch overhead is not measured
            times.append(elapsed_ms(driver, stream, lambda: bound.launch(stream, (programs, 1, 1))))
        driver.free(x)
        driver.free(out)
        self.bytes_per_s = 2 * count / (statistics.median(times) / 1e3)
        return self.bytes_per_s


TINY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 256,
}


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)


def finish(engine: Engine) -> int:
    """Run the engine until all requests are done, and return the number of generated tokens."""
    tokens = 0
    while engine.has_work:
        tokens += sum(len(output.token_ids) for output in engine.step())
    return tokens


def latency(
    bench: Bench,
    name: str,
    quantize: str | None = None,
    *,
    deterministic: bool = False,
    prompt: int = 128,
    count: int = 512,
) -> Row:
    """Measure decode of one sequence: tokens per second, the limit by reading weights and KV cache, and device use."""
    prompt, count = bench.of(prompt, 8), bench.of(count, 8)
    model = bench.model(name, quantize)
    engine = model.engine(bench.driver, 1, bench.of(8192, 64), prompt + 3 * count, deterministic)
    try:
        engine.add_request("warm", [5] * prompt, greedy(count // 4))
        finish(engine)
        rates = []
        for turn in range(3):
            engine.add_request(str(turn), [5] * prompt, greedy(count))
            while not any(output.token_ids for output in engine.step()):
                pass
            started = time.perf_counter()
            rates.append(finish(engine) / (time.perf_counter() - started))
        step_ms = engine.runner.step_ms(1)  # type: ignore[attr-defined]
    finally:
        engine.close()
    read = model.read_bytes + (prompt + count // 2) * model.kv_bytes_per_token
    rate = statistics.median(rates)
    return {
        **beside_limit(bench, rate, 1, read),
        "device_ms_a_step": round(step_ms, 4),
        "idle": round(1 - step_ms * rate / 1e3, 4),
    }


def beside_limit(bench: Bench, tokens_per_s: float, seqs: int, read: float) -> Row:
    """Return a decode rate beside its limit, at which reading the `read` bytes of a step takes all bandwidth."""
    limit = seqs * bench.read_bandwidth() / read
    return {
        "tokens_per_s": round(tokens_per_s, 1),
        "limit": round(limit, 1),
        "of_limit": round(tokens_per_s / limit, 3),
    }


def price(row: Row, fast: Row) -> Row:
    """Return a row of deterministic kernels with its cost relative to the fast row, measured in the same run."""
    share = 1 - row["tokens_per_s"] / fast["tokens_per_s"]
    return {**row, "fast_tokens_per_s": fast["tokens_per_s"], "price": round(share, 4)}


def steady(bench: Bench, name: str, seqs: int, prompt: int, steps: int, *, deterministic: bool = False) -> Row:
    """Measure decode of `seqs` sequences once all of them decode; idle: share of time without work for the device."""
    seqs, prompt, steps = bench.of(seqs, 4), bench.of(prompt, 8), bench.of(steps, 8)
    model, budget = bench.model(name), bench.of(8192, 64)
    count = 2 * steps + -(-seqs * prompt // budget)  # the first sequences already decode during the last prefills
    engine = model.engine(bench.driver, seqs, budget, prompt + count, deterministic)
    try:
        for index in range(seqs):
            engine.add_request(str(index), [5 + index % 7] * prompt, greedy(count))
        begun: set[str] = set()
        spent, tokens = 0.0, 0

        def decode(num_steps: int) -> None:
            nonlocal tokens
            for _ in range(num_steps):
                outputs = engine.step()
                tokens += sum(len(output.token_ids) for output in outputs)
                begun.update(output.request_id for output in outputs)

        while len(begun) < seqs:
            decode(1)
        for half in range(2):
            decode(2)  # steps in flight before the clock starts
            started = time.perf_counter()
            decode(steps // 2)
            spent += time.perf_counter() - started
            if half == 0:
                step_ms, context = engine.runner.step_ms(seqs), prompt + tokens / seqs  # type: ignore[attr-defined]
        assert engine.scheduler.num_running == seqs, "a sequence was finished before the end"
    finally:
        engine.close()
    wall_ms = 1e3 * spent / (steps // 2 * 2)
    read = model.read_bytes + seqs * context * model.kv_bytes_per_token
    return {
        **beside_limit(bench, 1e3 * seqs / wall_ms, seqs, read),
        "context": round(context),
        "ms_a_step": round(wall_ms, 4),
        "device_ms_a_step": round(step_ms, 4),
        "idle": round(1 - step_ms / wall_ms, 4),
        "idle_target": IDLE_TARGET,
    }


def shared_plan(model: RandomModel, seqs: int, prefix: int, own: int) -> StepPlan:
    """Return a decode step of sequences that share the blocks of `prefix` tokens and have `own` tokens after them.

    `prefix` fills whole blocks.
    """
    size = model.block_size
    num_shared, num_own = prefix // size, -(-own // size)
    shared = np.tile(np.arange(1, 1 + num_shared, dtype=np.int32), (seqs, 1))
    of_own = 1 + num_shared + np.arange(seqs * num_own, dtype=np.int32).reshape(seqs, num_own)
    table, last = np.concatenate((shared, of_own), 1), prefix + own - 1
    each = np.arange(seqs, dtype=np.int32)
    return StepPlan(
        token_ids=5 + each,
        positions=np.full(seqs, last, np.int64),
        query_start_loc=np.arange(seqs + 1, dtype=np.int32),
        seq_lens=np.full(seqs, last + 1, np.int32),
        seq_slots=each,
        logits_rows=each,
        slot_mapping=(table[:, last // size].astype(np.int64) * size + last % size,),
        block_tables=(table,),
        sample=SampleRows.greedy(each),
    )


def shared_prefix(bench: Bench, name: str, seqs: int, prefix: int, own: int) -> Row:
    """Measure decode over a prefix that all sequences share: read once for several of them, and read for each."""
    seqs, prefix, own, steps = bench.of(seqs, 4), bench.of(prefix, 128), bench.of(own, 8), bench.of(100, 4)
    model = bench.model(name)
    plan = shared_plan(model, seqs, prefix, own)
    num_blocks = int(plan.block_tables[0].max())
    runner, _ = model.runner(bench.driver, seqs, bench.of(1024, 64), num_blocks)
    runner.fill_blocks(1 + num_blocks)
    least, found = shared_prefixes.LEAST_SAVED_BYTES, {}
    try:
        for how, saved in (("", 1), ("apart_", sys.maxsize)):
            shared_prefixes.LEAST_SAVED_BYTES = saved
            for turn in range(2):  # the first captures the graph
                started = time.perf_counter()
                runner.submit(plan)
                for _ in range(steps):
                    runner.submit(plan)
                    runner.wait()
                runner.wait()
                spent = time.perf_counter() - started
            found[f"{how}tokens_per_s"] = round(seqs * (steps + 1) / spent, 1)
            found[f"{how}device_ms_a_step"] = round(runner.step_ms(seqs), 4)
    finally:
        shared_prefixes.LEAST_SAVED_BYTES = least
        runner.close()
    read = model.read_bytes + (prefix + seqs * own) * model.kv_bytes_per_token
    limit = beside_limit(bench, found["tokens_per_s"], seqs, read)
    return {**limit, **found, "ratio": round(found["tokens_per_s"] / found["apart_tokens_per_s"], 2)}


def offline(bench: Bench, name: str, seqs: int, prompt: int, count: int, kv_dtype: str = "auto") -> Row:
    """Measure requests that arrive all at once: output tokens per second, from their arrival to the last token."""
    seqs, prompt, count = bench.of(seqs, 3), bench.of(prompt, 4), bench.of(count, 6)
    model = bench.model(name, kv_dtype=kv_dtype)
    engine = model.engine(bench.driver, seqs, bench.of(8192, 64), prompt + count)
    try:
        engine.add_request("warm", [5] * prompt, greedy(4))
        finish(engine)
        started = time.perf_counter()
        for index in range(seqs):
            engine.add_request(str(index), [5 + index % 7] * prompt, greedy(count))
        tokens = finish(engine)
        spent = time.perf_counter() - started
    finally:
        engine.close()
    read = model.read_bytes + seqs * (prompt + count // 2) * model.kv_bytes_per_token
    return beside_limit(bench, tokens / spent, seqs, read)


def prefill(bench: Bench, name: str, seqs: int, prompt: int) -> Row:
    """Measure prompts that arrive all at once, with one output token each.

    "cublaslt" in the row is the version of cuBLASLt, if it computes products.
    """
    seqs, prompt = bench.of(seqs, 2), bench.of(prompt, 40)
    model = bench.model(name)
    engine = model.engine(bench.driver, seqs, bench.of(8192, 64), prompt + 2)
    try:
        engine.add_request("warm", [5] * prompt, greedy(1))
        finish(engine)
        started = time.perf_counter()
        for index in range(seqs):
            engine.add_request(str(index), [5 + index % 7] * prompt, greedy(1))
        finish(engine)
        spent = time.perf_counter() - started
        version = engine.runner.cublaslt_version  # type: ignore[attr-defined]
    finally:
        engine.close()
    flops = 2 * (model.read_bytes / 2) * seqs * prompt
    rates = {"tokens_per_s": round(seqs * prompt / spent, 1), "tflop_per_s": round(flops / spent / 1e12, 1)}
    return {**rates, "cublaslt": version}


def bandwidth(bench: Bench) -> Row:
    return {"read_gb_per_s": round(bench.read_bandwidth() / 1e9, 1)}


def start(bench: Bench) -> Row:
    """Measure a fresh process from its start to its first token (benchmarks/gpu_start.py)."""
    from gpu_start import row

    options = ("--kv-memory", "1MiB", "--max-num-seqs", "1") if bench.scale == "tiny" else ()
    return row(bench.driver, "llama-3.1-8b", *options)


def deterministic_latency(bench: Bench) -> Row:
    return price(latency(bench, "llama-3.1-8b", deterministic=True), latency(bench, "llama-3.1-8b"))


def deterministic_steady(bench: Bench) -> Row:
    of = ("llama-3.1-8b", 128, 512, 200)
    return price(steady(bench, *of, deterministic=True), steady(bench, *of))


def kernels(bench: Bench) -> Row:
    """Measure every kernel at a model's shapes beside PyTorch's own (benchmarks/gpu_kernels.py).

    A kernel with wrong results has an "error".
    """
    from gpu_kernels import rows

    return {"kernels": rows(bench.driver, tiny=bench.scale == "tiny")}


def transformers_compiled(bench: Bench) -> Row:
    from gpu_peers import compiled_decode

    return compiled_decode("llama-3.1-8b")


def transformers_batched(bench: Bench) -> Row:
    """Measure continuous batching of 32 sequences by transformers and by inferc."""
    from gpu_peers import continuous_batching

    ours = offline(bench, "llama-3.1-8b", 32, 128, 256)
    theirs = continuous_batching("llama-3.1-8b", 32, 128, 256)
    return {**ours, **theirs, "ratio": round(ours["tokens_per_s"] / theirs["transformers_tokens_per_s"], 2)}


ROWS: dict[str, Callable[[Bench], Row]] = {
    "bandwidth": bandwidth,
    "kernels": kernels,
    "8b-decode": lambda bench: latency(bench, "llama-3.1-8b"),
    "8b-int8-decode": lambda bench: latency(bench, "llama-3.1-8b", "int8"),
    "1b-decode": lambda bench: latency(bench, "llama-3.2-1b"),
    "8b-decode-128": lambda bench: offline(bench, "llama-3.1-8b", 128, 32, 2048),
    "8b-int8kv-decode-128": lambda bench: offline(bench, "llama-3.1-8b", 128, 32, 2048, "int8"),
    "8b-idle-128": lambda bench: steady(bench, "llama-3.1-8b", 128, 512, 400),
    "8b-decode-deterministic": deterministic_latency,
    "8b-decode-128-deterministic": deterministic_steady,
    "8b-shared-prefix": lambda bench: shared_prefix(bench, "llama-3.1-8b", 64, 4096, 64),
    "8b-prefill": lambda bench: prefill(bench, "llama-3.1-8b", 32, 4096),
    "8b-start": start,
    "8b-transformers-compiled": transformers_compiled,
    "8b-transformers-batched": transformers_batched,
}
PEERS = ("8b-transformers-compiled", "8b-transformers-batched")  # rows that take minutes and are only measured by name
DEFAULT = tuple(name for name in ROWS if name not in PEERS)


def run(bench: Bench, names: list[str], out: Path) -> dict[str, Row]:
    """Measure rows and return them; a row that fails has an "error", and the next one is measured all the same."""
    found: dict[str, Row] = {}
    for name in names:
        started = time.perf_counter()
        try:
            found[name] = ROWS[name](bench)
        except Exception as error:  # noqa: BLE001  (whatever it is, the other rows count)
            found[name] = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        found[name]["seconds"] = round(time.perf_counter() - started, 1)
        print(json.dumps({name: found[name]}), flush=True)
        merge({name: found[name]}, bench.driver.name, out)
    return found


def merge(found: dict[str, Row], gpu: str, out: Path) -> None:
    """Merge rows into the results, each with the facts of this run; a failed row does not replace an older result."""
    stored = json.loads(out.read_text()) if out.exists() else {"rows": {}}
    of_run = {**circumstances(), "gpu": gpu}
    for name, row in found.items():
        if "error" not in row or "error" in stored["rows"].get(name, {"error": ""}):
            stored["rows"][name] = {**row, **of_run}
    partial = out.with_suffix(".partial")
    partial.write_text(json.dumps(stored, indent=1) + "\n")
    partial.replace(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help="what to measure; all but the peers' if none is named")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the results, which keep the rows of other runs")
    parser.add_argument("--list", action="store_true", help="print the names of all rows")
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny model in place of the real ones: to try the benchmark"
    )
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(f"{name} (only by name)" if name in PEERS else name for name in ROWS))
        return
    if unknown := sorted(set(arguments.rows) - set(ROWS)):
        parser.error(f"unknown row {', '.join(unknown)}; known: {', '.join(ROWS)}")
    try:
        driver = Driver()
    except InfercError as error:
        sys.exit(f"gpu.py: {error}")
    bench = Bench(driver, "tiny" if arguments.tiny else "real")
    found = run(bench, arguments.rows or list(DEFAULT), arguments.out)
    if any("error" in row for row in [*found.values(), *found.get("kernels", {}).get("kernels", [])]):
        sys.exit(1)


if __name__ == "__main__":
    main()
