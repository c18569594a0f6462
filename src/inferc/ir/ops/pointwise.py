"""The reference op of a fused chain of elementwise arithmetic, whose attribute says what it computes.

An expression is Python syntax over `x0`, `x1`, … (the inputs), numbers, + - * /, unary minus, comparisons and
FUNCTIONS. A value used twice is named first: `t0 = tanh(x0); t0 * t0 + x1`. Everything is computed in float32 and
rounded once.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from inferc.ir.ops.registry import define

FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "abs": torch.abs,
    "erf": torch.erf,
    "exp": torch.exp,
    "floor": torch.floor,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "log": torch.log,
    "max": lambda x, y: torch.maximum(*_tensors(x, y)),
    "min": lambda x, y: torch.minimum(*_tensors(x, y)),
    "rsqrt": torch.rsqrt,
    "sigmoid": torch.sigmoid,
    "silu": torch.nn.functional.silu,
    "sqrt": torch.sqrt,
    "tanh": torch.tanh,
    "where": lambda condition, x, y: torch.where(condition, *_tensors(x, y)),
}

_OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: lambda x, y: x + y,
    ast.Sub: lambda x, y: x - y,
    ast.Mult: lambda x, y: x * y,
    ast.Div: lambda x, y: x / y,
    ast.Lt: lambda x, y: x < y,
    ast.Gt: lambda x, y: x > y,
}


def _tensors(x: Any, y: Any) -> tuple[Tensor, Tensor]:
    return torch.as_tensor(x, dtype=torch.float32), torch.as_tensor(y, dtype=torch.float32)


@cache
def parse(expression: str) -> tuple[tuple[tuple[str, ast.expr], ...], ast.expr]:
    """Return the named parts of an expression, in order, and its result; raise ValueError for what is no expression."""
    named: list[tuple[str, ast.expr]] = []
    body = ast.parse(expression.replace("; ", "\n")).body
    for statement in body[:-1]:
        if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
            raise ValueError(f"expected name = value before the last part of {expression!r}")  # noqa: TRY004
        named.append((statement.targets[0].id, statement.value))
    if not body or not isinstance(body[-1], ast.Expr):
        raise ValueError(f"expected a value at the end of {expression!r}")
    return tuple(named), body[-1].value


def walk(
    node: ast.expr,
    names: Mapping[str, Any],
    number: Callable[[float], Any],
    call: Callable[[str, list[Any]], Any],
    operator: Callable[[type[ast.AST], Any, Any], Any],
) -> Any:
    """Fold an expression's tree; the caller's functions say what each name, number, call and operator becomes."""

    def fold(each: ast.expr) -> Any:
        return walk(each, names, number, call, operator)

    if isinstance(node, ast.Name):
        return names[node.id]
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return number(float(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        if isinstance(node.operand, ast.Constant):
            return number(-float(node.operand.value))  # type: ignore[arg-type]
        return operator(ast.Sub, number(0.0), fold(node.operand))
    if isinstance(node, ast.BinOp):
        return operator(type(node.op), fold(node.left), fold(node.right))
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return operator(type(node.ops[0]), fold(node.left), fold(node.comparators[0]))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS:
        return call(node.func.id, [fold(each) for each in node.args])
    raise ValueError(f"not an elementwise expression: {ast.unparse(node)}")


def _fake(inputs: list[Tensor], _expression: str, dtype: torch.dtype) -> Tensor:
    shape = torch.broadcast_shapes(*(each.shape for each in inputs))
    return inputs[0].new_empty(shape, dtype=dtype)


@define("pointwise(Tensor[] inputs, str expression, ScalarType dtype) -> Tensor", _fake)
def pointwise(inputs: list[Tensor], expression: str, dtype: torch.dtype) -> Tensor:
    """Evaluate `expression` of the inputs, elementwise with broadcasting, in float32, rounded once to `dtype`."""
    names: dict[str, Any] = {f"x{index}": each.float() for index, each in enumerate(inputs)}

    def value(node: ast.expr) -> Any:
        return walk(
            node,
            names,
            lambda number: number,
            lambda name, args: FUNCTIONS[name](*args),
            lambda kind, left, right: _OPERATORS[kind](left, right),
        )

    named, result = parse(expression)
    for name, node in named:
        names[name] = value(node)
    shape = torch.broadcast_shapes(*(each.shape for each in inputs))
    out: Tensor = value(result)
    return out.expand(shape).to(dtype).contiguous()
