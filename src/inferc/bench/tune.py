"""The search for the server configuration that sustains the highest rate: simulate all, then measure the best few."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from inferc.bench.candidates import STEP, Candidate, grid, variants
from inferc.bench.endpoints import ServerFacts, check_lengths
from inferc.bench.report import within
from inferc.bench.session import Settings
from inferc.bench.simulated import MOST_ANSWERS, Simulator, input_lens, measure_prices
from inferc.bench.verify import START_SECONDS, Row, Verifier
from inferc.bench.workload import Replayed, Texts
from inferc.config import EngineConfig
from inferc.errors import ConfigError, InfercError
from inferc.runtime.artifact.load import Artifact, load_artifact
from inferc.runtime.simulate.calibrate import CostFile
from inferc.system.progress import Progress
from inferc.system.resources import available_cores

# Shares of the total time: for measuring step costs, until the end of simulating the grid, and until the end of
# simulating its variants.
PRICES_SHARE, GRID_UNTIL, SIMULATED_UNTIL = 0.08, 0.32, 0.4
LEAST_PRICES_SECONDS, MOST_PRICES_SECONDS = 2.0, 20.0
# Lengths of a load, in durations of one answer: no load is shorter than the first, and a note is printed if a load is
# shorter than the second.
LEAST_ANSWERS, ENOUGH_ANSWERS = 3, 5
LOADS = 4  # number of loads per candidate for which time is set aside
NUM_VARIED = 2  # number of the best grid candidates whose other options are varied


@dataclass(frozen=True)
class Wish:
    """The task of `inferc bench tune`: the artifact, the workload and its goals, what to try, and the time to spend.

    settings: the workload and goals; its rates are empty.
    policies: scheduling policies to try besides the default.
    num_measured: number of candidates that are measured besides the default.
    seconds: length of each load; None derives it from the time that there is.
    """

    artifact: Path
    settings: Settings
    minutes: float = 15.0
    policies: tuple[str, ...] = ("sjf",)
    num_measured: int = 3
    seconds: float | None = None
    isa: str = "auto"
    logprobs: bool = False


@dataclass
class Tuned:
    """The result of tuning.

    rows: the measured candidates, the default first, then those that were only simulated.
    winner: the best candidate; None if no measured candidate sustains any rate.
    """

    default: Candidate
    rows: list[Row]
    winner: Row | None
    seconds: float  # length of each load
    machine: str
    price_error: float  # relative error of the predicted step times
    notes: list[str]

    @property
    def errors(self) -> list[float]:
        """The differences between measured and simulated rates, relative to the simulated ones."""
        return [each.measured / each.simulated - 1 for each in self.rows if each.measured and each.simulated]


class _Clock:
    """A clock that counts how much of the allowed time is spent."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self._start = seconds, time.monotonic()

    @property
    def spent(self) -> float:
        return time.monotonic() - self._start

    def left_at_least(self, seconds: float) -> bool:
        return self.seconds - self.spent >= seconds


def tune(wish: Wish, progress: Progress) -> Tuned:
    """Find the configuration that sustains the highest rate of good requests.

    Raises InfercError if the objectives cannot be met, or the time is too short to measure the default.
    """
    clock = _Clock(60 * wish.minutes)
    workload = wish.settings.workload
    if isinstance(workload, Replayed) and not workload.rate:
        raise ConfigError(
            "the trace's requests come all at once; expected a trace that can be replayed faster and slower"
        )
    artifact = load_artifact(wish.artifact)
    _check_lengths(artifact, wish)
    default = _default(artifact)
    simulator = _simulator(wish, artifact, clock, progress)
    _check_alone(simulator)
    first = simulator.find(default, 0) or 0
    answer = simulator.answer_seconds(default, first)
    seconds = _load_seconds(wish, simulator.alone_seconds, answer, clock)
    simulator = replace(simulator, seconds=seconds, outcomes={})
    rows, notes = _simulate(wish, simulator, default, first, clock, progress)
    if seconds < ENOUGH_ANSWERS * answer:
        notes.append(
            f"a load lasts {seconds:.3g} s, and an answer about {answer:.3g} s: most of it is start and end; raise"
            f" {'--seconds' if wish.seconds is not None else '--minutes'}"
        )
    chosen = _chosen(rows, default, wish.num_measured)
    verifier = Verifier(wish.artifact, wish.isa, wish.logprobs, simulator, default, clock.left_at_least, progress)
    for row in chosen:
        verifier.measure(row)
    if chosen[0].fault is not None:
        raise InfercError(f"the default could not be measured: {chosen[0].fault}")
    if not chosen[0].is_measured:
        raise InfercError(f"--minutes {wish.minutes:g} is too short to measure even the default; raise it")
    notes += [
        f"not measured: {row.candidate.said(default)}: {row.fault or 'there was no time'}"
        for row in chosen
        if not row.is_measured
    ]
    notes += [
        f"{row.candidate.said(default)}: the search for its rate ended early; it may bear a higher one"
        for row in chosen
        if row.is_cut
    ]
    winner = _winner(chosen, verifier, notes, default)
    prices = simulator.prices[None]
    rest = sorted((row for row in rows if row not in chosen), key=lambda row: row.key, reverse=True)
    rows = [*chosen, *rest]
    return Tuned(default, rows, winner, seconds, prices.machine, prices.error, notes)


def _default(artifact: Artifact) -> Candidate:
    """Return the default configuration of `inferc serve` for an artifact."""
    config = EngineConfig()
    tokens = config.token_budget(artifact.manifest.targets[0])
    return Candidate(config.max_num_seqs, tokens, config.policy, config.tbt_ms, config.prefix_cache)


def _check_lengths(artifact: Artifact, wish: Wish) -> None:
    """Raise RequestError if the workload has requests that are too long for the model."""
    workload, limit = wish.settings.workload, artifact.max_model_len
    if isinstance(workload, Texts):
        longest = max(input_lens(workload, artifact)), max(each or workload.output_len for each in workload.output_lens)
    elif isinstance(workload, Replayed):
        request = max(workload.trace.requests, key=lambda each: each.prompt_len + each.output_len)
        longest = request.prompt_len, request.output_len
    else:
        longest = workload.longest
    check_lengths(ServerFacts(None, 0, limit), *longest)


def _simulator(wish: Wish, artifact: Artifact, clock: _Clock, progress: Progress) -> Simulator:
    """Return a simulator with step costs for all cores, and for one core less, which leaves a core to the server."""
    seconds = min(max(PRICES_SHARE * clock.seconds, LEAST_PRICES_SECONDS), MOST_PRICES_SECONDS)
    cores = available_cores()
    prices: dict[int | None, CostFile] = {}
    for threads in (None, *((cores - 1,) if cores > 1 else ())):

        def report(share: float, count: int = threads or cores) -> None:
            progress(f"measuring steps by {count} threads", int(100 * share), 100)

        prices[threads] = measure_prices(artifact, threads, wish.isa, seconds, report)
    workload = wish.settings.workload
    lens = input_lens(workload, artifact) if isinstance(workload, Texts) else ()
    return Simulator(wish.settings, prices, lens, wish.seconds)


def _check_alone(simulator: Simulator) -> None:
    """Raise InfercError if not even requests that have the engine for themselves are good."""
    share, ttft, tpot = simulator.alone()
    if share < simulator.goals.share:
        raise InfercError(
            f"simulated, {share:.0%} of the requests are {within(simulator.goals)} where each has the engine for itself"
            f" (medians: TTFT {ttft:.3g} ms, TPOT {tpot:.3g} ms), expected {simulator.goals.share:.0%}; allow more by"
            " --ttft and --tbt, or take a smaller model or shorter prompts"
        )


def _load_seconds(wish: Wish, alone: float, answer: float, clock: _Clock) -> float:
    """Return the length of each load in seconds.

    It is short enough that all loads fit into the time, and no longer than a growing queue takes to show.
    alone: duration of a request that runs alone. answer: duration of a request at the rate that the default sustains.
    """
    if wish.seconds is not None:
        return wish.seconds
    servers = wish.num_measured + 1
    left = (1 - SIMULATED_UNTIL) * clock.seconds - (servers + 2) * START_SECONDS
    return max(LEAST_ANSWERS * alone, min(MOST_ANSWERS * answer, left / (LOADS * servers + 2) - answer))


def _simulate(
    wish: Wish, simulator: Simulator, default: Candidate, first: int, clock: _Clock, progress: Progress
) -> tuple[list[Row], list[str]]:
    """Simulate candidates as long as there is time, and return their rows, the default's first, and notes.

    first: the rung at which each search starts; it should be near the rungs that candidates sustain.
    """
    rows: list[Row] = []
    notes: list[str] = []

    def simulate(candidates: Sequence[Candidate], until: float) -> None:
        left_out = 0
        for number, candidate in enumerate(candidates):
            progress("simulating", number, len(candidates))
            if rows and clock.spent > until * clock.seconds:
                left_out += 1
                continue
            rung = simulator.find(candidate, first)
            row = Row(candidate, rung, simulator.good(candidate))
            if rung is not None:
                row.simulated_next = simulator.outcome(candidate, rung + 1).share
            rows.append(row)
        if left_out:
            notes.append(f"{left_out} of {len(candidates)} candidates were not simulated for want of time")

    simulate(grid(default, simulator.goals.tbt_ms), GRID_UNTIL)
    best = sorted(rows, key=lambda row: (-row.key[0], -row.key[1], row.candidate.distance(default)))
    threads = [each for each in simulator.prices if each is not None]
    known = {row.candidate for row in rows}
    varied = [each for row in best[:NUM_VARIED] for each in variants(row.candidate, wish.policies, threads)]
    simulate([each for each in dict.fromkeys(varied) if each not in known], SIMULATED_UNTIL)
    return rows, notes


def _chosen(rows: Sequence[Row], default: Candidate, count: int) -> list[Row]:
    """Return the default and the `count` best others; of candidates that simulate alike, keep the nearest to it."""
    ordered = sorted(rows[1:], key=lambda row: (-row.key[0], -row.key[1], row.candidate.distance(default)))
    chosen = [rows[0]]
    for row in ordered:
        if len(chosen) > count:
            break
        if row.simulated is not None and not any(row.does_as(each) for each in chosen):
            chosen.append(row)
    return chosen


def _winner(chosen: Sequence[Row], verifier: Verifier, notes: list[str], default: Candidate) -> Row | None:
    """Return the candidate with the most good requests per second, or None if no measured candidate sustains a rate.

    The default wins unless another candidate is better by a step of the ladder, and if there is time for a second
    measurement, better by a step in that one too.
    """
    own = chosen[0]
    good = [row for row in chosen if row.measured is not None]
    if not good:
        return None
    best = max(good, key=lambda row: row.measured or 0.0)
    if own.measured is None or best is own or best.measured_rung is None:
        return best
    if (best.measured or 0.0) < STEP * own.measured:
        notes.append(
            f"{best.candidate.said(default)} was better than the default by less than {STEP - 1:.0%}, which says"
            " nothing"
        )
        return own
    for row in (best, own):
        verifier.measure_again(row, best.measured_rung)
    if best.again is None or own.again is None:
        notes.append("there was no time to measure the winner and the default once more: the difference may be chance")
        return best
    if best.again.is_borne(verifier.goals.share) and best.again.good >= STEP * max(own.measured, own.again.good):
        return best
    notes.append(
        f"{best.candidate.said(default)} was better than the default once, and not again ({best.again.good:.3g} good"
        " requests/s of"
        f" {best.again.rate:.3g} sent, the default {own.again.good:.3g}, and {own.measured:.3g} before): the"
        " difference is chance"
    )
    return own
