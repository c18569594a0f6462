"""Fuse chains of elementwise arithmetic into one op each, whatever they compute.

Elementwise ops that no named fusion matched (scales, softcaps, gates, unusual activations) would each be one pass over
memory. A chain of them becomes one `inferc.pointwise`, whose expression a backend turns into code. Intermediate values
are not rounded to the model's dtype, so the result is nearer to that of float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from inferc.ir import weights as weight_lib
from inferc.ir.program import Program, arguments, dtype_name, name_of
from inferc.passes.rewrite import infer_type, no_rewrite

aten, inferc = torch.ops.aten, torch.ops.inferc
MAX_INPUTS = 8
EXPONENTS = (2.0, 3.0, 0.5, -0.5, -1.0)


def _call(name: str) -> Callable[..., str]:
    return lambda *args: f"{name}({', '.join(args)})"


def _power(x: str, exponent: str) -> str:
    known = {2.0: f"{x} * {x}", 3.0: f"{x} * {x} * {x}", 0.5: f"sqrt({x})", -0.5: f"rsqrt({x})", -1.0: f"1.0 / {x}"}
    return f"({known[float(exponent)]})"


def _softplus(x: str, beta: str, threshold: str) -> str:
    """Write log(1 + exp(beta * x)) / beta.

    Above the threshold torch returns x itself; the difference is less than a rounding error.
    """
    scaled = x if float(beta) == 1.0 else f"({x} * {beta})"
    soft = f"log(1.0 + exp(min({scaled}, {threshold})))"
    return f"where(({scaled} > {threshold}), {x}, {soft if scaled == x else f'({soft} / {beta})'})"


def _scaled(x: str, alpha: str) -> str:
    return x if float(alpha) == 1.0 else f"{x} * {alpha}"


# The expression of each op over its arguments: values and numbers are given as text; modes, dtypes and None as they
# are.
OPS: dict[Any, Callable[..., str]] = {
    aten.add.Tensor: lambda x, y, alpha: f"({x} + {_scaled(y, alpha)})",
    aten.sub.Tensor: lambda x, y, alpha: f"({x} - {_scaled(y, alpha)})",
    aten.rsub.Scalar: lambda x, y, alpha: f"({y} - {_scaled(x, alpha)})",
    aten.mul.Tensor: lambda x, y: f"({x} * {y})",
    aten.div.Tensor: lambda x, y: f"({x} / {y})",
    aten.neg.default: lambda x: f"(-{x})",
    aten.reciprocal.default: lambda x: f"(1.0 / {x})",
    aten.square.default: lambda x: f"({x} * {x})",
    aten.pow.Tensor_Scalar: _power,
    aten.maximum.default: _call("max"),
    aten.minimum.default: _call("min"),
    aten.relu.default: lambda x: f"max({x}, 0.0)",
    aten.log1p.default: lambda x: f"log(1.0 + {x})",
    aten.expm1.default: lambda x: f"(exp({x}) - 1.0)",
    aten.gelu.default: lambda x, approximate: f"gelu_tanh({x})" if approximate == "tanh" else f"gelu({x})",
    aten.softplus.default: _softplus,
    aten.clamp.default: lambda x, low, high: _clamped(x, low, high),
    aten.gt.Scalar: lambda x, y: f"({x} > {y})",
    aten.lt.Scalar: lambda x, y: f"({x} < {y})",
    aten.where.self: _call("where"),
    aten._to_copy.default: lambda x, *_: x,
    **{
        getattr(aten, name).default: _call(name)
        for name in ("abs", "erf", "exp", "floor", "log", "rsqrt", "sigmoid", "silu", "sqrt", "tanh")
    },
}
NATIVE = (aten.add.Tensor, aten.mul.Tensor)  # ops with kernels of their own, if nothing is broadcast
# ops whose expression contains their argument twice
WRITTEN_TWICE = (aten.square.default, aten.pow.Tensor_Scalar, aten.softplus.default)
COMPARISONS = (aten.gt.Scalar, aten.lt.Scalar)


def _clamped(x: str, low: str | None, high: str | None) -> str:
    x = x if low is None else f"max({x}, {low})"
    return x if high is None else f"min({x}, {high})"


@dataclass
class _Group:
    """A chain under construction: the calls that it has taken in, and the values that they read."""

    root: fx.Node
    members: set[fx.Node] = field(default_factory=set)

    def inputs(self) -> list[fx.Node]:
        found = [arg for node in sorted(self.members) for arg in node.all_input_nodes if arg not in self.members]
        return list(dict.fromkeys(found))


@dataclass(frozen=True)
class FusePointwise:
    name: str = "fuse_pointwise"

    def __call__(self, program: Program) -> int:
        taken: set[fx.Node] = set()
        count = 0
        for node in reversed(list(program.graph.nodes)):
            if node in taken or node.target in COMPARISONS:
                continue
            reason = _why_not(program, node)
            if reason is not None:
                if reason:
                    no_rewrite(self.name, node, reason)
                continue
            group = _grow(program, node)
            taken |= group.members
            if _is_native(group):
                continue
            _rewrite(program, group)
            count += 1
        if count:
            program.drop_unused()
        return count


def _why_not(program: Program, node: fx.Node) -> str | None:
    """Return None for elementwise arithmetic on rows, else why it is none; "" if it does not look like it."""
    if node.op != "call_function" or node.target not in OPS:
        return ""
    value = node.meta["val"]
    if not isinstance(value, Tensor) or not value.dim() or not _per_row(program, node):
        return "it has no row for each token"
    if node.target == aten.pow.Tensor_Scalar and float(node.args[1]) not in EXPONENTS:  # type: ignore[arg-type]
        return f"its exponent is {node.args[1]}, expected one of {', '.join(map(str, EXPONENTS))}"
    if not value.is_floating_point() and node.target not in COMPARISONS:
        # Integers beyond 2^24 are inexact in float32; only positions stay below.
        return f"it makes {dtype_name(value.dtype)}, expected floating point"
    endless = endless_argument(node)
    return None if endless is None else f"its argument {endless} is no finite number"


def _per_row(program: Program, node: fx.Node) -> bool:
    """Return whether the value has a row for each token, or for each row whose logits are asked for."""
    rows = {str(each.meta["val"].shape[0]) for each in program.inputs() if each.name in ("token_ids", "logits_rows")}
    return str(node.meta["val"].shape[0]) in rows


def _grow(program: Program, root: fx.Node) -> _Group:
    """Take in producers that nothing else reads, nearest first, as long as there are at most MAX_INPUTS inputs."""
    group = _Group(root, {root})
    todo = list(root.all_input_nodes)
    while todo:
        node = todo.pop(0)
        if node in group.members or _why_not(program, node) is not None:
            continue
        others = [user for user in node.users if user not in group.members]
        if others:
            no_rewrite("fuse_pointwise", node, f"it is also read by {name_of(others[0])}")
            continue
        group.members.add(node)
        if len(group.inputs()) > MAX_INPUTS:
            no_rewrite("fuse_pointwise", node, f"{name_of(root)} would read {len(group.inputs())} values with it")
            group.members.remove(node)
            continue
        todo += node.all_input_nodes
    return group


def _is_native(group: _Group) -> bool:
    """Return whether the chain is a single addition or multiplication of equal shapes, or by a number."""
    root = group.root
    if len(group.members) > 1 or root.target not in NATIVE:
        return False
    left, right = root.args[:2]
    if not isinstance(left, fx.Node) or left.meta["val"].dtype != root.meta["val"].dtype:
        return False
    if not isinstance(right, fx.Node):
        return True
    a, b = left.meta["val"], right.meta["val"]
    return bool(a.dtype == b.dtype and list(map(str, a.shape)) == list(map(str, b.shape)))


def _rewrite(program: Program, group: _Group) -> None:
    names: dict[fx.Node, str] = {}
    inputs: list[fx.Node] = []
    for node in group.inputs():
        number = _number(program, node)
        if number is not None:
            names[node] = repr(number)
            continue
        names[node] = f"x{len(inputs)}"
        inputs.append(weight_behind(node))
    expression = _expression(group, names)
    root = group.root
    with program.graph.inserting_before(root):
        made = program.graph.call_function(inferc.pointwise.default, (inputs, expression, root.meta["val"].dtype))
    made.meta.update({key: root.meta[key] for key in ("name", "layer") if key in root.meta})
    made.meta["val"] = infer_type(program, made)
    root.replace_all_uses_with(made)
    for node in sorted(group.members, reverse=True):
        program.graph.erase_node(node)


def _expression(group: _Group, names: dict[fx.Node, str]) -> str:
    """Combine the members' texts into one expression; a text that is read twice gets a name."""
    named: list[str] = []
    for node in sorted(group.members):
        text = text_of(node, names)
        reads = sum(list(user.all_input_nodes).count(node) for user in node.users if user in group.members)
        twice = reads > 1 or _reads_twice(node, group)
        if twice and node is not group.root and node.target not in COMPARISONS and not text.isidentifier():
            named.append(f"t{len(named)} = {text}")
            text = f"t{len(named) - 1}"
        names[node] = text
    result = names[group.root]
    return "; ".join([*named, _without_brackets(result)])


def endless_argument(node: fx.Node) -> float | None:
    """Return an argument that is infinite or NaN, which an expression cannot hold, or None."""
    return next((arg for arg in arguments(node) if isinstance(arg, float) and not math.isfinite(arg)), None)


def text_of(node: fx.Node, names: dict[fx.Node, str]) -> str:
    """Return the expression of a call of one of OPS over the texts of the values that it reads."""
    return OPS[node.target](*(_argument(node, index, names) for index in range(len(arguments(node)))))


def _argument(node: fx.Node, index: int, names: dict[fx.Node, str]) -> Any:
    """Return what the table OPS receives for an argument.

    A value is given by its text. A comparison is given as one if a choice is made by it, and as a number otherwise.
    """
    arg = arguments(node)[index]
    if isinstance(arg, (int, float)):
        return repr(arg)
    if not isinstance(arg, fx.Node):
        return arg
    text = names[arg]
    # A comparison that is part of this expression, and not one of its inputs.
    compared = arg.target in COMPARISONS and not text.isidentifier()
    if node.target == aten.where.self and index == 0:
        return text if compared else f"({text} > 0.5)"
    return f"where({text}, 1.0, 0.0)" if compared else text


def _reads_twice(node: fx.Node, group: _Group) -> bool:
    """Return whether a reader of the node is written twice: by its op, or as a comparison that several nodes read."""
    return any(
        user in group.members and (user.target in WRITTEN_TWICE or (user.target in COMPARISONS and len(user.users) > 1))
        for user in node.users
    )


def _without_brackets(text: str) -> str:
    """Return `a + b` for `(a + b)`, if the two outer brackets belong together."""
    depth = 0
    for index, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth == 0 and index < len(text) - 1:
            return text
    return text[1:-1] if text.startswith("(") else text


def weight_behind(node: fx.Node) -> fx.Node:
    """Return the weight that views and casts turn into this single number; return any other node itself."""
    source = node
    while source.target in (aten.view.default, aten._to_copy.default) and source.meta["val"].numel() == 1:
        source = source.args[0]  # type: ignore[assignment]
    return source if source.op == "get_attr" and source.meta["val"].numel() == 1 else node


def _number(program: Program, node: fx.Node) -> float | None:
    """Return the value of a constant with one element, which is then written into the expression, or None."""
    source = weight_behind(node)
    if source.op != "get_attr" or source.meta["val"].dim() != 1 or source.meta["val"].numel() != 1:
        return None
    weight = program.weight(source)
    if not weight.is_constant:
        return None
    return float(weight_lib.read_constant(weight).item())
