"""The calls of embeddings, of element-wise ops and of rows that are picked or copied."""

from __future__ import annotations

import math

from torch import fx

from inferc.codegen.cpp.calls.builder import Builder, cpp_float
from inferc.codegen.cpp.values import Call, cpp_type, row_count
from inferc.codegen.values import Values
from inferc.errors import UnsupportedError
from inferc.ir.program import argument, name_of


def embedding(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    out, operand = b.write()
    kind = cpp_type(operand)
    sizes = f"{row_count(operand)}, {operand.width}"
    return b.done(
        f"embedding<{kind}, {b.index_type('indices')}>(t, {b.weight('weight')}, {b.input('indices')}, {sizes}, {out});"
    )


def embedding_panel(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    out, operand = b.write()
    kind = cpp_type(operand)
    return b.done(
        f"embedding_panel<{kind}>(t, {b.panels('weight')}, {b.input('indices')}, {row_count(operand)}, {out});"
    )


def embedding_int8(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    out, operand = b.write()
    table, ids = f"{b.weight('weight')}, {b.weight('scale')}", b.input("indices")
    types = f"{cpp_type(operand)}, {b.index_type('indices')}"
    return b.done(f"embedding_int8<{types}>(t, {table}, {ids}, {row_count(operand)}, {operand.width}, {out});")


def embedding_panel_int8(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    out, operand = b.write()
    table, ids = f"{b.panels('weight')}, {b.weight('scale')}", b.input("indices")
    return b.done(f"embedding_panel_int8<{cpp_type(operand)}>(t, {table}, {ids}, {row_count(operand)}, {out});")


def _elementwise(node: fx.Node, values: Values, name: str, left: str, right: str) -> Call:
    b = Builder(node, values)
    x, _ = b.read(left)
    scalar = not isinstance(b.arg(right), fx.Node)
    y = cpp_float(b.arg(right)) if scalar else b.read(right)[0]
    out, result = b.write()
    name = f"{name}_scalar" if scalar else name
    return b.done(f"{name}<{cpp_type(result)}>(t, {x}, {y}, {row_count(result)}, {result.width}, {out});")


def add(node: fx.Node, values: Values) -> Call:
    if argument(node, "alpha") != 1:
        raise UnsupportedError(f"{name_of(node)}: add with alpha {argument(node, 'alpha')}")
    return _elementwise(node, values, "add", "self", "other")


def mul(node: fx.Node, values: Values) -> Call:
    return _elementwise(node, values, "mul", "self", "other")


def silu_mul(node: fx.Node, values: Values) -> Call:
    return _elementwise(node, values, "silu_mul", "gate", "up")


def gelu_mul(node: fx.Node, values: Values) -> Call:
    name = "gelu_tanh_mul" if argument(node, "approximate") == "tanh" else "gelu_mul"
    return _elementwise(node, values, name, "gate", "up")


def cat(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    parts = []
    for each in node.args[0]:  # type: ignore[union-attr]
        operand = values.operand(each)  # type: ignore[arg-type]
        b.reads.append(operand.extent)
        *_, width = each.meta["val"].shape  # type: ignore[union-attr]
        parts.append(f"{{{{{b.view(operand)}, {width}, {operand.width // width}}}}}")
    out, result = b.write()
    heads = math.prod(int(size) for size in node.meta["val"].shape[1:-1])
    return b.done(f"cat<{cpp_type(result)}>(t, {row_count(result)}, {heads}, {{{{{', '.join(parts)}}}}}, {out});")


def resize_heads(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    x, _ = b.read("x")
    out, result = b.write()
    heads, had = b.arg("x").meta["val"].shape[1:]
    sizes = f"{row_count(result)}, {heads}, {had}, {node.meta['val'].shape[2]}"
    return b.done(f"resize_heads<{cpp_type(result)}>(t, {x}, {sizes}, {out});")


def index_select(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    of_input = b.arg("self").name == "positions"
    x = f"Rows<const i64>{{{{{b.input('self')}, 1}}}}" if of_input else b.read("self")[0]
    out, result = b.write()
    kind = cpp_type(result)
    return b.done(f"index_select<{kind}>(t, {x}, {b.input('index')}, {row_count(result)}, {result.width}, {out});")
