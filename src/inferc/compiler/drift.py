"""The measure of how far logits are from a reference's, and the limits that certificates and `inferc diff` judge by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Literal

from torch import Tensor, cat, tensor, zeros_like
from torch import bool as bool_

if TYPE_CHECKING:
    from inferc.passes.quantize.schemes import Budget

FLOAT32_BUDGET = 1e-5  # the largest `relative_error` of a float32 program
REFERENCE_FACTOR = 1.1  # a mean KL may be this many times the reference's
# A mean KL is too large if it exceeds REFERENCE_FACTOR times the reference's by more than STANDARD_ERRORS times its own
# standard error. This margin is at most MARGIN times the reference's mean.
STANDARD_ERRORS = 3.0
MARGIN = 0.5
# A position is broken if its KL is more than OUTLIER_FACTOR times the reference's largest, and more than OUTLIER_FLOOR
# nats.
OUTLIER_FACTOR = 10.0
OUTLIER_FLOOR = 1e-3
# Exception: in a dtype other than float32 a router may choose another expert where two are equally likely to within
# rounding. At most ROUTED_SHARE of the positions may be off for this reason, each by at most ROUTED_KL nats.
ROUTED_SHARE, ROUTED_KL = 0.03, 2.0
CHUNK_ELEMENTS = 1 << 20  # logits that are measured at once, in float64


Measure = Literal["relative_error", "kl", "other_top1", "kl_of_one"]


@dataclass(frozen=True)
class Limit:
    """A measure that is judged, with what was found of it and what is allowed; found is None if it is no number.

    kl is a mean over positions, and kl_of_one the largest of one position, both in nats. other_top1 is the share of
    positions at which another token is the most likely one.
    """

    measure: Measure
    found: float | None
    allowed: float


@dataclass(frozen=True)
class Verdict:
    """The verdict about logits: why they are too far from the reference's, empty if they are not, and the limits."""

    reason: str
    limits: tuple[Limit, ...]


@dataclass(frozen=True)
class Drift:
    """The distance of logits from a reference's, over all positions; errors are those of centred logits."""

    max_abs_error: float
    relative_error: float  # the root mean square of the error, relative to that of the reference's logits
    kl: Tensor  # the KL divergence from the reference at each position, in nats
    top1_agreement: float

    @property
    def is_finite(self) -> bool:
        mean = float(self.kl.mean())
        return all(map(math.isfinite, (self.max_abs_error, self.relative_error, mean)))


def measure(found: Sequence[Tensor], reference: Sequence[Tensor]) -> Drift:
    """Measure how far logits are from the reference's; both are one tensor [T, vocab_size] per prompt."""
    errors, sizes, largest, kls, agreed = 0.0, 0.0, 0.0, [], 0
    pairs = zip(found, reference, strict=True)
    chunks = (zip(*(each.split(_rows_at_once(each)) for each in pair), strict=True) for pair in pairs)
    for logits, expected in chain.from_iterable(chunks):
        ours, wide = logits.double().log_softmax(-1), expected.double().log_softmax(-1)
        centred = _centred(wide)
        error = _centred(ours) - centred
        errors += float(error.pow(2).sum())
        sizes += float(centred.pow(2).sum())
        largest = max(largest, float(error.abs().max()))
        kls.append((wide.exp() * (wide - ours)).sum(-1))
        agreed += int((ours.argmax(-1) == wide.argmax(-1)).sum())
    kl = cat(kls)
    return Drift(largest, math.sqrt(errors / sizes), kl, agreed / len(kl))


def perplexity(logits: Sequence[Tensor], prompts: Sequence[Sequence[int]]) -> float | None:
    """Return the perplexity of the prompts' own tokens; None if there is nothing to predict or it is no number."""
    losses = []
    for of_prompt, prompt in zip(logits, prompts, strict=True):
        if len(prompt) > 1:
            count, following = _rows_at_once(of_prompt), tensor(list(prompt[1:]))
            for rows, token_ids in zip(of_prompt[:-1].split(count), following.split(count), strict=True):
                losses.append(-rows.double().log_softmax(-1).gather(-1, token_ids[:, None])[:, 0])
    return figure(float(cat(losses).mean().exp())) if losses else None


def _rows_at_once(logits: Tensor) -> int:
    return max(1, CHUNK_ELEMENTS // logits.shape[-1])


def _centred(log_probabilities: Tensor) -> Tensor:
    """Subtract the mean of each position, since a constant added to its logits changes no probability."""
    return log_probabilities - log_probabilities.mean(-1, keepdim=True)


def judge_float32(relative_error: float) -> Verdict:
    """Judge a float32 program by how far it is from float32."""
    reason = ""
    if relative_error > FLOAT32_BUDGET:
        reason = f"its logits are off by {relative_error:.1e} of the reference's, allowed {FLOAT32_BUDGET:.0e}"
    return Verdict(reason, (_limit("relative_error", relative_error, FLOAT32_BUDGET),))


def judge_budget(kl: float, top1_agreement: float, budget: Budget) -> Verdict:
    """Judge a quantized program by the budget of its lossy passes."""
    reason = ""
    if kl > budget.max_kl:
        reason = f"its KL to float32 is {kl:.2e} nats, {budget.name} is allowed {budget.max_kl:.2e}"
    elif top1_agreement < budget.min_top1:
        reason = (
            f"float32's most likely token is its own at {top1_agreement:.1%} of the positions,"
            f" {budget.name} needs {budget.min_top1:.0%}"
        )
    limits = _limit("kl", kl, budget.max_kl), _limit("other_top1", 1.0 - top1_agreement, 1.0 - budget.min_top1)
    return Verdict(reason, limits)


def judge_by_own(kl: Tensor, own: Tensor, name: str, has_router: bool = False) -> Verdict:
    """Judge the KL per position by `own`, that of `name`.

    It is too large if a single position is broken, or in the mean. Positions that a router may have decided otherwise
    do not count, unless there are too many of them.
    """
    of_one = max(OUTLIER_FACTOR * float(own.max()), OUTLIER_FLOOR)
    routed = (kl > of_one) & (kl <= ROUTED_KL) if has_router else zeros_like(kl, dtype=bool_)
    if int(routed.sum()) > max(1.0, ROUTED_SHARE * len(kl)):
        return Verdict(
            f"{int(routed.sum())} of {len(kl)} positions are off by more than {of_one:.1e} nats,"
            " too many to be ties of the router",
            (_limit("kl_of_one", float(kl.max()), of_one),),
        )
    kl, own = kl[~routed], own[~routed]
    if not len(kl):
        return Verdict("", ())
    largest, mean, mean_of_own = float(kl.max()), float(kl.mean()), float(own.mean())
    noise = float((kl - REFERENCE_FACTOR * own).std()) / math.sqrt(len(kl)) if len(kl) > 1 else 0.0
    margin = min(STANDARD_ERRORS * noise, MARGIN * mean_of_own) if math.isfinite(noise) else 0.0
    allowed = REFERENCE_FACTOR * mean_of_own + margin
    reason = ""
    if largest > of_one:
        reason = f"a position's KL to float32 is {largest:.2e} nats, and {name} is {float(own.max()):.2e} at most"
    elif mean > allowed:
        reason = f"its KL to float32 is {mean:.2e}, {name} is {mean_of_own:.2e}"
    return Verdict(reason, (_limit("kl", mean, allowed), _limit("kl_of_one", largest, of_one)))


def _limit(measure: Measure, found: float, allowed: float) -> Limit:
    return Limit(measure, figure(found), float(f"{allowed:.4g}"))


def figure(value: float) -> float | None:
    """Round to four digits, as more would be noise in a file that people read; return None for NaN and infinity.

    JSON has neither.
    """
    return float(f"{value:.4g}") if math.isfinite(value) else None
