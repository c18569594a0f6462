"""Tests of what the page is told of a certificate: the limit that each row is nearest to."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inferc.serve.http.certificate_report import certificate_report


def limit(measure: str, found: float | None, allowed: float) -> dict[str, Any]:
    return {"measure": measure, "found": found, "allowed": allowed}


def row(name: str, judged_by: str = "", *limits: dict[str, Any], **more: Any) -> dict[str, Any]:
    own = {"name": name, "ran_by": "reference", "ok": True, "judged_by": judged_by, "limits": limits}
    return {**own, **more}


def certificate(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"ok": True, "scope": "", "num_positions": 9, "prompts": [[1], [2]], "budgets": {}, "rows": rows}


def uses(*rows: dict[str, Any]) -> list[Any]:
    report = certificate_report(json.dumps(certificate(*rows)).encode())
    return [
        use and (use["measure"], use["found"], use["limit"], use["by"]) for use in (r["use"] for r in report["rows"])
    ]


def test_a_row_uses_what_is_nearest_to_its_limit() -> None:
    mean, of_one = limit("kl", 1e-4, 2e-4), limit("kl_of_one", 9e-4, 1e-3)
    assert uses(row("kernels", "hugging_face", mean, of_one)) == [("kl_of_one", 9e-4, 1e-3, "hugging_face")]
    top = limit("other_top1", 0.01, 0.1)
    assert uses(row("quantize", "kv_int8 with int8", limit("kl", 0.015, 0.02), top)) == [
        ("kl", 0.015, 0.02, "kv_int8 with int8")
    ]


def test_a_row_without_limits_uses_nothing() -> None:
    before_there_were_limits = {"name": "program", "ran_by": "reference", "ok": True}
    assert uses(row("hugging_face"), before_there_were_limits) == [None, None]


def test_logits_that_are_no_numbers_use_more_than_any_budget() -> None:
    broken = row("program", "float32", limit("relative_error", None, 1e-5))
    assert uses(broken) == [("relative_error", None, 1e-5, "float32")]


def test_where_nothing_is_allowed_anything_is_over_it() -> None:
    exact = limit("kl", 0.0, 0.0)
    assert uses(row("kernels", "hugging_face", exact)) == [("kl", 0.0, 0.0, "hugging_face")]
    assert uses(row("kernels", "hugging_face", exact, limit("kl_of_one", 1e-9, 0.0)))[0][0] == "kl_of_one"


def test_the_rest_is_shown_as_it_is_stored() -> None:
    report = certificate_report(json.dumps(certificate(row("program", kl=1e-6, later="field"))).encode())
    assert (report["kind"], report["num_prompts"]) == ("auto", 2) and "prompts" not in report
    assert (report["rows"][0]["kl"], report["rows"][0]["later"]) == (1e-6, "field")
    assert certificate_report(json.dumps(certificate(row("captured"))).encode())["kind"] == "passes"


@pytest.mark.parametrize("damage", [{"rows": [{"name": "program"}]}, {"ok": "yes"}, {"budgets": None}])
def test_a_damaged_certificate_is_refused(damage: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"rows|ok|budgets"):
        certificate_report(json.dumps({**certificate(), **damage}).encode())
