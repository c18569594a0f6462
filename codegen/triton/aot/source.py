"""A Triton kernel and the choices under which it is compiled, for the compiler, the interpreter and launches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from inferc.manifest_types import RecordProduct

POINTERS = {
    "float32": "*fp32",
    "bfloat16": "*bf16",
    "float16": "*fp16",
    "int8": "*i8",
    "int32": "*i32",
    "int64": "*i64",
}
# Indices into `counts_ptr`: the step's numbers of tokens, of logits rows and of sequences. Every kernel reads them on
# the device, so that a graph that was captured for larger numbers leaves the rest alone.
COUNTS = {"tokens": 0, "rows": 1, "seqs": 2}


@dataclass(frozen=True)
class Source:
    """A Triton kernel with the argument types, constants, grid and warps that it is compiled for.

    - `function`: a triton.jit function.
    - `signature`: argument name to "*bf16", "i32", …, in order, without the constants. Pointers are multiples of 16
      bytes unless `unaligned` names them.
    - `constants`: the values of constexpr arguments. `WIDE_DOT` is for the interpreter, whose products of bfloat16 are
      wrong.
    - `grid`: one expression per axis over `num_tokens`, `num_rows`, `num_seqs` and the constants, see
      `grid_for`.
    - `stack_bytes`: how many bytes of a thread's registers may spill to memory, which is slow.
    - `product`: what the kernel computes, if a library can compute it as well.
    """

    function: Any
    signature: dict[str, str]
    constants: dict[str, int | float]
    grid: tuple[str, str, str]
    num_warps: int
    num_stages: int = 1
    stack_bytes: int = 0
    unaligned: tuple[str, ...] = ()
    product: RecordProduct | None = None

    @property
    def all_constants(self) -> dict[str, int | float]:
        """The constants, and 0 for each argument of the function that this specialisation does not have."""
        return {**self.constants, **absent(self.function, (*self.signature, *self.constants))}

    @property
    def aligned(self) -> tuple[str, ...]:
        """The arguments that are promised to be multiples of 16 bytes, in order."""
        return tuple(
            name for name, kind in self.signature.items() if kind.startswith("*") and name not in self.unaligned
        )


def absent(function: Any, given: Iterable[str]) -> dict[str, int | float]:
    """Return 0 for each argument of a triton.jit function that is not among those `given`."""
    return dict.fromkeys([name for name in function.arg_names if name not in set(given)], 0)
