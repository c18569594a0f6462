"""Measure the gain of each part of the engine: one burst of requests, served with one more part on every rung.

    python benchmarks/ladder.py [--turns 3] [--reservations 2] [--quantize w8a8] [--trace FILE] [--out FOLDER] [--quick]

The model is a Llama with random weights. The requests have mixed lengths, arrive all at once, and half of them begin
with one system prompt. The rungs, from first to last:

- static batches without a KV cache: every token is a request of its own, over the prompt and all tokens before it;
- + KV cache: static batches, which no request joins before the last one has ended (there is no padding in either rung);
- + continuous batching, with as many sequences as the KV memory holds ranges of `max_model_len`, as if each sequence
  had one range reserved;
- + paging: the same memory in blocks, for as many sequences as fit; + larger batch: memory for all requests at once;
- + 8-bit weights; + prefix cache.

Every rung runs once per turn in alternating order. Ratios are within one turn, and their medians count; a warm-up turn
comes first. The first rung takes longer than all others together and runs in one turn only. Each ratio is shown with
its expected value: for the KV cache at most the ratio of computed tokens; for weights the ratio of their bytes; for the
others the ratio of the work in their steps at the step costs of the rung before (runtime/step/cost.py). All rungs with
the same weights must give the same tokens. The result also shows how much of the KV memory is held but not used, in
this burst and at the lengths of a conversation trace (by the same scheduler and cache, without a model). The files
ladder.json and ladder.png go into the folder --out, and the tables are printed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from burst import KVUse, Request, generate, lengths, use_on_trace, workload
from conversation import find_trace
from ladder_report import draw, tables
from measured import ROOT, save
from own_model import VOCAB_SIZE, Llama
from rich.console import Console
from rich.progress import Progress
from tables import markdown

from inferc.cost.machine import measure_read
from inferc.errors import ConfigError
from inferc.runtime.artifact.load import load_artifact
from inferc.runtime.engine.engine import Engine
from inferc.runtime.engine.load import load_engine
from inferc.runtime.simulate.trace import read_trace
from inferc.runtime.step.cost import WORK, StepCost, StepWork
from inferc.runtime.step.plan import F64
from inferc.system.resources import available_cores

MODEL, QUICK_MODEL = Llama(640, 1728, 4, 10, 2), Llama(128, 256, 2, 2, 1)
MAX_MODEL_LEN = 2048
TOKEN_BUDGET = 512
TRACE_REQUESTS = 200


@dataclass(frozen=True)
class Rung:
    """A rung of the ladder: the configuration of the engine.

    kv_tokens: number of tokens that the KV cache holds.
    by: the quantity that gives the expected ratio to the rung before: "tokens", "weights" or "work".
    """

    name: str
    max_num_seqs: int
    kv_tokens: int
    by: str = "work"
    format: str = "bfloat16"
    policy: str = "fcfs"
    prefix_cache: bool = False
    recomputes: bool = False


def rungs(requests: Sequence[Request], reservations: int, max_model_len: int, quantize: str) -> list[Rung]:
    room, count = reservations * max_model_len, len(requests)
    all_room = sum(16 + request.length for request in requests)
    return [
        Rung("static batches, no KV cache", reservations, room, recomputes=True),
        Rung("+ KV cache", reservations, room, "tokens", policy="static"),
        Rung("+ continuous batching", reservations, room),
        Rung("+ paging", count, room),
        Rung("+ larger batch", count, all_room),
        Rung(f"+ 8-bit weights ({quantize})", count, all_room, "weights", quantize),
        Rung("+ prefix cache", count, all_room, format=quantize, prefix_cache=True),
    ]


class CountedCost(StepCost):
    """A step cost model that also sums up the work of all steps."""

    def __init__(self) -> None:
        super().__init__()
        self.total: F64 = np.zeros(len(WORK))

    def observe(self, work: StepWork, seconds: float) -> None:
        self.total += work.row
        super().observe(work, seconds)


@dataclass
class Climb:
    """The run of a rung: its engine, and the seconds of each turn."""

    rung: Rung
    engine: Engine
    cost: CountedCost
    weights_bytes: int
    seconds: list[float] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    num_steps: int = 0  # number of steps of a turn
    num_tokens: int = 0  # number of tokens computed in a turn
    work: F64 = field(default_factory=lambda: np.zeros(len(WORK)))
    use: KVUse = field(default_factory=KVUse)


def start(rung: Rung, path: Path) -> Climb:
    artifact = load_artifact(path)
    size, own = artifact.block_size, artifact.kv_bytes_per_token
    engine = load_engine(
        artifact,
        max_num_seqs=rung.max_num_seqs,
        max_num_batched_tokens=max(TOKEN_BUDGET, rung.max_num_seqs),
        kv_memory_bytes=(1 + -(-rung.kv_tokens // size)) * size * own,
        policy=rung.policy,
        prefix_cache=rung.prefix_cache,
    )
    engine.scheduler.foresees = True  # makes the scheduler observe the cost of its steps
    cost = engine.scheduler.forecast.cost = CountedCost()
    return Climb(rung, engine, cost, sum(weight.num_bytes for weight in artifact.weights))


def without_cache(engine: Engine, requests: Sequence[Request], batch: int) -> list[list[int]]:
    """Generate tokens in static batches without a KV cache: each token is a new request that computes all before it."""
    answers: list[list[int]] = []
    for first in range(0, len(requests), batch):
        group = requests[first : first + batch]
        own: list[list[int]] = [[] for _ in group]
        while left := [i for i, request in enumerate(group) if len(own[i]) < request.output_len]:
            found = generate(engine, [Request([*group[i].prompt, *own[i]], 1) for i in left])
            for i, tokens in zip(left, found, strict=True):
                own[i] += tokens
        answers += own
    return answers


def take_turn(climb: Climb, requests: Sequence[Request], turn: int) -> None:
    """Serve the burst once; turn 0 warms up and measures the use of the KV cache. Fails if tokens change."""
    engine, rung = climb.engine, climb.rung
    if not turn:
        if rung.recomputes:
            without_cache(
                engine, [replace(each, output_len=2) for each in requests[: rung.max_num_seqs]], rung.max_num_seqs
            )
        else:
            generate(engine, requests, "warm", lambda: climb.use.add(engine.scheduler))
        return
    before, work, begun = engine.stats(), climb.cost.total.copy(), time.perf_counter()
    if rung.recomputes:
        answers = without_cache(engine, requests, rung.max_num_seqs)
    else:
        answers = generate(engine, requests, str(turn))
    climb.seconds.append(time.perf_counter() - begun)
    after = engine.stats()
    climb.num_steps = after.num_steps - before.num_steps
    climb.num_tokens = after.scheduled_tokens - before.scheduled_tokens
    climb.work = climb.cost.total - work
    if climb.answers and climb.answers != answers:
        raise SystemExit(f"ladder: {rung.name}: turn {turn} gave other tokens than the one before it")
    climb.answers = answers


def check_tokens(climbs: Sequence[Climb]) -> None:
    """Fail unless all rungs of the same weights gave the same tokens."""
    first: dict[str, Climb] = {}
    for climb in climbs:
        other = first.setdefault(climb.rung.format, climb)
        differing = [i for i, pair in enumerate(zip(climb.answers, other.answers, strict=True)) if pair[0] != pair[1]]
        if differing:
            raise SystemExit(
                f"ladder: {climb.rung.name!r} gives other tokens than {other.rung.name!r}, whose weights are the same,"
                f" in requests {', '.join(map(str, differing[:8]))}"
            )


def climb_all(
    paths: dict[str, Path], chosen: Sequence[Rung], requests: Sequence[Request], turns: int, show: Callable[[], None]
) -> tuple[list[Climb], list[float]]:
    """Run all turns of all rungs; return them with the memory bandwidth of each turn, in bytes per second.

    show: called after each run.
    """
    climbs = [start(rung, paths[rung.format]) for rung in chosen]
    reads = []
    try:
        for turn in range(turns + 1):
            if turn:
                reads.append(measure_read(available_cores()))
            for climb in climbs if turn % 2 else reversed(climbs):
                if turn < 2 or not climb.rung.recomputes:
                    take_turn(climb, requests, turn)
                show()
    finally:
        for climb in climbs:
            climb.engine.close()
    check_tokens(climbs)
    return climbs, reads


def expected(climb: Climb, before: Climb) -> float:
    """Return the expected ratio to the rung before, by the quantity that `by` names."""
    prices = before.cost.prices
    more, less = {
        "tokens": (before.num_tokens, climb.num_tokens),
        "weights": (before.weights_bytes, climb.weights_bytes),
        "work": (float(prices @ before.work), float(prices @ climb.work)),
    }[climb.rung.by]
    return more / less


def over(before: Climb, climb: Climb) -> float:
    """Return how many times faster a rung is, as the median over turns; a rung with a single turn counts for all."""
    turns = max(len(each.seconds) for each in (before, climb))
    slow, fast = (each.seconds * (turns // len(each.seconds)) for each in (before, climb))
    return statistics.median(one / two for one, two in zip(slow, fast, strict=True))


def rows(climbs: Sequence[Climb], requests: Sequence[Request]) -> list[dict[str, Any]]:
    output = sum(request.output_len for request in requests)
    found = []
    for before, climb in zip([climbs[0], *climbs], climbs, strict=False):
        row = {
            **asdict(climb.rung),
            "output_tokens_per_s": output / statistics.median(climb.seconds),
            "seconds": climb.seconds,
            "steps": climb.num_steps,
            "computed_tokens": climb.num_tokens,
            "work": dict(zip(WORK, climb.work.tolist(), strict=True)),
            "prices": dict(zip(WORK, climb.cost.prices.tolist(), strict=True)),
            "over_before": over(before, climb),
            "expected_over_before": expected(climb, before),
            "over_first": over(climbs[0], climb),
        }
        if climb.use.num_steps:
            row |= {
                "seqs_at_once": climb.use.seqs_at_once,
                "kv_unused": climb.use.unused_of_blocks,
                "kv_unused_if_reserved": climb.use.unused_of_reserved,
            }
        found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--reservations", type=int, default=2, help="sequences of full length that the KV memory holds")
    parser.add_argument("--quantize", default="w8a8", help="quantization scheme of the rungs with 8-bit weights")
    parser.add_argument("--trace", type=Path, help="a conversation trace, for the KV memory use at its lengths")
    parser.add_argument("--work", type=Path, default=ROOT / "out/bench", help="folder where models are kept")
    parser.add_argument("--out", type=Path, help="folder for the results (benchmarks/results; with --quick, --work)")
    parser.add_argument("--quick", action="store_true", help="try it out with a small model and few requests")
    options = parser.parse_args()
    if min(options.turns, options.requests, options.reservations) < 1:
        parser.error("expected at least one turn, one request and one reservation")
    out = options.out or (options.work if options.quick else ROOT / "benchmarks/results")
    for folder in (options.work, out):
        folder.mkdir(parents=True, exist_ok=True)
    model, count, turns = (QUICK_MODEL, 8, 1) if options.quick else (MODEL, options.requests, options.turns)
    console = Console(stderr=True)
    with console.status("compiling"):
        formats = ("bfloat16", options.quantize)
        paths = {format: model.compiled(format, options.work, MAX_MODEL_LEN) for format in formats}
    requests = workload(count, VOCAB_SIZE, 0.25 if options.quick else 1.0)
    chosen = rungs(requests, options.reservations, MAX_MODEL_LEN, options.quantize)
    with Progress(console=console) as progress:
        task = progress.add_task("climbing", total=(turns + 1) * len(chosen))
        climbs, reads = climb_all(paths, chosen, requests, turns, lambda: progress.advance(task))
    result: dict[str, Any] = {
        **model.facts(MAX_MODEL_LEN),
        "threads": available_cores(),
        "read_gb_per_s": [read / 1e9 for read in reads],
        "token_budget": TOKEN_BUDGET,
        "workload": lengths(requests),
        "rungs": rows(climbs, requests),
    }
    try:
        trace = read_trace(find_trace(options.trace)).first(10 if options.quick else TRACE_REQUESTS)
        result["trace"] = use_on_trace(trace, load_artifact(paths["bfloat16"]).block_size)
    except ConfigError as error:
        console.print(f"ladder: without the KV memory at a trace's lengths: {error}", style="yellow")
    save(result, out / "ladder.json")
    draw(result, out / "ladder.png")
    print("\n\n".join(map(markdown, tables(result))))


if __name__ == "__main__":
    main()
