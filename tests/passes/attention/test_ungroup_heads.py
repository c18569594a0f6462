from typing import Any

from graphs import example, random, rows
from torch import ops

from inferc.passes.attention.ungroup_heads import UngroupHeads
from inferc.passes.normalize.canonicalise import Canonicalise

aten = ops.aten
WEIGHTS = {"qkv": random(12, 8), "bias": random(12, seed=1)}


def part(view: Any, start: int, stop: int) -> Any:
    return aten.slice.Tensor(view, -1, start, stop)


def test_q_k_and_v_packed_head_by_head_become_three_projections() -> None:
    def graph(x: Any, qkv: Any, bias: Any) -> Any:
        heads = aten.view.default(aten.linear.default(x, qkv, bias), [-1, 2, 6])
        return part(heads, 0, 2), part(heads, 2, 4), part(heads, 4, 6)

    golden = """
        %x: float32[s0, 8] = input
        %0: float32[s0, 4] = aten.linear(%x, @qkv.0_2, @bias.0_2)
        %1: float32[s0, 2, 2] = aten.view(%0, [-1, 2, 2])
        %2: float32[s0, 4] = aten.linear(%x, @qkv.2_4, @bias.2_4)
        %3: float32[s0, 2, 2] = aten.view(%2, [-1, 2, 2])
        %4: float32[s0, 4] = aten.linear(%x, @qkv.4_6, @bias.4_6)
        %5: float32[s0, 2, 2] = aten.view(%4, [-1, 2, 2])
        return (%1, %3, %5)
    """
    example(graph, {"x": rows(8)}, WEIGHTS).check(UngroupHeads(), 1, golden)


def test_keeps_heads_that_are_read_whole_or_twice_or_in_steps() -> None:
    def whole(x: Any, qkv: Any) -> Any:
        heads = aten.view.default(aten.linear.default(x, qkv), [-1, 2, 6])
        return part(heads, 0, 2), heads

    def overlapping(x: Any, qkv: Any) -> Any:
        heads = aten.view.default(aten.linear.default(x, qkv), [-1, 2, 6])
        return part(heads, 0, 4), part(heads, 2, 6)

    def in_steps(x: Any, qkv: Any) -> Any:
        heads = aten.view.default(aten.linear.default(x, qkv), [-1, 2, 6])
        return (aten.slice.Tensor(heads, -1, 0, 6, 2),)

    for graph in (whole, overlapping, in_steps):
        example(graph, {"x": rows(8)}, {"qkv": WEIGHTS["qkv"]}).check_untouched(UngroupHeads())


def test_a_part_that_is_viewed_in_another_shape_is_no_longer_copied_for_it() -> None:
    """The gates of attention that are packed behind each head's queries (Qwen3-Next)."""

    def graph(x: Any, both: Any) -> Any:
        heads = aten.view.default(aten.linear.default(x, both), [-1, 2, 6])
        return part(heads, 0, 3), aten.view.default(aten.clone.default(part(heads, 3, 6)), [-1, 6])

    golden = """
        %x: float32[s0, 8] = input
        %0: float32[s0, 6] = aten.linear(%x, @both.0_3)
        %1: float32[s0, 2, 3] = aten.view(%0, [-1, 2, 3])
        %2: float32[s0, 6] = aten.linear(%x, @both.3_6)
        %3: float32[s0, 2, 3] = aten.view(%2, [-1, 2, 3])
        %4: float32[s0, 6] = aten.view(%3, [-1, 6])
        return (%1, %4)
    """
    made = example(graph, {"x": rows(8)}, {"both": random(12, 8)})
    made.check_untouched(Canonicalise())  # to which a copy is nothing, but where the view needs it
    made.check(UngroupHeads(), 1, golden)
