"""The measurement of candidates for `inferc bench tune`: the same loads on a real server with each configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from inferc.bench.candidates import Candidate, Outcome, best_rung, borne, highest_good, next_rung
from inferc.bench.endpoints import Target
from inferc.bench.figures import ServeResult
from inferc.bench.own_server import server_options, serving
from inferc.bench.session import measure
from inferc.bench.simulated import Simulator
from inferc.errors import InfercError
from inferc.system.progress import Progress

# Largest number of loads per candidate. The first candidate may have more, because it is not known yet how far the
# simulation is off.
MOST_LOADS, MOST_FIRST_LOADS = 6, 12
LEAST_TIMEOUT = 5.0
START_SECONDS = 3.0  # time that the start of a server takes
GONE = "UNAVAILABLE"  # a status that a running server never gives, whatever the load: the server is gone


@dataclass
class Row:
    """A candidate with its simulated and measured results.

    simulated, measured: good requests per second; None if no rate is sustained.
    loads: the measured loads, by rung of the simulator's ladder.
    """

    candidate: Candidate
    simulated_rung: int | None
    simulated: float | None
    simulated_next: float = 0.0  # simulated share of good requests one rung above the highest sustained rung
    loads: dict[int, ServeResult] = field(default_factory=dict)
    measured_rung: int | None = None
    measured: float | None = None
    again: Outcome | None = None  # a second measurement, at the rate of the winner
    is_cut: bool = False  # the search for its rate ended early
    fault: str | None = None  # why it could not be measured

    @property
    def is_measured(self) -> bool:
        return bool(self.loads)

    @property
    def key(self) -> tuple[float, float]:
        """The sort key that ranks candidates before they are measured."""
        return self.simulated or 0.0, self.simulated_next

    def does_as(self, other: Row) -> bool:
        """Return whether the simulation sees no difference between two candidates."""
        return (self.simulated_rung, self.simulated_next) == (other.simulated_rung, other.simulated_next)


class Verifier:
    """A runner that puts the same loads on a server of each candidate.

    An interrupted load raises KeyboardInterrupt. An error of a server is recorded in the `fault` of its row, and
    nothing that was measured on that server counts.
    """

    def __init__(
        self,
        artifact: Path,
        isa: str,
        logprobs: bool,
        simulator: Simulator,
        default: Candidate,
        has_left: Callable[[float], bool],
        progress: Progress,
    ) -> None:
        """Prepare to measure candidates; `has_left` tells whether a number of seconds is still left."""
        self.goals = simulator.goals
        self._artifact, self._isa, self._logprobs = artifact, isa, logprobs
        self._simulator, self._default = simulator, default
        self._has_left, self._progress = has_left, progress
        self._off: int | None = None
        self._longest_output = simulator.longest_output

    def measure(self, row: Row) -> None:
        """Search for the highest good rung of a candidate, as long as there is time.

        Costs that the simulation does not know are about the same for all candidates. The search therefore starts as
        far from the simulated rung as the search for the candidate before it ended.
        """
        first = (row.simulated_rung or 0) + (self._off or 0)
        if not self._has_time(first):
            return
        try:
            self._measure(row, first)
        except InfercError as error:
            row.loads.clear()
            row.fault = str(error)

    def _measure(self, row: Row, first: int) -> None:
        known: dict[int, Outcome] = {}
        share = self.goals.share
        most = MOST_FIRST_LOADS if self._off is None else MOST_LOADS
        with self._server(row.candidate) as target:
            while (rung := next_rung(borne(known, share), first)) is not None:
                if self._simulator.is_below_the_ladder(rung):
                    break
                if len(known) >= most or not self._has_time(rung):
                    row.is_cut = True
                    break
                row.loads[rung] = self._load(row.candidate, target, rung, len(known))
                known[rung] = self._outcome(rung, row.loads[rung])
        row.measured_rung, highest = best_rung(known, share), highest_good(borne(known, share))
        if row.measured_rung is not None and highest is not None:
            row.measured = known[row.measured_rung].good
            self._off = highest - (row.simulated_rung or 0)

    def measure_again(self, row: Row, rung: int) -> None:
        """Measure a candidate a second time at one rung, if there is time."""
        if not self._has_time(rung):
            return
        with suppress(InfercError), self._server(row.candidate) as target:
            row.again = self._outcome(rung, self._load(row.candidate, target, rung, MOST_FIRST_LOADS))

    def _outcome(self, rung: int, result: ServeResult) -> Outcome:
        answered = (result.requests - result.unfinished) / max(result.seconds, 1e-9)
        return Outcome(self._simulator.rate(rung), answered, result.goodput_per_s, result.goodput or 0.0)

    def _load(self, candidate: Candidate, target: Target, rung: int, turn: int) -> ServeResult:
        settings = replace(self._simulator.settings_at(self._simulator.rate(rung)), first_turn=1 + turn)

        def report(stage: str, done: int, total: int) -> None:
            self._progress(f"{candidate.said(self._default)}: {stage}", done, total)

        measured = measure(target, settings, report)
        if measured.is_interrupted:
            raise KeyboardInterrupt
        (result,) = measured.results
        if result.failed.get(GONE):
            raise InfercError(f"its server went away: {'; '.join(result.warnings)}")
        return result

    @contextmanager
    def _server(self, candidate: Candidate) -> Iterator[Target]:
        flags = {**candidate.flags(), "--isa": None if self._isa == "auto" else self._isa}
        goals = self.goals
        timeout = 600.0
        if goals.ttft_ms is not None and goals.tbt_ms is not None:
            # A request that takes much longer than a good one need not run to its end.
            timeout = max(LEAST_TIMEOUT, 4e-3 * (goals.ttft_ms + goals.tbt_ms * self._longest_output))
        with serving(self._artifact, server_options(flags)) as addresses:
            objectives = self._simulator.objectives(candidate)
            yield Target("grpc", addresses.grpc, timeout=timeout, objectives=objectives, logprobs=self._logprobs)

    def _has_time(self, rung: int) -> bool:
        simulator = self._simulator
        rate = simulator.rate(rung)
        requests = simulator.settings_at(rate).requests or 0
        return self._has_left(requests / rate + 2 * simulator.alone_seconds + START_SECONDS)
