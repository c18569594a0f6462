"""The cuda target on one NVIDIA GPU: kernels and whole models beside the hardware's limit, and beside PyTorch's.

    python benchmarks/gpu.py [ROW …] [--out benchmarks/results/gpu.json]
    python benchmarks/gpu.py --list

Each row is measured in this run and merged into the results by its name, with GPU, versions, commit and date. Weights are
random, of real shapes, made on the GPU.
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

import triton
import triton.language as tl
from gpu_model import RandomModel, random_model
from measured import circumstances

from inferc.codegen.triton.build import build
from inferc.codegen.triton.source import POINTERS, Source
from inferc.errors import InfercError
from inferc.runtime.cuda.driver import Driver
from inferc.runtime.engine import Engine
from inferc.runtime.sampling_params import SamplingParams

RESULTS = Path(__file__).parent / "results" / "gpu.json"
READ_BLOCK = 4096
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
    """The GPU, and what rows share."""

    driver: Driver
    scale: str = "real"  # or "tiny", which is for trying the benchmark itself
    models: dict[tuple[str, str | None], RandomModel] = field(default_factory=dict)
    bytes_per_s: float = 0.0

    def model(self, name: str, quantize: str | None = None) -> RandomModel:
        if (name, quantize) not in self.models:
            shape: Any = TINY if self.scale == "tiny" else name
            longest = 256 if self.scale == "tiny" else 8192
            self.models[name, quantize] = random_model(
                shape, self.driver.arch, quantize=quantize, max_model_len=longest
            )
        return self.models[name, quantize]

    def of(self, real: int, tiny: int) -> int:
        return tiny if self.scale == "tiny" else real

    def read_bandwidth(self) -> float:
        """Bytes a second of a kernel that reads memory and does nothing else: the limit of everything that is memory-bound."""
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
            driver.fill(out, 0, 4 * programs, stream)  # so that the launch is not waited for
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


def elapsed_ms(driver: Driver, stream: Any, run: Callable[[], object]) -> float:
    start, end = driver.new_event(timed=True), driver.new_event(timed=True)
    driver.record(start, stream)
    run()
    driver.record(end, stream)
    driver.wait_event(end)
    spent = driver.milliseconds(start, end)
    for event in (start, end):
        driver.call("cuEventDestroy_v2", event)
    return spent


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)


def finish(engine: Engine) -> int:
    """Run until all requests are done; tokens that came."""
    tokens = 0
    while engine.has_work:
        tokens += sum(len(output.token_ids) for output in engine.step())
    return tokens


def latency(bench: Bench, name: str, quantize: str | None, prompt: int = 128, count: int = 512) -> Row:
    """Decode of one sequence: tokens a second, the limit that reading weights and cache sets, and how busy the device is."""
    prompt, count = bench.of(prompt, 8), bench.of(count, 8)
    model = bench.model(name, quantize)
    engine = model.engine(bench.driver, 1, bench.of(8192, 64), prompt + 3 * count)
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
        "tokens_per_s": round(rate, 1),
        "limit": round(bench.read_bandwidth() / read, 1),
        "of_limit": round(rate * read / bench.read_bandwidth(), 3),
        "device_ms_a_step": round(step_ms, 4),
        "idle": round(1 - step_ms * rate / 1e3, 4),
    }


def offline(bench: Bench, name: str, seqs: int, prompt: int, count: int) -> Row:
    """Requests that come all at once: output tokens a second from the first to the last."""
    seqs, prompt, count = bench.of(seqs, 3), bench.of(prompt, 4), bench.of(count, 6)
    model = bench.model(name)
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
    limit = seqs * bench.read_bandwidth() / read
    return {
        "tokens_per_s": round(tokens / spent, 1),
        "limit": round(limit, 1),
        "of_limit": round(tokens / spent / limit, 3),
    }


def prefill(bench: Bench, name: str, seqs: int, prompt: int) -> Row:
    """Prompts that come all at once, one token each; "cublaslt": the version that computes products, if one does."""
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


def kernels(bench: Bench) -> Row:
    """Every kernel at a model's shapes, beside PyTorch's own (benchmarks/gpu_kernels.py)."""
    from gpu_kernels import rows

    return {"kernels": rows(bench.driver, tiny=bench.scale == "tiny")}


def transformers_compiled(bench: Bench) -> Row:
    from gpu_peers import compiled_decode

    return compiled_decode("llama-3.1-8b")


def transformers_batched(bench: Bench) -> Row:
    """Continuous batching of 32 sequences by transformers, and by us."""
    from gpu_peers import continuous_batching

    ours = offline(bench, "llama-3.1-8b", 32, 128, 256)
    theirs = continuous_batching("llama-3.1-8b", 32, 128, 256)
    return {**ours, **theirs, "ratio": round(ours["tokens_per_s"] / theirs["transformers_tokens_per_s"], 2)}


ROWS: dict[str, Callable[[Bench], Row]] = {
    "bandwidth": bandwidth,
    "kernels": kernels,
    "8b-decode": lambda bench: latency(bench, "llama-3.1-8b", None),
    "8b-int8-decode": lambda bench: latency(bench, "llama-3.1-8b", "int8"),
    "1b-decode": lambda bench: latency(bench, "llama-3.2-1b", None),
    "8b-decode-128": lambda bench: offline(bench, "llama-3.1-8b", 128, 32, 2048),
    "8b-prefill": lambda bench: prefill(bench, "llama-3.1-8b", 32, 4096),
    "8b-transformers-compiled": transformers_compiled,
    "8b-transformers-batched": transformers_batched,
}


def run(bench: Bench, names: list[str], out: Path) -> dict[str, Row]:
    """The rows, each with its error where it has one: the next is measured all the same."""
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
    """Put rows into the results, each with its own circumstances; rows that failed leave what was there."""
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
    parser.add_argument("rows", nargs="*", metavar="ROW", help="what to measure; all if none is named")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the results, which keep the rows of other runs")
    parser.add_argument("--list", action="store_true", help="print the names of all rows")
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny model in place of the real ones: to try the benchmark"
    )
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(ROWS))
        return
    if unknown := sorted(set(arguments.rows) - set(ROWS)):
        parser.error(f"unknown row {', '.join(unknown)}; known: {', '.join(ROWS)}")
    try:
        driver = Driver()
    except InfercError as error:
        sys.exit(f"gpu.py: {error}")
    bench = Bench(driver, "tiny" if arguments.tiny else "real")
    found = run(bench, arguments.rows or list(ROWS), arguments.out)
    if any("error" in row for row in found.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
