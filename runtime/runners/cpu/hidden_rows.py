"""The rows in front of the LM head, where a step left them in its arena."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferc.errors import UnsupportedError
from inferc.runtime.step.plan import F32

POOLS = ("T", "S", "B", "sample")  # as they follow one another in the arena; see passes/lower/plan_memory.py


def has_hidden_rows(program: Mapping[str, Any]) -> bool:
    """Whether a program's rows are numbers that can be read: not of the ones whose LM head reads integers and scales."""
    hidden = program["step"]["hidden"]
    return hidden["dtype"] in ("bfloat16", "float32") and hidden.get("value") in program["memory_plan"]["values"]


def hidden_rows(program: Mapping[str, Any], arena: NDArray[np.uint8], maxima: Sequence[int], count: int) -> F32:
    """[count, hidden_size] as float32. maxima: the most tokens, sequences and rows of a step, as the arena was made for them."""
    if not has_hidden_rows(program):
        raise UnsupportedError("this artifact's rows cannot be read; compile it again, without --quantize")
    hidden, plan = program["step"]["hidden"], program["memory_plan"]
    place = plan["values"][hidden["value"]]
    tokens, seqs, rows = maxima
    most = {"T": tokens, "S": rows, "B": seqs}
    start = sum(plan["pools"][pool] * most[pool] for pool in POOLS[: POOLS.index(place["pool"])])
    start += place["offset"] * most[place["pool"]]
    data = arena[start : start + count * place["row_bytes"]].reshape(count, place["row_bytes"])
    width = int(hidden["shape"][-1])
    if hidden["dtype"] == "float32":
        return data[:, : 4 * width].copy().view(np.float32)
    bits = data[:, : 2 * width].copy().view(np.uint16).astype(np.uint32) << 16
    return bits.view(np.float32)
