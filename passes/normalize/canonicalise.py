"""Remove ops that compute nothing and rewrite synonyms to one op, so that later patterns see one spelling.

These are removed: assertions, casts to the same dtype, aliases, copies, dropout, `x * 1.0`, `x + 0`, slices of a whole
axis, views to the same shape, empty parts of concatenations, and a widening cast followed by its inverse.

These are rewritten: splits, and parts that are selected of heads, become slices; `addmm` and products with weights
become linears; tensors that are filled part by part become concatenations. Axes count from the end, so that dropping a
leading axis later changes no argument.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from inferc.ir import weights as weight_lib
from inferc.ir.program import Program, arguments
from inferc.passes.rewrite import infer_type, size_key

aten = torch.ops.aten

ALIASES = (
    aten.alias.default,
    aten.detach.default,
    aten.detach_.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.lift_fresh_copy.default,
)
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
SPLITS = (aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default)
EXTREMES = {aten.min.other: aten.minimum.default, aten.max.other: aten.maximum.default}
NEW_TENSORS = (aten.new_empty.default, aten.new_zeros.default, aten.empty.memory_format)
ASSERTIONS = (
    aten._assert_tensor_metadata.default,
    aten._assert_scalar.default,
    aten._assert_async.msg,
    aten.sym_constrain_range_for_size.default,
)


def _same_type(a: fx.Node, b: fx.Node) -> bool:
    x, y = a.meta["val"], b.meta["val"]
    return bool(x.dtype == y.dtype and x.dim() == y.dim() and all(_equal(*pair) for pair in zip(x.shape, y.shape)))


def _equal(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """Return whether two sizes are equal as expressions; asking torch `a == b` of two symbols could merge them."""
    return size_key(a) == size_key(b)


def _identity(node: fx.Node) -> fx.Node | None:
    """Return the node that `node` is a copy of, or None."""
    target, args = node.target, node.args
    if not args or not isinstance(args[0], fx.Node):
        return None
    if not isinstance(node.meta.get("val"), Tensor) or not isinstance(args[0].meta.get("val"), Tensor):
        return None
    source = args[0]
    if target in ALIASES:
        # Repeated elements, and elements of a part of each row, need a copy to be viewed in another shape.
        return None if source.target == aten.expand.default or _is_viewed_as_a_copy(node, source) else source
    if target == aten.dropout.default and (args[1] == 0.0 or not args[2]):
        return source
    if target in (aten.mul.Tensor, aten.div.Tensor) and args[1] == 1.0 and _same_type(node, source):
        return source
    if target in (aten.add.Tensor, aten.sub.Tensor) and args[1] == 0 and _same_type(node, source):
        return source
    if target == aten._to_copy.default:
        if _same_type(node, source):
            return source
        if source.target == aten._to_copy.default:
            first = source.args[0]
            assert isinstance(first, fx.Node)
            narrow, wide = first.meta["val"].dtype, source.meta["val"].dtype
            if _same_type(node, first) and torch.promote_types(narrow, wide) == wide:
                return first
    if target == aten.copy.default:  # a copy over the whole of a part that is written
        written = args[1]
        return written if isinstance(written, fx.Node) and _same_type(node, written) else None
    if target in (*VIEWS, aten.expand.default, aten.slice.Tensor) and _same_type(node, source):
        return source
    if target == aten.transpose.int and source.target == aten.transpose.int:
        first = source.args[0]
        assert isinstance(first, fx.Node)
        return first if _axes(node) == _axes(source) else None
    return None


def _is_viewed_as_a_copy(node: fx.Node, source: fx.Node) -> bool:
    """Return whether a copy is viewed in a shape that its source cannot be viewed in.

    An example are the gates that stand behind the queries of each head.
    """
    if source.meta["val"].is_contiguous():
        return False
    for user in node.users:
        if user.target in VIEWS and user.args[0] is node:
            try:
                source.meta["val"].view(user.meta["val"].shape)
            except (RuntimeError, ValueError):
                return True
    return False


def _axes(node: fx.Node) -> set[Any]:
    return {axis % node.meta["val"].dim() for axis in node.args[1:]}


def _softmax(program: Program, node: fx.Node) -> bool:
    """Rewrite the spellings of softmax to `softmax.int`, with a cast in front of it if it names a dtype."""
    if node.target == aten._softmax.default and not node.args[2]:
        node.target, node.args = aten.softmax.int, node.args[:2]
        return True
    dtype = arguments(node)[2] if node.target == aten.softmax.int else None
    if dtype is None:
        return False
    source = node.args[0]
    assert isinstance(source, fx.Node)
    if source.meta["val"].dtype != dtype:
        with program.graph.inserting_before(node):
            wide = program.graph.call_function(aten._to_copy.default, (source,), {"dtype": dtype})
        wide.meta.update(source.meta, val=infer_type(program, wide))
        wide.meta["name"] = f"{node.meta.get('name', node.name)}.input"
        source = wide
    node.args, node.kwargs = (source, node.args[1]), {}
    return True


def _type_as(program: Program, node: fx.Node) -> bool:
    """Rewrite a cast to another value's dtype as a cast to that dtype."""
    if node.target != aten.type_as.default:
        return False
    node.target, node.args, node.kwargs = aten._to_copy.default, node.args[:1], {"dtype": node.meta["val"].dtype}
    return True


def _cat(program: Program, node: fx.Node) -> bool:
    """Remove the empty parts of a concatenation (a head whose every element is rotated has no rest)."""
    if node.target != aten.cat.default:
        return False
    dim = int(node.args[1]) if len(node.args) > 1 else 0  # type: ignore[arg-type]
    parts: Any = node.args[0]
    full = [part for part in parts if str(part.meta["val"].shape[dim]) != "0"]
    if len(full) == len(parts) or not full:
        return False
    if len(full) == 1:
        node.replace_all_uses_with(full[0])
    node.args = (full, dim)
    return True


def _filled(program: Program, node: fx.Node) -> bool:
    """Rewrite a new tensor whose parts are written one after the other as their concatenation."""
    parts: list[tuple[int, int, fx.Node]] = []
    base: Any = node
    if node.target != aten.slice_scatter.default:
        return False
    rank = node.meta["val"].dim()
    dim = int(arguments(node)[2]) % rank
    while base.target == aten.slice_scatter.default:
        base, part, axis, start, end, step = arguments(base)
        if axis % rank != dim or step != 1 or not isinstance(part, fx.Node):
            return False
        size = base.meta["val"].shape[axis]
        parts.append((int(start or 0), min(int(size if end is None else end), int(size)), part))
    if not parts or base.target not in NEW_TENSORS or any(user.target == node.target for user in node.users):
        return False
    parts.sort(key=lambda each: each[0])
    ends = [0, *(stop for _, stop, _ in parts)]
    if [start for start, _, _ in parts] != ends[:-1] or ends[-1] != base.meta["val"].shape[dim]:
        return False
    node.target, node.args, node.kwargs = aten.cat.default, ([part for _, _, part in parts], dim), {}
    return True


def _addmm(program: Program, node: fx.Node) -> bool:
    """Rewrite `bias + x @ weight` as a linear with the transposed weight."""
    if node.target != aten.addmm.default:
        return False
    bias, x, weight, beta, alpha = arguments(node)
    if (beta, alpha) != (1, 1) or any(each.op != "get_attr" for each in (bias, weight)):
        return False
    transposed = weight_lib.permute(program.weight(weight), (1, 0))
    made = program.add_weight(f"{weight.target}.1_0", transposed, before=node)
    node.target, node.args, node.kwargs = aten.linear.default, (x, made, bias), {}
    return True


def _matmul(program: Program, node: fx.Node) -> bool:
    """Rewrite `x @ weight` as a linear with the transposed weight."""
    if node.target != aten.matmul.default:
        return False
    x, weight = node.args
    if not isinstance(x, fx.Node) or not isinstance(weight, fx.Node) or weight.op != "get_attr" or x.op == "get_attr":
        return False
    if weight.meta["val"].dim() != 2 or x.meta["val"].dim() < 2:
        return False
    transposed = weight_lib.permute(program.weight(weight), (1, 0))
    made = program.add_weight(f"{weight.target}.1_0", transposed, before=node)
    node.target, node.args = aten.linear.default, (x, made)
    return True


def _embedding(program: Program, node: fx.Node) -> bool:
    """Rewrite `table[indices + n]` as a lookup in the table without its first n rows."""
    if node.target != aten.embedding.default:
        return False
    table, index = node.args[0], node.args[1]
    assert isinstance(table, fx.Node) and isinstance(index, fx.Node)
    if table.op != "get_attr" or index.target != aten.add.Tensor:
        return False
    skipped, size = index.args[1], program.weight(table).shape[0]
    if not isinstance(skipped, int) or not 0 <= skipped < size or arguments(index)[2] != 1:
        return False
    shorter = weight_lib.slice_(program.weight(table), 0, skipped, size)
    node.args = (program.add_weight(f"{table.target}.{skipped}", shorter, before=node), index.args[0])
    node.kwargs = {}
    return True


def _select(program: Program, node: fx.Node) -> bool:
    """Rewrite part i of each [n, size] that a view makes of a head as a range of the head's elements."""
    source = node.args[0] if node.target == aten.select.int else None
    if not isinstance(source, fx.Node) or source.target not in VIEWS:
        return False
    shape, (_, dim, index) = source.meta["val"].shape, arguments(node)
    parts, size = shape[-2], shape[-1]
    if dim % len(shape) != len(shape) - 2 or len(shape) < 4 or not all(isinstance(each, int) for each in (parts, size)):
        return False
    start = int(index % parts) * int(size)
    packed, before = source.args
    assert isinstance(packed, fx.Node) and isinstance(before, (list, tuple))
    key = (packed, [*before[:-2], int(parts) * int(size)])
    made = (user for user in packed.users if user.target == aten.view.default and user.args == key and user < node)
    whole = next(made, None)
    if whole is None:
        with program.graph.inserting_before(source):
            whole = program.graph.call_function(aten.view.default, key)
        whole.meta.update(source.meta, val=infer_type(program, whole))
    node.target, node.args, node.kwargs = aten.slice.Tensor, (whole, -1, start, start + int(size)), {}
    return True


def _split(program: Program, node: fx.Node) -> bool:
    """Rewrite the parts of a split as slices."""
    if node.target not in SPLITS:
        return False
    source, dim = node.args[0], arguments(node)[2]
    ends = [0]
    for part in node.meta["val"]:
        ends.append(ends[-1] + part.shape[dim])
    if not all(isinstance(end, int) for end in ends):
        return False
    for part in list(node.users):
        index = int(part.args[1])  # type: ignore[arg-type]
        part.target, part.args = aten.slice.Tensor, (source, dim, ends[index], ends[index + 1])
    return True


def _to_copy(program: Program, node: fx.Node) -> bool:
    """Keep only the dtype of a cast: devices and layouts are chosen by the compiler and not by the graph."""
    if node.target != aten._to_copy.default or set(node.kwargs) == {"dtype"}:
        return False
    node.kwargs = {"dtype": node.meta["val"].dtype}
    return True


def _extreme(program: Program, node: fx.Node) -> bool:
    """Rewrite the minimum or maximum of two values to one op name."""
    if node.target not in EXTREMES:
        return False
    node.target = EXTREMES[node.target]
    return True


def _power(program: Program, node: fx.Node) -> bool:
    """Rewrite `x ** -0.5` as the reciprocal square root, with which most norms are spelled."""
    if node.target != aten.pow.Tensor_Scalar or node.args[1] != -0.5:
        return False
    node.target, node.args = aten.rsqrt.default, node.args[:1]
    return True


def _views(program: Program, node: fx.Node) -> bool:
    """Rewrite all views to one op that reads past the views before it."""
    if node.target not in VIEWS:
        return False
    source, changed = node.args[0], node.target != aten.view.default
    assert isinstance(source, fx.Node)
    node.target = aten.view.default
    while source.target == aten.view.default:
        source, changed = source.args[0], True
        assert isinstance(source, fx.Node)
    node.args = (source, node.args[1])
    return changed


def _axes_from_end(program: Program, node: fx.Node) -> bool:
    """Rewrite `dim` arguments as negative numbers, and a slice's end as a plain size if that is known."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.args:
        return False
    first = node.args[0]
    value = node.meta["val"] if node.target == aten.unsqueeze.default else None
    if isinstance(first, fx.Node) and value is None:
        value = first.meta.get("val")
    elif isinstance(first, (list, tuple)) and first and isinstance(first[0], fx.Node):
        value = first[0].meta["val"]
    if not isinstance(value, Tensor):
        return False
    rank = value.dim()
    args, changed = list(node.args), False
    for index, parameter in enumerate(node.target._schema.arguments[: len(args)]):
        if parameter.name in ("dim", "dim0", "dim1", "dims"):
            new = _negative(args[index], rank)
            changed, args[index] = changed or new != args[index], new
    if node.target == aten.slice.Tensor and len(args) > 3:
        size = value.shape[args[1]]  # type: ignore[index]
        if isinstance(size, int) and isinstance(args[3], int) and args[3] > size:
            changed, args[3] = True, size
    node.args = tuple(args)
    return changed


def _negative(dim: Any, rank: int) -> Any:
    if isinstance(dim, (list, tuple)):
        return [_negative(each, rank) for each in dim]
    return dim - rank if isinstance(dim, int) and dim >= 0 else dim


RULES: tuple[Callable[[Program, fx.Node], bool], ...] = (
    _type_as,
    _softmax,
    _filled,
    _addmm,
    _matmul,
    _embedding,
    _cat,
    _select,
    _split,
    _to_copy,
    _extreme,
    _power,
    _views,
    _axes_from_end,
)


@dataclass(frozen=True)
class Canonicalise:
    name: str = "canonicalise"

    def __call__(self, program: Program) -> int:
        count = 0
        for node in list(program.graph.nodes):
            if node.op != "call_function":
                continue
            if node.target in ASSERTIONS:
                program.graph.erase_node(node)
                count += 1
                continue
            # Apply every rule, not only the first that matches.
            changed = [rule(program, node) for rule in RULES]
            source = _identity(node)
            if source is not None:
                node.replace_all_uses_with(source)
                program.graph.erase_node(node)
            count += source is not None or any(changed)
        if count:
            program.drop_unused()
        return count
