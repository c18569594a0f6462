"""A long prompt and the turn after it, shortened: what is counted, and what the formula says."""

from pathlib import Path

import long_context
import pytest


def test_attention_counts_all_tokens_before() -> None:
    sizes = (8, 16, 3, 2, 1)
    weights = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16
    assert long_context.operations(0, 10, sizes) == 3 * (2 * weights * 10 + 4 * 8 * 50)
    parts = sum(long_context.operations(start, 5, sizes) for start in (0, 5))
    assert parts == long_context.operations(0, 10, sizes)


def test_the_second_turn_finds_the_first(tiny_artifact: Path, tmp_path: Path) -> None:
    found = long_context.measure(tiny_artifact, 150, 2)
    history = 150 + long_context.ANSWER
    assert history // 32 * 32 <= found["cached_tokens"] <= history and len(found["second_s"]) == 2
    assert found["first"]["steps"][-1][0] == 150 and found["first"]["ttft_s"] > 0
    formula = found["formula_bytes"]
    assert formula["kv"] >= (history + long_context.NEW_TOKENS) * found["kv_bytes_per_token"]
    assert formula["all"] == sum(formula[name] for name in ("before", "weights", "arena", "kv"))
    result = {**found, "limits": long_context.limits(found, 1e9)}
    assert 0 < result["limits"]["second_over_first"] < 1
    times, memory = long_context.tables(result)
    assert len(times) == 4 and len(memory[0]) == len(memory[1])
    long_context.draw(result, tmp_path / "long.png")
    assert (tmp_path / "long.png").read_bytes()[:4] == b"\x89PNG"


def test_a_worker_prints_what_it_measured(tiny_artifact: Path) -> None:
    found = long_context.in_own_process(tiny_artifact, 100, 1)
    formula = found["formula_bytes"]["all"]
    assert found["tokens"] == 100 and found["peak_bytes"] == pytest.approx(formula, rel=0.5)


def test_a_prompt_that_does_not_fit_ends_the_run(tiny_artifact: Path) -> None:
    with pytest.raises(SystemExit, match="the measuring process ended"):
        long_context.in_own_process(tiny_artifact, 400, 1)
