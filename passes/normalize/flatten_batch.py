"""Flatten the captured `[1, T, …]` values to rows of tokens `[T, …]`.

Every value that depends on tokens comes out with the token axis first and no batch axis; its other axes keep their
order. So `[1, T, heads, head_dim]` and its transpose `[1, heads, T, head_dim]` become one value, and attention reads
and writes `[T, heads, head_dim]`. There is one rule per op; an op without a rule is refused by name.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from inferc.codegen.select import cannot_run
from inferc.errors import UnsupportedError
from inferc.ir.program import Program, name_of, target_name
from inferc.passes.rewrite import infer_type

aten, inferc = torch.ops.aten, torch.ops.inferc


@dataclass(frozen=True)
class Layout:
    """The roles of a captured value's axes: the batch (axis 0, or absent), the tokens, and the rest."""

    rank: int
    batched: bool
    token_axis: int

    @property
    def rest(self) -> list[int]:
        return [axis for axis in range(int(self.batched), self.rank) if axis != self.token_axis]

    def new_axis(self, axis: int) -> int:
        """Return where a captured axis of the rest lies in the flattened value, counted from the end."""
        return self.rest.index(axis % self.rank) - len(self.rest)


class Flattener:
    """A copier of a captured program's graph, node by node; `new` maps each captured node to its copy."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.graph = fx.Graph()
        self.new: dict[fx.Node, fx.Node] = {}
        self.on_tokens: set[fx.Node] = set()
        self.views: dict[tuple[fx.Node, tuple[Any, ...]], fx.Node] = {}  # the views from which parts are selected
        token_ids = program.input("token_ids")
        self.tokens = token_ids.meta["val"].shape[1]

    def layout(self, node: fx.Node, value: Any = None) -> Layout:
        shape = (node.meta["val"] if value is None else value).shape
        axes = [axis for axis, size in enumerate(shape) if str(size) == str(self.tokens)]
        batched = bool(axes) and axes[0] > 0
        if len(axes) != 1 or (batched and shape[0] != 1):
            sizes = ", ".join(map(str, shape))
            raise UnsupportedError(f"{name_of(node)}: [{sizes}] has no one axis of {self.tokens} tokens to flatten to")
        return Layout(len(shape), batched, axes[0])

    def sizes(self, node: fx.Node) -> list[Any]:
        """Return the sizes of the axes beside batch and tokens; no rule makes them depend on the number of tokens."""
        return [node.meta["val"].shape[axis] for axis in self.layout(node).rest]

    def emit(self, node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a new call, typed and named, that stands for the captured `node`."""
        made = self.graph.create_node("call_function", target, args, kwargs)
        made.meta.update({key: node.meta[key] for key in ("name", "layer") if key in node.meta})
        made.meta["val"] = infer_type(self.program, made)
        return made

    def old(self, node: fx.Node, index: int = 0) -> fx.Node:
        arg = node.args[index]
        assert isinstance(arg, fx.Node)
        return arg

    def first(self, node: fx.Node) -> fx.Node:
        return self.new[self.old(node)]

    def mapped(self, args: Any) -> Any:
        return fx.map_arg(args, lambda arg: self.new[arg])

    def run(self) -> None:
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                made = self.graph.placeholder(str(node.target))
                _, _, *rest = node.meta["val"].shape
                made.meta.update(node.meta, val=self.program.fake((self.tokens, *rest), node.meta["val"].dtype))
                self.new[node] = made
                self.on_tokens.add(node)
            elif node.op == "output":
                made = self.graph.output(self.mapped(node.args[0]))
                made.meta.update(node.meta)
            elif node.op == "get_attr":
                self.new[node] = self.graph.node_copy(node)
            elif not isinstance(node.meta["val"], (int, torch.SymInt)):
                self.call(node)
        self.program.graph = self.graph

    def call(self, node: fx.Node) -> None:
        inputs = [arg for arg in node.all_input_nodes if arg in self.on_tokens]
        if node.target in COUNTS and _counts_tokens(node, self.tokens):
            self.new[node] = self.new[self.program.input("positions")]
            self.on_tokens.add(node)
            return
        if not inputs:
            self.new[node] = self._of_no_token(node)
            return
        rule = RULES.get(node.target)
        if rule is None:
            raise cannot_run(node)
        self.new[node] = rule(self, node)
        self.on_tokens.add(node)

    def _of_no_token(self, node: fx.Node) -> fx.Node:
        """Copy a value that is the same for every token.

        A value that the model expands to all tokens stays unexpanded, because ops broadcast it.
        """
        sizes = list(map(str, node.meta["val"].shape)) if isinstance(node.meta["val"], Tensor) else []
        if node.target == aten.expand.default and sizes.count(str(self.tokens)) == 1:
            return self.first(node)
        if any(arg not in self.new for arg in node.all_input_nodes):
            raise cannot_run(node)  # an input is a size that counts tokens
        return self.graph.node_copy(node, lambda arg: self.new[arg])


COUNTS = (aten.arange.default, aten.arange.start, aten.arange.start_step)


def _counts_tokens(node: fx.Node, tokens: Any) -> bool:
    """Return whether the node counts the captured tokens as 0, 1, …: their positions, because a capture starts at 0."""
    value = node.meta["val"]
    plain = node.target == aten.arange.default or node.args[0] == 0
    plain = plain and (node.target != aten.arange.start_step or len(node.args) < 3 or node.args[2] == 1)
    return bool(plain and value.dtype == torch.int64 and str(value.shape[0]) == str(tokens))


def refuse(node: fx.Node, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"inferc cannot run {target_name(node.target)} as this model uses it (node {name_of(node)}): {why}"
    )


# ------------------------------------------------------------------------------------------------ rules


def _elementwise(flat: Flattener, node: fx.Node) -> fx.Node:
    out = flat.layout(node)

    def operand(arg: Any) -> Any:
        if not isinstance(arg, fx.Node):
            return arg
        value, made = arg.meta["val"], flat.new[arg]
        shift = out.rank - value.dim()
        if arg in flat.on_tokens:
            layout = flat.layout(arg)
            if layout.token_axis + shift != out.token_axis:
                raise refuse(node, "its operands have their tokens on different axes")
            missing = len(out.rest) - len(layout.rest)
            return flat.emit(node, aten.view.default, made, [-1, *[1] * missing, *flat.sizes(arg)]) if missing else made
        if shift > out.token_axis:
            return made
        sizes = [value.shape[axis - shift] for axis in out.rest if axis >= shift]
        return flat.emit(node, aten.view.default, made, sizes)

    return flat.emit(node, node.target, *(operand(arg) for arg in node.args), **node.kwargs)


def _along_axes(flat: Flattener, node: fx.Node) -> fx.Node:
    """Flatten an op with `dim` arguments that works within a token's row."""
    lists = isinstance(node.args[0], (list, tuple))
    first = node.args[0][0] if lists else node.args[0]  # type: ignore[index]
    assert isinstance(first, fx.Node)
    layout = flat.layout(first)

    def dim(axis: Any) -> Any:
        if isinstance(axis, (list, tuple)):
            return [dim(each) for each in axis]
        if axis % layout.rank not in layout.rest:
            raise refuse(node, f"axis {axis} is the batch's or the tokens'")
        return layout.new_axis(axis)

    parameters = node.target._schema.arguments  # type: ignore[union-attr]
    names = [parameter.name for parameter in parameters]
    args = [dim(arg) if name == "dim" else flat.mapped(arg) for name, arg in zip(names, node.args)]
    if "dim" in names[len(args) :] and "dim" not in node.kwargs:
        default = parameters[names.index("dim")].default_value
        if default is None or dim(default) != default:
            raise refuse(node, f"its axis is left at {default}")
    kwargs = {name: dim(arg) if name == "dim" else arg for name, arg in node.kwargs.items()}
    return flat.emit(node, node.target, *args, **kwargs)


def _unsqueeze(flat: Flattener, node: fx.Node) -> fx.Node:
    layout = flat.layout(node)
    axis = int(node.args[1]) % layout.rank  # type: ignore[arg-type]
    if axis not in layout.rest:
        return flat.first(node)  # the new axis is a batch of one
    if node.meta["val"].is_complex():  # a complex number is a rotation, which fuse_rope reads
        return flat.emit(node, aten.unsqueeze.default, flat.first(node), layout.new_axis(axis))
    return flat.emit(node, aten.view.default, flat.first(node), [-1, *flat.sizes(node)])


def _view(flat: Flattener, node: fx.Node) -> fx.Node:
    source = flat.old(node)
    before, after = flat.sizes(source), flat.sizes(node)
    if before == after:
        return flat.first(node)
    if not _keeps_tokens(flat.layout(source), flat.layout(node), source, node):
        raise refuse(node, "it mixes tokens with the axes before them")
    return flat.emit(node, aten.view.default, flat.first(node), [-1, *after])


def _select(flat: Flattener, node: fx.Node) -> fx.Node:
    """Flatten the selection of one of the parts that lie side by side along an axis.

    It becomes a range of the elements of a view in which the parts lie side by side.
    """
    source = flat.old(node)
    layout, before = flat.layout(source), flat.sizes(source)
    axis = int(node.args[1]) % layout.rank  # type: ignore[arg-type]
    if node.meta["val"].is_complex() or axis not in layout.rest:
        return _along_axes(flat, node)
    at = layout.rest.index(axis)
    outer, inner = before[:at], math.prod(before[at + 1 :])
    index = int(node.args[2]) % before[at]  # type: ignore[arg-type]
    row = flat.first(node)
    if row.target == aten.view.default:
        row = row.args[0]  # type: ignore[assignment]
    shape = [-1, *outer, before[at] * inner]
    key = (row, tuple(shape))
    if key not in flat.views:
        flat.views[key] = flat.emit(source, aten.view.default, row, shape)
    part = flat.emit(node, aten.slice.Tensor, flat.views[key], -1, index * inner, (index + 1) * inner)
    after = flat.sizes(node)
    return part if [*outer, inner] == after else flat.emit(node, aten.view.default, part, [-1, *after])


def _keeps_tokens(before: Layout, after: Layout, source: fx.Node, node: fx.Node) -> bool:
    """Return whether a view keeps the number of elements before the token axis, and so the number behind it."""

    def size(layout: Layout, value: Any) -> int:
        return math.prod(int(each) for each in value.shape[int(layout.batched) : layout.token_axis])

    return size(before, source.meta["val"]) == size(after, node.meta["val"])


def _expand(flat: Flattener, node: fx.Node) -> fx.Node:
    source = flat.old(node)
    if flat.sizes(source) == flat.sizes(node):
        return flat.first(node)
    return flat.emit(node, aten.expand.default, flat.first(node), [-1, *flat.sizes(node)])


def _permute(flat: Flattener, node: fx.Node) -> fx.Node:
    before, after = flat.layout(flat.old(node)), flat.layout(node)
    order, dims = list(range(before.rank)), node.args[1]
    if isinstance(dims, (list, tuple)):
        order = [int(axis) % before.rank for axis in dims]  # type: ignore[arg-type]
    else:
        a, b = (int(axis) % before.rank for axis in node.args[1:])  # type: ignore[arg-type]
        order[a], order[b] = order[b], order[a]
    moved = [order[axis] for axis in after.rest]
    if before.batched != after.batched or (before.batched and order[0] != 0):
        raise refuse(node, "it moves the batch axis")
    if moved == before.rest:
        return flat.first(node)
    return flat.emit(
        node, aten.permute.default, flat.first(node), [0, *(1 + before.rest.index(axis) for axis in moved)]
    )


def _linear(flat: Flattener, node: fx.Node) -> fx.Node:
    layout = flat.layout(flat.old(node))
    if layout.rank - 1 not in layout.rest:
        raise refuse(node, "it contracts over tokens")
    return flat.emit(node, node.target, *flat.mapped(node.args))


def _outer_product(flat: Flattener, node: fx.Node) -> fx.Node:
    """Flatten `inv_freq[1, n, 1] @ positions[1, 1, T]`, a matrix product over one element, to a multiplication."""
    a, b = flat.old(node), flat.old(node, 1)
    if a in flat.on_tokens or a.meta["val"].shape[-1] != 1:
        raise refuse(node, "it is not the product of a column and one row of tokens")
    size = a.meta["val"].shape[-2]
    while a.target in (aten.unsqueeze.default, aten.expand.default) and str(a.meta["val"].numel()) == str(size):
        a = flat.old(a)
    column = flat.new[a] if a.meta["val"].dim() == 1 else flat.emit(node, aten.view.default, flat.new[a], [size])
    return flat.emit(node, aten.mul.Tensor, flat.new[b], column)


def _attention(flat: Flattener, node: fx.Node) -> fx.Node:
    for arg in node.args[:3]:
        assert isinstance(arg, fx.Node)
        layout = flat.layout(arg)
        if (layout.rank, layout.token_axis) != (4, 2):
            raise refuse(node, f"{name_of(arg)} is not [1, heads, T, head_dim]")
    return flat.emit(node, node.target, *flat.mapped(node.args), **flat.mapped(node.kwargs))


def _same(flat: Flattener, node: fx.Node) -> fx.Node:
    """Flatten an op over whole rows, whose arguments stay as they are."""
    return flat.emit(node, node.target, *flat.mapped(node.args), **flat.mapped(node.kwargs))


_ELEMENTWISE = (
    aten._to_copy,
    aten.clone,
    aten.neg,
    aten.abs,
    aten.cos,
    aten.sin,
    aten.exp,
    aten.log,
    aten.sqrt,
    aten.rsqrt,
    aten.reciprocal,
    aten.sigmoid,
    aten.silu,
    aten.tanh,
    aten.relu,
    aten.gelu,
    aten.erf,
    aten.clamp,
    aten.maximum,
    aten.minimum,
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.rsub.Scalar,
    aten.mul.Tensor,
    aten.div.Tensor,
    aten.pow.Tensor_Scalar,
    aten.where.self,
    aten.square,
    aten.floor,
    aten.log1p,
    aten.expm1,
    aten.softplus,
    aten.gt.Scalar,
    aten.lt.Scalar,
    aten.bitwise_not,
    aten.masked_fill.Scalar,
    aten.zeros_like,
    aten.ones_like,
    aten.polar,
)
_ALONG_AXES = (
    aten.mean.dim,
    aten.sum.dim_IntList,
    aten.amax,
    aten.amin,
    aten.softmax.int,
    aten.log_softmax.int,
    aten.cumsum,
    aten.slice.Tensor,
    aten.cat,
    aten.stack,
    aten.split.Tensor,
    aten.split_with_sizes,
    aten.topk,
    aten.sort.default,
    aten.sort.stable,
    aten.squeeze.dim,
    aten.gather,
    aten.scatter.value,
    aten.max.dim,
)


def _overload(op: Any) -> Any:
    return op.default if isinstance(op, torch._ops.OpOverloadPacket) else op


RULES: dict[Any, Callable[[Flattener, fx.Node], fx.Node]] = {
    **{_overload(op): _elementwise for op in _ELEMENTWISE},
    **{_overload(op): _along_axes for op in _ALONG_AXES},
    aten.embedding.default: _same,
    aten.layer_norm.default: _same,
    aten.view_as_complex.default: _same,
    aten.view_as_real.default: _same,
    aten.linear.default: _linear,
    aten.repeat_interleave.self_int: _along_axes,
    aten.view.default: _view,
    aten.unsqueeze.default: _unsqueeze,
    aten.select.int: _select,
    aten.expand.default: _expand,
    aten.transpose.int: _permute,
    aten.permute.default: _permute,
    aten.matmul.default: _outer_product,
    aten.bmm.default: _outer_product,
    inferc.attention.default: _attention,
    inferc.moe_experts.default: _same,
    inferc.moe_routing.default: _same,
    operator.getitem: _same,
}


@dataclass(frozen=True)
class FlattenBatch:
    name: str = "flatten_batch"

    def __call__(self, program: Program) -> int:
        before = [node for node in program.inputs() if isinstance(node.meta["val"], Tensor)]
        if all(node.meta["val"].dim() == 1 for node in before):
            return 0
        Flattener(program).run()
        program.drop_unused()
        return len(program.graph.nodes)
