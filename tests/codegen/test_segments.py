"""Tests of which segments one engine computes, and of what it is given."""

from __future__ import annotations

from typing import Any

import torch
from graphs import example, random, rows

from inferc.codegen.segments import Segment, segments_of, source_of
from inferc.ir.program import Program

aten, inferc = torch.ops.aten, torch.ops.inferc
INPUTS = {"token_ids": torch.tensor([3, 1, 4, 1, 5]), "x": rows(8)}


def numbered(function: Any, weights: dict[str, torch.Tensor], numbers: dict[int, int]) -> tuple[Program, list[Segment]]:
    """Give calls their segments; numbers: the segment of a call, by its place among all calls."""
    program = example(function, INPUTS, weights).program
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    for place, number in numbers.items():
        calls[place].meta["segment"] = number
    return program, list(segments_of(program))


def test_equal_layers_share_an_engine_and_have_their_own_weights() -> None:
    def model(token_ids: Any, x: Any, first: Any, second: Any, wide: Any) -> Any:
        one = inferc.rms_norm.default(aten.linear.default(x, first), None, 1e-5)
        two = inferc.rms_norm.default(aten.linear.default(one, second), None, 1e-5)
        three = inferc.rms_norm.default(aten.linear.default(two, first), None, 1e-5)
        four = inferc.rms_norm.default(aten.linear.default(three, second), None, 1e-6)
        return inferc.rms_norm.default(aten.linear.default(four, wide), None, 1e-5)

    weights = {"first": random(8, 8), "second": random(8, 8), "wide": random(16, 8)}
    _, found = numbered(model, weights, {place: place // 2 for place in range(10)})
    assert [each.engine for each in found] == [f"segment-{index}" for index in (0, 1, 1, 2, 3)]
    assert [[*each.inputs] for each in found] == [["x", "w0"], *[["x0", "w0"]] * 4]
    assert [str(each.inputs["w0"].target) for each in found] == ["first", "second", "first", "second", "wide"]
    assert [[*each.outputs] for each in found] == [["y0"]] * 5 and {each.rows for each in found} == {"tokens"}


def test_what_several_read_is_given_once_and_views_are_made_of_it() -> None:
    def model(token_ids: Any, x: Any, weight: Any) -> Any:
        wide = aten.linear.default(x, weight)
        left, right = aten.slice.Tensor(wide, -1, 0, 8), aten.slice.Tensor(wide, -1, 8, 16)
        both = aten.add.Tensor(inferc.silu_mul.default(left, right), left)
        return aten.add.Tensor(aten.linear.default(both, weight), wide)

    _, (first, second) = numbered(model, {"weight": random(16, 8)}, {0: 0, 3: 1, 4: 1, 5: 1, 6: 1})
    (wide,) = first.outputs.values()
    assert [*second.inputs] == ["x0", "w0"] and second.inputs["x0"] is wide
    assert len(second.nodes) == 4 and [*second.outputs.values()] == [second.nodes[-1]]
    assert all(source_of(each) is wide for node in second.nodes[:1] for each in node.all_input_nodes)


def test_how_it_is_cut_tells_engines_apart() -> None:
    def model(token_ids: Any, x: Any, weight: Any) -> Any:
        left, right = aten.slice.Tensor(x, -1, 0, 4), aten.slice.Tensor(x, -1, 4, 8)
        return aten.add.Tensor(aten.linear.default(left, weight), aten.linear.default(right, weight))

    _, found = numbered(model, {"weight": random(8, 4)}, {2: 0, 3: 1, 4: 2})
    assert [each.engine for each in found] == ["segment-0", "segment-1", "segment-2"]
    assert [*found[2].inputs] == ["x0", "x1"]


def test_a_program_without_segments_has_none() -> None:
    assert segments_of(example(lambda x: aten.add.Tensor(x, x), {"x": rows(8)}).program) == ()
