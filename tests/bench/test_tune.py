"""The tests of `inferc bench tune`: candidates, the search for a rate, given step costs, and the choice of a winner."""

import math
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferc.bench import candidates as of_candidates
from inferc.bench import verify
from inferc.bench.candidates import (
    MOST_STRIDE,
    Candidate,
    Outcome,
    best_rung,
    grid,
    highest_good,
    next_rung,
    variants,
)
from inferc.bench.endpoints import ServerFacts
from inferc.bench.figures import Goals, LoadOf, ServeResult, figures
from inferc.bench.load import Load
from inferc.bench.own_server import server_options
from inferc.bench.session import Measured, Settings
from inferc.bench.simulated import LEAST_REQUESTS, Simulator, _config
from inferc.bench.tune import Tuned, Wish, _chosen, _Clock, _load_seconds, _simulate, _winner
from inferc.bench.tune_report import as_json, as_text, draw
from inferc.bench.verify import Row, Verifier
from inferc.bench.workload import Lengths, Replayed, Texts, Workload
from inferc.runtime.simulate.calibrate import CostFile
from inferc.runtime.simulate.trace import Trace, TraceRequest

DEFAULT = Candidate(4, 32)
WISH = Wish(Path("nowhere"), Settings(Lengths(16, 8)))


def prices(step_ms: float = 10.0, token_ms: float = 0.0, sequence_ms: float = 0.0) -> CostFile:
    found = {"steps": step_ms, "tokens": token_ms, "sequences": sequence_ms, "keys": 0.0, "pairs": 0.0}
    return CostFile(
        model="planted",
        machine="planted, 2 cores",
        prices={name: value / 1e3 for name, value in found.items()},
        error=0.0,
        num_steps=1000,
        vocab_size=1000,
        max_model_len=256,
        block_size=16,
        num_blocks=10_000,
        kv_bytes_per_token=1,
        max_num_seqs=128,
        max_num_batched_tokens=2048,
    )


def simulator(
    planted: CostFile | Mapping[int | None, CostFile],
    workload: Workload | None = None,
    seconds: float = 1.0,
    **goals: Any,
) -> Simulator:
    settings = Settings(workload or Lengths(16, 8), goals=Goals(**{"ttft_ms": 200.0, "tbt_ms": None, **goals}))
    return Simulator(settings, {None: planted} if isinstance(planted, CostFile) else dict(planted), seconds=seconds)


def found_good(simulator: Simulator, candidate: Candidate) -> float:
    simulator.find(candidate, 0)
    return simulator.good(candidate) or 0.0


@pytest.fixture
def small_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_candidates, "SEQS", (2, 4, 8))
    monkeypatch.setattr(of_candidates, "BUDGETS", (16, 32))


# Candidates


@pytest.mark.parametrize("default", [Candidate(64, 512), Candidate(48, 300), Candidate(512, 8192)])
def test_the_grid_begins_with_the_default_and_goes_outwards(default: Candidate) -> None:
    found = grid(default, 50.0)
    assert found[0] == default and len(set(found)) == len(found)
    assert {each.tbt_ms for each in found} == {None, 50.0} and len(grid(default, None)) * 2 == len(found)
    distances = [each.distance(default) for each in found]
    assert distances == sorted(distances) and distances[1] > 0
    for each in found:
        _config(prices(), each)  # raises for what no engine takes


def test_variants_differ_in_one_thing() -> None:
    of = Candidate(8, 256, tbt_ms=50.0)
    found = variants(of, ("fcfs", "sjf", "lpm"), (1,))
    assert [each.changes(of) for each in found] == [
        {"policy": "sjf"},
        {"policy": "lpm"},
        {"threads": 1},
        {"prefix_cache": False},
    ]
    assert DEFAULT.said(DEFAULT) == "default"
    assert replace(DEFAULT, max_num_seqs=8, tbt_ms=50.0, prefix_cache=False).said(DEFAULT) == (
        "max-num-seqs 8, tbt-ms 50, prefix-cache off"
    )


def test_every_field_is_an_option_of_the_server() -> None:
    full = Candidate(8, 256, "sjf", 50.0, False, 1)
    options = ["--max-num-seqs", "8", "--max-num-batched-tokens", "256", "--policy", "sjf", "--tbt-ms", "50.0"]
    assert server_options(full.flags()) == [*options, "--no-prefix-cache", "--threads", "1"]
    assert all(
        value != getattr(DEFAULT, field.name) for field, value in zip(fields(full), asdict(full).values(), strict=True)
    )
    assert "--tbt-ms" not in server_options(DEFAULT.flags()) and "--threads" not in server_options(DEFAULT.flags())


# The search


@given(last_good=st.integers(-60, 60), first=st.integers(-60, 60))
def test_the_search_finds_the_last_good_rung(last_good: int, first: int) -> None:
    known: dict[int, bool] = {}
    while (rung := next_rung(known, first)) is not None:
        assert rung not in known
        known[rung] = rung <= last_good
    assert highest_good(known) == last_good and known[last_good + 1] is False
    assert len(known) <= 5 + abs(last_good - first) / MOST_STRIDE + math.log2(MOST_STRIDE)


def test_what_is_good_above_a_bad_rung_does_not_count() -> None:
    assert highest_good({1: True, 2: False, 3: True}) == 1
    assert highest_good({2: False, 3: True}) is None
    assert next_rung({1: True, 2: False, 3: True}, 1) is None


def test_a_rate_is_borne_if_requests_are_good_and_answers_keep_up() -> None:
    good = Outcome(rate=10, answered=9, good=9, share=1.0)
    assert good.is_borne(0.9) and not replace(good, share=0.89).is_borne(0.9)
    burst = Outcome(rate=1000, answered=60, good=60, share=1.0)  # all at once, and each within its objectives
    assert not burst.is_borne(0.9)
    assert best_rung({0: replace(good, good=8), 1: good, 2: replace(good, good=8.5), 3: burst}, 0.9) == 1
    assert best_rung({0: burst, 1: good}, 0.9) is None


# Planted prices


@pytest.mark.slow
def test_where_a_step_costs_the_same_for_all_more_sequences_are_better(small_grid: None) -> None:
    of = simulator(prices(step_ms=10), seconds=2.0)
    rows, notes = _simulate(WISH, of, DEFAULT, 0, _Clock(600), lambda *_: None)
    assert rows[0].candidate == DEFAULT and not notes
    best = max(rows, key=lambda row: row.key)
    assert best.candidate.max_num_seqs == 8 and (best.simulated or 0) > 1.5 * (rows[0].simulated or 0)
    assert max((row for row in rows if row.candidate.max_num_seqs == 2), key=lambda row: row.key).key < rows[0].key
    few = _chosen(rows, DEFAULT, 2)
    assert few[0] is rows[0] and few[1].simulated == best.simulated and len(few) == 3
    assert len({(row.simulated_rung, row.simulated_next) for row in few}) == 3
    # Of those that do the same, the nearest to the default.
    same = [row for row in rows if row.does_as(few[1]) and row.simulated == few[1].simulated]
    assert few[1].candidate.distance(DEFAULT) == min(row.candidate.distance(DEFAULT) for row in same)


def test_candidates_that_there_is_no_time_for_are_counted(small_grid: None) -> None:
    rows, notes = _simulate(WISH, simulator(prices()), DEFAULT, 0, _Clock(0), lambda *_: None)
    assert [row.candidate for row in rows] == [DEFAULT]
    assert notes == [
        "5 of 6 candidates were not simulated for want of time",
        "2 of 2 candidates were not simulated for want of time",
    ]


@pytest.mark.slow
def test_more_sequences_than_are_of_use_are_no_better_for_a_short_load() -> None:
    """A burst of the whole load is no rate: it has the server take all requests at once, and each of them is good."""
    of = simulator(prices(step_ms=0.1, sequence_ms=1), Lengths(16, 32), seconds=0.2)
    few, many = (found_good(of, Candidate(seqs, 512)) for seqs in (16, 128))
    assert few == pytest.approx(many, rel=0.15)
    most = 1000 / 32  # tokens a second, whatever the batch, by the tokens of an answer
    assert 0.6 * most < few < 1.01 * most


@pytest.mark.slow
def test_threads_and_the_prefix_cache_are_told_apart() -> None:
    of = simulator({None: prices(10), 1: prices(5)})
    assert found_good(of, replace(DEFAULT, threads=1)) > 1.5 * found_good(of, DEFAULT)
    shared = simulator(prices(1, token_ms=1), Lengths(128, 4, shared_prefix=112), tbt_ms=200.0)
    assert found_good(shared, DEFAULT) > 3 * found_good(shared, replace(DEFAULT, prefix_cache=False))


@pytest.mark.slow
def test_steps_that_are_bounded_keep_the_time_between_tokens() -> None:
    of = simulator(prices(1, token_ms=1), Lengths(100, 50), seconds=10.0, ttft_ms=2000.0, tbt_ms=4.0)
    default = Candidate(8, 128)  # whose steps of a whole prompt take as long as all tokens of an answer
    assert found_good(of, replace(default, tbt_ms=4.0)) > 1.5 * found_good(of, default)


def test_a_load_is_as_long_at_every_rate() -> None:
    of = simulator(prices(), seconds=4.0)
    assert of.settings_at(100.0).requests == 400 and of.settings_at(200.0).rates == (200.0,)
    assert of.settings_at(0.1).requests == LEAST_REQUESTS
    assert of.alone_seconds == pytest.approx(0.08, rel=0.01)  # 8 steps of 10 ms
    assert replace(of, seconds=None).settings_at(100.0).requests == math.ceil(100 * 10 * of.alone_seconds)


def test_a_trace_comes_faster_and_slower_in_its_own_pattern() -> None:
    arrivals = (0.0, 0.5, 1.0, 5.0, 5.0, 6.0)
    trace = Trace(tuple(TraceRequest(when, 16, 8, (number,)) for number, when in enumerate(arrivals)), 16)
    of = simulator(prices(), Replayed(trace), seconds=100.0)
    settings = of.settings_at(10.0)
    assert settings.requests == 6 and settings.speeds == (12.0,)
    assert of._trace(settings).requests[3].arrival == pytest.approx(5 / 12)
    assert Replayed(trace).rate_of(3) == 2.0 and Replayed(trace).rate == pytest.approx(5 / 6)
    at_once = Replayed(Trace(trace.requests[3:], 16))
    assert at_once.rate_of(2) == at_once.rate == 2.0  # the first two come at once
    assert found_good(of, Candidate(8, 64)) > 2 * found_good(of, Candidate(1, 64))


def test_real_texts_have_their_own_lengths() -> None:
    of = simulator(prices(1, token_ms=1), Texts(("one", "two"), (0, 4), 8))
    of.lens = (10, 100)
    rows = of._trace(of.settings_at(10.0)).requests
    assert {(row.prompt_len, row.output_len) for row in rows} == {(10, 8), (100, 4)}


def test_the_time_is_shared_out_among_loads() -> None:
    clock = _Clock(600)
    assert _load_seconds(replace(WISH, seconds=7.0), 1.0, 2.0, clock) == 7.0
    assert _load_seconds(WISH, 0.1, 0.5, clock) == 5.0  # enough
    assert 10 < _load_seconds(WISH, 1.0, 5.0, clock) < 20  # as long as there is time: 18 loads and 6 servers in 360 s
    assert _load_seconds(WISH, 1.0, 5.0, _Clock(60)) == 3.0  # never less than three answers
    assert _load_seconds(replace(WISH, num_measured=1), 1.0, 5.0, clock) > _load_seconds(WISH, 1.0, 5.0, clock)


# Who wins


def result(rate: float = 10.0, **changes: Any) -> ServeResult:
    nothing = figures(Load(), LoadOf(16, 8, rate=rate), Goals(), ServerFacts(None, 1000, 256))
    return replace(nothing, **{"goodput": 1.0, "goodput_per_s": rate, "requests": int(rate), "seconds": 1.0, **changes})


def row(seqs: int, measured: float | None, simulated: float = 10.0) -> Row:
    found = Row(Candidate(seqs, 32), seqs, simulated, loads={seqs: result(measured or 1.0)})
    found.measured, found.measured_rung = measured, None if measured is None else seqs
    return found


class Again:
    """A verifier that says what it is told when it is asked again."""

    goals = Goals(share=0.9)

    def __init__(self, good: dict[int, float], share: float = 1.0) -> None:
        self.good, self.share, self.asked = good, share, list[tuple[int, int]]()

    def measure_again(self, row: Row, rung: int) -> None:
        seqs = row.candidate.max_num_seqs
        self.asked.append((seqs, rung))
        if seqs in self.good:
            row.again = Outcome(self.good[seqs], self.good[seqs], self.good[seqs], self.share)


def winner(rows: list[Row], again: Again) -> tuple[Row | None, list[str]]:
    notes: list[str] = []
    return _winner(rows, again, notes, DEFAULT), notes  # type: ignore[arg-type]


def test_the_winner_is_better_by_a_step_twice() -> None:
    rows = [row(4, 10.0), row(8, 12.0), row(2, 11.5)]
    again = Again({4: 10.0, 8: 11.5})
    assert winner(rows, again) == (rows[1], []) and again.asked == [(8, 8), (4, 8)]  # both at the rate of the winner


@pytest.mark.parametrize(
    ("measured", "again", "note"),
    [
        (10.9, Again({}), "max-num-seqs 8 was better than the default by less than 10%"),
        (12.0, Again({4: 11.0, 8: 11.5}), "the difference is chance"),
        (12.0, Again({4: 5.0, 8: 10.5}), "the difference is chance"),
        (12.0, Again({4: 10.0, 8: 12.0}, share=0.5), "the difference is chance"),
        (9.0, Again({}), None),
    ],
)
def test_else_the_default_is_kept(measured: float, again: Again, note: str | None) -> None:
    rows = [row(4, 10.0), row(8, measured)]
    found, notes = winner(rows, again)
    assert found is rows[0] and (len(notes) == 1 and note in notes[0] if note else not notes)


def test_without_time_to_look_again_the_winner_stands_and_that_is_said() -> None:
    rows = [row(4, 10.0), row(8, 12.0)]
    found, (note,) = winner(rows, Again({8: 12.0}))
    assert found is rows[1] and "there was no time" in note


def test_where_the_default_bears_no_rate_any_that_does_is_better() -> None:
    rows = [row(4, None), row(8, 1.0)]
    again = Again({})
    assert winner(rows, again) == (rows[1], []) and not again.asked
    assert winner([row(4, None), row(8, None)], Again({})) == (None, [])


def test_a_server_that_does_not_start_or_goes_away_is_a_fault(
    monkeypatch: pytest.MonkeyPatch, tiny_artifact: Path, tmp_path: Path
) -> None:
    of = simulator(prices())
    found = Row(Candidate(8, 4), 0, 1.0)  # fewer tokens than sequences
    given = (tiny_artifact, "auto", False, of, DEFAULT, lambda seconds: True, lambda *_: None)
    Verifier(*given).measure(found)
    assert not found.is_measured and found.fault is not None and "max_num_batched_tokens 4 is below" in found.fault
    gone = Measured(ServerFacts(None, 1000, 256), results=[result(failed={"UNAVAILABLE": 3}, warnings=["3 failed"])])
    monkeypatch.setattr(verify, "measure", lambda *_: gone)
    found = Row(DEFAULT, 0, 1.0)
    Verifier(*given).measure(found)
    assert not found.is_measured and found.fault == "its server went away: 3 failed"
    tries = [result(good, goodput=float(good > 1), requests=10**6) for good in (1.0, 1.0, 10.0, *[10.0] * 20)]
    monkeypatch.setattr(verify, "measure", lambda *_: Measured(gone.facts, results=[tries.pop(0)]))
    found, verifier = Row(DEFAULT, 30, 1.0), Verifier(*given)
    verifier.measure(found)  # bad at 30 and 29, good from 27 on
    assert (sorted(found.loads), found.is_cut) == ([27, 28, 29, 30], False)
    verifier.measure(
        found := Row(DEFAULT, 40, 1.0)
    )  # begins as far below what was simulated, and finds all of them good
    assert next(iter(found.loads)) == 38 and found.is_cut and len(found.loads) == verify.MOST_LOADS
    found = Row(DEFAULT, 0, 1.0)
    Verifier(*given[:-2], lambda seconds: False, given[-1]).measure(found)
    assert not found.is_measured and found.fault is None


# What is shown


def test_the_report(tmp_path: Path) -> None:
    rows = [row(4, 10.0, simulated=20.0), row(8, 12.0, simulated=16.0), Row(Candidate(16, 32), None, None)]
    rows[1].again, rows[0].again = Outcome(12, 12, 11.75, 1.0), Outcome(10, 10, 9.75, 1.0)
    tuned = Tuned(Candidate(4, 32), rows, rows[1], 3.5, "planted", 0.2, ["a note"])
    goals = Goals(500.0, 50.0, 0.9)
    text = "\n".join(as_text(tuned, goals))
    assert (
        "the best: max-num-seqs 8, 12 good requests/s, and by default 10; once more, both at that rate, 11.8 and 9.75"
        in text
    )
    assert "38% off the simulated ones on average (-50% to -25%)" in text and "note: a note" in text
    assert "3 candidates were simulated, of which 0 do as the default does" in text
    failed = [result(warnings=[f"{count} requests failed, the first with 503"]) for count in (3, 20)]
    rows[0].loads |= dict(enumerate(failed))
    assert "warning: in 2 of 4 loads, for example: 3 requests failed" in "\n".join(as_text(tuned, goals))
    found = as_json(tuned, goals)
    assert found["winner"]["changes"] == {"max_num_seqs": 8} and not found["is_default_best"]
    assert [each["measured"] for each in found["candidates"]] == [10.0, 12.0, None]
    assert found["simulation_error"] == pytest.approx(0.375) and found["candidates"][1]["again"]["good"] == 11.75
    draw(tmp_path / "found.svg", "planted", tuned, goals)
    assert "max-num-seqs 8" in (tmp_path / "found.svg").read_text() or (tmp_path / "found.svg").stat().st_size > 10_000
    assert "nothing is written" in list(as_text(replace(tuned, winner=None), goals))[-1]
    assert list(as_text(replace(tuned, winner=rows[0]), goals))[-1] == "the default is the best: 10 good requests/s"
