import operator
from typing import Any

import pytest
import torch
from graphs import Example, example, random, rows
from torch import ops

from inferc.ir import weights as weight_lib
from inferc.passes.fuse.rope import FuseRope
from inferc.passes.fuse.rope_kv_write import fuse_norm_rope_kv_write, fuse_rope_kv_write

aten, inferc = ops.aten, ops.inferc
POSITIONS = torch.tensor([4, 9, 0, 2, 7])


def table(positions: Any, inv_freq: Any, scaling: float = 1.0, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    row = aten._to_copy.default(aten.unsqueeze.default(positions, -1), dtype=torch.float32)
    angle = aten.mul.Tensor(row, inv_freq)
    both = aten.cat.default([angle, angle], -1)
    out = aten.cos.default(both), aten.sin.default(both)
    if scaling != 1.0:
        out = aten.mul.Tensor(out[0], scaling), aten.mul.Tensor(out[1], scaling)
    if dtype != torch.float32:
        out = aten._to_copy.default(out[0], dtype=dtype), aten._to_copy.default(out[1], dtype=dtype)
    return out


def rotated(x: Any, cos: Any, sin: Any, size: int) -> Any:
    cos, sin = aten.unsqueeze.default(cos, -2), aten.unsqueeze.default(sin, -2)
    halves = [aten.neg.default(aten.slice.Tensor(x, -1, size // 2, size)), aten.slice.Tensor(x, -1, 0, size // 2)]
    return aten.add.Tensor(aten.mul.Tensor(x, cos), aten.mul.Tensor(aten.cat.default(halves, -1), sin))


def model(function: Any, size: int = 8, dtype: torch.dtype = torch.float32) -> Example:
    inputs = {"q": rows(4, 8, dtype=dtype), "k": rows(2, 8, dtype=dtype, seed=1), "positions": POSITIONS}
    return example(function, inputs, {"inv_freq": random(size // 2).abs()})


@pytest.mark.parametrize("scaling", [1.0, 1.25])
def test_one_table_for_all_rotations(scaling: float) -> None:
    def graph(q: Any, k: Any, positions: Any, inv_freq: Any) -> Any:
        cos, sin = table(positions, inv_freq, scaling)
        return rotated(q, cos, sin, 8), rotated(k, cos, sin, 8)

    golden = f"""
        %q: float32[s0, 4, 8] = input
        %k: float32[s0, 2, 8] = input
        %positions: int64[s0] = input
        %0: float32[s0, 8] = inferc.rope_table(%positions, @inv_freq, {scaling})
        %1: float32[s0, 4, 8] = inferc.rope(%q, %0)
        %2: float32[s0, 2, 8] = inferc.rope(%k, %0)
        return (%1, %2)
    """
    model(graph).check(FuseRope(), 2, golden)


def test_bfloat16_keeps_its_table_in_float32() -> None:
    def graph(q: Any, k: Any, positions: Any, inv_freq: Any) -> Any:
        cos, sin = table(positions, inv_freq, dtype=torch.bfloat16)
        return rotated(q, cos, sin, 8)

    golden = """
        %q: bfloat16[s0, 4, 8] = input
        %k: bfloat16[s0, 2, 8] = input
        %positions: int64[s0] = input
        %0: float32[s0, 8] = inferc.rope_table(%positions, @inv_freq, 1.0)
        %1: bfloat16[s0, 4, 8] = inferc.rope(%q, %0)
        return (%1)
    """
    model(graph, dtype=torch.bfloat16).check(FuseRope(), 1, golden, tolerance=0.03)


def test_heads_that_are_viewed_anew_by_each_reader() -> None:
    """A clamp in place leaves such views (OLMo); equal views are one value."""

    def graph(x: Any, positions: Any, inv_freq: Any) -> Any:
        cos, sin = (aten.unsqueeze.default(each, -2) for each in table(positions, inv_freq))
        clamped = aten.clamp.default(x, -0.5, 0.5)
        whole, low, high = (aten.view.default(clamped, [-1, 4, 8]) for _ in range(3))
        halves = [aten.neg.default(aten.slice.Tensor(low, -1, 4, 8)), aten.slice.Tensor(high, -1, 0, 4)]
        return aten.add.Tensor(aten.mul.Tensor(whole, cos), aten.mul.Tensor(aten.cat.default(halves, -1), sin))

    golden = """
        %x: float32[s0, 32] = input
        %positions: int64[s0] = input
        %0: float32[s0, 32] = aten.clamp(%x, -0.5, 0.5)
        %1: float32[s0, 4, 8] = aten.view(%0, [-1, 4, 8])
        %2: float32[s0, 8] = inferc.rope_table(%positions, @inv_freq, 1.0)
        %3: float32[s0, 4, 8] = inferc.rope(%1, %2)
        return (%3)
    """
    inputs = {"x": rows(32), "positions": POSITIONS}
    example(graph, inputs, {"inv_freq": random(4).abs()}).check(FuseRope(), 1, golden)


def test_the_first_part_of_a_head() -> None:
    def graph(q: Any, k: Any, positions: Any, inv_freq: Any) -> Any:
        cos, sin = table(positions, inv_freq)
        first = rotated(aten.slice.Tensor(q, -1, 0, 4), cos, sin, 4)
        return aten.cat.default([first, aten.slice.Tensor(q, -1, 4, 8)], -1)

    golden = """
        %q: float32[s0, 4, 8] = input
        %k: float32[s0, 2, 8] = input
        %positions: int64[s0] = input
        %0: float32[s0, 4] = inferc.rope_table(%positions, @inv_freq, 1.0)
        %1: float32[s0, 4, 8] = inferc.rope(%q, %0)
        return (%1)
    """
    model(graph, size=4).check(FuseRope(), 1, golden)


def neighbours(x: Any, step: int) -> Any:
    return aten.slice.Tensor(x, -1, step, 8, 2)


def stacked(q: Any, k: Any, positions: Any, inv_freq: Any) -> Any:
    """Cohere: each angle twice by repeat_interleave, the turned head by stack."""
    angle = aten.mul.Tensor(aten.unsqueeze.default(positions, -1), inv_freq)
    both = aten.repeat_interleave.self_int(angle, 2, -1)
    cos, sin = (aten.unsqueeze.default(function(both), -2) for function in (aten.cos.default, aten.sin.default))
    turned = aten.stack.default([aten.neg.default(neighbours(q, 1)), neighbours(q, 0)], -1)
    turned = aten.view.default(turned, [-1, 4, 8])
    return aten.add.Tensor(aten.mul.Tensor(q, cos), aten.mul.Tensor(turned, sin))


def by_parts(q: Any, positions: Any, inv_freq: Any, first: Any, second: Any) -> Any:
    angle = aten.unsqueeze.default(aten.mul.Tensor(aten.unsqueeze.default(positions, -1), inv_freq), -2)
    cos, sin = aten.cos.default(angle), aten.sin.default(angle)
    low = aten.sub.Tensor(aten.mul.Tensor(first, cos), aten.mul.Tensor(second, sin))
    high = aten.add.Tensor(aten.mul.Tensor(first, sin), aten.mul.Tensor(second, cos))
    return aten.cat.default([low, high], -1)


def chunks(q: Any, k: Any, positions: Any, inv_freq: Any) -> Any:
    """Rotate the two halves apart and join them, as gpt-oss does."""
    return by_parts(q, positions, inv_freq, aten.slice.Tensor(q, -1, 0, 4), aten.slice.Tensor(q, -1, 4, 8))


def joined(q: Any, k: Any, positions: Any, inv_freq: Any) -> Any:
    """DeepSeek: neighbours are read, halves written."""
    return by_parts(q, positions, inv_freq, neighbours(q, 0), neighbours(q, 1))


def as_complex(q: Any, k: Any, positions: Any, inv_freq: Any) -> Any:
    """Llama 4: neighbours are the parts of a complex number."""
    angle = aten.mul.Tensor(aten.unsqueeze.default(positions, -1), inv_freq)
    turn = aten.unsqueeze.default(aten.polar.default(aten.ones_like.default(angle), angle), -2)
    numbers = aten.view_as_complex.default(aten.view.default(q, [-1, 4, 4, 2]))
    return aten.view.default(aten.view_as_real.default(aten.mul.Tensor(numbers, turn)), [-1, 4, 8])


@pytest.mark.parametrize(
    ("spelling", "pairs"),
    [(as_complex, ", 'neighbours'"), (stacked, ", 'neighbours'"), (chunks, ""), (joined, ", 'neighbours_to_halves'")],
)
def test_a_rotation_is_found_in_any_spelling(spelling: Any, pairs: str) -> None:
    golden = f"""
        %q: float32[s0, 4, 8] = input
        %k: float32[s0, 2, 8] = input
        %positions: int64[s0] = input
        %0: float32[s0, 8] = inferc.rope_table(%positions, @inv_freq, 1.0)
        %1: float32[s0, 4, 8] = inferc.rope(%q, %0{pairs})
        return (%1)
    """
    model(spelling).check(FuseRope(), 1, golden)


def backwards(x: Any, cos: Any, sin: Any) -> Any:
    cos, sin = aten.unsqueeze.default(cos, -2), aten.unsqueeze.default(sin, -2)
    halves = [aten.slice.Tensor(x, -1, 4, 8), aten.neg.default(aten.slice.Tensor(x, -1, 0, 4))]
    return aten.add.Tensor(aten.mul.Tensor(x, cos), aten.mul.Tensor(aten.cat.default(halves, -1), sin))


def turned_back(q: Any, k: Any, positions: Any, inv_freq: Any) -> Any:
    cos, sin = table(positions, inv_freq)
    return backwards(q, cos, sin), backwards(k, cos, sin)


def test_a_turn_the_other_way_is_by_negative_frequencies() -> None:
    golden = """
        %q: float32[s0, 4, 8] = input
        %k: float32[s0, 2, 8] = input
        %positions: int64[s0] = input
        %0: float32[s0, 8] = inferc.rope_table(%positions, @inv_freq.negative, 1.0)
        %1: float32[s0, 4, 8] = inferc.rope(%q, %0)
        %2: float32[s0, 2, 8] = inferc.rope(%k, %0)
        return (%1, %2)
    """
    each = model(turned_back)
    each.program.weights["inv_freq"] = weight_lib.constant(random(4).abs())
    each.check(FuseRope(), 2, golden)


def test_keeps_a_turn_the_other_way_whose_frequencies_are_learned() -> None:
    model(turned_back).check_untouched(FuseRope())


def test_the_last_part_of_a_head() -> None:
    def graph(q: Any, k: Any, positions: Any, inv_freq: Any) -> Any:
        cos, sin = table(positions, inv_freq)
        last = rotated(aten.slice.Tensor(q, -1, 4, 8), cos, sin, 4)
        return aten.cat.default([aten.slice.Tensor(q, -1, 0, 4), last], -1)

    golden = """
        %q: float32[s0, 4, 8] = input
        %k: float32[s0, 2, 8] = input
        %positions: int64[s0] = input
        %0: float32[s0, 4, 4] = aten.slice.Tensor(%q, -1, 4, 8)
        %1: float32[s0, 4] = inferc.rope_table(%positions, @inv_freq, 1.0)
        %2: float32[s0, 4, 4] = inferc.rope(%0, %1)
        %3: float32[s0, 4, 4] = aten.slice.Tensor(%q, -1, 0, 4)
        %4: float32[s0, 4, 8] = aten.cat([%3, %2], -1)
        return (%4)
    """
    model(graph, size=4).check(FuseRope(), 1, golden)


def test_keeps_a_rotation_that_is_another() -> None:
    def swapped(q: Any, k: Any, positions: Any, inv_freq: Any) -> Any:
        cos, sin = table(positions, inv_freq)
        return rotated(q, sin, cos, 8)

    def uneven(q: Any, k: Any, positions: Any, inv_freq: Any) -> Any:
        cos, sin = (aten.unsqueeze.default(each, -2) for each in table(positions, inv_freq))
        halves = [aten.neg.default(aten.slice.Tensor(q, -1, 3, 8)), aten.slice.Tensor(q, -1, 0, 3)]
        return aten.add.Tensor(aten.mul.Tensor(q, cos), aten.mul.Tensor(aten.cat.default(halves, -1), sin))

    model(swapped).check_untouched(FuseRope())
    model(uneven).check_untouched(FuseRope())


PAGED = {
    "q": rows(4, 8),
    "k": rows(2, 8, seed=1),
    "v": rows(2, 8, seed=2),
    "table": rows(8, seed=3),
    "kv_cache": random(4, 1, 2, 4, 2, 8),
    "slot_mapping": torch.arange(4, 9),
    "block_table": torch.tensor([[1, 2]], dtype=torch.int32),
    "query_start_loc": torch.tensor([0, 5], dtype=torch.int32),
    "seq_lens": torch.tensor([5], dtype=torch.int32),
}


def paged(q: Any, k: Any, v: Any, table: Any, kv_cache: Any, slot_mapping: Any, places: tuple[Any, ...]) -> Any:
    written = inferc.kv_write.default(kv_cache, k, v, slot_mapping, 0)
    out = inferc.paged_attention.default(q, written, *places, None, 0, 0.5, "causal", 0, 0.0)
    return out, written


def test_rotation_joins_the_write_of_k_and_v() -> None:
    def graph(
        q: Any,
        k: Any,
        v: Any,
        table: Any,
        kv_cache: Any,
        slot_mapping: Any,
        block_table: Any,
        query_start_loc: Any,
        seq_lens: Any,
    ) -> Any:
        q, k = inferc.rope.default(q, table), inferc.rope.default(k, table)
        return paged(q, k, v, table, kv_cache, slot_mapping, (block_table, query_start_loc, seq_lens))

    golden = """
        %q: float32[s0, 4, 8] = input
        %k: float32[s0, 2, 8] = input
        %v: float32[s0, 2, 8] = input
        %table: float32[s0, 8] = input
        %kv_cache: float32[4, 1, 2, 4, 2, 8] = input
        %slot_mapping: int64[s0] = input
        %block_table: int32[1, 2] = input
        %query_start_loc: int32[2] = input
        %seq_lens: int32[1] = input
        %0: (float32[s0, 4, 8], float32[4, 1, 2, 4, 2, 8]) = inferc.rope_kv_write(%q, %k, %v, %table, %kv_cache, \
%slot_mapping, 0, 'halves')
        %1: float32[s0, 4, 8] = getitem(%0, 0)
        %2: float32[4, 1, 2, 4, 2, 8] = getitem(%0, 1)
        %3: float32[s0, 4, 8] = inferc.paged_attention(%1, %2, %block_table, %query_start_loc, %seq_lens, None, 0, \
0.5, 'causal', 0, 0.0)
        return (%3, %2)
    """
    example(graph, PAGED).check(fuse_rope_kv_write, 1, golden)


def test_keeps_a_write_whose_rotated_k_is_read_elsewhere() -> None:
    def graph(
        q: Any,
        k: Any,
        v: Any,
        table: Any,
        kv_cache: Any,
        slot_mapping: Any,
        block_table: Any,
        query_start_loc: Any,
        seq_lens: Any,
    ) -> Any:
        q, k = inferc.rope.default(q, table), inferc.rope.default(k, table)
        return *paged(q, k, v, table, kv_cache, slot_mapping, (block_table, query_start_loc, seq_lens)), k

    example(graph, PAGED).check_untouched(fuse_rope_kv_write)


WRITTEN = {name: PAGED[name] for name in ("q", "k", "v", "table", "kv_cache", "slot_mapping")}


def normed(q: Any, k: Any, q_norm: Any, k_norm: Any, eps: float = 1e-5) -> tuple[Any, Any]:
    return inferc.rms_norm.default(q, q_norm, eps), inferc.rms_norm.default(k, k_norm, 1e-5)


def test_norms_of_heads_join_the_rotation_and_the_write() -> None:
    def graph(q: Any, k: Any, v: Any, table: Any, kv_cache: Any, slot_mapping: Any, q_norm: Any, k_norm: Any) -> Any:
        both = inferc.rope_kv_write.default(*normed(q, k, q_norm, k_norm), v, table, kv_cache, slot_mapping, 0)
        return operator.getitem(both, 0), operator.getitem(both, 1)

    golden = """
        %q: float32[s0, 4, 8] = input
        %k: float32[s0, 2, 8] = input
        %v: float32[s0, 2, 8] = input
        %table: float32[s0, 8] = input
        %kv_cache: float32[4, 1, 2, 4, 2, 8] = input
        %slot_mapping: int64[s0] = input
        %0: (float32[s0, 4, 8], float32[4, 1, 2, 4, 2, 8]) = inferc.norm_rope_kv_write(%q, %k, %v, @q_norm, @k_norm, \
1e-05, 0.0, True, %table, %kv_cache, %slot_mapping, 0, 'halves')
        %1: float32[s0, 4, 8] = getitem(%0, 0)
        %2: float32[4, 1, 2, 4, 2, 8] = getitem(%0, 1)
        return (%1, %2)
    """
    weights = {"q_norm": random(8), "k_norm": random(8, seed=1)}
    example(graph, WRITTEN, weights).check(fuse_norm_rope_kv_write, 1, golden)


def test_keeps_norms_of_two_kinds() -> None:
    def graph(q: Any, k: Any, v: Any, table: Any, kv_cache: Any, slot_mapping: Any, q_norm: Any, k_norm: Any) -> Any:
        heads = normed(q, k, q_norm, k_norm, eps=1e-3)
        both = inferc.rope_kv_write.default(*heads, v, table, kv_cache, slot_mapping, 0)
        return operator.getitem(both, 0), operator.getitem(both, 1)

    weights = {"q_norm": random(8), "k_norm": random(8, seed=1)}
    example(graph, WRITTEN, weights).check_untouched(fuse_norm_rope_kv_write)
