"""Measure the cost of decoding a mixture of experts as the number of experts grows and top-k stays the same.

    python benchmarks/moe_decode.py [--experts 8 16 32 64 128] [--formats bfloat16 w8a8 ...] [--out FILE.json]

A step must read only the experts that its tokens chose, so at a fixed top-k its time must not grow with the number of
experts. For each number, a model like Qwen3-MoE with random weights is made and compiled to each format (once, under
--work: 5 GB of models and 5 GB of artifacts in all), with so many layers that even the top-k experts of all layers do
not fit in the CPU caches. Then each is loaded and timed in turn, `--repeats` times. The medians are shown beside

- `predicted_mb`: the bytes that a step reads and writes by the program's cost model (for --batch 1 exactly top-k
  experts),
- `counted_mb`: the same bytes with the experts that the routers really chose, counted in a run that is not timed,
- the memory's read bandwidth, measured before every turn of the same run; targets.toml asks for a share of it.
"""

from __future__ import annotations

import argparse
import statistics
import time
import tomllib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import make_model
import numpy as np
from measured import ROOT, report
from own_model import compiled

from inferc.cost.formulas import Step
from inferc.cost.machine import measure_read
from inferc.manifest_types import Observable
from inferc.runtime.artifact.load import Artifact, load_artifact
from inferc.runtime.engine.engine import Engine
from inferc.runtime.engine.load import load_engine
from inferc.runtime.measure.expert_loads import routed_values
from inferc.runtime.runners.cpu.runner import CpuRunner
from inferc.runtime.step.sampling_params import SamplingParams
from inferc.system.resources import available_cores

VOCABULARY = 4096  # vocabulary of the tokenizer; small, so that the LM head does not hide the cost of the experts
HEAD_DIM = 64
FORMATS = ("bfloat16", "int8", "w8a8", "int4")
INPUT_LEN = 32
# Number of warm-up tokens. Together they choose nearly every expert, so that all pages are mapped before the
# measurement.
WARM_LEN = 512


@dataclass(frozen=True)
class Shape:
    hidden: int
    expert: int  # intermediate size of an expert
    layers: int
    top_k: int

    def name(self, num_experts: int) -> str:
        return f"moe-{self.hidden}x{self.expert}x{self.layers}-{self.top_k}of{num_experts}"

    def config(self, num_experts: int) -> make_model.Config:
        heads = max(1, self.hidden // HEAD_DIM)
        sizes = (self.hidden, self.expert, self.layers, heads, max(1, heads // 4))
        return make_model.qwen3_moe(*sizes, experts=num_experts) | {
            "head_dim": HEAD_DIM,
            "moe_intermediate_size": self.expert,
            "num_experts_per_tok": self.top_k,
            "vocab_size": VOCABULARY,
        }


def prepare(shape: Shape, num_experts: int, format: str, work: Path) -> Path:
    """Return the artifact, and make it and its model if they do not exist."""
    return compiled(shape.name(num_experts), shape.config(num_experts), format, work, 1024)


class Routing:
    """A counter of the chosen experts, by layer and step; it may miss a step that is in flight as it starts or ends."""

    def __init__(self, artifact: Artifact) -> None:
        self.names = routed_values(artifact)
        self.counts: dict[int, list[int]] = defaultdict(list)

    def observe(self, entry: Observable, layer: int, rows: Any) -> None:
        if entry.name in self.names:
            self.counts[layer].append(len(np.unique(rows)))

    def per_step(self) -> float:
        """Return the mean number of distinct experts per step, summed over all layers."""
        return float(sum(statistics.mean(counts) for counts in self.counts.values()))


def decode(engine: Engine, prompt_len: int, steps: int, batch: int, routing: Routing | None = None) -> float:
    """Return the seconds per step of `steps` decode steps with `batch` sequences."""
    source = np.random.default_rng(0)
    params = SamplingParams(temperature=0.0, max_tokens=steps + 2, ignore_eos=True)
    for index in range(batch):
        engine.add_request(str(index), source.integers(5, VOCABULARY, prompt_len).tolist(), params)
    waiting = set(map(str, range(batch)))
    while waiting:  # until all sequences have their first token
        waiting -= {output.request_id for output in engine.step()}
    if routing is not None and isinstance(engine.runner, CpuRunner):
        engine.runner.set_observer(routing.observe)
    start = time.perf_counter()
    for _ in range(steps):
        engine.step()
    seconds = (time.perf_counter() - start) / steps
    if routing is not None and isinstance(engine.runner, CpuRunner):
        engine.runner.set_observer(None)
    while engine.has_work:
        engine.step()
    return seconds


def run_once(artifact: Path, steps: int, batch: int, routing: Routing | None = None) -> float:
    engine = load_engine(
        artifact, max_num_seqs=batch, max_num_batched_tokens=WARM_LEN, kv_memory_bytes=64 << 20, prefix_cache=False
    )
    try:
        decode(engine, WARM_LEN, 4, 1)
        return decode(engine, INPUT_LEN, steps, batch, routing)
    finally:
        engine.close()


def bytes_of_step(artifact: Artifact, context: int, batch: int, experts_touched: float) -> tuple[float, float]:
    """Return the bytes that a decode step moves: by the cost model, and with the experts that were really chosen."""
    costs = artifact.costs()
    step = Step.decode(batch, context)
    total = experts = 0.0
    for op, count in costs.last.ops.items():
        weights = count * step.evaluate(op.weights)
        total += weights + count * (step.evaluate(op.cache) + step.evaluate(op.activations))
        experts += weights if op.op == "inferc.moe_experts" else 0.0
    nodes = artifact.program.program.nodes
    layer = next(node for node in nodes if node.target == "inferc.moe_experts")
    read = {arg["node"] for arg in layer.args if isinstance(arg, dict) and "node" in arg}
    names = {node.target for node in nodes if node.op == "get_attr" and node.id in read}
    stored = [weight for weight in artifact.weights if weight.name in names]
    of_one = sum(weight.num_bytes / weight.shape[0] for weight in stored)
    return total, total - experts + experts_touched * of_one


def row_of(
    count: int, format: str, path: Path, times: list[float], read: float, steps: int, batch: int
) -> dict[str, Any]:
    """Return a row of the result, after one more untimed run that counts the chosen experts."""
    artifact = load_artifact(path)
    routing = Routing(artifact)
    run_once(path, steps, batch, routing)
    predicted, counted = bytes_of_step(artifact, INPUT_LEN + steps // 2, batch, routing.per_step())
    seconds = statistics.median(times)
    return {
        "experts": count,
        "format": format,
        "weights_gb": round(sum(weight.num_bytes for weight in artifact.weights) / 1e9, 2),
        "experts_a_step": round(routing.per_step(), 1),
        "predicted_mb": round(predicted / 1e6, 1),
        "counted_mb": round(counted / 1e6, 1),
        "ms": round(1e3 * seconds, 3),
        "all_ms": [round(1e3 * each, 3) for each in times],
        "gb_per_s": round(counted / seconds / 1e9, 1),
        "of_read_bandwidth": round(counted / seconds / read, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 16, 32, 64, 128])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["bfloat16"])
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--expert-size", type=int, default=768, help="intermediate size of an expert")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=1, help="number of sequences that decode at once")
    parser.add_argument("--steps", type=int, default=64, help="number of decode steps of a turn")
    parser.add_argument("--repeats", type=int, default=5, help="number of turns")
    parser.add_argument("--work", type=Path, default=ROOT / "out/bench", help="folder for models and artifacts")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    options = parser.parse_args()
    shape = Shape(options.hidden, options.expert_size, options.layers, options.top_k)
    kinds = [(count, format) for count in options.experts for format in options.formats]
    paths = {kind: prepare(shape, *kind, options.work) for kind in kinds}
    times: dict[tuple[int, str], list[float]] = defaultdict(list)
    reads = []
    for _ in range(options.repeats):
        reads.append(measure_read(available_cores()))
        for kind, path in paths.items():
            times[kind].append(run_once(path, options.steps, options.batch))
    read = statistics.median(reads)
    rows = [row_of(*kind, path, times[kind], read, options.steps, options.batch) for kind, path in paths.items()]
    targets = tomllib.loads((Path(__file__).parent / "targets.toml").read_text(encoding="utf-8"))
    result = {
        "hidden": shape.hidden,
        "expert_size": shape.expert,
        "layers": shape.layers,
        "top_k": shape.top_k,
        "batch": options.batch,
        "read_gb_per_s": {"median": round(read / 1e9, 1), "all": [round(each / 1e9, 1) for each in reads]},
        "rows": rows,
        "asked_of_read_bandwidth": targets["own"]["experts_of_limit"],
    }
    report(result, options.out)


if __name__ == "__main__":
    main()
