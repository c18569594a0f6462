"""The table of the schemes of `--quantize`, one per row, and of `--kv-dtype`.

A scheme says what is rounded to 8 or 4 bits, and how far that may move the model's outputs (its error budget).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from inferc.ir.program import Program
from inferc.manifest_types import Quantization


@dataclass(frozen=True)
class Budget:
    """The error that a lossy pass may cause, measured against Hugging Face's float32 run; the certificate refuses more.

    max_kl is in nats, as a mean over positions. min_top1 is the smallest share of positions with the same top-1 token.
    """

    name: str
    max_kl: float
    min_top1: float


@dataclass(frozen=True)
class Scheme:
    """A scheme of `--quantize NAME`: what it does to weights and activation rows, and its error budget."""

    name: str
    what: str
    # Whether the rows that a product reads are rounded to 8 bits too, as they are computed.
    quantizes_rows: bool
    max_kl: float
    min_top1: float
    # The number of neighbouring four-bit values that share a scale; 0 means 8 bits and one scale per output.
    group: int = 0
    format: Literal["int8", "fp8"] = "int8"  # the 8-bit format; fp8 is float8_e4m3fn

    @property
    def budget(self) -> Budget:
        return Budget(self.name, self.max_kl, self.min_top1)


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("int8", "W8A16: weights in int8 with a scale per output", False, max_kl=0.01, min_top1=0.9),
        Scheme(
            "w8a8", "W8A8: weights as in int8, rows in int8 with a scale per token", True, max_kl=0.05, min_top1=0.85
        ),
        Scheme(
            "fp8",
            "FP8: projections and the rows they read in float8_e4m3fn, with scales as in w8a8; experts, embedding"
            " and LM head as they are",
            True,
            max_kl=0.1,
            min_top1=0.8,
            format="fp8",
        ),
        *(
            Scheme(
                name,
                f"W4A8: weights in four bits with an integer scale per {group} of them, rows as in w8a8;"
                " embedding and LM head as in w8a8",
                True,
                max_kl=max_kl,
                min_top1=0.5,
                group=group,
            )
            for name, group, max_kl in (
                ("int4", 32, 0.2),
                ("int4-g32", 32, 0.2),
                ("int4-g64", 64, 0.25),
                ("int4-g128", 128, 0.3),
            )
        ),
    )
}

KV_INT8 = Budget("kv_int8", max_kl=0.01, min_top1=0.9)


def budgets_of(program: Program) -> list[Budget]:
    """Return the error budgets of the lossy passes that a program has been through, in pass order."""
    found = [KV_INT8] if any(group.dtype == torch.int8 for group in program.kv_groups) else []
    done = program.info.quantization
    return [*found, SCHEMES[done.scheme].budget] if isinstance(done, Quantization) and done.products else found


def together(budgets: Sequence[Budget]) -> Budget:
    """Combine the budgets of several lossy passes: independent errors add up in the KL divergence."""
    return Budget(
        " with ".join(each.name for each in budgets),
        sum(each.max_kl for each in budgets),
        1.0 - sum(1.0 - each.min_top1 for each in budgets),
    )
