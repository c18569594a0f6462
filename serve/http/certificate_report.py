"""The certificate's part of the report about an artifact: each row with the budget that it was judged by.

A certificate holds what was measured, and the budgets, but not which row has which budget. The rules are those of
`compiler/certificate.py`, from the names of the rows: a row in float32 has the budget of float32; the first row with a
lossy pass has the budget of all lossy passes up to it; other rows are compared with the row before them that others are
compared with, which is Hugging Face's own run at first, and then that of the lossy pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

OWN = "hugging_face"  # the row of transformers' own run in the artifact's dtype
KERNELS = "kernels"
KV_BUDGET, KV_PASS = "kv_int8", "quantize_kv_cache"
SCHEME_PASS = "quantize"
Measure = Literal["relative_error", "kl", "other_top1"]


@dataclass(frozen=True)
class Use:
    """The part of its budget that a row uses: the measure that is nearest to its limit, what was found, and the limit.

    found is None if the logits are not all finite numbers. by: whose limit it is: `float32`, the names of lossy passes'
    budgets, or the name of the row that this one is compared with. other_top1 is the share of positions at which
    another token is the most likely one.
    """

    measure: Measure
    found: float | None
    limit: float
    by: str


def certificate_report(data: Mapping[str, Any], kernels_round: bool) -> dict[str, Any]:
    """Return the certificate as the page shows it; raise KeyError if a field that it needs is missing.

    kernels_round: whether the target's kernels have the budget of the lossy passes again (see targets.py). Each row
    gets `use`, which is null for a row without a budget of its own.
    """
    rows = [{**row, **{name: row[name] for name in ("name", "ran_by", "ok")}} for row in data["rows"]]
    shown = {name: data[name] for name in ("ok", "scope", "num_positions", "budgets")}
    others = {name: value for name, value in data.items() if name != "prompts"}
    uses = _uses(rows, data["budgets"], kernels_round)
    rows = [{**row, "use": None if use is None else asdict(use)} for row, use in zip(rows, uses, strict=True)]
    kind = "auto" if any(row["name"] == "program" for row in rows) else "passes"
    return {**others, **shown, "kind": kind, "rows": rows, "num_prompts": len(data["prompts"])}


def _uses(rows: list[dict[str, Any]], budgets: Mapping[str, Any], kernels_round: bool) -> list[Use | None]:
    lossy = {name: value for name, value in budgets.items() if isinstance(value, Mapping)}
    judged = _judged_by(rows, lossy, kernels_round)
    factor, float32 = budgets.get("kl_factor"), budgets.get("float32_relative_error")
    found: list[Use | None] = []
    compared: dict[str, Any] | None = None  # the row that later ones are compared with
    for index, row in enumerate(rows):
        if row["name"] == OWN:
            compared = row
            found.append(None)
        elif names := judged.get(index):
            found.append(_of_lossy(row, {name: lossy[name] for name in names}))
            compared = row if row.get("kl") is not None else compared
        elif compared is None or _is_exact(row, rows):
            found.append(None if float32 is None else _of("relative_error", row, float32, "float32"))
        elif factor is None or compared.get("kl") is None:
            found.append(None)
        else:
            found.append(_of("kl", row, factor * compared["kl"], compared["name"]))
    return found


def _is_exact(row: Mapping[str, Any], rows: list[dict[str, Any]]) -> bool:
    """Return whether a row of a certificate of the kind `auto` is of a program in exact float32."""
    return row["name"] != KERNELS and any(each["name"] == "program" for each in rows)


def _judged_by(rows: list[dict[str, Any]], lossy: Mapping[str, Any], kernels_round: bool) -> dict[int, tuple[str, ...]]:
    """Return the names of the budgets of the rows that are judged by lossy passes' budgets, by the rows' indexes."""
    if not lossy:
        return {}
    at = {row["name"]: index for index, row in enumerate(rows)}
    rest = at.get("partition", at.get(KERNELS))  # the first row of a program whose lossy passes have no row
    found: dict[int, tuple[str, ...]] = {}
    for count, name in enumerate(lossy, 1):
        index = at.get(KV_PASS if name == KV_BUDGET else SCHEME_PASS, rest)
        if index is not None:
            found[index] = tuple(lossy)[:count]
    if kernels_round and KERNELS in at:
        found[at[KERNELS]] = tuple(lossy)
    return found


def _of_lossy(row: Mapping[str, Any], budgets: Mapping[str, Any]) -> Use:
    """Return what a row uses of several budgets together, whose errors add up."""
    by = " with ".join(budgets)
    uses = [_of("kl", row, sum(each["max_kl"] for each in budgets.values()), by)]
    if (same := row.get("top1_agreement")) is not None:
        other = sum(1.0 - each["min_top1"] for each in budgets.values())
        uses.append(Use("other_top1", 1.0 - same, other, by))
    return max(uses, key=lambda use: (use.found is None, 0.0 if use.found is None else use.found / use.limit))


def _of(measure: Literal["relative_error", "kl"], row: Mapping[str, Any], limit: float, by: str) -> Use:
    return Use(measure, row.get(measure), limit, by)
