"""The measure of how far logits are from a reference's, and the limits that certificates and `inferc diff` judge by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

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


def over_float32(relative_error: float) -> str:
    """Return why a float32 program is too far from float32; empty if it is not."""
    if relative_error <= FLOAT32_BUDGET:
        return ""
    return f"its logits are off by {relative_error:.1e} of the reference's, allowed {FLOAT32_BUDGET:.0e}"


def over_budget(kl: float, top1_agreement: float, budget: Budget) -> str:
    """Return why a quantized program is too far from float32; empty if it is not."""
    if kl > budget.max_kl:
        return f"its KL to float32 is {kl:.2e} nats, {budget.name} is allowed {budget.max_kl:.2e}"
    if top1_agreement < budget.min_top1:
        return (
            f"float32's most likely token is its own at {top1_agreement:.1%} of the positions,"
            f" {budget.name} needs {budget.min_top1:.0%}"
        )
    return ""


def over_own(kl: Tensor, own: Tensor, name: str, has_router: bool = False) -> str:
    """Return why the KL per position is worse than `own`, that of `name`; empty if it is not.

    It is worse if a single position is broken, or if the mean is too large.
    """
    limit = max(OUTLIER_FACTOR * float(own.max()), OUTLIER_FLOOR)
    routed = (kl > limit) & (kl <= ROUTED_KL) if has_router else zeros_like(kl, dtype=bool_)
    if int(routed.sum()) > max(1.0, ROUTED_SHARE * len(kl)):
        return (
            f"{int(routed.sum())} of {len(kl)} positions are off by more than {limit:.1e} nats,"
            " too many to be ties of the router"
        )
    kl, own = kl[~routed], own[~routed]
    if not len(kl):
        return ""
    if float(kl.max()) > limit:
        return f"a position's KL to float32 is {float(kl.max()):.2e} nats, and {name} is {float(own.max()):.2e} at most"
    worse = kl - REFERENCE_FACTOR * own
    margin = STANDARD_ERRORS * float(worse.std()) / math.sqrt(len(worse)) if len(worse) > 1 else 0.0
    if float(worse.mean()) > min(margin, MARGIN * float(own.mean())):
        return f"its KL to float32 is {float(kl.mean()):.2e}, {name} is {float(own.mean()):.2e}"
    return ""


def figure(value: float) -> float | None:
    """Round to four digits, as more would be noise in a file that people read; return None for NaN and infinity.

    JSON has neither.
    """
    return float(f"{value:.4g}") if math.isfinite(value) else None
