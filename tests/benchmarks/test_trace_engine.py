"""A trace played to the engine: limits by its lengths, and a small one played to all variants."""

from pathlib import Path

import conversation
import numpy as np
import pytest
import tables
import trace_engine
import trace_limits
import trace_report
from trace_limits import Lengths

from inferc.errors import ConfigError
from inferc.runtime.artifact.load import load_artifact
from inferc.runtime.simulate.trace import Trace, TraceRequest
from inferc.runtime.step.cost import StepCost


def small_trace(count: int) -> Trace:
    """Prompts of two to five blocks of 32, whose first is the same."""
    requests = []
    for index in range(count):
        blocks = (0, *(100 * index + place for place in range(1, 2 + index % 4)))
        requests.append(TraceRequest(0.01 * index, 32 * len(blocks) - 3, 2 + 5 * (index % 3), blocks))
    return Trace(tuple(requests), 32)


def test_steps_follow_from_lengths() -> None:
    requests = [Lengths(10, 10, output) for output in (8, 2, 2, 2)]
    assert trace_limits.static_steps(requests, 2, 100) == 8 + 2, "as long as the longest of each two"
    assert trace_limits.continuous_steps(requests, 2, 100) == 8, "the others take turns beside the longest"
    assert trace_limits.static_steps(requests, 2, 10) == 2 + 7 + 2 + 1, "a prompt a step"
    assert trace_limits.continuous_steps(requests, 2, 5) == 10, "all tokens by five"


def test_what_tokens_take_is_the_same_in_both() -> None:
    requests = [Lengths(10, 10, output) for output in (8, 2, 2, 2)]
    cost = StepCost()
    cost.set_prices({"steps": 1.0, "tokens": 0.0, "sequences": 0.0, "keys": 0.0, "pairs": 0.0})
    assert trace_limits.over_static(requests, 2, 100, cost) == (10 / 8, 10 / 8)
    cost.set_prices({"steps": 1.0, "tokens": 0.5, "sequences": 0.0, "keys": 0.0, "pairs": 0.0})
    work = 0.5 * (40 + 14 - 4)
    assert trace_limits.over_static(requests, 2, 100, cost)[1] == pytest.approx((10 + work) / (8 + work))


def test_a_trace_is_found_or_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "FOLDERS", (tmp_path / "none", tmp_path))
    with pytest.raises(ConfigError, match="give --trace FILE"):
        conversation.find_trace(None)
    with pytest.raises(ConfigError, match="there is no trace"):
        conversation.find_trace(tmp_path / "other.jsonl")
    (tmp_path / "a_conversation_9.jsonl").touch()
    assert conversation.find_trace(None) == tmp_path / "a_conversation_9.jsonl"


def test_without_a_trace_there_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.argv", ["trace_engine.py", "--trace", str(tmp_path / "no.jsonl")])
    with pytest.raises(SystemExit, match=r"^trace_engine: there is no trace \S+$"):
        trace_engine.main()


@pytest.mark.slow
def test_all_variants_play_the_trace(tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_engine, "measure_read", lambda threads: 1e9)
    trace, runs = small_trace(12), []
    artifact = load_artifact(tiny_artifact)
    sizes = trace_engine.Sizes(4, 1024)
    found = trace_engine.measure(artifact, trace, sizes, 0.8, 1, lambda: runs.append(1))
    assert len(runs) == 1 + 2 * len(trace_engine.VARIANTS)
    whole, uncached, *_ = found["variants"]
    assert whole["hit_rate"] == pytest.approx(trace.hit_rate()) and uncached["hit_rate"] == 0
    assert found["hits"]["measured"] == pytest.approx(found["hits"]["ideal"])
    assert all(row["simulated"] == pytest.approx(row["ideal"], abs=0.05) for row in found["hits"]["by_size"])
    assert found["limits"]["prefix cache"] > 1 and found["limits"]["continuous batching, by steps"] > 1
    assert np.isfinite([row["at_once"] for row in found["ratios"]]).all()
    facts = {"requests": 12, "scale": 1, "mean_prompt": 50.0, "mean_output": 7.0, "load": 0.8, "parameters": 1e5}
    result = {**facts, "threads": 2, **found}
    figures, gains, hits = trace_report.tables(result)
    assert (len(figures), len(gains), len(hits)) == (5, 4, 2) and "| prefix cache |" in tables.markdown(gains)
    trace_report.draw(result, tmp_path / "trace.png")
    assert (tmp_path / "trace.png").read_bytes()[:4] == b"\x89PNG"
