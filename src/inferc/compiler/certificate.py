"""The certificate: its rows, and the judge of how far logits may be from a reference's.

A float32 row must stay within `drift.FLOAT32_BUDGET`; a row in another dtype may be no worse than `REFERENCE_FACTOR`
times Hugging Face's own run in that dtype, in the mean and at every position. The row of a lossy pass (weights, rows or
the KV cache in integers) has the budget of all lossy passes up to it, and later rows may be no worse than that row,
judged the same way.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from torch import Tensor

from inferc.compiler import drift
from inferc.errors import VerifyError
from inferc.ir.program import Program
from inferc.passes.quantize.schemes import Budget

log = logging.getLogger(__name__)

FLOAT32 = "float32"  # whose limits a row has that rounds nothing


@dataclass(frozen=True)
class Row:
    """A line of the certificate; errors are those of centred logits, KL is from the float32 reference, in nats."""

    name: str
    ran_by: str  # transformers, reference (the ops' references), or the target's kernels and the machine
    dtype: str
    # max_abs_error, relative_error and kl are None where the logits are not all finite numbers.
    max_abs_error: float | None
    relative_error: float | None  # the root mean square of the error, relative to that of the reference's logits
    kl: float | None  # the mean over positions
    top1_agreement: float
    kl_p99: float | None = None  # the KL that one position in a hundred exceeds
    perplexity: float | None = None  # of the prompts' own tokens
    greedy_equal: int | None = None  # how many prompts have the greedy tokens of transformers in the same dtype
    # The limits that the row was judged by, and whose they are: float32's, the lossy passes' budgets, by name, or those
    # of another row that this one is compared with, by its name. The row that is compared with has none.
    judged_by: str = ""
    limits: tuple[drift.Limit, ...] = ()
    ok: bool = True
    reason: str = ""


@dataclass
class Certificate:
    """The rows of a certificate in the order of the compile; `scope` says which weights they were computed with."""

    scope: str
    prompts: list[list[int]]
    perplexity: float | None = None  # of the prompts' own tokens by the float32 reference
    rows: list[Row] = field(default_factory=list)
    lossy: list[Budget] = field(default_factory=list)  # the budgets of the passes that round to integers, in order

    @property
    def ok(self) -> bool:
        """The verdict of the certificate: True if every row is within its budget."""
        return all(row.ok for row in self.rows)

    def to_json(self) -> dict[str, object]:
        """Return the contents of certificate.json."""
        return {
            "scope": self.scope,
            "ok": self.ok,
            "budgets": {
                "float32_relative_error": drift.FLOAT32_BUDGET,
                "kl_factor": drift.REFERENCE_FACTOR,
                **self._lossy(),
            },
            "num_positions": sum(len(prompt) for prompt in self.prompts),
            "perplexity": self.perplexity,
            "prompts": self.prompts,
            "rows": [asdict(row) for row in self.rows],
        }

    def _lossy(self) -> dict[str, dict[str, float]]:
        return {each.name: {"max_kl": each.max_kl, "min_top1": each.min_top1} for each in self.lossy}


def computed_text(program: Program) -> str:
    """Return a text of what a program computes: its graph without kernels and places, its weights without layouts."""
    graph = re.sub(r"  #.*", "", program.to_text())
    logical = {name: weight.args[0] if weight.op == "pack" else weight for name, weight in program.weights.items()}
    return graph + "".join(f"{name} = {weight}\n" for name, weight in logical.items())


class Judge:
    """The judge of rows: each is measured against one reference, added to the certificate, and refused if it drifted.

    reference: its logits [T, vocab_size] per prompt, in float32; prompts: the token ids, for perplexities. allow_drift:
    record a row that is over its budget, and go on.
    """

    def __init__(
        self,
        certificate: Certificate,
        reference: list[Tensor],
        dtype: str,
        *,
        prompts: Sequence[Sequence[int]] = (),
        allow_drift: bool = False,
    ) -> None:
        self.certificate, self.reference, self._prompts = certificate, reference, prompts
        self._dtype, self._allow_drift = dtype, allow_drift
        self.has_router = False
        # The joint budget of lossy passes, for the next row.
        self.budget: Budget | None = None
        # The KL per position of the run that later rows must not be worse than, the name of its row, and its own name.
        self._own_kl: Tensor | None = None
        self._own_row, self._own_name = "", f"transformers' own in {dtype}"

    def add_own(self, logits: Sequence[Tensor]) -> None:
        """Add the row of transformers' own run in the artifact's dtype, which later rows are judged by."""
        row, self._own_kl = self._compare("hugging_face", "transformers", logits)
        self._own_row = row.name
        self.certificate.rows.append(row)

    def add(
        self, name: str, ran_by: str, logits: Sequence[Tensor], greedy_equal: int | None = None, why: str = ""
    ) -> Row:
        """Add a row; raise VerifyError if it is over its budget. why: what else is known of the reason."""
        row, kl = self._compare(name, ran_by, logits)
        judged_by, verdict = self._judge(row, kl, greedy_equal)
        row = replace(
            row,
            greedy_equal=greedy_equal,
            judged_by=judged_by,
            limits=verdict.limits,
            ok=not verdict.reason,
            reason=f"{verdict.reason}{why}" if verdict.reason else "",
        )
        self.certificate.rows.append(row)
        if self.budget is not None:  # later rows compute the same integers: this row is their reference
            if bool(kl.isfinite().all()):  # a row that is kept with --allow-drift but not finite can be no reference
                self._own_kl, self._own_row = kl, name
                self._own_name = f"the {self.budget.name} program's own by the references"
            self.budget = None
        log.info("certificate: %s by %s: relative error %s, KL %s", name, ran_by, row.relative_error, row.kl)
        if not row.ok and not self._allow_drift:
            raise VerifyError(f"{name} (run by {row.ran_by}): {row.reason}; --allow-drift compiles it all the same")
        return row

    def _compare(self, name: str, ran_by: str, found: Sequence[Tensor]) -> tuple[Row, Tensor]:
        """Return the row without judgement, and the KL of each position.

        found: one tensor of logits [T, vocab_size] per prompt.
        """
        found_drift = drift.measure(found, self.reference)
        row = Row(
            name,
            ran_by,
            self._dtype,
            max_abs_error=drift.figure(found_drift.max_abs_error),
            relative_error=drift.figure(found_drift.relative_error),
            kl=drift.figure(float(found_drift.kl.mean())),
            top1_agreement=round(found_drift.top1_agreement, 4),
            kl_p99=drift.figure(float(found_drift.kl.quantile(0.99))),
            perplexity=drift.perplexity(found, self._prompts) if self._prompts else None,
        )
        return row, found_drift.kl

    def _judge(self, row: Row, kl: Tensor, greedy_equal: int | None) -> tuple[str, drift.Verdict]:
        """Return whose limits the row is judged by, and the verdict."""
        judged_by, verdict = self._by_limits(row, kl)
        if row.max_abs_error is None or row.relative_error is None or row.kl is None:
            return judged_by, replace(verdict, reason="its logits are not all finite numbers")
        count = len(self.certificate.prompts)
        if judged_by == FLOAT32 and not verdict.reason and greedy_equal is not None and greedy_equal < count:
            reason = f"greedy tokens differ from transformers' in {count - greedy_equal} prompts"
            return judged_by, replace(verdict, reason=reason)
        return judged_by, verdict

    def _by_limits(self, row: Row, kl: Tensor) -> tuple[str, drift.Verdict]:
        if self.budget is not None:
            return self.budget.name, drift.judge_budget(_number(row.kl), row.top1_agreement, self.budget)
        if self._own_kl is None:
            return FLOAT32, drift.judge_float32(_number(row.relative_error))
        return self._own_row, self._judge_positions(kl, self._own_kl)

    def _judge_positions(self, kl: Tensor, own: Tensor) -> drift.Verdict:
        return drift.judge_by_own(kl, own, self._own_name, self.has_router)


def _number(value: float | None) -> float:
    return math.nan if value is None else value
