"""The paged K,V pool and attention over it, against the references on the canonical cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from cpp_kernels import DTYPES, Kernels, assert_near, packed
from torch import Tensor

from inferc.kv_pools import CacheGroup

ops = torch.ops.inferc
MASKS = ("causal", "sliding", "chunked")


@dataclass(frozen=True)
class Case:
    """Sequences as (tokens cached, new tokens), and how attention is masked."""

    seqs: tuple[tuple[int, int], ...]
    heads: int = 4
    kv_heads: int = 2
    dim: int = 32
    block_size: int = 16
    mask: str = "causal"
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False


class Pool:
    """A K,V pool in the CPU's layout, NaN where nothing was written, and the same content canonically."""

    def __init__(self, kernels: Kernels, case: Case, dtype: torch.dtype, layers: int = 2) -> None:
        self.kernels, self.case, self.dtype, self.layers = kernels, case, dtype, layers
        longest = max(cached + new for cached, new in case.seqs)
        self.max_blocks = -(-longest // case.block_size) + 1
        num_blocks = 1 + len(case.seqs) * self.max_blocks
        shape = (num_blocks, layers, 2, case.block_size, case.kv_heads, case.dim)
        self.data = torch.full(shape, float("nan"), dtype=dtype)
        self.canonical = torch.zeros(shape, dtype=dtype)
        # Blocks in no order, as after many sequences have come and gone.
        order = torch.randperm(num_blocks - 1)[: len(case.seqs) * self.max_blocks] + 1
        self.table = order.view(len(case.seqs), -1).to(torch.int32)

    def slots(self, seq: int, begin: int, end: int) -> Tensor:
        positions = torch.arange(begin, end)
        size = self.case.block_size
        return self.table[seq, positions // size].long() * size + positions % size

    def write(self, k: Tensor, v: Tensor, slots: Tensor, layer: int) -> None:
        case, rows = self.case, k.shape[0]
        args = (self.layers, layer, case.block_size, case.kv_heads, case.dim, slots, rows, case.heads, None)
        stride = case.kv_heads * case.dim
        call = (False, None, k, v, stride, None, 0, self.data)
        self.kernels.run("test_kv_write", self.dtype, *call, *args)
        self.canonical = ops.kv_write(self.canonical, k, v, slots, layer)

    def attend(
        self, q: Tensor, starts: Tensor, lengths: Tensor, layer: int, sinks: Tensor | None, splits: bool
    ) -> Tensor:
        case, out = self.case, torch.full_like(q, float("nan"))
        partials = torch.full((200_000 if splits else 1,), float("nan"))
        shape = (self.layers, layer, case.block_size, case.kv_heads, case.dim, self.table, self.max_blocks)
        how = (case.dim**-0.5, case.softcap, MASKS.index(case.mask), case.window)
        self.kernels(
            *("test_attention", self.kernels.threads, DTYPES.index(self.dtype), q, out, self.data, *shape),
            *(starts, lengths, sinks, lengths.shape[0], case.heads, *how, partials, partials.numel()),
        )
        return out


def run_case(kernels: Kernels, case: Case, dtype: torch.dtype, splits: bool = False) -> tuple[Tensor, Tensor]:
    """(kernel's output, reference's)"""
    pool = Pool(kernels, case, dtype)
    for seq, (cached, new) in enumerate(case.seqs):
        k, v = (torch.randn(cached + new, case.kv_heads, case.dim).to(dtype) for _ in range(2))
        pool.write(k, v, pool.slots(seq, 0, cached + new), 1)
    starts = torch.tensor([0, *(new for _, new in case.seqs)]).cumsum(0).to(torch.int32)
    lengths = torch.tensor([cached + new for cached, new in case.seqs], dtype=torch.int32)
    q = torch.randn(int(starts[-1]), case.heads, case.dim).to(dtype) * 2
    sinks = torch.randn(case.heads).to(dtype) if case.sinks else None
    found = pool.attend(q, starts, lengths, 1, sinks, splits)
    scale = case.dim**-0.5
    rest = (1, scale, case.mask, case.window, case.softcap)
    return found, ops.paged_attention(q, pool.canonical, pool.table, starts, lengths, sinks, *rest)


CASES = (
    Case(((0, 1),)),
    Case(((0, 17), (5, 1), (63, 1), (64, 1), (31, 33))),
    Case(((0, 70), (600, 3), (1030, 1)), heads=6, kv_heads=1, dim=16),
    Case(((0, 100), (511, 2)), heads=3, kv_heads=3, dim=80, block_size=32),
    Case(((0, 90), (700, 1)), mask="sliding", window=37),
    Case(((0, 90), (700, 5)), mask="chunked", window=50),
    Case(((10, 30), (130, 1)), softcap=5.0, sinks=True),
    Case(((3, 4),), heads=48, kv_heads=1, dim=128),
)


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_paged_attention(kernels: Kernels, dtype: torch.dtype, case: Case) -> None:
    assert_near(*run_case(kernels, case, dtype), factor=2.0)


def test_decode_split_over_threads_gives_the_same_bits(kernels: Kernels, dtype: torch.dtype) -> None:
    for mask, window in (("causal", 0), ("sliding", 600)):
        case = Case(((1500, 1),), heads=4, kv_heads=2, mask=mask, window=window, sinks=True)
        torch.manual_seed(1)
        whole, expected = run_case(kernels, case, dtype)
        torch.manual_seed(1)
        split, _ = run_case(kernels, case, dtype, splits=True)
        assert torch.equal(whole, split)
        assert_near(split, expected, factor=2.0)


@pytest.mark.parametrize("mask", MASKS)
def test_a_row_does_not_depend_on_batch_or_chunks(kernels: Kernels, dtype: torch.dtype, mask: str) -> None:
    case = Case(((0, 700), (0, 90)), mask=mask, window=0 if mask == "causal" else 300, softcap=7.0)
    pool = Pool(kernels, case, dtype)
    for seq, (_, new) in enumerate(case.seqs):
        k, v = (torch.randn(new, case.kv_heads, case.dim).to(dtype) for _ in range(2))
        pool.write(k, v, pool.slots(seq, 0, new), 0)
    q = torch.randn(790, case.heads, case.dim).to(dtype)
    whole = pool.attend(q, torch.tensor([0, 700, 790]).int(), torch.tensor([700, 90]).int(), 0, None, False)
    for cuts in ((0, 1, 65, 300, 513, 699, 700), (0, 512, 575, 700)):
        for begin, end in pairwise(cuts):
            starts, lengths = torch.tensor([0, end - begin]).int(), torch.tensor([end]).int()
            part = pool.attend(q[begin:end].contiguous(), starts, lengths, 0, None, True)
            assert torch.equal(part, whole[begin:end])


@pytest.mark.parametrize(("mask", "window"), [("sliding", 1), ("sliding", 50), ("sliding", 300), ("chunked", 70)])
def test_blocks_that_were_given_back_change_no_bit(
    kernels: Kernels, dtype: torch.dtype, mask: str, window: int
) -> None:
    """Entries of blocks that no query sees are 0, and block 0 holds NaN: in K, in V, in the middle of a tile of keys."""
    case = Case(((0, 700),), mask=mask, window=window, softcap=7.0, sinks=True)
    pool = Pool(kernels, case, dtype)
    k, v = (torch.randn(700, case.kv_heads, case.dim).to(dtype) for _ in range(2))
    pool.write(k, v, pool.slots(0, 0, 700), 0)
    assert pool.data[0].isnan().all()
    pool.canonical[0] = float("nan")
    q, sinks = torch.randn(700, case.heads, case.dim).to(dtype), torch.randn(case.heads).to(dtype)
    kept = pool.table.clone()
    group = CacheGroup("window" if mask == "sliding" else "chunk", window, 8)
    for begin, end in ((0, 130), (130, 131), (209, 210), (210, 300), (383, 384), (640, 641), (641, 700)):
        starts, lengths = torch.tensor([0, end - begin]).int(), torch.tensor([end]).int()
        rows = q[begin:end].contiguous()
        pool.table = kept
        whole = pool.attend(rows, starts, lengths, 0, sinks, False)
        expected = ops.paged_attention(
            rows, pool.canonical, kept, starts, lengths, sinks, 0, case.dim**-0.5, mask, window, case.softcap
        )
        pool.table = kept.clone()
        pool.table[0, : group.first_key(begin) // case.block_size] = 0
        for splits in (False, True):
            assert torch.equal(pool.attend(rows, starts, lengths, 0, sinks, splits), whole)
        found = ops.paged_attention(
            rows, pool.canonical, pool.table, starts, lengths, sinks, 0, case.dim**-0.5, mask, window, case.softcap
        )
        assert torch.equal(found, expected)
        assert_near(whole, expected, factor=2.0)


def test_fused_write_equals_rope_then_write(kernels: Kernels, dtype: torch.dtype) -> None:
    case = replace(CASES[1], seqs=((0, 21),))
    fused, plain = Pool(kernels, case, dtype), Pool(kernels, case, dtype)
    plain.table = fused.table
    widths = (case.heads * case.dim, case.kv_heads * case.dim, case.kv_heads * case.dim)
    qkv = torch.randn(21, sum(widths)).to(dtype)
    q, k, v = qkv.split(widths, -1)
    half, slots = 12, fused.slots(0, 0, 21)
    table = ops.rope_table(torch.arange(21), 10000.0 ** (-torch.arange(half).float() / half), 1.0)
    out = torch.full((21, case.heads, case.dim), float("nan"), dtype=dtype)
    rest = (2, 1, case.block_size, case.kv_heads, case.dim, slots, 21, case.heads, out)
    kernels.run("test_kv_write", dtype, True, q, k, v, qkv.shape[1], table, half, fused.data, *rest)
    heads = k.reshape(21, case.kv_heads, case.dim)
    assert_near(out, ops.rope(q.reshape(21, case.heads, case.dim), table))
    plain.write(ops.rope(heads, table).contiguous(), v.reshape_as(heads).contiguous(), slots, 1)
    left, right = fused.data.float(), plain.data.float()
    assert torch.equal(left.isnan(), right.isnan())
    assert_near(left.nan_to_num().to(dtype), right.nan_to_num().to(dtype))


def test_norms_in_the_write_equal_norms_before_it(kernels: Kernels, dtype: torch.dtype) -> None:
    case = replace(CASES[1], seqs=((0, 21),))
    fused, plain = Pool(kernels, case, dtype), Pool(kernels, case, dtype)
    plain.table = fused.table
    q, k = torch.randn(21, case.heads, case.dim).to(dtype), torch.randn(21, case.kv_heads, case.dim).to(dtype)
    qkv = torch.cat([each.flatten(1) for each in (q, k, k)], -1)
    parts = qkv.split((q[0].numel(), k[0].numel(), k[0].numel()), -1)
    weights = torch.randn(case.dim).to(dtype), torch.randn(case.dim).to(dtype)
    half, slots, norm = 12, fused.slots(0, 0, 21), (1e-5, 1.0, False)
    table = ops.rope_table(torch.arange(21), 10000.0 ** (-torch.arange(half).float() / half), 1.0)
    out = torch.full_like(q, float("nan"))
    rest = (2, 1, case.block_size, case.kv_heads, case.dim, slots, 21, case.heads, out)
    call = (*parts, qkv.shape[1], *weights, *norm, table, half, fused.data)
    kernels.run("test_norm_rope_kv_write", dtype, *call, *rest)
    assert_near(out, ops.rope(ops.rms_norm(q, weights[0], *norm), table), factor=2.0)
    plain.write(ops.rope(ops.rms_norm(k, weights[1], *norm), table).contiguous(), k.contiguous(), slots, 1)
    left, right = fused.data.float(), plain.data.float()
    assert torch.equal(left.isnan(), right.isnan())
    assert_near(left.nan_to_num().to(dtype), right.nan_to_num().to(dtype), factor=2.0)


@pytest.mark.parametrize("num_tokens", [1, 7, 13, 200], ids=lambda count: f"T{count}")
@pytest.mark.parametrize(("dim", "normed", "biased"), [(32, True, False), (64, False, True), (48, False, False)])
def test_the_projection_in_the_write_moves_no_bit(
    kernels: Kernels, dtype: torch.dtype, num_tokens: int, dim: int, normed: bool, biased: bool
) -> None:
    """Against the projection and the fused write as two kernels: one row, tall tiles, more rows than a block."""
    case = replace(CASES[1], dim=dim, seqs=((0, num_tokens),))
    fused, plain = Pool(kernels, case, dtype), Pool(kernels, case, dtype)
    plain.table = fused.table
    widths = (case.heads * dim, case.kv_heads * dim, case.kv_heads * dim)
    x, weight = torch.randn(num_tokens, 72).to(dtype), packed((torch.randn(sum(widths), 72) / 8).to(dtype))
    bias = torch.randn(sum(widths)).to(dtype) if biased else None
    half, slots, norm = 12, fused.slots(0, 0, num_tokens), (1e-5, 1.0, False)
    norms = (torch.randn(dim).to(dtype), torch.randn(dim).to(dtype)) if normed else (None, None)
    table = ops.rope_table(torch.arange(num_tokens), 10000.0 ** (-torch.arange(half).float() / half), 1.0)
    outs = [torch.full((num_tokens, case.heads, dim), float("nan"), dtype=dtype) for _ in range(2)]
    rest = (2, 1, case.block_size, case.kv_heads, dim, slots, num_tokens, case.heads)
    kernels.run(
        *("test_qkv_rope_kv_write", dtype, x, weight, 72, bias, *norms, *norm, table, half, fused.data, *rest, outs[0])
    )
    qkv = torch.empty(num_tokens, sum(widths), dtype=dtype)
    kernels.run("test_linear", dtype, x, 72, num_tokens, weight, sum(widths), 72, bias, qkv, sum(widths), False)
    parts = qkv.split(widths, -1)
    if normed:
        call = (*parts, sum(widths), *norms, *norm, table, half, plain.data)
        kernels.run("test_norm_rope_kv_write", dtype, *call, *rest, outs[1])
    else:
        kernels.run("test_kv_write", dtype, True, *parts, sum(widths), table, half, plain.data, *rest, outs[1])
    assert torch.equal(*outs)
    assert torch.equal(fused.data.isnan(), plain.data.isnan())
    assert torch.equal(fused.data.nan_to_num(), plain.data.nan_to_num())
    assert not fused.data.isnan().all()


def test_blocks_pack_into_the_canonical_form_and_back(kernels: Kernels, dtype: torch.dtype) -> None:
    case = replace(CASES[3], seqs=((0, 64), (0, 40)))
    pool = Pool(kernels, case, dtype)
    for layer in range(2):
        for seq, (_, new) in enumerate(case.seqs):
            k, v = (torch.randn(new, case.kv_heads, case.dim).to(dtype) for _ in range(2))
            pool.write(k, v, pool.slots(seq, 0, new), layer)
    shape = (2, case.block_size, case.kv_heads, case.dim)
    blocks = pool.table[0, :2].contiguous()
    packed = torch.empty(2, *shape[:1], 2, *shape[1:], dtype=dtype)
    kernels("test_move_blocks", DTYPES.index(dtype), True, pool.data, *shape, blocks, 2, packed)
    assert torch.equal(packed, pool.canonical[blocks.long()])
    copy = torch.full_like(pool.data, float("nan"))
    kernels("test_move_blocks", DTYPES.index(dtype), False, copy, *shape, blocks, 2, packed)
    assert torch.equal(copy[blocks.long()], pool.data[blocks.long()])
