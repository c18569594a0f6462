"""What each node of a step launches: `name(node, values) -> Call`, as the kernel table's `emit` names them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from inferc.codegen.triton.aot.launch import FAST, INVARIANT, PREFILL, SHARED
from inferc.codegen.triton.aot.source import Source
from inferc.codegen.triton.kernels import (
    attention_decode,
    attention_plan,
    attention_prefill,
    attention_tiles,
    gather_rows,
    rms_norm,
    rope,
    silu_mul,
)
from inferc.codegen.values import Operand, Values, part
from inferc.errors import UnsupportedError
from inferc.ir.program import argument, dtype_name, name_of

ROWS = {"T": "tokens", "S": "rows", "sample": "rows"}
ALIGNMENT = 16  # bytes
NUM_PROGRAMS = 296  # of decode attention at most: see `occupancy.PROGRAMS`


@dataclass(frozen=True)
class Choice:
    """How a launch is done for at most `up_to` rows, or for any number of them."""

    source: Source
    up_to: int | None = None


@dataclass(frozen=True)
class Call:
    """One launch. arguments: where each argument of the kernel lies, as JSON; a choice for each number of rows, rising.

    An argument is {"value": pool, "offset", "column", "shifted"}: `offset` times the most rows of its pool, plus `column`
    bytes, plus, if shifted, the rows before those whose logits are made; {"weight": name}; {"input": name}; {"cache": group,
    "offset"}: bytes from the start of its pool; {"counts": "step" or "sample"}. What a kernel is not to read is {}.
    """

    node: fx.Node | None
    kernel: str
    rows: str
    choices: tuple[Choice, ...]
    arguments: dict[str, dict[str, Any]]
    writes: list[tuple[fx.Node, Operand]]  # the values that it makes
    only: str = ""  # the steps that need it: PREFILL, SHARED
    order: str = (
        ""  # of addition, where the call is for one of the two: FAST or INVARIANT, whatever else is in the batch
    )
    scratch: dict[str, dict[str, int]] = field(default_factory=dict)  # memory of its own, as `CudaStep.scratch` has it
    begin: tuple[Call, ...] = ()  # what must be launched once in a step, before all others


@dataclass
class Builder:
    """Collects the arguments of one call."""

    node: fx.Node
    values: Values
    arguments: dict[str, dict[str, Any]] = field(default_factory=dict)
    writes: list[tuple[fx.Node, Operand]] = field(default_factory=list)

    def arg(self, name: str) -> Any:
        return argument(self.node, name)

    def place(self, name: str, operand: Operand) -> Operand:
        self.arguments[name] = {
            "value": operand.pool,
            "offset": operand.offset,
            "column": operand.column,
            **({"shifted": operand.stride * operand.dtype.itemsize} if operand.shifted else {}),
        }
        return operand

    def read(self, name: str, of: str) -> Operand:
        """An argument of the op that has rows, as `name` of the kernel."""
        return self.place(name, self.values.operand(self.arg(of)))

    def write(self, name: str, index: int | None = None) -> Operand:
        """The result, or part `index` of it."""
        node = self.node if index is None else part(self.node, index)
        assert node is not None, f"{name_of(self.node)}: result {index} is not used"
        self.writes.append((node, self.place(name, self.values.operand(node))))
        return self.writes[-1][1]

    def weight(self, name: str, of: str) -> bool:
        """An argument of the op that is a weight; whether it is there."""
        node = self.arg(of)
        if node is None:
            return False
        if not isinstance(node, fx.Node) or node.op != "get_attr":
            raise UnsupportedError(f"{name_of(self.node)}: {of} must be a weight")
        self.arguments[name] = {"weight": str(node.target)}
        return True

    def input(self, name: str, of: str) -> None:
        """An argument of the op that is an input of the step."""
        node = self.arg(of)
        if not isinstance(node, fx.Node) or node.op != "placeholder":
            raise UnsupportedError(f"{name_of(self.node)}: {of} must be an input of the step")
        self.arguments[name] = {"input": str(node.target)}

    def cache(self, name: str) -> tuple[int, int]:
        """The layer of the pool that the op works on; returns the pool's layers and the tokens of a block.

        It lies as [block][layer][kv head][k, v][block_size][head_dim].
        """
        group, layer = self.values.cache_group(self.arg("kv_cache")), int(self.arg("layer"))
        value = self.arg("kv_cache").meta["val"]
        _, layers, parts, block_size, heads, dim = (int(size) if at else 0 for at, size in enumerate(value.shape))
        self.arguments[name] = {
            "cache": group,
            "offset": layer * parts * block_size * heads * dim * value.dtype.itemsize,
        }
        return layers, block_size

    def unaligned(self) -> tuple[str, ...]:
        """The arguments whose rows start at no multiple of 16 bytes."""
        columns = {name: at.get("column", 0) + at.get("shifted", 0) for name, at in self.arguments.items()}
        return tuple(name for name, column in columns.items() if column % ALIGNMENT)

    def done(self, kernel: str, of: Operand, *choices: Source | Choice, **more: Any) -> Call:
        """of: the operand whose rows the kernel goes over. more: further fields of the call."""
        self.arguments["counts_ptr"] = {"counts": "sample" if of.pool == "sample" else "step"}
        made = tuple(each if isinstance(each, Choice) else Choice(each) for each in choices)
        names = made[0].source.signature
        arguments = {name: self.arguments.get(name, {}) for name in names}
        assert not set(self.arguments) - set(names), f"{kernel} takes no {set(self.arguments) - set(names)}"
        return Call(self.node, kernel, ROWS[of.pool], made, arguments, self.writes, **more)


def embedding(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    b.weight("table_ptr", "weight")
    b.input("index_ptr", "indices")
    out = b.write("out_ptr")
    return b.done("gather_rows", out, _gather(out, out.width))


def index_select(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    table, out = b.read("table_ptr", "self"), b.write("out_ptr")
    b.input("index_ptr", "index")
    return b.done("gather_rows", out, _gather(out, table.stride))


def _gather(out: Operand, table_stride: int) -> Source:
    return gather_rows.gather_rows(dtype_name(out.dtype), ROWS[out.pool], out.width, table_stride, out.stride)


def rms_norm_(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    x, out = b.read("x_ptr", "x"), b.write("out_ptr")
    return _rms_norm(b, (x, x, out, out), False)


def rms_norm_add(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    x, residual = b.read("x_ptr", "x"), b.read("residual_ptr", "residual")
    out, total = b.write("out_ptr", 0), b.write("sum_ptr", 1)
    return _rms_norm(b, (x, residual, out, total), True)


def _rms_norm(b: Builder, operands: tuple[Operand, Operand, Operand, Operand], adds: bool) -> Call:
    out = operands[2]
    weighs = b.weight("weight_ptr", "weight")
    x, residual, _, total = (operand.stride for operand in operands)
    source = rms_norm.rms_norm(
        *(dtype_name(out.dtype), ROWS[out.pool], out.width, (x, residual, out.stride, total)),
        *(float(b.arg("eps")), float(b.arg("weight_offset"))),
        *(rms_norm.how_scaled(weighs, bool(b.arg("round_before_scale"))), adds),
    )
    return b.done("rms_norm", out, source)


def silu_mul_(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    gate, up, out = b.read("gate_ptr", "gate"), b.read("up_ptr", "up"), b.write("out_ptr")
    strides = (gate.stride, up.stride, out.stride)
    source = silu_mul.silu_mul(dtype_name(out.dtype), ROWS[out.pool], out.width, strides, b.unaligned())
    return b.done("silu_mul", out, source)


def rope_table(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    b.input("positions_ptr", "positions")
    b.weight("inv_freq_ptr", "inv_freq")
    out = b.write("out_ptr")
    return b.done("rope_table", out, rope.rope_table(out.width // 2, out.stride, float(b.arg("scaling"))))


def rope_kv_write(node: fx.Node, values: Values) -> Call:
    return _rope_kv_write(Builder(node, values), 0.0, 0.0, 0)


def norm_rope_kv_write(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    b.weight("q_weight_ptr", "q_weight")
    b.weight("k_weight_ptr", "k_weight")
    how = rms_norm.how_scaled(True, bool(b.arg("round_before_scale")))
    return _rope_kv_write(b, float(b.arg("eps")), float(b.arg("weight_offset")), how)


def _rope_kv_write(b: Builder, eps: float, offset: float, how: int) -> Call:
    q, k, v = (b.read(f"{name}_ptr", name) for name in ("q", "k", "v"))
    table = b.read("table_ptr", "table")
    layers, block_size = b.cache("cache_ptr")
    b.input("slots_ptr", "slot_mapping")
    out = b.write("out_ptr", 0)
    _, heads, dim = b.arg("q").meta["val"].shape
    kv_heads = int(b.arg("k").meta["val"].shape[1])
    strides = (q.stride, k.stride, v.stride, table.stride, out.stride)
    source = rope.rope_kv_write(
        *(dtype_name(out.dtype), int(heads), kv_heads, int(dim), table.width // 2, str(b.arg("pairs")), strides),
        *(layers, block_size, eps, offset, how, b.unaligned(), b.arg("kv_cache").meta["val"].dtype == torch.int8),
    )
    return b.done("rope_kv_write", out, source)


def paged_attention_(node: fx.Node, values: Values) -> tuple[Call, ...]:
    b = Builder(node, values)
    q, out = b.read("q_ptr", "q"), b.write("out_ptr")
    cache = b.arg("kv_cache").meta["val"]
    layers, block_size = b.cache("cache_ptr")
    for name, of in (("block_table", "block_table"), ("query_start", "query_start_loc"), ("seq_lens", "seq_lens")):
        b.input(f"{name}_ptr", of)
    has_sinks, has_alibi = b.weight("sinks_ptr", "sinks"), b.weight("alibi_ptr", "alibi")
    b.arguments["max_blocks_ptr"] = {"input": f"max_blocks_{values.cache_group(b.arg('kv_cache'))}"}
    _, heads, dim = (int(size) if at else 0 for at, size in enumerate(b.arg("q").meta["val"].shape))
    kv_heads, mask, window = int(cache.shape[4]), str(b.arg("mask")), int(b.arg("window"))
    shape = attention_tiles.AttentionShape(
        dtype=dtype_name(out.dtype),
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        strides=(q.stride, out.stride),
        layers=layers,
        block_size=block_size,
        scale=float(b.arg("scale")),
        softcap=float(b.arg("softcap")),
        mask=mask,
        window=window,
        has_sinks=has_sinks,
        int8_kv=cache.dtype == torch.int8,
        has_alibi=has_alibi,
    )
    kind = hashlib.sha256(repr((heads, kv_heads, dim, mask, window)).encode()).hexdigest()[:6]
    group = values.cache_group(b.arg("kv_cache"))
    cells = attention_plan.invariant_cells(mask, window, int(values.program.info["max_model_len"]))
    made = [
        *([_prefix_attention(b, out, shape, group, kind)] if mask == "causal" and not has_alibi else []),
        _decode_attention(b, out, shape, group, kind, attention_plan.TILES, order=FAST),
        _decode_attention(b, out, shape, group, f"{kind}_in_cells", cells, order=INVARIANT),
    ]
    for order, each in ((FAST, attention_plan.TILES), (INVARIANT, cells)):
        prefill = attention_prefill.prefill_attention(shape, each)
        made.append(b.done("prefill_attention", out, prefill, only=PREFILL, order=order))
    return tuple(made)


def _decode_attention(
    b: Builder,
    out: Operand,
    shape: attention_tiles.AttentionShape,
    cache_group: int,
    kind: str,
    cells: attention_plan.Cells,
    order: str,
) -> Call:
    """Of an attention whose operands b has. What a group's prefix left is read in the fast order."""
    has_shared = order == FAST and shape.mask == "causal" and not shape.has_alibi
    partial = attention_decode.partial_bytes(attention_tiles.decode_rows(shape.group), shape.dim, NUM_PROGRAMS, cells)
    planned = attention_plan.attention_plan(
        *(shape.kv_heads, attention_tiles.query_limit(shape.group), shape.mask, shape.window),
        *(NUM_PROGRAMS, cells, has_shared),
    )
    places, scratch = _of_plan(kind, partial)
    shared = {}
    if has_shared:
        shared = {"shared_ptr": {"input": f"shared_{cache_group}"}}
        places["prefix_ptr"] = {"scratch": f"prefix_{kind}"}
        scratch[f"prefix_{kind}"] = {"per_seq": attention_decode.prefix_bytes(shape.heads, shape.dim)}
    lengths = {name: b.arguments[name] for name in ("query_start_ptr", "seq_lens_ptr")}
    before = Builder(b.node, b.values, {**lengths, **shared, "plan_ptr": places["plan_ptr"]})
    begin = replace(before.done("attention_plan", out, planned, order=order), node=None)
    source = attention_decode.decode_attention(shape, NUM_PROGRAMS, cells, has_shared)
    each = Builder(b.node, b.values, {**b.arguments, **places, **shared}, b.writes)
    return each.done("decode_attention", out, source, order=order, scratch=scratch, begin=(begin,))


def _prefix_attention(
    b: Builder, out: Operand, shape: attention_tiles.AttentionShape, cache_group: int, kind: str
) -> Call:
    """The keys that sequences share, in steps that have such groups: the host says which in a `SharedPrefixes`."""
    rows = attention_decode.prefix_rows(shape.group, shape.dim, shape.int8_kv)
    members = attention_decode.prefix_members(shape.group, shape.dim, shape.int8_kv)
    partial = attention_decode.partial_bytes(rows, shape.dim, NUM_PROGRAMS)
    places, scratch = _of_plan(f"{kind}_prefix", partial)
    counts = {"counts_ptr": {"input": f"group_counts_{cache_group}"}}
    lengths = {"seq_lens_ptr": {"input": f"group_keys_{cache_group}"}}
    starts = {"input": f"member_start_{cache_group}"}
    before = Builder(b.node, b.values, {**lengths, "query_start_ptr": starts, "plan_ptr": places["plan_ptr"]})
    planned = attention_plan.attention_plan(shape.kv_heads, members, shape.mask, shape.window, NUM_PROGRAMS)
    begin = replace(before.done("attention_plan", out, planned, order=FAST, only=SHARED), node=None)
    begin = replace(begin, arguments={**begin.arguments, **counts})
    places |= {"members_ptr": {"input": f"members_{cache_group}"}, "member_start_ptr": starts}
    places["prefix_ptr"] = {"scratch": f"prefix_{kind}"}
    arguments = {name: at for name, at in b.arguments.items() if name not in ("seq_lens_ptr", "out_ptr")}
    each = Builder(b.node, b.values, {**arguments, **lengths, **places})
    source = attention_decode.prefix_attention(shape, NUM_PROGRAMS)
    call = each.done("prefix_attention", out, source, order=FAST, only=SHARED, scratch=scratch, begin=(begin,))
    return replace(call, arguments={**call.arguments, **counts})


def _of_plan(kind: str, partial_bytes: int) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, int]]]:
    """Where what a plan shares out has its scratch, and how much."""
    none = attention_plan.plan_bytes(0)
    scratch = {
        f"plan_{kind}": {"const": none, "per_seq": attention_plan.plan_bytes(1) - none},
        f"partial_{kind}": {"const": partial_bytes},
        f"arrived_{kind}": {"const": 4 * NUM_PROGRAMS},
    }
    return {f"{name.split('_')[0]}_ptr": {"scratch": name} for name in scratch}, scratch
