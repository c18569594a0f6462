"""The calls of norms, and of quantizing rows, alone or after a norm."""

from __future__ import annotations

from torch import fx

from inferc.codegen.cpp.calls.builder import Builder, cpp_bool, cpp_float
from inferc.codegen.cpp.values import Call, cpp_type, row_count
from inferc.codegen.values import Values, part
from inferc.ir.program import target_name


def norm_arguments(b: Builder) -> str:
    eps, offset = cpp_float(b.arg("eps")), cpp_float(b.arg("weight_offset"))
    return f"Norm{{{{{eps}, {offset}, {cpp_bool(b.arg('round_before_scale'))}}}}}"


def rms_norm(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    x, _ = b.read("x")
    out, result = b.write()
    width = int(node.meta["val"].shape[-1])
    sizes = f"{row_count(result)}, {result.width // width}, {width}"
    return b.done(f"rms_norm<{cpp_type(result)}>(t, {x}, {b.weight('weight')}, {norm_arguments(b)}, {sizes}, {out});")


def layer_norm(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    x, _ = b.read("x")
    out, result = b.write()
    width = int(node.meta["val"].shape[-1])
    # Each head may have its own weight; these lie one after the other in memory.
    own = b.arg("weight") is not None and b.arg("weight").meta["val"].dim() == 2
    sizes = f"{row_count(result)}, {result.width // width}, {width}, {width if own else 0}"
    weights = f"{b.weight('weight')}, {b.weight('bias')}"
    return b.done(f"layer_norm<{cpp_type(result)}>(t, {x}, {weights}, {cpp_float(b.arg('eps'))}, {sizes}, {out});")


def rms_norm_add(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    x, _ = b.read("x")
    residual, _ = b.read("residual")
    out, result = b.write(0)
    # The sum after the last norm has no reader: it is written where the result will be.
    total = b.write(1)[0] if part(node, 1) is not None else b.view(result)
    sizes = f"{row_count(result)}, {result.width}"
    weight = b.weight("weight")
    return b.done(
        f"rms_norm_add<{cpp_type(result)}>(t, {x}, {residual}, {weight}, {norm_arguments(b)}, {sizes}, {out}, {total});"
    )


def quantize_rows(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    x, _ = b.read("x")
    return _quantized(b, "x", x)


def silu_mul_quantize(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    return _quantized(b, "gate", f"{b.read('gate')[0]}, {b.read('up')[0]}")


def rms_norm_quantize(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    x, _ = b.read("x")
    return _quantized(b, "x", f"{x}, {b.weight('weight')}, {norm_arguments(b)}")


def rms_norm_add_quantize(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    x, _ = b.read("x")
    residual, _ = b.read("residual")
    return _quantized(b, "x", f"{x}, {residual}, {b.weight('weight')}, {norm_arguments(b)}", results=3)


def layer_norm_quantize(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    x, _ = b.read("x")
    return _quantized(b, "x", f"{x}, {b.weight('weight')}, {b.weight('bias')}, {cpp_float(b.arg('eps'))}")


def _quantized(b: Builder, name: str, inputs: str, results: int = 2) -> Call:
    """Return the call of an op that returns int8 rows, their scales and possibly more results."""
    kind = cpp_type(b.values.operand(b.arg(name)))
    parts = [b.write(index) for index in range(results)]
    outs = ", ".join(text for text, _ in parts)
    _, rows = parts[0]
    op = target_name(b.node.target).removeprefix("inferc.")
    return b.done(f"{op}<{kind}>(t, {inputs}, {row_count(rows)}, {rows.width}, {outs});")
