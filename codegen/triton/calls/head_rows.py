"""The launches of a head that drafts: what makes its input, and what keeps rows for it to read."""

from __future__ import annotations

from inferc.codegen.triton.aot.source import Source
from inferc.codegen.triton.calls.builder import Call, Choice
from inferc.codegen.triton.kernels.head_rows import head_input, keep_rows
from inferc.codegen.values import Operand
from inferc.ir.program import dtype_name
from inferc.manifest_types import RowKind, Where

HIDDEN_IN = "hidden_in"  # the input of a head's step that has rows of other steps


def head_input_call(hidden_in: Operand, own: int) -> Call:
    """Return the launch that makes the head's input [tokens, …], whose last `own` columns are for rows of its own."""
    arguments = {
        "given_ptr": Where(state="given_rows"),
        "own_ptr": Where(state="own_rows"),
        "numbers_ptr": Where(input="row_numbers"),
        "out_ptr": Where(hidden_in.pool, offset=hidden_in.offset, column=hidden_in.column),
        "counts_ptr": Where(counts="step"),
    }
    source = head_input(dtype_name(hidden_in.dtype), hidden_in.width - own, own, hidden_in.stride)
    return Call(None, "head_input", "tokens", (Choice(source),), arguments, [])


def keep_calls(hidden_in: Operand, own: int) -> list[Call]:
    """Return the launches that keep rows: the model's, the head's own by token, and its own by sampled row.

    Whose rows they keep, and where in memory these are, is known when the head is loaded beside its model.
    """
    dtype, given = dtype_name(hidden_in.dtype), hidden_in.width - own
    return [
        _keep("tokens", keep_rows(dtype, "tokens", given)),
        _keep("rows", keep_rows(dtype, "rows", own, has_rows=True)),
        _keep("rows", keep_rows(dtype, "rows", own)),
    ]


def _keep(rows: RowKind, source: Source) -> Call:
    known = {
        "rows_ptr": Where(input="logits_rows"),
        "numbers_ptr": Where(input="kept_numbers"),
        "kept_ptr": Where(state="kept_rows"),
        "counts_ptr": Where(counts="step"),
    }
    arguments = {name: known.get(name, Where()) for name in source.signature}
    return Call(None, "keep_rows", rows, (Choice(source),), arguments, [])
