"""The hidden rows before the LM head, read from the arena after a step."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from inferc.arena import MostRows
from inferc.errors import UnsupportedError
from inferc.manifest_types import Program
from inferc.runtime.step.plan import F32


def has_hidden_rows(program: Program) -> bool:
    """Return whether the hidden rows of a program are stored as bfloat16 or float32 in its arena, so they can be read.

    They are not where the LM head reads quantized integers and scales.
    """
    hidden = program.step.hidden
    return hidden.dtype in ("bfloat16", "float32") and hidden.value in program.memory_plan.values


def hidden_rows(program: Program, arena: NDArray[np.uint8], most: MostRows, count: int) -> F32:
    """Return the hidden rows as float32 [count, hidden_size]. most: the row counts that the arena was sized for."""
    if not has_hidden_rows(program):
        raise UnsupportedError("this artifact's rows cannot be read; compile it again, without --quantize")
    hidden, plan = program.step.hidden, program.memory_plan
    place = plan.values[hidden.value]
    start = plan.arena.address(place.pool, place.offset, most)
    data = arena[start : start + count * place.row_bytes].reshape(count, place.row_bytes)
    width = int(hidden.shape[-1])
    if hidden.dtype == "float32":
        return data[:, : 4 * width].copy().view(np.float32)
    bits = data[:, : 2 * width].copy().view(np.uint16).astype(np.uint32) << 16
    return bits.view(np.float32)
