"""Tests of the figures of `inferc bench serve`."""

import math
from pathlib import Path

import pytest

from inferc.bench.answers import Answer, num_under_way, shared_out
from inferc.bench.endpoints import ServerFacts
from inferc.bench.figures import Goals, LoadOf, Percentiles, Point, figures, largest_good_rate, next_rate
from inferc.bench.load import Load
from inferc.bench.plot import saved_figure
from inferc.serve.models.metrics import Ended, ModelMetrics, Objectives

FACTS = ServerFacts("fake", 100)


def answered(*messages: tuple[float, int], sent: float = 0.0, whole: float | None = None, asked: int = 0) -> Answer:
    answer = Answer(0, sent, 16, asked or sum(count for _, count in messages), sent)
    answer.messages = list(messages)
    answer.end(messages[-1][0] if whole is None else whole)
    return answer


def failed(status: str) -> Answer:
    answer = Answer(0, 0.0, 16, 4, 0.0)
    answer.fail(status, "why")
    return answer


def test_every_token_after_the_first_message_has_its_share_of_a_gap() -> None:
    answer = answered((0.50, 3), (0.70, 2), (1.00, 1))
    assert answer.gaps == pytest.approx([0.1, 0.1, 0.3])
    assert answer.tpot == pytest.approx(0.5 / 5)
    assert answered((0.5, 1), (0.6, 1), (0.8, 1)).gaps == pytest.approx([0.1, 0.2])
    alone = answered((0.5, 8))
    assert alone.gaps == [] and alone.tpot == 0.0 and answered((0.5, 1)).tpot is None
    assert Percentiles.of_ms(answer.gaps).p50 == pytest.approx(100.0)


def test_percentiles() -> None:
    found = Percentiles.of_ms([0.001 * value for value in range(101)])
    assert (found.mean, found.p50, found.p90, found.p95, found.p99, found.max) == pytest.approx(
        (50, 50, 90, 95, 99, 100)
    )
    assert Percentiles.maybe([]) is None


@pytest.mark.parametrize(
    ("messages", "ttft_ms", "tbt_ms", "is_good"),
    [
        ([(0.4, 1), (0.5, 1), (0.6, 1)], 400, 100, True),
        ([(0.401, 1), (0.5, 1)], 400, 100, False),
        ([(0.1, 1), (0.15, 1), (0.35, 1)], 400, 120, False),  # 125 ms on average
        ([(0.1, 1), (0.15, 1), (0.35, 1)], 400, 125.001, True),
        ([(0.1, 1), (0.15, 1), (0.35, 1)], 400, None, True),
        ([(9.0, 1), (9.1, 1)], None, 101, True),
        ([(0.1, 1)], 400, 0.001, True),  # of a single token there is nothing between
    ],
)
def test_a_request_is_good_as_the_server_counts(
    messages: list[tuple[float, int]], ttft_ms: float | None, tbt_ms: float | None, is_good: bool
) -> None:
    answer = answered(*messages)
    assert answer.is_good(ttft_ms, tbt_ms) == is_good
    metrics = ModelMetrics(Objectives(ttft_ms, tbt_ms))
    ends = [messages[0][0]], [messages[-1][0]], [len(messages)]
    metrics.ended(Ended("stop", 0.0, 16, 0, *ends))
    assert metrics.num_good == is_good


def test_figures_count_every_request_once() -> None:
    answers = [
        answered((0.1, 1), (0.2, 1), whole=0.25),
        answered((0.3, 1), (0.4, 2), whole=0.45, sent=1.0, asked=9),
        answered((0.9, 1), (1.0, 1)),
        failed("429"),
        failed("429"),
        failed("cut short"),
        Answer(0, 0.0, 16, 4, 1.9),
    ]
    answers[0].prompt_tokens = answers[1].prompt_tokens = answers[2].prompt_tokens = 17
    answers[5].messages = [(0.1, 3)]  # before the connection broke
    found = figures(Load(answers, seconds=2.0, cpu=0.1), LoadOf(16, 4, rate=3.0), Goals(500, 100), FACTS)
    assert (found.requests, found.completed, found.unfinished) == (7, 3, 1)
    assert found.failed == {"429": 2, "cut short": 1}
    assert found.requests_per_s == 1.5 and found.output_tokens_per_s == (2 + 3 + 2 + 3) / 2
    assert found.goodput == pytest.approx(2 / 6) and found.goodput_per_s == 1.0
    assert found.ttft_ms is not None and found.ttft_ms.max == pytest.approx(900)
    assert found.e2e_ms is not None and found.e2e_ms.p50 == pytest.approx(450)
    assert found.prompt_tokens == 51 and found.total_tokens_per_s == (51 + 10) / 2
    assert found.short_answers == 1 and found.cached_tokens is None
    assert any("3 requests failed, the first with 429: why" in each for each in found.warnings)


def test_figures_of_nothing_are_none() -> None:
    found = figures(Load([failed("503")], seconds=1.0), LoadOf(16, 4, rate=1.0), Goals(), ServerFacts(None, 9))
    assert found.ttft_ms is found.itl_ms is found.e2e_ms is found.tpot_ms is None
    assert found.goodput == 0.0 and found.prompt_tokens is None
    assert figures(Load(), LoadOf(1, 1), Goals(), FACTS).goodput is None


def test_the_generator_says_how_late_it_was() -> None:
    late = [answered((0.1, 1), (0.2, 1), sent=0.03 + index) for index in range(10)]
    for index, each in enumerate(late):
        each.planned = float(index)

    def warned(rate: float, ticks: list[float]) -> list[str]:
        return figures(Load(late, 10.0, ticks), LoadOf(16, 2, rate=rate), Goals(), FACTS).warnings

    assert not warned(rate=1.0, ticks=[0.001])  # 30 ms late, of a second between two requests
    (sent,) = warned(rate=50.0, ticks=[0.001])
    assert "sent up to 30 ms late" in sent
    (noted,) = warned(rate=1.0, ticks=[0.02])
    assert "noted tokens up to 20 ms late" in noted
    found = figures(Load(late, 10.0), LoadOf(16, 2, rate=1.0), Goals(), FACTS)
    assert found.lag_ms is not None and found.lag_ms.p50 == pytest.approx(30)


def test_answers_that_come_whole_are_told_of() -> None:
    def warned(answers: list[Answer]) -> list[str]:
        return figures(Load(answers, 1.0), LoadOf(16, 4), Goals(), FACTS).warnings

    assert "1 of 2 answers came whole" in warned([answered((0.1, 8)), answered((0.1, 1), (0.2, 1))])[0]
    assert not warned([answered((0.1, 1)), answered((0.1, 1), (0.2, 1))])


def test_the_largest_good_rate_is_one_that_was_measured() -> None:
    points = [Point(4, 0.95), Point(1, 1.0), Point(2, 0.9), Point(8, 0.2)]
    assert largest_good_rate(points, 0.9) == 4
    assert largest_good_rate([*points, Point(2, 0.5)], 0.9) == 1  # not good at 2 each time, so not beyond either
    assert largest_good_rate([Point(1, 0.5), Point(2, 1.0)], 0.9) is None
    assert largest_good_rate([], 0.9) is None


def test_a_search_surrounds_the_rate_and_ends() -> None:
    def search(limit: float, first: float) -> list[Point]:
        points: list[Point] = []
        while (rate := next_rate(points, 0.9, first)) is not None:
            points.append(Point(rate, 1.0 if rate <= limit else 0.1))
            assert len(points) < 30
        return points

    for limit in (0.3, 1.0, 7.7, 100.0):
        points = search(limit, 1.0)
        found = largest_good_rate(points, 0.9)
        assert found is not None and limit / 1.1 <= found <= limit
    assert [each.rate for each in search(3.0, 1.0)][:4] == pytest.approx([1, 2, 4, math.sqrt(8)])


def test_tokens_are_shared_out_over_chunks() -> None:
    assert shared_out(7, 3) == [3, 2, 2] and shared_out(3, 3) == [1, 1, 1] and shared_out(1, 4) == [1, 0, 0, 0]


def test_requests_under_way() -> None:
    answers = [
        answered((0.1, 1), sent=0.0, whole=1.0),
        answered((0.1, 1), sent=0.5, whole=1.0),
        Answer(0, 0, 1, 1, 0.7),
    ]
    assert [num_under_way(answers, when) for when in (0.0, 0.6, 0.8, 1.2, 9.0)] == [1, 2, 3, 2, 1]


@pytest.mark.slow
def test_a_picture_of_one_part(tmp_path: Path) -> None:
    with saved_figure(tmp_path / "one.png", "title", rows=1, columns=1, size=(3, 2)) as (ax,):
        ax.plot([1, 2], [3, 4])
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
