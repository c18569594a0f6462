"""The capture of attention that a model's own code computes: it is found by its results, not by its ops.

Between the product of queries and keys and the product with the values, any ops may stand that turn scores s into the
probabilities softmax(scale * s + slope * (key - query)), with 0 for the keys that a mask hides; which ops, in which
order and shape, does not matter. So this part of the graph is run on random scores of a few tokens, and the result
tells its scale, slopes and mask, or that it is something else. What is found is replaced by `inferc.attention`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, fx

from inferc.errors import ExportError
from inferc.frontend.nodes import Calls, constant_value, retype
from inferc.frontend.trace.torch_export import op_name
from inferc.ir import weights as weight_lib
from inferc.ir.ops.attention import visible
from inferc.ir.program import Program, name_of

log = logging.getLogger(__name__)

aten, inferc, frontend = torch.ops.aten, torch.ops.inferc, torch.ops.frontend
PRODUCTS = (aten.matmul.default, aten.bmm.default, aten.baddbmm.default)
SOFTMAX = (aten.softmax.int, aten._softmax.default)
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.clone.default, aten.alias.default)
TRIED = 13  # tokens that are tried: no size of a model, and more than the small windows that replace larger ones
TOLERANCE = 1e-6
LOWEST = 1e4  # a score lower than others by this much is hidden, and a literal this large is no position
# Ops that may combine a position with a number.
ARITHMETIC = frozenset(
    [
        "add",
        "sub",
        "rsub",
        "mul",
        "div",
        "floor_divide",
        "remainder",
        "fmod",
        "pow",
        "clamp",
        "clamp_min",
        "clamp_max",
        "gt",
        "ge",
        "lt",
        "le",
        "eq",
        "ne",
    ]
)
_Kind = tuple[str, int]


class _Other(Exception):
    """The error raised for a softmax that is not attention as `inferc.attention` computes it; the message says why."""


def capture_eager_attention(program: Program) -> int:
    """Replace every attention that is spelled out in `program`, and return how many there were.

    Raises ExportError, with the reason, if a mask is left that is part of something else.
    """
    if not any(node.target in SOFTMAX for node in program.graph.nodes):
        return 0
    tokens = program.input("token_ids").meta["val"].shape[1]
    dependent = _dependent(program)
    count, reasons = 0, []
    for node in list(program.graph.nodes):
        if node.target in PRODUCTS and node.args[0] in dependent and _is_square(node.args[0], tokens):
            try:
                _replace(program, _Region(program, node, tokens, dependent).attention())
                count += 1
            except _Other as reason:
                reasons.append(f"{name_of(node)}: {reason}")
                log.debug("%s", reasons[-1])
    if count or reasons:
        program.drop_unused()
    left = [node for node in program.graph.nodes if node.target == frontend.mask.default]
    if left:
        why = reasons[0] if reasons else f"{name_of(left[0])} is read by {name_of(next(iter(left[0].users)))}"
        raise ExportError(f"attention code adds the mask to its scores itself, in a way that is not known: {why}")
    if reasons and not any(node.target == inferc.attention.default for node in program.graph.nodes):
        raise ExportError(f"attention code of the model's own is not known: {reasons[0]}")
    return count


@dataclass
class _Attention:
    """An attention that was found in a graph; `node` is its product with the values."""

    node: fx.Node
    q: fx.Node
    k: fx.Node
    v: fx.Node
    is_turned: bool  # k is [1, heads, head_dim, T]
    scale: float
    mask: _Kind
    slopes: Tensor | None


def _dependent(program: Program) -> set[fx.Node]:
    """Return the values that depend on tokens or weights, and not only on the number of tokens."""
    found: set[fx.Node] = set()
    for node in program.graph.nodes:
        if node.op == "get_attr":
            known = program.weight(node).is_constant
        else:
            known = node.op != "placeholder" and not any(arg in found for arg in node.all_input_nodes)
            known = known or not isinstance(node.meta.get("val"), (Tensor, tuple))
        if not known:
            found.add(node)
    return found


def _is_square(node: Any, tokens: Any) -> bool:
    """Tell whether a value's last two axes are queries and keys."""
    shape: Any = node.meta["val"].shape if isinstance(node, fx.Node) else ()
    return len(shape) > 2 and str(shape[-1]) == str(shape[-2]) == str(tokens)


@dataclass
class _Region:
    """The nodes between the product of queries and keys, and `node`, the product of probabilities and values."""

    program: Program
    node: fx.Node
    tokens: Any
    dependent: set[fx.Node]
    values: dict[fx.Node, Any] = field(default_factory=dict)
    kinds: dict[_Kind, _Kind] = field(default_factory=dict)  # a mask as it is tried -> the mask of the model

    def attention(self) -> _Attention:
        """Return the attention that the region computes; raise _Other if it is none."""
        product, softmax = self._ends()
        shape = tuple(self._size(size) for size in product.meta["val"].shape)
        generator = torch.Generator().manual_seed(0)
        scores = torch.randn(shape, generator=generator, dtype=torch.float64)
        bias = self._run(softmax.args[0], product, torch.zeros_like(scores)).view(-1, TRIED, TRIED)
        found = self._run(softmax.args[0], product, scores).view(-1, TRIED, TRIED)
        if scores.numel() != bias.numel():
            raise _Other(f"its scores are {list(bias.shape)}, of products {list(shape)}")
        scores = scores.view(bias.shape)
        mask, seen = self._mask(bias)
        scale = float(f"{float((found - bias)[:, seen].div(scores[:, seen]).median()):.12g}")  # drops rounding errors
        slopes = self._slopes(bias, seen)
        distance = torch.arange(TRIED) - torch.arange(TRIED)[:, None]
        expected = scale * scores + slopes[:, None, None] * distance
        expected = expected.masked_fill(~seen, float("-inf")).softmax(-1)
        if scale <= 0 or not torch.allclose(self._probabilities(product, scores.view(shape)), expected, atol=TOLERANCE):
            raise _Other("what it makes of the products is no softmax of them with a scale, ALiBi and a mask")
        q, k = product.args[-2:] if product.target == aten.baddbmm.default else product.args[:2]
        v = self.node.args[1]
        assert isinstance(q, fx.Node) and isinstance(k, fx.Node) and isinstance(v, fx.Node)
        alibi = slopes.float() if slopes.any() else None
        (q, _), (k, is_turned), (v, _) = _heads(q), _heads(k, transposed=True), _heads(v)
        return _Attention(self.node, q, k, v, is_turned, scale, mask, alibi)

    def _ends(self) -> tuple[fx.Node, fx.Node]:
        """Return the product of queries and keys, and the softmax after it."""
        todo, seen = [self.node.args[0]], set()
        products, softmaxes = [], []
        while todo:
            node: Any = todo.pop()
            if node in seen or node not in self.dependent:
                continue
            seen.add(node)
            if node.target in PRODUCTS and _is_square(node, self.tokens):
                products.append(node)
                # The tensor that baddbmm adds to a product must, like everything else, depend only on the number of
                # tokens.
                todo += node.args[:1] if node.target == aten.baddbmm.default else []
            elif node.op != "call_function" or not _is_square(node, self.tokens):
                raise _Other(f"its scores depend on {name_of(node)} too")
            else:
                softmaxes += [node] if node.target in SOFTMAX else []
                todo += node.all_input_nodes
        if len(products) != 1 or len(softmaxes) != 1:
            raise _Other(f"it has {len(products)} products and {len(softmaxes)} softmaxes, expected one of each")
        return products[0], softmaxes[0]

    def _mask(self, bias: Tensor) -> tuple[_Kind, Tensor]:
        """Return the mask, and which pairs of query and key it leaves visible to any degree."""
        # A key whose score is lower than others by 1e4 has probability 0; 16-bit masks can subtract no more than that.
        of_heads = bias.softmax(-1) > 0
        seen, rows = of_heads[0], torch.arange(TRIED)
        for tried, real in {("causal", 0): ("causal", 0), **self.kinds}.items():
            if torch.equal(seen, visible(rows, rows, *tried)) and torch.equal(of_heads.all(0), seen):
                return real, seen
        raise _Other("its mask is not causal, sliding or chunked")

    def _slopes(self, bias: Tensor, seen: Tensor) -> Tensor:
        """Return the slope of each head: its bias per position of distance; raise _Other if that is not linear."""
        added = bias - bias.diagonal(dim1=1, dim2=2)[:, :, None]
        slopes = -added[:, 1, 0].where(added[:, 1, 0].abs() > TOLERANCE**2, 0.0)
        distance = torch.arange(TRIED) - torch.arange(TRIED)[:, None]
        if not torch.allclose(added[:, seen], (slopes[:, None, None] * distance)[:, seen], rtol=1e-5, atol=TOLERANCE):
            raise _Other("what it adds to the scores is not linear in the distance of key and query")
        return slopes

    def _probabilities(self, product: fx.Node, scores: Tensor) -> Tensor:
        probabilities: Tensor = self._run(self.node.args[0], product, scores)
        return probabilities.view(-1, TRIED, TRIED)

    # ------------------------------------------------------------------------------------- running it

    def _run(self, node: Any, product: fx.Node, scores: Tensor) -> Any:
        """Compute the value of `node` for some `scores`, in float64 where the model has float32 or its own dtype."""
        values: dict[fx.Node, Any] = {}

        def value(each: fx.Node) -> Any:
            known = self.values if each not in self.dependent else values
            if each not in known:
                known[each] = self._result(each, product, scores, value)
            return known[each]

        return value(node)

    def _result(self, node: fx.Node, product: fx.Node, scores: Tensor, value: Callable[[fx.Node], Any]) -> Any:
        if node is product:
            return scores if node.target != aten.baddbmm.default else self._added(node, scores, value)
        if not isinstance(node.meta["val"], (Tensor, tuple)):
            return self._size(node.meta["val"])
        if node.op == "get_attr":
            return self._constant(constant_value(self.program, node))
        if node.op != "call_function":
            raise _Other(f"its scores depend on {name_of(node)} too")
        if node not in self.dependent:
            _check_literals(node)
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), value)
        if node.target == frontend.mask.default:
            kind, window = (str(args[2]), int(args[3]))  # type: ignore[arg-type]
            return frontend.mask.default(args[0], torch.float64, *self._stand_in(kind, window))
        args, kwargs = self._widened((args, kwargs))
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _added(self, node: fx.Node, scores: Tensor, value: Callable[[fx.Node], Any]) -> Tensor:
        added: Any = node.args[0]
        beta, alpha = (float(node.kwargs.get(name, 1)) for name in ("beta", "alpha"))  # type: ignore[arg-type]
        total: Tensor = beta * value(added) + alpha * scores
        return total

    def _widened(self, arg: Any) -> Any:
        """Return the arguments with float64 in place of narrow dtypes, and with sizes as numbers."""
        if isinstance(arg, (list, tuple)):
            return type(arg)(self._widened(each) for each in arg)
        if isinstance(arg, dict):
            return {key: self._widened(each) for key, each in arg.items()}
        if isinstance(arg, torch.SymInt):
            return self._size(arg)
        narrow = (torch.float32, self.program.input("token_ids").meta["val"].dtype, _dtype(self.program))
        return torch.float64 if isinstance(arg, torch.dtype) and arg.is_floating_point and arg in narrow else arg

    def _constant(self, value: Tensor | None) -> Tensor:
        """Return a constant's value; a mask over all positions is replaced by one with a small window."""
        assert value is not None
        value = value.double() if value.is_floating_point() else value
        size = value.shape[-1]
        if value.dim() < 2 or value.shape[-2] != size or size < TRIED or value.numel() != size * size:
            return value
        kind = _kind_of(value.view(size, size))
        if kind is None:
            return value
        rows = torch.arange(size)
        return visible(rows, rows, *self._stand_in(*kind)).to(value.dtype).view(value.shape)

    def _stand_in(self, kind: str, window: int) -> _Kind:
        """Return the mask to try in place of this one: the same kind, with a small window that stands for this one."""
        real = (kind, window)
        tried = next((each for each, known in self.kinds.items() if known == real), None)
        if tried is None:
            windows = [each for each, _ in self.kinds if each != "causal"]
            tried = real if kind == "causal" else (kind, 3 + 2 * len(windows))
            self.kinds[tried] = real
        return tried

    def _size(self, size: Any) -> Any:
        if not isinstance(size, torch.SymInt):
            return size
        expression = size.node.expr
        return int(expression.subs(dict.fromkeys(expression.free_symbols, sympy.Integer(TRIED))))


def _check_literals(node: fx.Node) -> None:
    """Raise _Other for arithmetic on positions with a number too large to show in TRIED positions.

    Such a number may be a window, or the distance at which a bias ends.
    """
    if op_name(node).rstrip("_") not in ARITHMETIC:  # the name of an in-place op ends in _
        return
    for arg in (*node.args, *node.kwargs.values()):
        if isinstance(arg, (int, float)) and TRIED - 1 <= abs(arg) < LOWEST:
            raise _Other(
                f"{name_of(node)} reckons with positions and {arg}, more than the {TRIED} tokens that are tried"
            )


def _dtype(program: Program) -> torch.dtype:
    (results,) = program.output().args
    dtype: torch.dtype = results[0].meta["val"].dtype  # type: ignore[index, union-attr]
    return dtype


def _kind_of(mask: Tensor) -> _Kind | None:
    """Return the mask that a matrix of zeros and ones over all positions is, or None for another matrix."""
    seen, rows = mask != 0, torch.arange(len(mask))
    if not torch.equal(seen.to(mask.dtype), mask):
        return None
    window = int(seen[-1].sum())
    for kind in (("causal", 0), ("sliding", window)):
        if torch.equal(seen, visible(rows, rows, *kind)):
            return kind
    return None


# ----------------------------------------------------------------------------------------------- heads


def _heads(node: fx.Node, transposed: bool = False) -> tuple[fx.Node, bool]:
    """Return the [1, heads, T, head_dim] that an operand of a product is a view of, and whether it is still transposed.

    Casts and the repetition of heads are left out. transposed: whether the operand's last two axes are swapped.
    """
    while True:
        shape = node.meta["val"].shape
        source = node.args[0] if node.op == "call_function" and node.args else None
        is_whole = len(shape) == 4 and not transposed
        if not isinstance(source, fx.Node) or not isinstance(source.meta.get("val"), Tensor):
            break
        if node.target == aten._to_copy.default:
            node = source
        elif transposed and _swaps_last(node):
            node, transposed = source, False
        elif _regroups(source, node) or _repeats(source, node):
            node = source
        elif is_whole and (repeated := _before_repeat(node)) is not None:
            node = repeated
        else:
            break
    if len(node.meta["val"].shape) != 4 or node.meta["val"].shape[0] != 1:
        raise _Other(f"{name_of(node)} is no [1, heads, T, head_dim] that is multiplied")
    return node, transposed


def _swaps_last(node: fx.Node) -> bool:
    rank = node.meta["val"].dim()
    if node.target == aten.transpose.int:
        return {axis % rank for axis in node.args[1:]} == {rank - 2, rank - 1}
    order = [axis % rank for axis in node.args[1]] if node.target == aten.permute.default else []  # type: ignore[union-attr]
    return order == [*range(rank - 2), rank - 1, rank - 2]


def _regroups(source: fx.Node, node: fx.Node) -> bool:
    """Tell whether a view only differs in axes of size 1, or in how batch and heads are counted."""
    if node.target not in VIEWS:
        return False
    one, other = (list(map(str, each.meta["val"].shape)) for each in (source, node))
    return one[-2:] == other[-2:] and len(one) in (3, 4) and _count(source) == _count(node)


def _count(node: fx.Node) -> int:
    return int(torch.Size(node.meta["val"].shape[:-2]).numel())


def _repeats(source: fx.Node, node: fx.Node) -> bool:
    """Tell whether an expand widens only the heads of [1, 1, T, head_dim], or nothing."""
    if node.target != aten.expand.default:
        return False
    one, other = (list(map(str, each.meta["val"].shape[-2:])) for each in (source, node))
    return one == other and _count(source) in (1, _count(node))


def _before_repeat(node: fx.Node) -> fx.Node | None:
    """Return the K or V with few heads that was repeated for each query head of a group, or None."""
    steps = []
    for target in (VIEWS, (aten.expand.default,), (aten.unsqueeze.default,)):
        if isinstance(node, fx.Node) and node.target == aten.clone.default:
            node = node.args[0]  # type: ignore[assignment]
        if not isinstance(node, fx.Node) or node.target not in target:
            return None
        steps.append(node)
        node = node.args[0]  # type: ignore[assignment]
    axis = int(steps[2].args[1]) % 5  # type: ignore[arg-type]
    return node if axis == 2 and len(node.meta["val"].shape) == 4 else None


# ------------------------------------------------------------------------------------------- replacing


def _replace(program: Program, found: _Attention) -> None:
    """Replace the attention that was found by `inferc.attention`, in the shape of the product with the values."""
    old = found.node
    dtype = old.meta["val"].dtype
    base = name_of(old).rpartition(".")[0]
    slopes = None if found.slopes is None else _slopes_weight(program, found.slopes)
    calls = Calls(program, old)
    k = calls.add(aten.transpose.int, found.k, 2, 3) if found.is_turned else found.k
    parts = [
        each if each.meta["val"].dtype == dtype else calls.add(aten._to_copy.default, each, dtype=dtype)
        for each in (found.q, k, found.v)
    ]
    alibi = () if slopes is None else (slopes,)
    out = calls.add(inferc.attention.default, *parts, None, found.scale, *found.mask, 0.0, *alibi)
    out.meta["name"] = f"{base}.out"
    result = calls.add(aten.transpose.int, out, 1, 2)
    if old.meta["val"].dim() == 3:
        heads, dim = int(old.meta["val"].shape[0]), int(old.meta["val"].shape[2])
        result = calls.add(aten.reshape.default, result, [heads, -1, dim])
    old.replace_all_uses_with(result)
    retype(program, result)


def _slopes_weight(program: Program, slopes: Tensor) -> fx.Node:
    """Return the weight of these slopes, which all layers with equal slopes share."""
    weight = weight_lib.constant(slopes)
    name = next((name for name, known in program.weights.items() if known == weight), None)
    name = name or f"alibi_slopes{'' if 'alibi_slopes' not in program.weights else len(program.weights)}"
    known_node: fx.Node | None = next(iter(program.graph.find_nodes(op="get_attr", target=name)), None)
    if known_node is not None:
        return known_node
    first = next(node for node in program.graph.nodes if node.op not in ("placeholder", "get_attr"))
    node = program.add_weight(name, weight, before=first)
    node.meta["layer"] = None
    return node
