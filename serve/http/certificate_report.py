"""The certificate's part of the report about an artifact: each row with the budget that it was judged by.

A certificate holds what was measured, and the budgets, but not which row has which budget. The rules are those of
`compiler/certificate.py`, from the names of the rows: a row in float32 has the budget of float32; the first row with a
lossy pass has the budget of all lossy passes up to it; other rows are compared with the row before them that others are
compared with, which is Hugging Face's own run at first, and then that of the lossy pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from msgspec import Struct

from inferc.manifest_types import read_typed
from inferc.system.json_text import parse_json

OWN = "hugging_face"  # the row of transformers' own run in the artifact's dtype
KERNELS = "kernels"
KV_BUDGET, KV_PASS = "kv_int8", "quantize_kv_cache"
SCHEME_PASS = "quantize"
Measure = Literal["relative_error", "kl", "other_top1"]


class LossyBudget(Struct, frozen=True):
    """The budget of a lossy pass."""

    max_kl: float
    min_top1: float


class StoredRow(Struct, frozen=True):
    """A row of certificate.json, as far as it is judged here."""

    name: str
    ran_by: str
    ok: bool
    relative_error: float | None = None
    kl: float | None = None
    top1_agreement: float | None = None


class StoredCertificate(Struct, frozen=True):
    """The contents of certificate.json, as far as they are needed here.

    budgets: those of lossy passes, by name in the order of the passes, beside the limits that bear names of their own.
    """

    ok: bool
    scope: str
    num_positions: int
    budgets: dict[str, LossyBudget | float]
    rows: list[StoredRow]
    prompts: list[Any]

    @property
    def lossy(self) -> dict[str, LossyBudget]:
        return {name: value for name, value in self.budgets.items() if isinstance(value, LossyBudget)}

    def limit(self, name: str) -> float | None:
        """Return a limit that is no lossy pass's; None if the certificate has none of that name."""
        value = self.budgets.get(name)
        return None if isinstance(value, LossyBudget) else value


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


def certificate_report(data: bytes, kernels_round: bool) -> dict[str, Any]:
    """Return the certificate as the page shows it; raise ValueError if a field that it needs is missing.

    data: certificate.json. kernels_round: whether the target's kernels have the budget of the lossy passes again (see
    targets.py). Each row gets `use`, which is null for a row without a budget of its own.
    """
    certificate, stored = read_typed(data, StoredCertificate), parse_json(data)
    uses = _uses(certificate, kernels_round)
    rows = [{**row, "use": None if use is None else asdict(use)} for row, use in zip(stored["rows"], uses, strict=True)]
    others = {name: value for name, value in stored.items() if name != "prompts"}
    kind = "auto" if _is_auto(certificate.rows) else "passes"
    return {**others, "kind": kind, "rows": rows, "num_prompts": len(certificate.prompts)}


def _uses(certificate: StoredCertificate, kernels_round: bool) -> list[Use | None]:
    rows, lossy = certificate.rows, certificate.lossy
    judged = _judged_by(rows, lossy, kernels_round)
    factor, float32 = certificate.limit("kl_factor"), certificate.limit("float32_relative_error")
    found: list[Use | None] = []
    compared: StoredRow | None = None  # the row that later ones are compared with
    for index, row in enumerate(rows):
        if row.name == OWN:
            compared = row
            found.append(None)
        elif names := judged.get(index):
            found.append(_of_lossy(row, {name: lossy[name] for name in names}))
            compared = row if row.kl is not None else compared
        elif compared is None or _is_exact(row, rows):
            found.append(None if float32 is None else Use("relative_error", row.relative_error, float32, "float32"))
        elif factor is None or compared.kl is None:
            found.append(None)
        else:
            found.append(Use("kl", row.kl, factor * compared.kl, compared.name))
    return found


def _is_auto(rows: Sequence[StoredRow]) -> bool:
    """Return whether the rows are those of a certificate of the kind `auto`."""
    return any(row.name == "program" for row in rows)


def _is_exact(row: StoredRow, rows: Sequence[StoredRow]) -> bool:
    """Return whether a row of a certificate of the kind `auto` is of a program in exact float32."""
    return row.name != KERNELS and _is_auto(rows)


def _judged_by(
    rows: Sequence[StoredRow], lossy: Mapping[str, LossyBudget], kernels_round: bool
) -> dict[int, tuple[str, ...]]:
    """Return the names of the budgets of the rows that are judged by lossy passes' budgets, by the rows' indexes."""
    if not lossy:
        return {}
    at = {row.name: index for index, row in enumerate(rows)}
    rest = at.get("partition", at.get(KERNELS))  # the first row of a program whose lossy passes have no row
    found: dict[int, tuple[str, ...]] = {}
    for count, name in enumerate(lossy, 1):
        index = at.get(KV_PASS if name == KV_BUDGET else SCHEME_PASS, rest)
        if index is not None:
            found[index] = tuple(lossy)[:count]
    if kernels_round and KERNELS in at:
        found[at[KERNELS]] = tuple(lossy)
    return found


def _of_lossy(row: StoredRow, budgets: Mapping[str, LossyBudget]) -> Use:
    """Return what a row uses of several budgets together, whose errors add up."""
    by = " with ".join(budgets)
    uses = [Use("kl", row.kl, sum(each.max_kl for each in budgets.values()), by)]
    if row.top1_agreement is not None:
        other = sum(1.0 - each.min_top1 for each in budgets.values())
        uses.append(Use("other_top1", 1.0 - row.top1_agreement, other, by))
    return max(uses, key=lambda use: (use.found is None, 0.0 if use.found is None else use.found / use.limit))
