"""The schemes of `--quantize`, one a row, and of `--kv-dtype`: what is rounded to 8 or 4 bits, and how far that may move the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from inferc.ir.program import Program


@dataclass(frozen=True)
class Budget:
    """max_kl (nats, mean over positions) and min_top1 are to Hugging Face's float32 run; the certificate refuses more."""

    name: str
    max_kl: float
    min_top1: float


@dataclass(frozen=True)
class Scheme:
    """What `--quantize NAME` does to weights and rows, and its budget."""

    name: str
    what: str
    quantizes_rows: bool  # the rows that a product reads are rounded to 8 bits too, as they are computed
    max_kl: float
    min_top1: float
    group: int = 0  # of neighbours in four bits that share a scale; 0: 8 bits, a scale for each output
    format: Literal["int8", "fp8"] = "int8"  # of what is in 8 bits; fp8 is float8_e4m3fn

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
            "FP8: projections and the rows they read in float8_e4m3fn, with scales as in w8a8; experts, embedding and LM"
            " head as they are",
            True,
            max_kl=0.1,
            min_top1=0.8,
            format="fp8",
        ),
        *(
            Scheme(
                name,
                f"W4A8: weights in four bits with an integer scale per {group} of them, rows as in w8a8; embedding and LM"
                " head as in w8a8",
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
    """Of the lossy passes that a program has been through, in their order."""
    found = [KV_INT8] if any(group.dtype == torch.int8 for group in program.kv_groups) else []
    done = program.info.get("quantization", {"products": 0})
    return [*found, SCHEMES[done["scheme"]].budget] if done["products"] else found


def together(budgets: Sequence[Budget]) -> Budget:
    """What several lossy passes may do between them: independent errors add up in the KL."""
    return Budget(
        " with ".join(each.name for each in budgets),
        sum(each.max_kl for each in budgets),
        1.0 - sum(1.0 - each.min_top1 for each in budgets),
    )
