"""The calls of matrix products, by the type of their weights."""

from __future__ import annotations

from torch import fx

from inferc.codegen.cpp.calls.builder import Builder
from inferc.codegen.cpp.values import CPP_TYPES, Call, cpp_type, row_count
from inferc.codegen.values import Values
from inferc.ir.ops.quantize import int4_group
from inferc.ir.program import target_name


def linear(node: fx.Node, values: Values) -> Call:
    return _matrix(Builder(node, values), "input")


def linear_wide(node: fx.Node, values: Values) -> Call:
    return _matrix(Builder(node, values), "x")


def linear_add(node: fx.Node, values: Values) -> Call:
    return _matrix(Builder(node, values), "x")


def linear_int8(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    x, operand = b.read("x")
    weights = f"{b.streamed(b.panels('weight', cpp_type(operand)))}, {b.weight('scale')}"
    return _integer_matrix(b, x, weights, cpp_type(operand))


def linear_w8a8(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    return _integer_matrix(b, scaled_rows(b), f"{b.streamed(b.panels('weight', 'i8'))}, {b.weight('scale')}")


def linear_w4a8(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    rows = scaled_rows(b)
    return _integer_matrix(b, rows, f"{b.streamed(int4_panels(b))}, {b.weight('scale')}")


def int4_panels(b: Builder) -> str:
    (n, _), k = b.arg("weight").meta["val"].shape, b.arg("x").meta["val"].shape[1]
    group = int4_group(b.arg("weight").meta["val"], b.arg("group_scale").meta["val"])
    sizes = f"{n}, {k}, {group}, {b.blocking(n, k, 'i8', 0.5)}"
    return f"Int4Panels{{{{{b.weight('weight')}, {b.weight('group_scale')}, {sizes}}}}}"


def scaled_rows(b: Builder) -> str:
    return f"{b.read('x')[0]}, {b.read('x_scale')[0]}"


def _integer_matrix(b: Builder, x: str, weights: str, kind: str = "") -> Call:
    """Return the call of a product with integer weights.

    kind: the C++ type of float rows and of the bias; if empty, the rows are integers and it is the bias's type.
    """
    residual = b.read("residual")[0] if b.arg("residual") is not None else "{{}}"
    out, result = b.write()
    bias, name = b.arg("bias"), target_name(b.node.target).removeprefix("inferc.")
    kind = kind or (cpp_type(result) if bias is None else CPP_TYPES[bias.meta["val"].dtype])
    written = f"Written<{cpp_type(result)}>{{{{{residual}, {out}}}}}"
    types = f"{kind}, {cpp_type(result)}"
    return b.done(f"{name}<{types}>(t, {x}, {row_count(result)}, {weights}, {b.weight('bias')}, {written});")


def linear_silu_mul(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    x, operand = b.read("x")
    out, result = b.write()
    weights = f"{b.streamed(b.panels('weight', cpp_type(operand), gated=True))}, {b.weight('bias')}"
    return b.done(f"linear_silu_mul<{cpp_type(result)}>(t, {x}, {row_count(result)}, {weights}, {out});")


def lm_head(node: fx.Node, values: Values) -> Call:
    return _matrix(Builder(node, values), "hidden")


def _matrix(b: Builder, name: str) -> Call:
    x, left = b.read(name)
    adds = target_name(b.node.target) == "inferc.linear_add"
    residual = f"{b.read('residual')[0]}, " if adds else ""
    out, result = b.write()
    types = f"{cpp_type(left)}, {cpp_type(result)}"
    bias = "nullptr" if target_name(b.node.target) == "inferc.linear_wide" else b.weight("bias")
    weights = f"{b.streamed(b.panels('weight', cpp_type(left)))}, {bias}"
    kernel = "linear_add" if adds else "linear"
    return b.done(f"{kernel}<{types}>(t, {x}, {row_count(result)}, {weights}, {residual}{out});")


def head_linear(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    x, operand = b.read("x")
    heads, n, k = b.arg("weight").meta["val"].shape
    panels = f"Panels<{cpp_type(operand)}>{{{{{b.weight('weight')}, {n}, {k}}}}}"
    out, result = b.write()
    return b.done(f"head_linear<{cpp_type(result)}>(t, {x}, {row_count(result)}, {heads}, {panels}, {out});")
