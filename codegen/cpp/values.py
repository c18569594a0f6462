"""A call of a C++ kernel, and how C++ names what it is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from inferc.codegen.cpp.blocking import Product
from inferc.codegen.values import Operand

CPP_TYPES = {
    torch.float32: "float",
    torch.bfloat16: "bf16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.float16: "u16",  # its bits: scales
    torch.int32: "i32",
    torch.int64: "i64",
}
POOLS = {"T": "token", "S": "row", "B": "seq", "sample": "sample"}
ROW_COUNTS = {"T": "s.tokens", "S": "s.rows", "B": "s.seqs", "sample": "rows"}


def cpp_type(operand: Operand) -> str:
    """Of an element."""
    return CPP_TYPES[operand.dtype]


def row_count(operand: Operand) -> str:
    """How many rows the step has in the operand's pool."""
    return ROW_COUNTS[operand.pool]


@dataclass(frozen=True)
class Slot:
    """A number in a call that may differ from layer to layer: it is printed, or read from the layers' table."""

    value: int


@dataclass
class Call:
    """One kernel call: C++ text with a `{n}` for each slot, and what it touches (for the barriers)."""

    text: str
    slots: list[Slot]
    reads: list[tuple[Any, int, int]]
    writes: list[tuple[Any, int, int]]
    outputs: list[tuple[fx.Node, Operand, int]]  # with the slot of the result's offset
    node: fx.Node
    ahead: str = ""  # the C++ text of what a thread will read first, if that is known before
    apart: bool = True  # the kernel, if it is a template, can be compiled apart from the call
    own: bool = False  # the kernel is a user's
    product: Product | None = None  # the matrix product that it is, which its text has a blocking for

    @property
    def kernel(self) -> str:
        """What is called, with its template arguments."""
        return self.text.partition("(")[0]

    def conflicts(self, others: list[Call]) -> bool:
        """Whether it must wait for any of `others`."""
        return any(
            _overlap(self.reads, other.writes) or _overlap(self.writes, other.writes + other.reads) for other in others
        )


def _overlap(left: list[tuple[Any, int, int]], right: list[tuple[Any, int, int]]) -> bool:
    return any(a == b and low < top and bottom < high for a, low, high in left for b, bottom, top in right)
