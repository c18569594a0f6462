"""The calls that exchange values with other ranks: reductions, gathers, rows between pipeline stages."""

from __future__ import annotations

from torch import fx

from inferc.codegen.cpp.calls.builder import Builder
from inferc.codegen.cpp.values import POOLS, Call, cpp_type, row_count
from inferc.codegen.values import Values

GROUPS = {"tp": 0, "ep": 1}  # as in inferc_abi.h


def hidden_in(node: fx.Node, values: Values) -> Call:
    """Return the call that copies the previous pipeline stage's rows from the host into their place."""
    b = Builder(node, values)
    out, operand = b.write()
    return b.done(f"hidden_in<{cpp_type(operand)}>(t, s, {row_count(operand)}, {operand.width}, {out});")


def hidden_out(node: fx.Node, values: Values) -> str:
    """Return the statement at the step's end that copies the rows for the next pipeline stage to the host."""
    x = values.operand(node)
    view = f"s.{POOLS[x.pool]}<{cpp_type(x)}>({x.offset}, {x.column}, {x.stride})"
    return f"hidden_out<{cpp_type(x)}>(t, s, {view}, {row_count(x)}, {x.width});"


def all_reduce(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    x, _ = b.read("x")
    out, result = b.write_exchanged()
    sizes = f"{row_count(result)}, {result.width}, {GROUPS[b.arg('group')]}"
    return b.done(f"all_reduce<{cpp_type(result)}>(t, s, {x}, {sizes}, {out});")


def all_gather(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    x, _ = b.read("x")
    out, result = b.write_exchanged()
    parts = ", ".join(map(str, b.arg("sizes")))
    sizes = f"{row_count(result)}, {{{{{parts}}}}}, {result.width}, {GROUPS[b.arg('group')]}"
    return b.done(f"all_gather<{cpp_type(result)}, {len(b.arg('sizes'))}>(t, s, {x}, {sizes}, {out});")
