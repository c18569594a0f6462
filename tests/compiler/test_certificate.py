"""Tests of which limits a row of a certificate is judged by, and that it holds them."""

from __future__ import annotations

import torch
from torch import Tensor

from inferc.compiler import drift
from inferc.compiler.certificate import Certificate, Judge, Row
from inferc.passes.quantize.schemes import Budget, together

PROMPTS = [[1, 2, 3], [4, 5]]
KV, INT8 = Budget("kv_int8", 0.5, 0.5), Budget("int8", 1.0, 0.75)


def logits() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(len(prompt), 16, generator=generator) for prompt in PROMPTS]


def off_by(size: float, seed: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [each + size * torch.randn(each.shape, generator=generator) for each in logits()]


def judge(dtype: str = "bfloat16", *, allow_drift: bool = False) -> Judge:
    return Judge(Certificate("", PROMPTS), logits(), dtype, prompts=PROMPTS, allow_drift=allow_drift)


def limits(row: Row) -> dict[str, float]:
    return {limit.measure: limit.allowed for limit in row.limits}


def test_a_float32_row_is_judged_by_its_relative_error() -> None:
    row = judge("float32").add("program", "reference", off_by(1e-7))
    assert (row.judged_by, limits(row)) == ("float32", {"relative_error": 1e-5})
    assert row.limits[0].found == row.relative_error
    assert row.ok


def test_a_row_behind_transformers_own_is_judged_by_it() -> None:
    of = judge()
    of.add_own(off_by(1e-2))
    row = of.add("kernels", "cpu", off_by(1e-2, seed=3))
    own = of.certificate.rows[0]
    assert own.kl is not None and own.limits == () and row.judged_by == own.name
    allowed = limits(row)
    assert drift.REFERENCE_FACTOR * own.kl <= allowed["kl"] <= (drift.REFERENCE_FACTOR + drift.MARGIN) * own.kl * 1.001
    largest = float(drift.measure(off_by(1e-2), logits()).kl.max())
    assert allowed["kl_of_one"] == drift.figure(max(drift.OUTLIER_FACTOR * largest, drift.OUTLIER_FLOOR))
    assert row.limits[0].found == row.kl


def test_a_row_over_its_limit_has_found_more_than_is_allowed() -> None:
    of = judge(allow_drift=True)
    of.add_own(off_by(1e-3))
    row = of.add("kernels", "cpu", off_by(2e-3))
    mean = row.limits[0]
    assert not row.ok and mean.found is not None and mean.found > mean.allowed


def test_a_lossy_row_has_the_budgets_of_all_lossy_passes_and_later_rows_are_judged_by_it() -> None:
    of = judge(allow_drift=True)
    of.add_own(off_by(1e-3))
    of.budget = KV
    first = of.add("quantize_kv_cache", "reference", off_by(1e-2))
    assert (first.judged_by, limits(first)) == ("kv_int8", {"kl": 0.5, "other_top1": 0.5})
    between = of.add("select_rows", "reference", off_by(1e-2))
    assert between.judged_by == "quantize_kv_cache"
    of.budget = together([KV, INT8])
    second = of.add("quantize", "reference", off_by(2e-2))
    assert (second.judged_by, limits(second)) == ("kv_int8 with int8", {"kl": 1.5, "other_top1": 0.75})
    assert of.add("kernels", "cpu", off_by(2e-2)).judged_by == "quantize"


def test_logits_that_are_no_numbers_are_found_to_be_none_and_can_be_no_reference() -> None:
    of = judge(allow_drift=True)
    of.add_own(off_by(1e-3))
    of.budget = INT8
    broken = of.add("quantize", "reference", [each * float("nan") for each in logits()])
    assert not broken.ok and broken.judged_by == "int8" and broken.limits[0].found is None
    assert of.add("kernels", "cpu", off_by(1e-3)).judged_by == "hugging_face"


def test_one_broken_position_is_told_by_its_own_limit() -> None:
    of = judge(allow_drift=True)
    of.add_own(off_by(1e-3))
    found = off_by(1e-3)
    found[0][1] = 30 * torch.randn(16, generator=torch.Generator().manual_seed(4))
    (_, of_one) = of.add("kernels", "cpu", found).limits
    assert of_one.measure == "kl_of_one" and of_one.found is not None and of_one.found > of_one.allowed
