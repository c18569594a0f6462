"""A Triton kernel and the choices under which it is compiled: what the compiler, the interpreter and a launch go by."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from inferc.codegen.triton.aot.launch import Product

POINTERS = {
    "float32": "*fp32",
    "bfloat16": "*bf16",
    "float16": "*fp16",
    "int8": "*i8",
    "int32": "*i32",
    "int64": "*i64",
}
# What `counts_ptr` points to, which every kernel reads on the device: a step's tokens, its logits rows, its sequences.
# A graph that was captured for more of them leaves the rest alone.
COUNTS = {"tokens": 0, "rows": 1, "seqs": 2}


@dataclass(frozen=True)
class Source:
    """A kernel, specialised.

    function: a triton.jit function. signature: argument name to "*bf16", "i32", …, in order, the constants left out.
    Pointers are multiples of 16 bytes unless `unaligned` has them. grid: one expression per axis over `num_tokens`,
    `num_rows`, `num_seqs` and the constants, see `LaunchRecord.grid_for`. A constant `WIDE_DOT` is for the interpreter,
    whose products of bfloat16 are wrong.
    stack_bytes: of a thread's registers, how much may lie in memory, which is slow.
    product: what it computes, if a library can as well.
    """

    function: Any
    signature: dict[str, str]
    constants: dict[str, int | float]
    grid: tuple[str, str, str]
    num_warps: int
    num_stages: int = 1
    stack_bytes: int = 0
    unaligned: tuple[str, ...] = ()
    product: Product | None = None

    @property
    def all_constants(self) -> dict[str, int | float]:
        """The constants, and 0 for each argument of the function of which this specialisation has nothing."""
        return {**self.constants, **absent(self.function, (*self.signature, *self.constants))}

    @property
    def aligned(self) -> tuple[str, ...]:
        """The arguments that are promised to be multiples of 16 bytes, in order."""
        return tuple(
            name for name, kind in self.signature.items() if kind.startswith("*") and name not in self.unaligned
        )


def absent(function: Any, given: Iterable[str]) -> dict[str, int | float]:
    """0 for each argument of a triton.jit function that is not among those `given`."""
    return dict.fromkeys([name for name in function.arg_names if name not in set(given)], 0)
