"""The cost of each op of a Program, at any stage from captured to lowered, as formulas over the step's sizes.

An op reads its inputs once and writes its results once, as one kernel with ideal caches would; weights, KV cache and
activations are counted separately. Views are free. An op without a row in `COSTS` gets the default cost: it reads its
inputs, writes its results and does one operation for each element of the largest of them; or, where it has an argument
`weight` whose matrices fit its first argument, the arithmetic of that product. Other products, lookups and ops that use
the cache have a row in `COSTS`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, fx

from inferc.cost.formulas import Formula, OpCost, Step
from inferc.ir.ops import cached_head_dim
from inferc.ir.program import MASK_KINDS, Program, dtype_name, target_name

Terms = dict[str, int]  # a formula while it is built
TYPICAL = Step(num_tokens=4096, num_seqs=64, num_rows=64, context=4096)  # decides which of two sizes is the larger

# Ops that only make another view of a value: they move nothing.
VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        "view",
        "_unsafe_view",
        "reshape",
        "slice.Tensor",
        "select.int",
        "transpose.int",
        "permute",
        "t",
        "alias",
        "unsqueeze",
        "squeeze",
        "squeeze.dim",
        "squeeze.dims",
        "expand",
        "detach",
        "split.Tensor",
        "chunk",
        "split_with_sizes",
        "unbind.int",
        "narrow",
        "movedim.int",
        "view_as_real",
        "view_as_complex",
    )
) | {"getitem"}
# Ops that move data without arithmetic.
COPIES = frozenset(
    f"aten.{name}"
    for name in (
        "_to_copy",
        "clone",
        "cat",
        "stack",
        "copy",
        "constant_pad_nd",
        "arange",
        "arange.start_step",
        "full",
        "zeros",
        "ones",
        "empty.memory_format",
        "scalar_tensor",
    )
)
COPIES |= {"inferc.resize_heads"}
# Operations per element of the largest value, for ops that do the work of several plain ones.
PER_ELEMENT = {
    "inferc.rms_norm": 4,  # square, sum, scale, weight
    "inferc.rms_norm_add": 5,
    "inferc.rope": 3,
    "inferc.rope_table": 3,
    "inferc.layer_norm": 6,
    "inferc.silu_mul": 2,
    "inferc.gelu_mul": 8,
    "inferc.moe_routing": 4,
    "inferc.quantize_rows_fp8": 3,
    "inferc.quantize_rows": 3,  # magnitude, division, rounding
    "inferc.rms_norm_quantize": 7,
    "inferc.rms_norm_add_quantize": 8,
    "inferc.layer_norm_quantize": 9,
    "inferc.silu_mul_quantize": 5,
}


class Sizes:
    """The sizes of one program's values as formulas over the numbers of tokens, logits rows and sequences."""

    def __init__(self, program: Program) -> None:
        inputs = {node.name: node.meta["val"] for node in program.inputs()}
        self.letters: dict[Any, str] = {}
        for name, letter in (("token_ids", "T"), ("logits_rows", "S"), ("seq_lens", "B")):
            if name in inputs:
                self.letters[_expression(inputs[name].shape[-1])] = letter
        self.cached: dict[tuple[Any, ...], Terms] = {}

    def elements(self, shape: Iterable[int | torch.SymInt]) -> Terms:
        """Return the number of elements of `shape` as a formula, which is empty for the KV cache and its tables.

        The size of these does not depend on the step.
        """
        key = tuple(map(_expression, shape))
        if key not in self.cached:
            self.cached[key] = self._product(key)
        return self.cached[key]

    def _product(self, shape: tuple[Any, ...]) -> Terms:
        count = math.prod(size for size in shape if isinstance(size, int))
        product = sympy.Integer(count)
        for size in shape:
            if not isinstance(size, int):
                if not size.free_symbols <= self.letters.keys():
                    return {}
                product *= size
        symbols = sorted(product.free_symbols, key=str)
        if not symbols:
            return {"1": int(product)}
        poly = product.as_poly(*symbols)
        if poly is None:  # a size such as T // 2, which is nearly proportional to T
            values = {symbol: getattr(TYPICAL, SIZES_OF[self.letters[symbol]]) for symbol in symbols}
            largest = max(symbols, key=lambda symbol: values[symbol])
            return {self.letters[largest]: int(product.subs(values)) // values[largest]}
        terms: Terms = {}
        for powers, coefficient in poly.terms():
            letters = [
                self.letters[symbol] for symbol, power in zip(symbols, powers, strict=True) for _ in range(power)
            ]
            terms["*".join(sorted(letters)) or "1"] = int(coefficient)
        return terms


SIZES_OF = {"T": "num_tokens", "S": "num_rows", "B": "num_seqs"}


def _expression(size: int | torch.SymInt) -> Any:
    return size if isinstance(size, int) else size.node.expr


def times(terms: Terms, factor: int) -> Terms:
    return {name: factor * coefficient for name, coefficient in terms.items()}


def add(total: Terms, terms: Terms) -> None:
    for name, coefficient in terms.items():
        total[name] = total.get(name, 0) + coefficient


def formula(terms: Terms) -> Formula:
    return tuple(sorted((name, coefficient) for name, coefficient in terms.items() if coefficient))


@dataclass
class Call:
    """A call node as a cost function sees it: its arguments by name and its cost so far."""

    node: fx.Node
    op: str
    sizes: Sizes
    weights: Terms = field(default_factory=dict)
    cache: Terms = field(default_factory=dict)
    activations: Terms = field(default_factory=dict)
    flops: Terms = field(default_factory=dict)
    dtype: torch.dtype = torch.float32

    @cached_property
    def arguments(self) -> Mapping[str, Any]:
        schema = self.node.target._schema  # type: ignore[union-attr]
        values = {
            parameter.name: self.node.args[index] if index < len(self.node.args) else parameter.default_value
            for index, parameter in enumerate(schema.arguments)
        }
        return {**values, **self.node.kwargs}

    def value(self, name: str) -> Tensor:
        """Return the fake tensor of an argument."""
        value: Tensor = self.arguments[name].meta["val"]
        return value

    def elements(self, value: Any) -> Terms:
        return self.sizes.elements(value.shape) if isinstance(value, Tensor) else {}

    def read(self, *without: str) -> None:
        """Count each distinct input as read once, except the arguments named in `without`."""
        left_out = {self.arguments[name] for name in without}
        for node in self.node.all_input_nodes:
            if node not in left_out:
                base, source = _base(node)
                value = source.meta.get("val")
                if isinstance(value, Tensor):
                    into = self.weights if base.op == "get_attr" else self.activations
                    add(into, times(self.elements(value), value.dtype.itemsize))

    def write(self, *values: Any) -> None:
        """Count `values` as written, by default what the op returns."""
        returned = self.node.meta.get("val")
        for value in values or (returned if isinstance(returned, (tuple, list)) else (returned,)):
            if isinstance(value, Tensor):
                add(self.activations, times(self.elements(value), value.dtype.itemsize))

    def cost(self) -> OpCost:
        terms = {"weights": self.weights, "cache": self.cache, "activations": self.activations, "flops": self.flops}
        formulas = {name: formula(each) for name, each in terms.items()}
        return OpCost(self.op, dtype_name(self.dtype), **formulas, kernel=self.node.meta.get("kernel", ""))


def _base(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Return the node at the end of a chain of views, and the node whose size is read.

    The two differ for an expanded value, which is read at its size before the expansion.
    """
    source = node
    while node.op == "call_function" and target_name(node.target) in VIEWS:
        grown = target_name(node.target) == "aten.expand" and source is node
        node = node.args[0]  # type: ignore[assignment]
        source = node if grown else source
    return node, source


# ------------------------------------------------------------------------------------------ ops that differ


def _default(call: Call) -> None:
    call.read()
    call.write()
    product = _multiplied(call)
    if product is not None:
        call.flops = product
    elif call.op not in COPIES:
        call.flops = times(_largest(call), PER_ELEMENT.get(call.op, 1))


def _multiplied(call: Call) -> Terms | None:
    """Return the arithmetic of an op that multiplies its first argument by `weight`, or None for other ops.

    weight [..., in], first argument [..., in], result [..., ...]: the result ends in the weight's leading axes, which
    are the outputs of one matrix, or of one matrix per head.
    """
    weight = call.arguments.get("weight") if isinstance(call.node.target, torch._ops.OpOverload) else None
    first = call.node.args[0] if call.node.args else None
    out = call.node.meta.get("val")
    out = out[0] if isinstance(out, (tuple, list)) and out else out
    if not (isinstance(weight, fx.Node) and isinstance(first, fx.Node) and isinstance(out, Tensor)):
        return None
    matrix, x = weight.meta.get("val"), first.meta.get("val")
    if not isinstance(matrix, Tensor) or not isinstance(x, Tensor) or first is weight or matrix.dim() < 2:
        return None
    ending = tuple(out.shape[1 - matrix.dim() :])
    # A symbolic size never belongs to a weight matrix, and comparing one would add a guard on the symbol.
    if not all(isinstance(size, int) for size in (*matrix.shape, *ending, x.shape[-1])):
        return None
    if tuple(matrix.shape) != (*ending, x.shape[-1]):
        return None
    call.dtype = matrix.dtype
    return times(call.elements(out), 2 * int(x.shape[-1]))


def _largest(call: Call) -> Terms:
    """Return the size of the largest value that the op reads or writes, weights aside."""
    returned = call.node.meta.get("val")
    values = [*(returned if isinstance(returned, (tuple, list)) else (returned,))]
    values += [_base(node)[1].meta.get("val") for node in call.node.all_input_nodes if node.op != "get_attr"]
    sizes = [call.elements(value) for value in values]
    return max(sizes, key=lambda terms: TYPICAL.evaluate(formula(terms)), default={})


@dataclass(frozen=True)
class Matmul:
    """The cost of a matrix product whose left operand is the argument `left`, [..., k].

    It does two operations for each of the k elements and each element of the result.
    """

    left: str

    def __call__(self, call: Call) -> None:
        call.read()
        call.write()
        left = call.value(self.left)
        call.flops = times(call.sizes.elements((*call.node.meta["val"].shape, left.shape[-1])), 2)
        call.dtype = left.dtype


@dataclass(frozen=True)
class Lookup:
    """The cost of reading rows or elements of the argument `table`, and their entries of `scale`, by index.

    Only the entries that are looked up count as read.
    """

    table: str
    scale: str = ""

    def __call__(self, call: Call) -> None:
        call.read(self.table, *([self.scale] if self.scale else []))
        call.write()
        base, _ = _base(call.arguments[self.table])
        into = call.weights if base.op == "get_attr" else call.activations
        add(into, times(call.elements(call.node.meta["val"]), call.value(self.table).dtype.itemsize))
        if self.scale:
            add(into, times(call.elements(call.value("indices")), call.value(self.scale).dtype.itemsize))


def _attend(call: Call, key_dim: int, value_dim: int, cached_bytes: int) -> None:
    """Count the KV cache reads and the arithmetic of an attention layer.

    K and V of every position that a sequence sees are read once, `cached_bytes` each; QK and PV are computed for every
    pair of a query and a key.
    """
    kind, window = MASK_KINDS[call.arguments["mask"]], int(call.arguments["window"])
    num_heads = int(call.value("q").shape[-2 if call.value("q").dim() == 3 else 1])
    call.cache = {f"keys:{kind}:{window}": cached_bytes}
    call.flops = {f"pairs:{kind}:{window}": 2 * num_heads * (key_dim + value_dim)}
    call.dtype = call.value("q").dtype


def _attention(call: Call) -> None:
    """Count attention as captured, with K and V as if they lay in a KV cache, so that the passes can be compared."""
    call.read("k", "v")
    call.write()
    k, v = call.value("k"), call.value("v")
    heads = int(k.shape[-2 if k.dim() == 3 else 1])
    key_dim, value_dim = int(k.shape[-1]), int(v.shape[-1])
    is_latent = _base(call.arguments["v"])[0] is call.arguments["k"]  # V is a part of K
    stored = key_dim if is_latent else key_dim + value_dim
    _attend(call, key_dim, value_dim, heads * stored * k.dtype.itemsize)


def _paged_attention(call: Call) -> None:
    call.read("kv_cache", "block_table")
    call.write()
    head_dim = cached_head_dim(call.value("kv_cache"))
    _attend(call, head_dim, head_dim, _cached_bytes(call))


def _latent_attention(call: Call) -> None:
    """Count attention over latents: K, which holds V, is read once for all heads."""
    call.read("kv_cache", "block_table")
    call.write()
    _attend(call, cached_head_dim(call.value("kv_cache")), int(call.arguments["v_dim"]), _cached_bytes(call))


def _cached_bytes(call: Call) -> int:
    """Return the bytes that one layer of the cache holds per token, scales included."""
    cache = call.value("kv_cache")
    return math.prod(int(cache.shape[axis]) for axis in (2, 4, 5)) * cache.dtype.itemsize


def _write_cache(call: Call, num_tokens: int | torch.SymInt) -> None:
    """Count the write of new tokens into one layer of the cache, and the rounding where the cache is int8."""
    cache = call.value("kv_cache")
    add(call.cache, times(call.sizes.elements((num_tokens,)), _cached_bytes(call)))
    if cache.dtype == torch.int8:
        rounded = int(cache.shape[2]) * int(cache.shape[4]) * cached_head_dim(cache)
        add(call.flops, times(call.sizes.elements((num_tokens, rounded)), PER_ELEMENT["inferc.quantize_rows"]))


def _latent_write(call: Call) -> None:
    call.read("kv_cache")
    _write_cache(call, call.value("k").shape[0])


def _kv_write(call: Call) -> None:
    """Count a write of K and V, of which only the new positions are written to the cache."""
    call.read("kv_cache")
    returned = call.node.meta["val"]
    if isinstance(returned, (tuple, list)):  # rope_kv_write also returns the rotated queries
        call.write(returned[0])
        each = PER_ELEMENT["inferc.rope"] + (PER_ELEMENT["inferc.rms_norm"] if "q_weight" in call.arguments else 0)
        call.flops = times(call.elements(call.value("q")), each)
        add(call.flops, times(call.elements(call.value("k")), each))
    _write_cache(call, call.value("k").shape[0])


def _dense_write(call: Call) -> None:
    """Count a write into a dense cache, of which only the new positions are written."""
    call.read("cache")
    cache = call.value("cache")
    row = int(cache.shape[1]) * int(cache.shape[3]) * cache.dtype.itemsize
    add(call.cache, times(call.sizes.elements((call.value("x").shape[0],)), row))


def _dense_attention(call: Call) -> None:
    call.read("k_cache", "v_cache")
    call.write()
    k, v = call.value("k_cache"), call.value("v_cache")
    key_dim, value_dim = int(k.shape[3]), int(v.shape[3])
    _attend(call, key_dim, value_dim, int(k.shape[1]) * (key_dim + value_dim) * k.dtype.itemsize)


def _dense_write_attention(call: Call) -> None:
    """Count the two writes and the attention; the returned caches are not copied."""
    call.read("k_cache", "v_cache")
    call.write(call.node.meta["val"][0])
    k, v = call.value("k_cache"), call.value("v_cache")
    key_dim, value_dim = int(k.shape[3]), int(v.shape[3])
    row = int(k.shape[1]) * (key_dim + value_dim) * k.dtype.itemsize
    _attend(call, key_dim, value_dim, row)
    add(call.cache, times(call.sizes.elements((call.value("k").shape[0],)), row))


def _dense_latent_attention(call: Call) -> None:
    call.read("cache")
    call.write()
    cache = call.value("cache")
    _attend(call, int(cache.shape[3]), int(call.arguments["v_dim"]), int(cache.shape[3]) * cache.dtype.itemsize)


def _linear_silu_mul(call: Call) -> None:
    """Count the products of gate and up, and the SwiGLU that combines them."""
    call.read()
    call.write()
    x, out = call.value("x"), call.node.meta["val"]
    call.flops = times(call.elements(out), 4 * int(x.shape[-1]) + PER_ELEMENT["inferc.silu_mul"])
    call.dtype = x.dtype


def _qkv_rope_kv_write(call: Call) -> None:
    """Count the projection, the norms and rotations of q and k, and the write of the new K and V."""
    call.read("kv_cache")
    cache, x = call.value("kv_cache"), call.value("x")
    q = call.node.meta["val"][0]
    call.write(q)
    call.flops = times(call.sizes.elements((x.shape[0], call.value("weight").shape[0], x.shape[1])), 2)
    each = PER_ELEMENT["inferc.rope"]
    if call.arguments["q_weight"] is not None:
        each += PER_ELEMENT["inferc.rms_norm"]
    add(call.flops, times(call.elements(q), each))
    add(call.flops, times(call.sizes.elements((x.shape[0], cache.shape[4], cached_head_dim(cache))), each))
    _write_cache(call, x.shape[0])
    call.dtype = x.dtype


def _moe_experts(call: Call) -> None:
    """Count the weights of the experts that the step's tokens touch, and the arithmetic of top_k experts per token."""
    names = ("gate_up_scale", "down_scale", "gate_up_group_scale", "down_group_scale")
    scales = [name for name in names if call.arguments[name] is not None]
    call.read("gate_up", "down", *scales)
    call.write()
    gate_up, down = call.value("gate_up"), call.value("down")
    num_experts, top_k = int(gate_up.shape[0]), int(call.value("expert_ids").shape[-1])
    rows = call.elements(call.value("expert_ids"))
    letter = next(iter(rows))
    stored = [call.value(name) for name in ("gate_up", "down", *scales)]
    bytes_of_one = sum(math.prod(each.shape[1:]) * each.dtype.itemsize for each in stored)
    call.weights = {f"experts:{num_experts}:{top_k}:{letter}": bytes_of_one}
    hidden, inter = int(down.shape[1]), int(gate_up.shape[1]) // 2
    call.flops = times(rows, 2 * 3 * inter * hidden)
    call.dtype = call.value("x").dtype


COSTS: Mapping[str, Callable[[Call], None]] = {
    "aten.embedding": Lookup("weight"),
    "inferc.embedding_int8": Lookup("weight", "scale"),
    "aten.index_select": Lookup("self"),
    "aten.index.Tensor": Lookup("self"),
    "aten.gather": Lookup("self"),
    "aten.addmm": Matmul("mat1"),
    "aten.mm": Matmul("self"),
    "aten.bmm": Matmul("self"),
    "aten.baddbmm": Matmul("batch1"),
    "aten.matmul": Matmul("self"),
    "inferc.attention": _attention,
    "inferc.paged_attention": _paged_attention,
    "inferc.latent_attention": _latent_attention,
    "inferc.latent_write": _latent_write,
    "inferc.dense_write": _dense_write,
    "inferc.dense_attention": _dense_attention,
    "inferc.dense_write_attention": _dense_write_attention,
    "inferc.dense_latent_attention": _dense_latent_attention,
    "inferc.kv_write": _kv_write,
    "inferc.norm_rope_kv_write": _kv_write,
    "inferc.rope_kv_write": _kv_write,
    "inferc.qkv_rope_kv_write": _qkv_rope_kv_write,
    "inferc.moe_experts": _moe_experts,
    "inferc.linear_silu_mul": _linear_silu_mul,
    "inferc.linear_int4": Matmul("x"),
    "inferc.linear_int8": Matmul("x"),
    "inferc.linear_w8a8": Matmul("x"),
    "inferc.linear_fp8": Matmul("x"),
    "inferc.linear_w4a8": Matmul("x"),
}
"""The cost functions of ops that the default does not fit. Every op that takes a KV cache must be here."""


def op_cost(node: fx.Node, sizes: Sizes) -> OpCost | None:
    """Return the cost of a node; None for nodes that run no kernel: inputs, weights, views, sizes."""
    op = target_name(node.target) if node.op == "call_function" else ""
    value = node.meta.get("val")
    if not op or op in VIEWS or not isinstance(value, (Tensor, tuple, list)):
        return None
    call = Call(node, op, sizes)
    inputs = [arg.meta.get("val") for arg in node.all_input_nodes]
    call.dtype = next((v.dtype for v in inputs if isinstance(v, Tensor) and v.is_floating_point()), torch.float32)
    COSTS.get(op, _default)(call)
    return call.cost()


def program_costs(program: Program) -> dict[OpCost, int]:
    """Return how often each cost occurs in the program, in the order of first use."""
    sizes = Sizes(program)
    costs = (op_cost(node, sizes) for node in program.graph.nodes)
    return dict(Counter(cost for cost in costs if cost is not None))
