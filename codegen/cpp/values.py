"""The dataclasses of a C++ kernel call, and the C++ names of its operands."""

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
    torch.float16: "u16",  # the bits of float16, as scales are stored
    torch.int32: "i32",
    torch.int64: "i64",
}
POOLS = {"T": "token", "S": "row", "B": "seq", "sample": "sample"}
ROW_COUNTS = {"T": "s.tokens", "S": "s.rows", "B": "s.seqs", "sample": "rows"}


def cpp_type(operand: Operand) -> str:
    """Return the C++ type of an element of the operand."""
    return CPP_TYPES[operand.dtype]


def row_count(operand: Operand) -> str:
    """Return the C++ expression for the number of rows that the step has in the operand's pool."""
    return ROW_COUNTS[operand.pool]


@dataclass(frozen=True)
class Slot:
    """A number in a call that may differ between layers: printed as a literal, or read from the layers' table."""

    value: int


@dataclass
class Call:
    """A kernel call: C++ text with a `{n}` for each slot, and the memory it reads and writes (to place barriers)."""

    text: str
    slots: list[Slot]
    reads: list[tuple[Any, int, int]]
    writes: list[tuple[Any, int, int]]
    outputs: list[tuple[fx.Node, Operand, int]]  # the last is the slot of the result's offset
    node: fx.Node
    # C++ text for the first piece of memory that each thread will read, if that is known before the call
    ahead: str = ""
    apart: bool = True  # a template kernel can be compiled in another unit than the call
    own: bool = False  # the kernel is a user's
    product: Product | None = None  # the matrix product that the call computes, if its text names a blocking

    @property
    def kernel(self) -> str:
        """The kernel's C++ name with its template arguments."""
        return self.text.partition("(")[0]

    def conflicts(self, others: list[Call]) -> bool:
        """Tell whether this call must wait at a barrier for any of `others`."""
        return any(
            _overlap(self.reads, other.writes) or _overlap(self.writes, other.writes + other.reads) for other in others
        )


def _overlap(left: list[tuple[Any, int, int]], right: list[tuple[Any, int, int]]) -> bool:
    return any(a == b and low < top and bottom < high for a, low, high in left for b, bottom, top in right)
