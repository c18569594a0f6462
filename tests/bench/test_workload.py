"""Tests of the load of `inferc bench serve`: the same for the same seed, with the statistics that were asked for."""

import json
from pathlib import Path

import numpy as np
import pytest

from inferc.bench.workload import Arrivals, Lengths, Replayed, Texts, read_texts, read_workload
from inferc.errors import ConfigError

COUNT, RATE = 20_000, 5.0


def times_of(arrivals: Arrivals, seed: int = 1) -> np.ndarray:
    return arrivals.times(RATE, COUNT, None, np.random.default_rng(seed))


@pytest.mark.parametrize(
    ("arrivals", "variation"),
    [
        (Arrivals("constant"), 0.0),
        (Arrivals("poisson"), 1.0),
        (Arrivals("gamma", burstiness=0.25), 2.0),
        (Arrivals("gamma", burstiness=4.0), 0.5),
        (Arrivals("burst", burst_size=10), None),
    ],
)
def test_arrivals_have_their_rate_and_their_variation(arrivals: Arrivals, variation: float | None) -> None:
    times = times_of(arrivals)
    gaps = np.diff(times)
    assert len(times) == COUNT and times[0] == 0 and gaps.min() >= 0
    assert COUNT / times[-1] == pytest.approx(RATE, rel=0.05)
    if variation is not None:
        assert gaps.std() / gaps.mean() == pytest.approx(variation, abs=0.05)
    assert np.array_equal(times, times_of(arrivals))
    if variation != 0.0:
        assert not np.array_equal(times, times_of(arrivals, seed=2))


def test_a_burst_comes_at_once() -> None:
    gaps = np.diff(times_of(Arrivals("burst", burst_size=10)))
    assert (gaps == 0).mean() == pytest.approx(0.9, abs=0.001)
    between = gaps[gaps > 0]
    assert between.mean() == pytest.approx(10 / RATE, rel=0.05) and between.std() == pytest.approx(2.0, rel=0.1)


def test_what_is_reached_first_ends_a_load() -> None:
    arrivals, random = Arrivals("constant"), np.random.default_rng(0)
    assert arrivals.times(2.0, 100, 3.0, random).tolist() == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
    assert arrivals.times(2.0, 3, 100.0, random).tolist() == [0.0, 0.5, 1.0]
    assert len(arrivals.times(1000.0, None, 3.0, random)) == 3000  # more than are drawn at a time


def test_lengths_are_spread_evenly_and_prompts_begin_alike() -> None:
    lengths = Lengths(100, 40, input_spread=0.5, output_spread=0.25, shared_prefix=20)
    plan = lengths.plan(np.zeros(4000), vocab_size=500, seed=3, turn=1)
    inputs = np.array([each.input_len for each in plan.requests])
    assert (inputs.min(), inputs.max()) == (50, 150) and inputs.mean() == pytest.approx(100, rel=0.02)
    outputs = {each.output_len for each in plan.requests}
    assert outputs == set(range(30, 51))
    first, second = (plan.prompt(each) for each in plan.requests[:2])
    assert isinstance(first, list) and isinstance(second, list)
    assert len(first) == plan.requests[0].input_len and first[:20] == second[:20] and first[20:30] != second[20:30]
    assert all(isinstance(token, int) and 2 <= token < 500 for token in first)
    again, other = (lengths.plan(np.zeros(2), 500, 3, turn) for turn in (1, 2))
    assert again.prompt(plan.requests[0]) == first
    different = other.prompt(plan.requests[0])
    assert different[:20] == first[:20] and different[20:] != first[20:]  # what one load cached, the next does not find


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ({"input_spread": 1.5}, "--input-spread 1.5: expected 0 to 1"),
        ({"shared_prefix": 8}, "less than the shortest prompt, 8"),
        ({"shared_prefix": 5, "input_spread": 0.5}, "less than the shortest prompt, 4"),
    ],
)
def test_lengths_that_cannot_be(lengths: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Lengths(8, 4, **lengths)  # type: ignore[arg-type]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    rows = [
        {"timestamp": 1000, "input_length": 600, "output_length": 8, "hash_ids": [7, 8]},
        {"timestamp": 3000, "input_length": 1000, "output_length": 16, "hash_ids": [7, 9]},
        {"timestamp": 4000, "input_length": 512, "output_length": 24},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_trace_is_replayed(trace: Path) -> None:
    replayed = read_workload(trace, scale=8)
    assert replayed.times(2.0, None, None).tolist() == pytest.approx([0, 0.125, 0.1875])
    assert replayed.times(1.0, 3, 0.3).tolist() == pytest.approx([0, 0.25])
    assert replayed.times(1.0, 1, None).tolist() == [0]
    plan = replayed.plan(replayed.times(1.0, None, None), 300, 0, 1)
    assert [(each.input_len, each.output_len) for each in plan.requests] == [(75, 1), (125, 2), (64, 3)]
    first, second, third = (plan.prompt(each) for each in plan.requests)
    assert [len(first), len(second), len(third)] == [75, 125, 64]
    assert first[:64] == second[:64] and first[64:] != second[64:75] and third != first[:64]
    other = replayed.plan(replayed.times(1.0, None, None), 300, 0, 2)
    assert other.prompt(plan.requests[0])[:64] != first[:64]


def test_made_up_requests_as_a_trace_share_what_they_share() -> None:
    lengths = Lengths(100, 8, shared_prefix=40)
    times = np.array([0.0, 0.5])
    trace = lengths.as_trace(times, seed=0)
    one, two = trace.requests
    assert (one.prompt_len, one.output_len, two.arrival, trace.block_tokens) == (100, 8, 0.5, 16)
    assert len(one.blocks) == len(two.blocks) == 7
    assert one.blocks[:2] == two.blocks[:2] and not set(one.blocks[2:]) & set(two.blocks[2:])


def test_texts_come_over_and_over_in_an_order_by_seed(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"prompt": "a", "max_tokens": 5}\n\n{"messages": [{"role": "user", "content": "b"}]}\n{"prompt": "c"}\n'
    )
    texts = read_texts(path, 7)
    assert texts.has_chats and texts.output_lens == (5, 0, 0)
    plan = texts.plan(np.zeros(6), 0, seed=1, turn=1)
    prompts = [plan.prompt(each) for each in plan.requests]
    assert prompts[:3] == prompts[3:] and sorted(map(str, prompts[:3])) == sorted(map(str, texts.prompts))
    lens = {str(prompt): each.output_len for prompt, each in zip(prompts, plan.requests, strict=True)}
    assert lens["a"] == 5 and lens["c"] == 7
    orders = {tuple(map(str, map(texts.plan(np.zeros(3), 0, seed, 1).prompt, plan.requests[:3]))) for seed in range(9)}
    assert len(orders) > 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: not a JSON object"),
        ('{"text": "a"}', "line 1: expected"),
        ('{"prompt": ""}', "line 1: expected"),
        ('{"messages": [{"role": "user"}]}', "line 1: expected"),
        ("[1]", "line 1: expected"),
        ('{"prompt": "a", "max_tokens": -1}', "max_tokens: expected a whole number"),
        ("", "there are no prompts"),
    ],
)
def test_prompts_that_cannot_be(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ConfigError, match=message):
        read_texts(path, 7)


def test_a_workload_of_each_kind_makes_as_many_requests_as_times(trace: Path) -> None:
    for workload in (Lengths(8, 4), read_workload(trace, 8), Texts(("a",), (0,), 4)):
        assert len(workload.plan(np.zeros(2), 100, 0, 1).requests) == 2
    assert isinstance(read_workload(trace, 8), Replayed)
