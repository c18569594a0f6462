"""The certificate's part of the report about an artifact: how much of its budget each row uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from msgspec import Struct, to_builtins

from inferc.manifest_types import read_typed
from inferc.system.json_text import parse_json

Measure = Literal["relative_error", "kl", "other_top1", "kl_of_one"]


class StoredLimit(Struct, frozen=True):
    """A limit of a row, as `compiler/drift.py` explains it: the measure, what was found of it, and what is allowed."""

    measure: Measure
    found: float | None
    allowed: float

    @property
    def share(self) -> float:
        if self.found is None or not self.allowed:
            return 0.0 if self.found == 0.0 else float("inf")
        return self.found / self.allowed


class StoredRow(Struct, frozen=True):
    """A row of certificate.json, as far as it is needed here; one of an earlier version has no limits."""

    name: str
    ran_by: str
    ok: bool
    judged_by: str = ""
    limits: list[StoredLimit] = []


class StoredCertificate(Struct, frozen=True):
    """The contents of certificate.json, as far as they are needed here."""

    ok: bool
    scope: str
    num_positions: int
    budgets: dict[str, Any]
    rows: list[StoredRow]
    prompts: list[Any]


@dataclass(frozen=True)
class Use:
    """The part of its budget that a row uses: the measure that is nearest to its limit, what was found, and the limit.

    found is None if the logits are not all finite numbers. by: whose limit it is: `float32`, the names of lossy passes'
    budgets, or the name of the row that this one is compared with.
    """

    measure: Measure
    found: float | None
    limit: float
    by: str


def certificate_report(data: bytes) -> dict[str, Any]:
    """Return the certificate as the page shows it; raise ValueError if a field that it needs is missing.

    data: certificate.json. Each row gets `use`, which is null for a row without a limit.
    """
    certificate, stored = read_typed(data, StoredCertificate), parse_json(data)
    uses = map(_use, certificate.rows)
    rows = [{**row, "use": to_builtins(use)} for row, use in zip(stored["rows"], uses, strict=True)]
    others = {name: value for name, value in stored.items() if name != "prompts"}
    kind = "auto" if any(row.name == "program" for row in certificate.rows) else "passes"
    return {**others, "kind": kind, "rows": rows, "num_prompts": len(certificate.prompts)}


def _use(row: StoredRow) -> Use | None:
    if not row.limits:
        return None
    nearest = max(row.limits, key=lambda limit: limit.share)
    return Use(nearest.measure, nearest.found, nearest.allowed, row.judged_by)
