"""Tests of which budget a row of a certificate has, in certificates of each kind that a compile writes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inferc.serve.http.certificate_report import certificate_report

INT8 = {"max_kl": 0.01, "min_top1": 0.9}
FLOAT32 = {"float32_relative_error": 1e-5, "kl_factor": 1.1}


def row(name: str, kl: float | None = 1e-4, error: float | None = 1e-6, top1: float = 1.0) -> dict[str, Any]:
    return {
        "name": name,
        "ran_by": "reference",
        "dtype": "bfloat16",
        "relative_error": error,
        "kl": kl,
        "top1_agreement": top1,
        "ok": True,
        "reason": "",
    }


def uses(rows: list[dict[str, Any]], kernels_round: bool = False, **lossy: Any) -> dict[str, tuple[Any, ...] | None]:
    data = {
        "ok": True,
        "scope": "",
        "num_positions": 9,
        "prompts": [[1]],
        "budgets": {**FLOAT32, **lossy},
        "rows": rows,
    }
    found = certificate_report(json.dumps(data).encode(), kernels_round)["rows"]
    return {
        each["name"]: None if (use := each["use"]) is None else (use["measure"], use["found"], use["limit"], use["by"])
        for each in found
    }


EXACT = ["program", "program_random", "captured_far", "program_small"]


def test_the_default_certificate_has_exact_rows_and_the_kernels() -> None:
    rows = [*map(row, EXACT), row("hugging_face", 2e-4), row("kernels", 1e-4)]
    found = uses(rows)
    assert [found[name] for name in EXACT] == [("relative_error", 1e-6, 1e-5, "float32")] * 4
    assert found["hugging_face"] is None
    assert found["kernels"] == ("kl", 1e-4, pytest.approx(2.2e-4), "hugging_face")


def test_the_default_certificate_in_float32_or_without_kernels() -> None:
    assert uses([row("program"), row("kernels", 1e-4, 2e-6)])["kernels"] == ("relative_error", 2e-6, 1e-5, "float32")
    assert set(uses([row(name) for name in EXACT])) == set(EXACT)


def test_quantized_kernels_have_the_budget_of_all_lossy_passes() -> None:
    found = uses([row("program"), row("kernels", 0.015, top1=0.99)], kv_int8=INT8, int8=INT8)
    assert found == {
        "program": ("relative_error", 1e-6, 1e-5, "float32"),
        "kernels": ("kl", 0.015, 0.02, "kv_int8 with int8"),
    }
    found = uses([row("program"), row("kernels", 0.001, top1=0.9)], kv_int8=INT8, int8=INT8)
    other = ("other_top1", pytest.approx(0.1), pytest.approx(0.2), "kv_int8 with int8")
    assert found["kernels"] == other, "the measure that is nearest to its limit"


PASSES = ["captured", "quantize_kv_cache", "select_rows", "quantize", "fuse_silu_mul_quantize", "kernels"]


def test_a_row_after_each_pass_is_held_to_the_last_one_that_others_are_held_to() -> None:
    rows = [row("hugging_face", 1e-5), *(row(name, 10.0**-power) for name, power in zip(PASSES, (5, 3, 3, 2, 2, 2)))]
    found = uses(rows, kv_int8=INT8, int8=INT8)
    assert [each and (each[0], each[2], each[3]) for each in found.values()] == [
        None,
        ("kl", pytest.approx(1.1e-5), "hugging_face"),
        ("kl", 0.01, "kv_int8"),
        ("kl", pytest.approx(1.1e-3), "quantize_kv_cache"),
        ("kl", 0.02, "kv_int8 with int8"),
        ("kl", pytest.approx(1.1e-2), "quantize"),
        ("kl", pytest.approx(1.1e-2), "quantize"),
    ]
    assert uses(rows, kernels_round=True, kv_int8=INT8, int8=INT8)["kernels"] == ("kl", 0.01, 0.02, "kv_int8 with int8")


def test_of_several_ranks_the_partition_is_the_first_row_that_is_quantized() -> None:
    found = uses([row("captured"), row("partition", 0.004), row("kernels", 0.004)], int8=INT8)
    assert found["captured"] == ("relative_error", 1e-6, 1e-5, "float32")
    assert found["partition"] == ("kl", 0.004, 0.01, "int8")
    assert found["kernels"] == ("kl", 0.004, pytest.approx(0.0044), "partition")


def test_logits_that_are_no_numbers_use_more_than_any_budget() -> None:
    found = uses([row("hugging_face"), row("quantize", None, None), row("kernels", 1e-5)], int8=INT8)
    assert found["quantize"] == ("kl", None, 0.01, "int8")
    assert found["kernels"] == ("kl", 1e-5, pytest.approx(1.1e-4), "hugging_face"), "they can be no reference"
