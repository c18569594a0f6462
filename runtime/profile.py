"""Where a step's time goes: each kernel timed through the step's own taps."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from inferc.errors import RequestError
from inferc.runtime.artifact import Artifact
from inferc.runtime.model_runner import ModelRunner
from inferc.runtime.step import SampleRows, StepPlan

REPEATS = 5


@dataclass(frozen=True)
class KernelTime:
    """One kernel's calls in a step: `ms` is the median over steps of their sum."""

    kernel: str
    calls: int
    ms: float
    share: float  # of all kernels' time
    weights_gb_per_s: float | None  # None for a kernel without weights


@dataclass(frozen=True)
class StepProfile:
    num_tokens: int  # new in the step
    context_len: int  # tokens cached before it
    isa: str
    ms: float
    kernels: list[KernelTime]


def profile_step(runner: ModelRunner, artifact: Artifact, num_tokens: int, context_len: int) -> StepProfile:
    """Time one sequence's step of `num_tokens` after `context_len`: the first run warms up, medians of five count.

    A tap costs two barriers, so the sum is a little more than a step takes without.
    """
    if num_tokens + context_len > artifact.max_model_len:
        raise RequestError(
            f"{num_tokens} tokens after {context_len} are more than the {artifact.max_model_len} the model takes; lower one"
        )
    kernels, weight_bytes = _kernel_of_node(artifact)
    plan = _plan(artifact, runner.num_blocks, num_tokens, context_len)
    runs = [_timed(runner, plan) for _ in range(REPEATS + 1)][1:]
    sums: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        total: dict[str, float] = defaultdict(float)
        for node, seconds in run:
            total[kernels[node]] += seconds
        for kernel, seconds in total.items():
            sums[kernel].append(seconds)
    medians = {kernel: statistics.median(values) for kernel, values in sums.items()}
    whole = sum(medians.values())
    calls = [kernels[node] for node, _ in runs[0]]
    rows = [
        KernelTime(
            kernel=kernel,
            calls=calls.count(kernel),
            ms=1e3 * seconds,
            share=seconds / whole,
            weights_gb_per_s=weight_bytes[kernel] / seconds / 1e9 if weight_bytes[kernel] else None,
        )
        for kernel, seconds in sorted(medians.items(), key=lambda item: -item[1])
    ]
    return StepProfile(num_tokens, context_len, runner.isa, 1e3 * whole, rows)


def _timed(runner: ModelRunner, plan: StepPlan) -> list[tuple[int, float]]:
    """(observable node, seconds since the node before) in running order."""
    stamps: list[tuple[int, float]] = []
    start = time.perf_counter()
    runner.set_tap(lambda node: stamps.append((node, time.perf_counter())))
    try:
        runner.submit(plan)
        error = runner.wait().error
    finally:
        runner.set_tap(None)
    if error is not None:
        raise RuntimeError(error)
    times = [start, *(stamp for _, stamp in stamps)]
    return [(node, after - before) for (node, after), before in zip(stamps, times, strict=False)]


def _kernel_of_node(artifact: Artifact) -> tuple[dict[int, str], dict[str, int]]:
    """The kernel behind every observable node, and the weights' bytes that each kernel reads in a step.

    A lookup reads rows, not its table; of the experts' weights, a decode step reads those of the routed ones alone, so
    neither counts.
    """
    nodes = {node["id"]: node for node in artifact.program["program"]["nodes"]}
    sizes = {weight.name: weight.num_bytes for weight in artifact.weights}
    by_name: dict[str, str] = {}
    weight_bytes: dict[str, int] = defaultdict(int)
    for node in nodes.values():
        if node.get("target") == "getitem":
            by_name[node["name"]] = nodes[node["args"][0]["node"]]["kernel"]
        elif "kernel" in node:
            by_name[node["name"]] = node["kernel"]
            if node["target"] in ("aten.embedding", "inferc.moe_experts"):
                continue
            for arg in node["args"]:
                source = nodes.get(arg.get("node", "")) if isinstance(arg, dict) else None
                if source is not None and source["op"] == "get_attr":
                    weight_bytes[node["kernel"]] += sizes[source["target"]]
    return {int(entry["id"]): by_name[entry["name"]] for entry in artifact.program["observable"]}, weight_bytes


def _plan(artifact: Artifact, num_blocks: Sequence[int], num_tokens: int, context_len: int) -> StepPlan:
    """One sequence: `num_tokens` new ones after `context_len`, its last row sampled.

    It has blocks 1, 2, … of each KV group; a pool that holds only a window of it begins again at 1.
    """
    length = context_len + num_tokens
    positions = np.arange(context_len, length, dtype=np.int64)
    block = np.arange(-(-length // artifact.block_size))
    tables = [(1 + block % (count - 1)).astype(np.int32) for count in num_blocks]
    places = positions // artifact.block_size, positions % artifact.block_size
    vocab_size = int(artifact.model["vocab_size"])
    slots = np.zeros(1, np.int32)
    return StepPlan(
        token_ids=np.random.default_rng(0).integers(0, vocab_size, num_tokens).astype(np.int32),
        positions=positions,
        query_start_loc=np.array([0, num_tokens], np.int32),
        seq_lens=np.array([length], np.int32),
        seq_slots=slots,
        logits_rows=np.array([num_tokens - 1], np.int32),
        slot_mapping=tuple(table[places[0]].astype(np.int64) * artifact.block_size + places[1] for table in tables),
        block_tables=tuple(table[None, :] for table in tables),
        sample=SampleRows.greedy(slots),
    )
