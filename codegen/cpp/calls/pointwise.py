"""The call of `inferc.pointwise`: one lambda over vectors that reads its inputs where and as they lie."""

from __future__ import annotations

import ast
import math
from dataclasses import dataclass
from typing import Any

from torch import fx

from inferc.codegen.cpp.calls.builder import Builder, cpp_float
from inferc.codegen.cpp.values import CPP_TYPES, Call, cpp_type, row_count
from inferc.codegen.pointwise import padded_sizes, parts
from inferc.codegen.values import Values
from inferc.ir.ops.pointwise import parse, walk

_OPERATORS: dict[type[ast.AST], str] = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div"}
# The functions that have another name in simd.h.
_NAMES = {"abs": "absolute", **{name: f"{name}_each" for name in ("floor", "log", "rsqrt", "sqrt")}}


@dataclass(frozen=True)
class _Comparison:
    left: str
    right: str


def pointwise(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    found = parts(node)
    assert found is not None, "why_not refuses it"
    count, width = found
    captured, reads = [], []
    inputs: Any = node.args[0]
    for index, each in enumerate(inputs):
        source, read = _input(b, each, index, count, width)
        captured.append(f"a{index} = {source}")
        reads.append(f"const Vec x{index} = {read};")
    out, result = b.write()
    named, value = parse(str(node.args[1]))
    lines = [f"const Vec {name} = {_cpp(part)};" for name, part in named]
    body = " ".join([*reads, *lines, f"return {_cpp(value)};"])
    sizes = f"{row_count(result)}, {count}, {width}"
    lambda_ = f"[{', '.join(captured)}](i64 row, i64 part, i64 i, i64 n) {{{{ (void)part, (void)i, (void)n; {body} }}}}"
    return b.done(f"pointwise<{cpp_type(result)}>(t, {sizes}, {out}, {lambda_});", apart=False)


def _input(b: Builder, node: fx.Node, index: int, count: int, width: int) -> tuple[str, str]:
    """Return the lambda's capture of an input, and the text that reads n elements of it.

    The elements are those from index i on, of part `part` of row `row`.
    """
    size = math.prod(padded_sizes(node, node.meta["val"].dim()))
    if node.op == "get_attr":
        kind = CPP_TYPES[node.meta["val"].dtype]
        at = _offset(size, count, width)
        text = f"s.weight<{kind}>({b.slot(b.values.weight(node))})"
        return text, f"load(a{index} + {at}, n)" if size >= width > 1 else f"set1(to_float(a{index}[{at}]))"
    if node.op == "placeholder":
        return b.step_input(node), f"set1(float(a{index}[row]))"
    operand = b.values.operand(node)
    b.reads.append(operand.extent)
    if size == count * width or (size == width and width > 1):
        return b.view(operand), f"load(a{index}[row] + {_offset(size, count, width)}, n)"
    return b.view(operand), f"set1(to_float(a{index}[row][{'part' if size > 1 else '0'}]))"


def _offset(size: int, count: int, width: int) -> str:
    if size == count * width and count > 1:
        return f"part * {width} + i"
    return "i" if size == width and width > 1 else "part" if size > 1 else "0"


def _cpp(node: ast.expr) -> str:
    text = walk(node, _Names(), lambda number: f"set1({cpp_float(number)})", _function, _operator)
    assert isinstance(text, str), "a comparison stands only in where"
    return text


class _Names(dict[str, str]):
    def __missing__(self, name: str) -> str:
        return name


def _function(name: str, args: list[Any]) -> str:
    if name == "where":
        condition, *choices = args
        return f"less({condition.left}, {condition.right}, {', '.join(choices)})"
    return f"{_NAMES.get(name, name)}({', '.join(args)})"


def _operator(kind: type[ast.AST], left: Any, right: Any) -> Any:
    if kind is ast.Lt:
        return _Comparison(left, right)
    if kind is ast.Gt:
        return _Comparison(right, left)
    return f"{_OPERATORS[kind]}({left}, {right})"
