"""Pattern matching and replacement on fx graphs, with a matcher of our own.

A pattern is a function over its captures, traced to a small graph. A capture annotated `Tensor` binds a node, one
annotated `Tensor | None` or `object` binds anything, any other annotation binds a Python constant (eps, window, a
dtype). Beyond equality the matcher accepts arguments left at their defaults, both operand orders of a commutative op,
and missing casts of values that have the dtype already.
"""

from __future__ import annotations

import inspect
import logging
import operator
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.proxy import GraphAppendingTracer

from inferc.ir.program import Program, arguments, name_of, target_name
from inferc.system import env as debug

log = logging.getLogger(__name__)
aten = torch.ops.aten

COMMUTATIVE = (aten.add.Tensor, aten.mul.Tensor)
Bindings = dict[fx.Node, Any]  # pattern node -> node or constant of the program
Function = Callable[..., Any]


def shared(value: Any) -> Any:
    """Mark `value` of a pattern, and all that it is computed from, as values that may have users outside of the match.

    An example is a table that all layers read.
    """
    value.node.meta["shared"] = True
    return value


def value_of(arg: Any) -> Any:
    """Return the fake tensor behind a node; return anything else unchanged."""
    return arg.meta["val"] if isinstance(arg, fx.Node) else arg


def no_rewrite(pass_name: str, node: fx.Node, reason: str) -> None:
    """Log at INFERC_DEBUG=2 why a pass did not rewrite a node that resembles its pattern.

    `reason` starts with what is found.
    """
    if debug.level() >= 2:
        log.info("%s: no rewrite at %s: %s", pass_name, name_of(node), reason)


# ------------------------------------------------------------------------------------------------ types


def _polar_type(length: Tensor, angle: Tensor) -> Tensor:
    return (length + angle).to(torch.complex64)


def _linear_type(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Infer the type of a linear on one row, so that torch's checks see sizes that are numbers."""
    row = aten.linear.default(x.new_empty((1, x.shape[-1])), weight, bias)
    return row.new_empty((*x.shape[:-1], row.shape[-1]))


def _matmul_type(left: Tensor, right: Tensor) -> Tensor:
    """Infer the type of a matmul on one row and one column, so that torch's checks see sizes that are numbers."""
    if left.dim() < 2 or right.dim() < 2:
        return aten.matmul.default(left, right)
    one = aten.mm.default(left.new_empty((1, left.shape[-1])), right.new_empty((right.shape[-2], 1)))
    batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    return one.new_empty((*batch, left.shape[-2], right.shape[-1]))


# Ops that are typed by a function of ours. The fake kernel of polar replaces a symbolic size by a number, and in torch
# 2.11 those of linear and matmul do so if there is a batch axis.
TYPED_AS: dict[Any, Any] = {
    aten.polar.default: _polar_type,
    aten.linear.default: _linear_type,
    aten.matmul.default: _matmul_type,
}


def infer_type(program: Program, node: fx.Node) -> Any:
    """Infer the type of what `node` returns by running its op on fake tensors.

    Equal calls, as in equal layers, are computed once. Raises ValueError if the op replaces a symbolic size by a
    number, because the size would then have that value in the whole program.
    """
    key = (node.target, _type_key(node.args), _type_key(node.kwargs))
    if key not in program.types:
        args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
        with program.fake_mode:
            value = TYPED_AS.get(node.target, node.target)(*args, **kwargs)
        for symbol, size in _fixed_sizes(program).items():
            raise ValueError(f"{node.target} makes the size {symbol} the number {size}: give it a type of its own")
        program.types[key] = value
    return program.types[key]


def _fixed_sizes(program: Program) -> dict[Any, Any]:
    """Return the symbolic sizes of the program that a fake kernel replaced by numbers, with those numbers."""
    env = program.fake_mode.shape_env
    return {} if env is None else {symbol: size for symbol, size in env.replacements.items() if size.is_number}


def _type_key(arg: Any) -> Any:
    """Return everything of an argument that the result's type can depend on, as a dictionary key."""
    if isinstance(arg, fx.Node):
        return _type_key(arg.meta["val"])
    if isinstance(arg, Tensor):
        return (arg.dtype, *map(size_key, arg.shape), None, *map(size_key, arg.stride()))
    if isinstance(arg, (list, tuple)):
        return tuple(map(_type_key, arg))
    if isinstance(arg, dict):
        return tuple((key, _type_key(value)) for key, value in arg.items())
    return (type(arg), str(arg))


def size_key(size: int | torch.SymInt) -> Any:
    """Return a size as a key, which is equal for sizes that are equal as expressions."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def infer_types(program: Program, nodes: list[fx.Node]) -> None:
    """Set the type of every call in `nodes`, which are in graph order."""
    for node in nodes:
        if node.op == "call_function":
            node.meta["val"] = infer_type(program, node)


def merge_equal(program: Program, target: Any) -> int:
    """Merge calls of `target` with equal arguments into the first of them, and return how many calls were removed."""
    first: dict[Any, fx.Node] = {}
    merged = 0
    for node in program.graph.find_nodes(op="call_function", target=target, sort=True):
        kept = first.setdefault((node.args, tuple(sorted(node.kwargs.items()))), node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            program.graph.erase_node(node)
            merged += 1
    return merged


# ------------------------------------------------------------------------------------------------ patterns


@dataclass(frozen=True)
class Pattern:
    """A pattern traced to a graph; matching starts at `root`, the last of its results `outputs` in graph order."""

    captures: dict[fx.Node, Any]  # placeholder -> annotation
    outputs: tuple[fx.Node, ...]
    root: fx.Node
    shared: frozenset[fx.Node]


@cache
def trace(function: Function) -> Pattern:
    graph = fx.Graph()
    tracer = GraphAppendingTracer(graph)
    hints = typing.get_type_hints(function)
    captures = {graph.placeholder(name): hints[name] for name in inspect.signature(function).parameters}
    result = function(*(fx.Proxy(node, tracer) for node in captures))
    outputs = tuple(proxy.node for proxy in (result if isinstance(result, tuple) else (result,)))
    open_nodes = {node for node in graph.nodes if node.meta.get("shared")}
    for node in reversed(list(graph.nodes)):
        if node in open_nodes:
            open_nodes.update(node.all_input_nodes)
    root = max(outputs, key=list(graph.nodes).index)
    return Pattern(captures, outputs, root, frozenset(open_nodes))


def _accepts(annotation: Any, value: Any) -> bool:
    if annotation is Tensor:
        return isinstance(value, fx.Node)
    if annotation is object or annotation == (Tensor | None):
        return True
    return not isinstance(value, fx.Node) and (value is not None)


def _match(pattern: Pattern, want: Any, got: Any, bound: Bindings) -> Iterator[Bindings]:
    """Yield all bindings under which `got`, a node or constant of the program, matches `want` of the pattern."""
    if isinstance(want, (list, tuple)):
        if isinstance(got, (list, tuple)) and len(want) == len(got):
            yield from _match_all(pattern, list(want), list(got), bound)
    elif not isinstance(want, fx.Node):
        if not isinstance(got, fx.Node) and want == got:
            yield bound
    elif want in bound:
        if bound[want] is got or (not isinstance(got, fx.Node) and bound[want] == got):
            yield bound
    elif want in pattern.captures:
        if _accepts(pattern.captures[want], got):
            yield {**bound, want: got}
    elif isinstance(got, fx.Node):
        if got.op == "call_function" and got.target == want.target:
            wanted, given = arguments(want), arguments(got)
            yield from _match_all(pattern, wanted, given, {**bound, want: got})
            if got.target in COMMUTATIVE:
                yield from _match_all(pattern, wanted, [given[1], given[0], *given[2:]], {**bound, want: got})
        if want.target == aten._to_copy.default and isinstance(got.meta.get("val"), Tensor):
            for now in _match(pattern, want.kwargs["dtype"], got.meta["val"].dtype, bound):
                for then in _match(pattern, want.args[0], got, now):
                    yield {**then, want: got}


def _match_all(pattern: Pattern, wanted: list[Any], given: list[Any], bound: Bindings) -> Iterator[Bindings]:
    if len(wanted) != len(given):
        return
    if not wanted:
        yield bound
        return
    for now in _match(pattern, wanted[0], given[0], bound):
        yield from _match_all(pattern, wanted[1:], given[1:], now)


def _match_outputs(pattern: Pattern, left: tuple[fx.Node, ...], bound: Bindings) -> Iterator[Bindings]:
    """Bind the outputs that the root does not depend on, by searching the users of nodes that are bound already."""
    if not left:
        yield bound
    elif left[0] in bound:
        yield from _match_outputs(pattern, left[1:], bound)
    else:
        for user in list(bound[left[0].all_input_nodes[0]].users):
            for now in _match(pattern, left[0], user, bound):
                yield from _match_outputs(pattern, left[1:], now)


def _fault(pattern: Pattern, bound: Bindings) -> str | None:
    """Return why a structural match must not be rewritten, or None if it may be.

    The reasons are that a value inside the match has other readers, or that an output is read before all are computed.
    """
    free = {bound[node] for node in (*pattern.captures, *pattern.outputs, *pattern.shared) if node in bound}
    matched = {value for value in bound.values() if isinstance(value, fx.Node)}
    for node in matched - free:
        for user in node.users:
            if user not in matched:
                return f"{name_of(node)} is also used by {name_of(user)}"
    root = bound[pattern.root]
    for output in pattern.outputs:
        for user in bound[output].users:
            if user not in matched and user < root:
                return f"{user.meta.get('name', user.name)} reads a result before all of them are computed"
    return None


# ------------------------------------------------------------------------------------------------ rewrites


@dataclass(frozen=True)
class Rewrite:
    """A pass that replaces every match of `pattern` (or of one of several patterns, tried in order) by `replacement`.

    `replacement` is called with the captures its parameters name. A check is a function over captures that gets fake
    tensors and constants and returns why the match must be left alone, or None. Outputs correspond in order.
    """

    name: str
    pattern: Function | tuple[Function, ...]
    replacement: Function
    checks: tuple[Callable[..., str | None], ...] = ()

    def __call__(self, program: Program) -> int:
        patterns = [trace(each) for each in (self.pattern if isinstance(self.pattern, tuple) else (self.pattern,))]
        count = 0
        gone: set[fx.Node] = set()
        # Go from the end, so that of two nested matches the larger is found: a cast before the value that it casts.
        for node in reversed(list(program.graph.nodes)):
            if node.op == "call_function" and node not in gone:
                count += any(self._apply(program, pattern, node, gone) for pattern in patterns)
        if count:
            program.drop_unused()
        return count

    def _apply(self, program: Program, pattern: Pattern, node: fx.Node, gone: set[fx.Node]) -> bool:
        for start in _match(pattern, pattern.root, node, {}):
            for bound in _match_outputs(pattern, pattern.outputs, start):
                captures = {str(name.target): bound[name] for name in pattern.captures if name in bound}
                reason = _fault(pattern, bound) or self._refuse(captures)
                if reason is None:
                    replace(program, [bound[output] for output in pattern.outputs], self.replacement, captures, node)
                    _erase_unused(program, bound.values(), gone)
                    return True
                no_rewrite(self.name, node, reason)
        return False

    def _refuse(self, captures: dict[str, Any]) -> str | None:
        for check in self.checks:
            names = inspect.signature(check).parameters
            reason = check(**{name: value_of(captures[name]) for name in names if name in captures})
            if reason is not None:
                return reason
        return None


def _erase_unused(program: Program, nodes: Iterable[Any], gone: set[fx.Node]) -> None:
    """Erase those calls among `nodes` that nothing reads any more, and add them to `gone`."""
    calls = {node for node in nodes if isinstance(node, fx.Node) and node.op == "call_function"}
    for node in sorted(calls, reverse=True):
        if not node.users:
            program.graph.erase_node(node)
            gone.add(node)


def replace(
    program: Program, outputs: list[fx.Node], replacement: Function, captures: dict[str, Any], anchor: fx.Node
) -> list[fx.Node]:
    """Insert `replacement(**captures)` before `anchor`, typed and named, and redirect the users of `outputs` to it."""
    tracer = GraphAppendingTracer(program.graph)
    wanted = {name: captures[name] for name in inspect.signature(replacement).parameters if name in captures}
    before = anchor.prev
    with program.graph.inserting_before(anchor):
        proxies = {n: fx.Proxy(v, tracer) if isinstance(v, fx.Node) else v for n, v in wanted.items()}
        result = replacement(**proxies)
    results = [proxy.node for proxy in (result if isinstance(result, tuple) else (result,))]
    made = []
    while before.next is not anchor:
        before = before.next
        made.append(before)
    infer_types(program, made)
    base = str(anchor.meta.get("name", anchor.name))
    for node in made:
        node.meta.update(name=f"{base}.{short_name(node)}", layer=anchor.meta.get("layer"))
    for old, new in zip(outputs, results, strict=True):
        if new in made:
            new.meta["name"] = old.meta.get("name", old.name)
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user not in made)
    return results


def short_name(node: fx.Node) -> str:
    """Return the short name of a call: `silu_mul` for `inferc.silu_mul`, the index for a getitem."""
    return str(node.args[1]) if node.target is operator.getitem else target_name(node.target).split(".")[1]
