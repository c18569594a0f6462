"""The plan against liveness, and against programs that are run inside of one arena."""

import math
import operator
from typing import Any

import msgspec
import pytest
import torch
from graphs import Tensors, random
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from inferc.arena import POOLS, MemoryPlan, Place
from inferc.errors import VerifyError
from inferc.ir.program import Program, new_program
from inferc.passes.lower.plan_memory import (
    PlanMemory,
    Value,
    live_values,
    memory_plan,
    padded,
    place_values,
    verify_plan,
)
from inferc.passes.rewrite import infer_type

aten, inferc = torch.ops.aten, torch.ops.inferc

lifetimes = st.tuples(st.integers(0, 20), st.integers(0, 6))
values = st.lists(st.tuples(st.sampled_from(POOLS), st.integers(1, 300), lifetimes), max_size=25).map(
    lambda rows: [Value(f"v{i}", pool, size, at, at + live) for i, (pool, size, (at, live)) in enumerate(rows)]
)


@given(values)
@settings(max_examples=150, deadline=None)
def test_live_values_never_overlap_and_pools_are_no_larger_than_without_reuse(made: list[Value]) -> None:
    plan = place_values(made)
    verify_plan(made, plan)
    for pool in POOLS:
        at_once = [sum(v.row_bytes for v in made if v.pool == pool and v.first <= t <= v.last) for t in range(30)]
        assert max(at_once) <= plan.arena.pools[pool] <= sum(v.row_bytes for v in made if v.pool == pool)


@given(values, st.integers(1, 300), st.integers(1, 90), st.integers(1, 90))
@settings(max_examples=80, deadline=None)
def test_addresses_are_aligned_and_inside_of_the_formula(made: list[Value], tokens: int, rows: int, seqs: int) -> None:
    plan = place_values(made)
    size = plan.arena_bytes(tokens, rows, seqs)
    by_formula = plan.formula.const + sum(
        getattr(plan.formula, key) * (-(-n // 64) * 64)
        for key, n in (("per_token", tokens), ("per_row", rows), ("per_seq", seqs))
    )
    assert size == by_formula
    spans: list[tuple[int, int, Value]] = []
    counts = {"T": tokens, "S": rows, "B": seqs, "sample": 64}
    for value in made:
        start = plan.address(value.name, tokens, rows, seqs)
        end = start + value.row_bytes * counts[value.pool]
        assert start % 64 == 0
        assert end <= size
        for low, high, other in spans:
            apart = end <= low or high <= start
            assert apart or (value.pool == other.pool and not value.live_with(other))
        spans.append((start, end, value))


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"a": Place("T", 8, 0), "b": Place("T", 8, 4)}, "b at .* overlaps a"),
        ({"a": Place("T", 8, 0), "b": Place("T", 8, 16)}, "outside of its pool"),
        ({"a": Place("T", 8, 0)}, "b needs 8 bytes a row in T, has None"),
        ({"a": Place("T", 8, 0), "b": Place("S", 8, 8)}, "b needs 8 bytes a row in T"),
    ],
)
def test_verify_plan_finds_faults(places: dict[str, Place], message: str) -> None:
    made = [Value("a", "T", 8, 0, 2), Value("b", "T", 8, 2, 3)]
    with pytest.raises(VerifyError, match=message):
        verify_plan(made, MemoryPlan.of(places, dict.fromkeys(POOLS, 16)))


# ------------------------------------------------------------------------------------- whole programs

TOKENS, ROWS = 7, 3
STEPS = st.lists(
    st.tuples(st.sampled_from(["relu", "add", "split", "widen", "merge", "norm", "head"]), st.integers(0, 99)),
    min_size=1,
    max_size=18,
)


def build(steps: list[tuple[str, int]], width: int = 8) -> tuple[Program, dict[str, Tensor], Tensors]:
    """A random program of rows: token rows of `width`, then a selection of them, then a head."""
    program = new_program()
    tokens, seqs, rows = (program.new_symbol(hint) for hint in (TOKENS, 11, ROWS))
    weights = Tensors(
        {
            "embed": random(9, width),
            "norm": random(width),
            "wide": random(2 * width, width),
            "head": random(9, width),
        }
    )
    inputs = {"token_ids": torch.arange(TOKENS), "seq_lens": torch.ones(11), "logits_rows": torch.tensor([6, 0, 2])}

    def add(node: fx.Node, value: Any = None) -> fx.Node:
        node.meta.update(name=node.name, layer=None, val=infer_type(program, node) if value is None else value)
        return node

    for name, size in (("token_ids", tokens), ("seq_lens", seqs), ("logits_rows", rows)):
        add(program.graph.placeholder(name), program.fake((size,), torch.int64))
    named = {node.name: node for node in program.inputs()}
    table = {
        name: add(program.graph.get_attr(name), program.fake(t.shape, t.dtype)) for name, t in weights.tensors.items()
    }

    def call(target: Any, *args: Any) -> fx.Node:
        return add(program.graph.call_function(target, args))

    pool = [call(aten.embedding.default, table["embed"], named["token_ids"])]
    for op, pick in steps:
        x, y = pool[pick % len(pool)], pool[pick // 2 % len(pool)]
        if op == "relu":
            pool.append(call(aten.relu.default, x))
        elif op == "add":
            pool.append(call(aten.add.Tensor, x, y))
        elif op == "reduce":
            pool.append(call(inferc.all_reduce.default, x, "tp", 2))
        elif op == "norm":
            both = call(inferc.rms_norm_add.default, x, y, table["norm"], 1e-5)
            pool += [call(operator.getitem, both, index) for index in (0, 1)][pick % 2 :]
        elif op == "split":
            pool.append(call(aten.view.default, call(aten.view.default, x, [-1, 2, width // 2]), [-1, width]))
        elif op == "widen":
            pool.append(call(aten.slice.Tensor, call(aten.linear.default, x, table["wide"]), -1, 4, 4 + width))
        elif op == "merge":
            pool = [call(aten.add.Tensor, x, y), *pool[pick % len(pool) :]]
        else:
            pool.append(call(aten.mul.Tensor, x, 0.5))
    hidden = call(aten.index_select.default, pool[-1], 0, named["logits_rows"])
    program.graph.output((hidden, call(inferc.lm_head.default, call(aten.relu.default, hidden), table["head"], None)))
    program.graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "get_attr", "output"))
    return program, inputs, weights


def test_rows_of_a_multiple_of_512_bytes_are_followed_by_a_cache_line() -> None:
    assert [padded(width) for width in (0, 64, 511, 512, 520, 2048, 6144)] == [0, 64, 511, 576, 520, 2112, 6208]


def test_rows_that_ranks_exchange_have_no_gaps() -> None:
    """Exchanged rows are sent and added as one run of bytes; values made of them are padded as ever."""
    program, _, _ = build([("relu", 0), ("reduce", 1), ("relu", 2)], width=128)
    sizes = {value.name: value.row_bytes for value in live_values(program)}
    reduced = next(node for node in program.graph.nodes if node.target is inferc.all_reduce.default)
    (reader,) = reduced.users
    assert (sizes[reduced.name], sizes[reader.name]) == (512, 576)


def run_in_arena(program: Program, plan: MemoryPlan, inputs: dict[str, Tensor], weights: Tensors) -> list[Tensor]:
    """Run with every placed value in one buffer of the planned size, read back whenever it is used."""
    sizes = (TOKENS, ROWS, 11)
    arena = torch.full((plan.arena_bytes(*sizes),), 0xFF, dtype=torch.uint8)
    shapes: dict[fx.Node, tuple[torch.Size, torch.dtype]] = {}

    def rows_of(node: fx.Node, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        stride, start = plan.values[node.name].row_bytes, plan.address(node.name, *sizes)
        rows = arena[start : start + shape[0] * stride].view(shape[0], stride)
        return rows[:, : math.prod(shape[1:]) * dtype.itemsize].view(dtype).view(shape)

    def load(node: fx.Node) -> Any:
        if node.op == "placeholder":
            return inputs[node.name]
        if node.op == "get_attr":
            return weights.tensors[str(node.target)]
        if node.name in plan.values:
            shape, dtype = shapes[node]
            return rows_of(node, shape, dtype).clone()
        return node.target(*fx.map_arg(node.args, load))  # type: ignore[operator]

    def store(node: fx.Node, value: Tensor) -> None:
        shapes[node] = (value.shape, value.dtype)
        rows_of(node, value.shape, value.dtype).copy_(value)

    for node in program.graph.nodes:
        if node.op == "call_function" and node.target not in (aten.view.default, aten.slice.Tensor, operator.getitem):
            result = node.target(*fx.map_arg(node.args, load))
            parts = {node: result}
            if isinstance(result, tuple):
                parts = {user: result[user.args[1]] for user in node.users}
            for part, value in parts.items():
                store(part, value)
    return [load(node) for node in program.output().all_input_nodes]


@given(STEPS, st.sampled_from([8, 128]))  # rows of 512 bytes are padded
@settings(max_examples=30, deadline=None)
def test_programs_run_in_the_planned_arena(steps: list[tuple[str, int]], width: int) -> None:
    program, inputs, weights = build(steps, width)
    expected = program.run(inputs, weights.tensors.__getitem__)
    plan = memory_plan(program)
    torch.testing.assert_close(tuple(run_in_arena(program, plan, inputs, weights)), expected, rtol=0, atol=0)
    assert memory_plan(program) == plan


def test_the_plan_is_printed_and_views_have_no_place() -> None:
    program, _, _ = build([("widen", 0), ("norm", 2), ("add", 5)])
    assert PlanMemory()(program) == len(live_values(program))
    golden = """
        %token_ids: int64[s0] = input
        %seq_lens: int64[s1] = input
        %logits_rows: int64[s2] = input
        %0: float32[s0, 8] = aten.embedding(@embed, %token_ids)  # T+64
        %1: float32[s0, 16] = aten.linear(%0, @wide)  # T+0
        %2: float32[s0, 8] = aten.slice.Tensor(%1, -1, 4, 12)
        %3: (float32[s0, 8], float32[s0, 8]) = inferc.rms_norm_add(%0, %2, @norm, 1e-05)
        %4: float32[s0, 8] = getitem(%3, 0)  # T+96
        %5: float32[s0, 8] = aten.add.Tensor(%2, %4)  # T+64
        %6: float32[s2, 8] = aten.index_select(%5, 0, %logits_rows)  # S+0
        %7: float32[s2, 8] = aten.relu(%6)  # sample+36
        %8: float32[s2, 9] = inferc.lm_head(%7, @head, None)  # sample+0
        return (%6, %8)
    """
    text = program.to_text()
    assert text.split() == golden.split(), f"the program is now\n{text}"
    assert set(msgspec.to_builtins(memory_plan(program))) == {"values", "pools", "formula"}
