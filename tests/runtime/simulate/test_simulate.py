"""Traces, what is played of them on a virtual clock, and what is shown."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_runner import FULL, make_engine

from inferc.errors import ConfigError
from inferc.runtime.scheduler.config import SchedulerConfig
from inferc.runtime.simulate.calibrate import SHIPPED, measure_cost, read_cost
from inferc.runtime.simulate.report import Summary, plot, summarize
from inferc.runtime.simulate.simulate import Playback, Replica, VirtualClock, play
from inferc.runtime.simulate.trace import Prompts, Trace, TraceRequest, read_trace
from inferc.runtime.step.cost import WORK, StepCost

ROW = {"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [3, 4]}
PRICES = dict(zip(WORK, (0.01, 1e-3, 0.0, 0.0, 0.0), strict=True))


def write(path: Path, *rows: Any) -> Path:
    file = path / "trace.jsonl"
    file.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return file


def trace_of(*rows: tuple[float, int, int], blocks: dict[int, tuple[int, ...]] | None = None) -> Trace:
    """(arrival, prompt, output) of requests that share nothing unless `blocks` says so, in blocks of 8 tokens."""
    requests = []
    for i, (arrival, prompt_len, output_len) in enumerate(rows):
        own = tuple(1000 * (i + 1) + j for j in range(-(-prompt_len // 8)))
        requests.append(TraceRequest(arrival, prompt_len, output_len, (blocks or {}).get(i, own)))
    return Trace(tuple(requests), 8)


def simulated(policy: str = "fcfs", num_blocks: int = 200, **options: Any) -> Replica:
    cost = StepCost()
    cost.set_prices(PRICES)
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "prefix_cache": True, **options}
    config = SchedulerConfig(
        max_model_len=400, num_blocks=(num_blocks,), block_size=8, groups=(FULL,), policy=policy, **sizes
    )
    return Replica.simulated(config, 50, cost)


# ------------------------------------------------------------------------------------------------------- traces


def test_a_trace_is_read_by_arrival_from_its_first_request(tmp_path: Path) -> None:
    late = {"timestamp": 5500, "input_length": 512, "output_length": 2, "hash_ids": [9], "client": "a", "priority": 2}
    trace = read_trace(write(tmp_path, late, {**ROW, "timestamp": 2500}, ""))
    assert trace.requests == (TraceRequest(0.0, 700, 5, (3, 4)), TraceRequest(3.0, 512, 2, (9,), "a", 2))
    assert (trace.longest, trace.longest_output, trace.seconds) == (705, 5, 3.0)


def test_prompts_without_ids_share_nothing(tmp_path: Path) -> None:
    row = {key: value for key, value in ROW.items() if key != "hash_ids"}
    trace = read_trace(write(tmp_path, row, row))
    blocks = [block for request in trace.requests for block in request.blocks]
    assert len(set(blocks)) == 4 and trace.hit_rate() == 0.0
    first, second = (Prompts(trace, 100).of(request) for request in trace.requests)
    assert first != second and len(first) == 700


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_length": 0}, r"line 2: input_length: expected a number in \[1, .*found 0"),
        ({"output_length": 1.5}, "output_length: expected a whole number, found 1.5"),
        ({"output_length": -3}, "output_length: .*found -3"),
        ({"timestamp": "now"}, "timestamp: .*found 'now'"),
        ({"timestamp": None}, "timestamp: .*found None"),
        ({"input_length": True}, "input_length: .*found True"),
        ({"hash_ids": [1]}, "hash_ids has 1 ids, and a prompt of 700 tokens has 2 blocks of 512"),
        ({"hash_ids": [1, -2]}, "hash_ids: expected a list of whole numbers, 0 or more"),
        ({"client": 7}, "client: expected a string, found 7"),
        ({"priority": 5000}, "priority: expected a number"),
        ("[1, 2]", "line 2: expected a JSON object, found list"),
        ("{", "line 2: not a JSON object"),
    ],
)
def test_impossible_rows_are_refused_by_line(tmp_path: Path, change: Any, message: str) -> None:
    bad = change if isinstance(change, str) else {**ROW, **change}
    with pytest.raises(ConfigError, match=message):
        read_trace(write(tmp_path, ROW, bad))


def test_no_trace_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no requests"):
        read_trace(write(tmp_path, ""))
    with pytest.raises(ConfigError, match="cannot read the trace"):
        read_trace(tmp_path / "no-file")


def test_a_scaled_trace_is_shorter_and_shares_the_same_part(tmp_path: Path) -> None:
    rows = [{**ROW, "timestamp": 1000 * i, "input_length": 1024, "hash_ids": [1, 10 + i]} for i in range(4)]
    trace = read_trace(write(tmp_path, *rows))
    small = trace.scaled(64)
    assert small.block_tokens == 8 and small.seconds == pytest.approx(3 / 64)
    assert [(each.prompt_len, each.output_len) for each in small.requests] == [(16, 1)] * 4
    assert trace.hit_rate() == pytest.approx(3 / 8) == small.hit_rate()
    with pytest.raises(ConfigError, match="scale is 3, expected a divisor of 512"):
        trace.scaled(3)


def test_a_cache_of_a_capacity_finds_what_was_used_last() -> None:
    trace = trace_of(*[(0.0, 16, 1)] * 5, blocks={0: (1, 2), 1: (3, 4), 2: (1, 2), 3: (5, 6), 4: (1, 2)})
    assert trace.hit_rate() == pytest.approx(30 / 80)  # the last token of a prompt is always computed
    assert trace.hit_rate(4) == pytest.approx(30 / 80)
    assert trace.hit_rate(3) == pytest.approx(16 / 80)  # of 1 and 2 the first stays longer
    assert trace.hit_rate(2) == 0.0


def test_equal_ids_are_equal_tokens() -> None:
    trace = trace_of((0.0, 12, 1), (0.0, 16, 1), blocks={0: (1, 2), 1: (1, 3)})
    prompts = Prompts(trace, 50)
    first, second = (prompts.of(request) for request in trace.requests)
    assert first[:8] == second[:8] and first[8:] != second[8:12] and (len(first), len(second)) == (12, 16)
    assert min(first + second) >= 2


# ------------------------------------------------------------------------------------------------------- playing


def test_steps_take_as_long_as_they_cost() -> None:
    played = play([simulated()], trace_of((0.0, 100, 3), (1.0, 20, 2)))
    first, second = played.times
    # 64 tokens and 36, with 10 ms for each step, then a token at a time.
    assert first.ttft == pytest.approx(0.12) and first.gaps == pytest.approx([0.011, 0.011])
    assert (first.num_tokens, second.num_tokens) == (3, 2)
    assert second.ttft == pytest.approx(0.03) and second.latency == pytest.approx(0.041)
    assert played.seconds == pytest.approx(1.041)


def test_what_prompts_share_is_computed_once() -> None:
    played = play([simulated()], trace_of((0.0, 64, 2), (1.0, 64, 2), blocks={0: tuple(range(8)), 1: tuple(range(8))}))
    assert (played.prompt_tokens, played.cached_tokens) == (128, 56)
    assert played.times[1].ttft == pytest.approx(0.01 + 0.008)


def test_a_second_engine_takes_half_of_the_requests() -> None:
    trace = trace_of(*[(0.0, 64, 4)] * 8)
    alone, both = play([simulated()], trace), play([simulated(), simulated()], trace)
    assert both.seconds < 0.6 * alone.seconds
    assert sum(each.num_tokens for each in both.times) == 32


def test_lengths_are_not_known_beforehand_but_kept() -> None:
    rng = np.random.default_rng(0)
    trace = trace_of(*[(0.05 * i, 16, int(rng.integers(1, 40))) for i in range(60)])
    replica = simulated()
    played = play([replica], trace)
    assert [each.num_tokens for each in played.times] == [request.output_len for request in trace.requests]
    assert replica.engine.stats().finished == {"stop": 60} and played.length_error > 0


def test_a_policy_that_refuses_keeps_its_objectives() -> None:
    trace = trace_of(*[(0.01 * i, 64, 2) for i in range(60)])
    summaries = {}
    for policy in ("fcfs", "slo"):
        played = play([simulated(policy)], trace, (500.0, 100.0))
        summaries[policy] = summarize(policy, 1.0, played, 500.0, 100.0)
    assert summaries["fcfs"].refused == 0 < summaries["slo"].refused < 50
    assert summaries["slo"].goodput > 1.5 * summaries["fcfs"].goodput
    assert summaries["slo"].ttft_p99 < 1.1 * 500


def test_short_jobs_are_fast_by_the_shortest_job_first() -> None:
    rng = np.random.default_rng(1)
    trace = trace_of(*[(0.02 * i, 8 if rng.random() < 0.8 else 160, 4) for i in range(150)])
    mean = {
        policy: summarize(policy, 1.0, play([simulated(policy, max_num_seqs=2)], trace), None, None).latency_mean
        for policy in ("fcfs", "sjf")
    }
    assert mean["sjf"] < 0.8 * mean["fcfs"]


def test_a_window_lets_time_pass() -> None:
    played = play([simulated("window:500ms")], trace_of((0.0, 8, 2), (0.2, 8, 2), (3.0, 8, 2)))
    assert [each.ttft for each in played.times] == pytest.approx([0.526, 0.326, 0.518])


def test_a_real_engine_plays_the_same_trace() -> None:
    clock = VirtualClock()  # and no time passes in its steps
    engine = make_engine(max_num_batched_tokens=64, num_blocks=200, max_model_len=200, clock=clock)
    played = play([Replica.real(engine, clock, clock.sleep)], trace_of((0.0, 30, 4), (2.0, 9, 3), (2.0, 9, 1)))
    assert [each.num_tokens for each in played.times] == [4, 3, 1] and played.seconds == pytest.approx(2.0)


# ---------------------------------------------------------------------------------------------------------- costs


def test_costs_are_measured_and_kept(tmp_path: Path) -> None:
    engine = make_engine(max_num_seqs=4, max_num_batched_tokens=32, num_blocks=400, max_model_len=300)
    shares: list[float] = []
    file = measure_cost(engine, "fake", seconds=0.6, progress=shares.append)
    assert not engine.has_work and file.num_steps > 30 and shares[-1] == pytest.approx(1.0, abs=0.5)
    assert (file.model, file.block_size, file.num_blocks, file.max_num_seqs) == ("fake", 4, 400, 4)
    path = tmp_path / "cost.json"
    file.save(path)
    assert read_cost(path) == file and list(tmp_path.iterdir()) == [path]
    assert file.cost.is_known and file.cost.prices.tolist() == list(file.prices.values())


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"format": 1}', SHIPPED.read_text().replace('"tokens"', '"tokns"'), '{"format": 2, "model": ""}'],
)
def test_what_is_no_cost_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cost.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="is no cost file .*--save-cost FILE"):
        read_cost(path)


def test_the_shipped_costs_are_of_a_real_machine() -> None:
    file = read_cost(SHIPPED)
    assert 0 < file.error < 0.2 and file.num_steps > 100 and 0 < file.prices["tokens"] < 0.1


# ------------------------------------------------------------------------------------------------------- pictures


@pytest.mark.parametrize("suffix", [".png", ".svg"])
@pytest.mark.parametrize("loads", [(1.0,), (1.0, 2.0)])
def test_pictures_are_drawn_of_one_load_and_of_several(tmp_path: Path, suffix: str, loads: tuple[float, ...]) -> None:
    trace = trace_of(*[(0.05 * i, 16, 3) for i in range(20)])
    runs: dict[str, Playback] = {}
    summaries: list[Summary] = []
    for policy in ("fcfs", "lpm"):
        for load in loads:
            runs[policy] = play([simulated(policy)], trace.faster(load))
            summaries.append(summarize(policy, load, runs[policy], 100.0, None))
    path = tmp_path / f"picture{suffix}"
    plot(path, "a title", runs, summaries)
    assert path.stat().st_size > 10_000 and list(tmp_path.iterdir()) == [path]
    with pytest.raises(ConfigError, match="expected a file named .png"):
        plot(tmp_path / "picture.gif", "", runs, summaries)
