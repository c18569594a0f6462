"""The profile of a step: the time of each kernel, measured by the step's own taps, beside the machine's limits."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from inferc.cost.formulas import Step
from inferc.cost.machine import measure_read
from inferc.errors import RequestError
from inferc.runtime.artifact.load import Artifact
from inferc.runtime.runners.cpu.runner import CpuRunner
from inferc.runtime.step.plan import SampleRows, StepPlan

REPEATS = 5
COMPUTE_BOUND_TOKENS = 64  # with fewer tokens, a product's time is the time to read its weight
PEAK_OF = {4: "float32", 2: "bfloat16", 1: "int8"}


@dataclass(frozen=True)
class Limits:
    """The measured limits of a runner's threads."""

    bytes_per_s: float  # read bandwidth of the memory
    flops_per_s: Mapping[str, float]  # by dtype, the peak of products on operands in registers or tiles


@dataclass(frozen=True)
class KernelTime:
    """The time of one kernel's calls in a step: `ms` is the median over steps of their sum."""

    kernel: str
    calls: int
    ms: float
    share: float  # the share of all kernels' time
    gb_per_s: float | None  # reads of weights and KV cache per second; None if it reads neither
    gflops_per_s: float | None
    of_limit: float | None  # the least time that its bytes or products take at the limits, as a share of its time


@dataclass(frozen=True)
class ProductTime:
    """The time of a step's matrix products of one size, and the blocking chosen for them.

    The blocking is that of `codegen/cpp/blocking.py`.
    """

    n: int  # the number of outputs
    k: int
    row_bytes: int  # the bytes of an element of the rows
    weight_bytes: float  # the bytes of an element of the weight
    calls: int
    ms: float  # the median over steps of their sum, including fused ops
    rows_at_a_time: int
    k_bytes_at_a_time: int
    pairs_at_a_time: int  # pairs of panels
    gflops_per_s: float
    expected_gflops_per_s: float  # predicted by the cost model from the measured peak

    @property
    def of_expected(self) -> float:
        return self.gflops_per_s / self.expected_gflops_per_s


@dataclass(frozen=True)
class StepProfile:
    num_tokens: int  # the new tokens of all sequences in the step
    num_seqs: int
    context_len: int  # the tokens that each sequence has in the KV cache before the step
    isa: str
    ms: float
    of_limit: float | None
    kernels: list[KernelTime]
    products: list[ProductTime]  # given if the limits are known and the step has enough tokens to be compute-bound


def measure_limits(runner: CpuRunner, num_threads: int) -> Limits:
    """Measure the limits of the machine as the best of several runs, because other processes may disturb one."""
    peaks = {dtype: max(runner.measure_peak(dtype) for _ in range(12)) for dtype in ("float32", "bfloat16", "int8")}
    return Limits(max(measure_read(num_threads) for _ in range(2)), peaks)


def profile_step(
    runner: CpuRunner,
    artifact: Artifact,
    num_tokens: int,
    context_len: int,
    num_seqs: int = 1,
    limits: Limits | None = None,
) -> StepProfile:
    """Time a step of `num_tokens` of each sequence after `context_len`: one run warms up, medians of five are returned.

    A tap costs two barriers, so the sum is a little more than the time of a step without taps. Raises RequestError for
    more tokens than the model or the KV pool takes.
    """
    if num_tokens + context_len > artifact.max_model_len:
        raise RequestError(
            f"{num_tokens} tokens after {context_len} are more than the {artifact.max_model_len} the model takes; lower"
            " one"
        )
    kernels = _kernel_of_node(artifact)
    plan = _plan(artifact, runner.num_blocks, num_tokens, context_len, num_seqs)
    runner.fill_blocks(max(int(table.max()) for table in plan.block_tables) + 1)
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
    work = _work(artifact, Step(num_seqs * num_tokens, num_seqs, num_seqs, context_len + num_tokens), limits)
    rows = [
        KernelTime(
            kernel=kernel,
            calls=calls.count(kernel),
            ms=1e3 * seconds,
            share=seconds / whole,
            gb_per_s=work[kernel].num_bytes / seconds / 1e9 if work[kernel].num_bytes else None,
            gflops_per_s=work[kernel].flops / seconds / 1e9 if work[kernel].flops else None,
            of_limit=work[kernel].seconds / seconds if work[kernel].seconds else None,
        )
        for kernel, seconds in sorted(medians.items(), key=lambda item: -item[1])
    ]
    least = sum(each.seconds for each in work.values())
    of_limit = least / whole if least else None
    products = _products(artifact, runner.isa, runs, plan.num_tokens, limits) if limits is not None else []
    return StepProfile(plan.num_tokens, num_seqs, context_len, runner.isa, 1e3 * whole, of_limit, rows, products)


def _products(
    artifact: Artifact, isa: str, runs: Sequence[Sequence[tuple[int, float]]], num_tokens: int, limits: Limits
) -> list[ProductTime]:
    """Return the times of the matrix products, the slowest first."""
    if num_tokens < COMPUTE_BOUND_TOKENS:
        return []
    names = {entry.id: entry.name for entry in artifact.program.observable}
    found = []
    for product in artifact.program.products:
        nodes = frozenset(product.nodes)
        if not nodes:  # the product of the LM head
            continue
        seconds = statistics.median(sum(each for node, each in run if names[node] in nodes) for run in runs)
        calls = sum(names[node] in nodes for node, _ in runs[0])
        choice = next(each for each in product.choices[isa] if num_tokens <= each.up_to)
        peak = limits.flops_per_s[PEAK_OF[product.row_bytes]]
        found.append(
            ProductTime(
                n=product.n,
                k=product.k,
                row_bytes=product.row_bytes,
                weight_bytes=product.weight_bytes,
                calls=calls,
                ms=1e3 * seconds,
                rows_at_a_time=min(num_tokens, choice.rows),
                k_bytes_at_a_time=min(product.k * product.row_bytes, choice.k_bytes),
                pairs_at_a_time=choice.pairs,
                gflops_per_s=2e-9 * calls * num_tokens * product.n * product.k / seconds,
                expected_gflops_per_s=choice.of_peak * peak / 1e9,
            )
        )
    return sorted(found, key=lambda each: -each.ms)


@dataclass
class _KernelWork:
    """The work of a kernel in a step, and its least time at the limits; 0 if they are unknown."""

    num_bytes: float = 0.0
    flops: float = 0.0
    seconds: float = 0.0


def _work(artifact: Artifact, step: Step, limits: Limits | None) -> dict[str, _KernelWork]:
    """Return the work by kernel. Activations are assumed to stay in the CPU's caches."""
    found: dict[str, _KernelWork] = defaultdict(_KernelWork)
    for op, count in artifact.costs().last.ops.items():
        work = found[op.kernel]
        num_bytes, flops = step.evaluate(op.weights) + step.evaluate(op.cache), step.evaluate(op.flops)
        work.num_bytes += count * num_bytes
        work.flops += count * flops
        if limits is not None:
            peak = limits.flops_per_s.get(op.dtype, limits.flops_per_s["float32"])
            work.seconds += count * max(num_bytes / limits.bytes_per_s, flops / peak)
    return found


def _timed(runner: CpuRunner, plan: StepPlan) -> list[tuple[int, float]]:
    """Return (observable node, seconds since the previous node) in execution order."""
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


def _kernel_of_node(artifact: Artifact) -> dict[int, str]:
    """Return the kernel of every observable node."""
    nodes = {node.id: node for node in artifact.program.program.nodes}
    by_name: dict[str | None, str | None] = {}
    for node in nodes.values():
        if node.target == "getitem":
            by_name[node.name] = nodes[node.args[0]["node"]].kernel
        elif node.kernel is not None:
            by_name[node.name] = node.kernel
    return {entry.id: str(by_name[entry.name]) for entry in artifact.program.observable}


def _plan(artifact: Artifact, pools: Sequence[int], num_tokens: int, context_len: int, num_seqs: int) -> StepPlan:
    """Return a plan of `num_tokens` new tokens of each sequence after `context_len`; the last row of each is sampled.

    Each sequence has blocks of its own, assigned in turn. A pool that holds only a window of a sequence starts again at
    block 1.
    """
    length = context_len + num_tokens
    per_seq = -(-length // artifact.block_size)
    if num_seqs > 1 and num_seqs * per_seq >= max(pools):
        raise RequestError(f"{num_seqs} sequences of {length} tokens: more than the {max(pools)} KV blocks hold")
    seqs = np.arange(num_seqs)
    position = np.arange(context_len, length, dtype=np.int64)
    block = seqs[:, None] * per_seq + np.arange(per_seq)
    tables = [(1 + block % (count - 1)).astype(np.int32) for count in pools]
    places, offsets = position // artifact.block_size, position % artifact.block_size
    vocab_size = artifact.vocab_size
    slots = seqs.astype(np.int32)
    total = num_seqs * num_tokens
    return StepPlan(
        token_ids=np.random.default_rng(0).integers(0, vocab_size, total).astype(np.int32),
        positions=np.tile(position, num_seqs),
        query_start_loc=(np.arange(num_seqs + 1) * num_tokens).astype(np.int32),
        seq_lens=np.full(num_seqs, length, np.int32),
        seq_slots=slots,
        logits_rows=((seqs + 1) * num_tokens - 1).astype(np.int32),
        slot_mapping=tuple(
            (table[:, places].astype(np.int64) * artifact.block_size + offsets).reshape(-1) for table in tables
        ),
        block_tables=tuple(tables),
        sample=SampleRows.greedy(slots),
    )
