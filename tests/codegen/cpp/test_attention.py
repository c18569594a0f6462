"""The paged K,V pool and attention over it, against the references on the canonical cache."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from cpp_kernels import DTYPES, Kernels, assert_near, group_panels, packed
from masses import ONE, masses_of, stored_rows
from torch import Tensor

from inferc.ir.ops.quantize import quantize_int4
from inferc.ir.program import dtype_name
from inferc.kv_groups import KINDS, row_size

ops = torch.ops.inferc
MASKS = ("causal", "sliding", "chunked")


@dataclass(frozen=True)
class Case:
    """Sequences as (tokens cached, new tokens), and how attention is masked."""

    seqs: tuple[tuple[int, int], ...]
    heads: int = 4
    kv_heads: int = 2
    dim: int = 32
    block_size: int = 32
    mask: str = "causal"
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    alibi: bool = False

    @property
    def slopes(self) -> Tensor | None:
        """Return another slope for each head, none of them a power of two."""
        return 1.3 * 0.7 ** torch.arange(1, self.heads + 1) if self.alibi else None


class Pool:
    """A K,V pool in the CPU's layout, NaN where nothing was written, and the same content canonically."""

    def __init__(self, kernels: Kernels, case: Case, dtype: torch.dtype, int8: bool, layers: int = 2) -> None:
        self.kernels, self.case, self.dtype, self.int8, self.layers = kernels, case, dtype, int8, layers
        longest = max(cached + new for cached, new in case.seqs)
        self.max_blocks = -(-longest // case.block_size) + 1
        num_blocks = 1 + len(case.seqs) * self.max_blocks
        stored = torch.int8 if int8 else dtype
        of_head = row_size(case.dim, dtype_name(stored))
        self.data = torch.empty((num_blocks, layers, 2, case.block_size, case.kv_heads, of_head), dtype=stored)
        self.data.view(torch.uint8).fill_(0xFF)  # NaN in float32, which scales are, and in bfloat16
        self.canonical = torch.zeros_like(self.data)
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
        self.kernels.run("test_kv_write", self.dtype, self.int8, *call, *args)
        self.canonical = ops.kv_write(self.canonical, k, v, slots, layer)

    def packed(self, blocks: Tensor) -> Tensor:
        """The blocks in their canonical form."""
        out = torch.empty_like(self.data[blocks.long()])
        self.move(True, blocks, out)
        return out

    def move(self, pack: bool, blocks: Tensor, canonical: Tensor) -> None:
        shape = (self.layers, self.case.block_size, self.case.kv_heads, self.case.dim)
        args = (pack, self.data, *shape, blocks, len(blocks), canonical)
        self.kernels("test_move_blocks", DTYPES.index(self.dtype), self.int8, *args)

    def attend(
        self,
        q: Tensor,
        starts: Tensor,
        lengths: Tensor,
        layer: int,
        sinks: Tensor | None,
        splits: bool,
        mass_from: Tensor | None = None,
        masses: Tensor | None = None,
    ) -> Tensor:
        case, out = self.case, torch.full_like(q, float("nan"))
        partials = torch.full((200_000 if splits else 1,), float("nan"))
        shape = (self.layers, layer, case.block_size, case.kv_heads, case.dim, self.table, self.max_blocks)
        how = (case.dim**-0.5, case.softcap, MASKS.index(case.mask), case.window)
        slopes = case.slopes
        self.kernels(
            "test_attention" if slopes is None else "test_alibi",
            self.kernels.threads,
            DTYPES.index(self.dtype),
            self.int8,
            q,
            out,
            self.data,
            *shape,
            starts,
            lengths,
            sinks,
            lengths.shape[0],
            case.heads,
            *how,
            partials,
            partials.numel(),
            mass_from,
            masses,
            *(() if slopes is None else (slopes,)),
        )
        return out


@dataclass(frozen=True)
class Filled:
    """A pool with all tokens of a case in its layer 1, and a step's queries."""

    pool: Pool
    starts: Tensor
    lengths: Tensor
    q: Tensor
    sinks: Tensor | None


def filled(kernels: Kernels, case: Case, dtype: torch.dtype, int8: bool) -> Filled:
    pool = Pool(kernels, case, dtype, int8)
    for seq, (cached, new) in enumerate(case.seqs):
        k, v = (torch.randn(cached + new, case.kv_heads, case.dim).to(dtype) for _ in range(2))
        pool.write(k, v, pool.slots(seq, 0, cached + new), 1)
    starts = torch.tensor([0, *(new for _, new in case.seqs)]).cumsum(0).to(torch.int32)
    lengths = torch.tensor([cached + new for cached, new in case.seqs], dtype=torch.int32)
    q = torch.randn(int(starts[-1]), case.heads, case.dim).to(dtype) * 2
    sinks = torch.randn(case.heads).to(dtype) if case.sinks else None
    return Filled(pool, starts, lengths, q, sinks)


def run_case(
    kernels: Kernels, case: Case, dtype: torch.dtype, int8: bool, splits: bool = False
) -> tuple[Tensor, Tensor]:
    """(kernel's output, reference's)"""
    of = filled(kernels, case, dtype, int8)
    found = of.pool.attend(of.q, of.starts, of.lengths, 1, of.sinks, splits)
    rest = (1, case.dim**-0.5, case.mask, case.window, case.softcap, case.slopes)
    return found, ops.paged_attention(of.q, of.pool.canonical, of.pool.table, of.starts, of.lengths, of.sinks, *rest)


CASES = (
    Case(((0, 1),)),
    Case(((0, 17), (5, 1), (63, 1), (64, 1), (31, 33))),
    Case(((0, 17), (5, 1), (63, 1), (64, 1), (31, 33)), block_size=16),
    Case(((0, 70), (600, 3), (1030, 1)), heads=6, kv_heads=1, dim=16),
    Case(((0, 100), (511, 2)), heads=3, kv_heads=3, dim=80, block_size=64),
    Case(((0, 90), (700, 1)), mask="sliding", window=37),
    Case(((0, 90), (700, 5)), mask="chunked", window=50, block_size=48),
    Case(((10, 30), (130, 1)), softcap=5.0, sinks=True),
    Case(((3, 4),), heads=48, kv_heads=1, dim=128),
    Case(((0, 40), (200, 1)), heads=20, kv_heads=2, dim=112),
    Case(((0, 17), (5, 1), (63, 1), (64, 1), (31, 33)), alibi=True),
    Case(((0, 70), (600, 3), (1030, 1)), heads=6, kv_heads=1, dim=16, sinks=True, alibi=True),
    Case(((0, 90), (700, 5)), mask="sliding", window=37, block_size=48, alibi=True),
    Case(((3, 4),), heads=48, kv_heads=1, dim=128, alibi=True),
)


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_paged_attention(kernels: Kernels, dtype: torch.dtype, int8: bool, case: Case) -> None:
    assert_near(*run_case(kernels, case, dtype, int8), factor=2.0)


def test_decode_split_over_threads_gives_the_same_bits(kernels: Kernels, dtype: torch.dtype, int8: bool) -> None:
    for mask, window in (("causal", 0), ("sliding", 600)):
        case = Case(((1500, 1),), heads=4, kv_heads=2, mask=mask, window=window, sinks=True, alibi=mask == "causal")
        torch.manual_seed(1)
        whole, expected = run_case(kernels, case, dtype, int8)
        torch.manual_seed(1)
        split, _ = run_case(kernels, case, dtype, int8, splits=True)
        assert torch.equal(whole, split)
        assert_near(split, expected, factor=2.0)


MASS_CASES = (
    Case(((0, 17), (5, 1), (64, 1), (31, 33), (8, 3)), block_size=16),
    Case(((0, 70), (600, 3), (1030, 1)), heads=6, kv_heads=1, dim=16),
    Case(((511, 2), (130, 2)), heads=48, kv_heads=1, dim=80, block_size=64, softcap=5.0, sinks=True),
    Case(((0, 17), (600, 3), (8, 3)), heads=6, kv_heads=3, sinks=True, alibi=True),
)


@pytest.mark.parametrize("case", MASS_CASES, ids=range(len(MASS_CASES)))
def test_blocks_are_told_what_attention_gave_them(kernels: Kernels, dtype: torch.dtype, int8: bool, case: Case) -> None:
    """The mass is added beside an unchanged result: for all rows of sequence 1, none of 2, the last of the others."""
    of = filled(kernels, case, dtype, int8)
    pool, starts, lengths, q, sinks = of.pool, of.starts, of.lengths, of.q, of.sinks
    mass_from = torch.cat((starts[:1], starts[2:3], starts[3:] - 1)).to(torch.int32)
    masses = torch.full((len(case.seqs), pool.max_blocks), 7)
    out = pool.attend(q, starts, lengths, 1, sinks, False, mass_from, masses)
    assert torch.equal(out, pool.attend(q, starts, lengths, 1, sinks, False))
    for seq, (length, first, end) in enumerate(
        zip(lengths.tolist(), mass_from.tolist(), starts[1:].tolist(), strict=True)
    ):
        expected = torch.zeros(pool.max_blocks, dtype=torch.float64)
        if first < end:
            blocks = pool.canonical[pool.table[seq].long(), 1, 0].flatten(0, 1)
            found = masses_of(
                q[first:end],
                stored_rows(blocks, case.dim)[:length],
                length - (end - first),
                case.block_size,
                case.dim**-0.5,
                case.softcap,
                sinks,
                case.slopes,
            )
            expected[: len(found)] = found
        assert ((masses[seq] - 7) / ONE - expected).abs().max() < 1e-4 * case.heads * max(1, end - first)
    # One token at a time, in another order: the same integers.
    again = torch.full_like(masses, 7)
    for seq in range(len(case.seqs) - 1, -1, -1):
        for row in range(int(mass_from[seq]), int(starts[seq + 1])):
            length = lengths[seq : seq + 1] - int(starts[seq + 1]) + row + 1
            table, pool.table = pool.table, pool.table[seq : seq + 1].contiguous()
            own, once = again[seq : seq + 1], torch.tensor([0, 1]).int()
            pool.attend(q[row : row + 1].contiguous(), once, length, 1, sinks, False, torch.zeros(1).int(), own)
            pool.table = table
    assert torch.equal(masses, again)


# Sequences that share blocks with the one before: (tokens, blocks of 32 in common with the first of them, or 0).
SHARED = ((700, 0), (690, 20), (641, 20), (1300, 20), (300, 0), (513, 9), (290, 8), (40, 1))


def shared_table(table: Tensor) -> Tensor:
    leader = 0
    for seq, (_, blocks) in enumerate(SHARED):
        leader = leader if blocks else seq
        table[seq, :blocks] = table[leader, :blocks]
    return table


def test_sequences_with_blocks_in_common_are_found(kernels: Kernels) -> None:
    table = shared_table(torch.arange(1, 8 * 41 + 1, dtype=torch.int32).view(8, 41))
    lengths = torch.tensor([tokens for tokens, _ in SHARED], dtype=torch.int32)
    tile = 128 if kernels.isa.startswith("amx") else 64
    for most, groups in (
        (8, [(0, 4, 640), (4, 3, 256), (7, 1, 0)]),
        (3, [(0, 3, 640), (3, 1, 0), (4, 3, 256), (7, 1, 0)]),
        (1, [(seq, 1, 0) for seq in range(8)]),
    ):
        out = torch.full((25,), -1)
        kernels("test_sharing", table, 41, lengths, 8, 32, most, out)
        found = out[1:].view(3, 8)[:, : int(out[0])].T.tolist()
        assert found == [[seq, count, keys // tile * tile] for seq, count, keys in groups]


@pytest.mark.parametrize("heads", [4, 16], ids=lambda heads: f"{heads}h")
def test_keys_read_once_for_several_sequences_change_no_bit(
    kernels: Kernels, dtype: torch.dtype, int8: bool, heads: int
) -> None:
    case = Case(tuple((tokens - 1, 1) for tokens, _ in SHARED), heads=heads, sinks=True, softcap=9.0)
    pool = Pool(kernels, case, dtype, int8)
    pool.table = shared_table(pool.table)
    for seq, (tokens, _) in enumerate(SHARED):
        k, v = (torch.randn(tokens, case.kv_heads, case.dim).to(dtype) for _ in range(2))
        pool.write(k, v, pool.slots(seq, 0, tokens), 0)
    q, sinks = torch.randn(8, heads, case.dim).to(dtype) * 2, torch.randn(heads).to(dtype)
    lengths = torch.tensor([tokens for tokens, _ in SHARED], dtype=torch.int32)
    together = pool.attend(q, torch.arange(9).int(), lengths, 0, sinks, False)
    rest = (0, case.dim**-0.5, "causal", 0, case.softcap)
    expected = ops.paged_attention(q, pool.canonical, pool.table, torch.arange(9).int(), lengths, sinks, *rest)
    assert_near(together, expected, factor=2.0)
    table = pool.table
    for seq in range(8):
        pool.table = table[seq : seq + 1].contiguous()
        alone = pool.attend(q[seq : seq + 1], torch.tensor([0, 1]).int(), lengths[seq : seq + 1], 0, sinks, False)
        assert torch.equal(alone[0], together[seq])


def test_sequences_with_the_same_blocks_attend_as_alone_with_alibi(
    kernels: Kernels, dtype: torch.dtype, int8: bool
) -> None:
    """A shared key lies at another distance from each sequence's query."""
    case = Case(((0, 700), (0, 300)), alibi=True)
    pool = Pool(kernels, case, dtype, int8)
    k, v = (torch.randn(700, case.kv_heads, case.dim).to(dtype) for _ in range(2))
    pool.write(k, v, pool.slots(0, 0, 700), 0)
    pool.table[1] = pool.table[0]
    q, lengths = torch.randn(2, case.heads, case.dim).to(dtype), torch.tensor([700, 290]).int()
    together = pool.attend(q, torch.arange(3).int(), lengths, 0, None, False)
    rest = (0, case.dim**-0.5, "causal", 0, 0.0, case.slopes)
    expected = ops.paged_attention(q, pool.canonical, pool.table, torch.arange(3).int(), lengths, None, *rest)
    assert_near(together, expected, factor=2.0)
    pool.table = pool.table[:1].contiguous()
    for seq in range(2):
        alone = pool.attend(q[seq : seq + 1], torch.tensor([0, 1]).int(), lengths[seq : seq + 1], 0, None, False)
        assert torch.equal(alone[0], together[seq])


@pytest.mark.parametrize("mask", ["causal", "sliding"])
@pytest.mark.parametrize(("fork", "end"), [(530, 537), (95, 99), (64, 70), (1, 3)], ids=str)
def test_a_branch_attends_as_if_it_were_a_chain(
    kernels: Kernels, dtype: torch.dtype, int8: bool, mask: str, fork: int, end: int
) -> None:
    """A branch has blocks of its own from its first token on, and in them copies of the tokens before it."""
    case = Case(((0, end), (0, end)), mask=mask, window=40 if mask == "sliding" else 0, alibi=mask == "causal")
    k, v = (torch.randn(end, case.kv_heads, case.dim).to(dtype) for _ in range(2))
    other_k, other_v = (torch.cat((x[:fork], torch.randn_like(x[fork:]))) for x in (k, v))
    q = torch.randn(2 * (end - fork), case.heads, case.dim).to(dtype) * 2
    starts, lengths = torch.tensor([0, end - fork, 2 * (end - fork)]).int(), torch.tensor([end, end]).int()

    chains = Pool(kernels, case, dtype, int8)
    chains.write(k, v, chains.slots(0, 0, end), 1)
    chains.write(other_k, other_v, chains.slots(1, 0, end), 1)
    expected = chains.attend(q, starts, lengths, 1, None, False)

    tree = Pool(kernels, case, dtype, int8)
    head = fork // case.block_size * case.block_size
    tree.table[1, : head // case.block_size] = tree.table[0, : head // case.block_size]
    tree.write(k, v, tree.slots(0, 0, end), 1)
    tree.write(other_k[fork:], other_v[fork:], tree.slots(1, fork, end), 1)
    sizes = (tree.layers, 1, case.block_size, case.kv_heads, case.dim)
    echoes = (tree.slots(0, head, fork), tree.slots(1, head, fork))
    before = tree.data[:, 0].clone()
    kernels("test_echo", kernels.threads, DTYPES.index(dtype), int8, tree.data, *sizes, *echoes, fork - head)
    assert torch.equal(tree.data[:, 0].view(torch.uint8), before.view(torch.uint8)), "another layer is untouched"
    assert torch.equal(tree.attend(q, starts, lengths, 1, None, False), expected)


@pytest.mark.parametrize("heads", [2, 6, 14, 20], ids=lambda heads: f"{heads}h")
def test_integers_attend_as_the_numbers_they_are(kernels: Kernels, dtype: torch.dtype, heads: int) -> None:
    """If all scales are 1, the additions are those over K and V in the dtype of the queries.

    Integers are widened in registers for few rows, and in memory for many or for tiles.
    """
    case = Case(((0, 66), (600, 1), (70, 2)), heads=heads, dim=48)
    plain, integers = Pool(kernels, case, dtype, int8=False), Pool(kernels, case, dtype, int8=True)
    integers.table = plain.table
    for seq, (cached, new) in enumerate(case.seqs):
        k, v = (torch.randint(-127, 128, (cached + new, case.kv_heads, case.dim)) for _ in range(2))
        k[..., 5], v[..., -1] = 127, -127
        for pool in (plain, integers):
            pool.write(k.to(dtype), v.to(dtype), pool.slots(seq, 0, cached + new), 1)
    starts, lengths = torch.tensor([0, 66, 67, 69]).int(), torch.tensor([66, 601, 72]).int()
    q = (torch.randn(69, heads, case.dim) / 64).to(dtype)
    found, expected = (pool.attend(q, starts, lengths, 1, None, False) for pool in (integers, plain))
    assert torch.equal(found, expected) and expected.abs().max() > 1


@pytest.mark.parametrize("mask", MASKS)
def test_a_row_does_not_depend_on_batch_or_chunks(kernels: Kernels, dtype: torch.dtype, int8: bool, mask: str) -> None:
    _rows_alone_and_in_chunks(kernels, dtype, int8, mask, alibi=False)


def test_a_row_with_alibi_does_not_either(kernels: Kernels, dtype: torch.dtype, int8: bool) -> None:
    _rows_alone_and_in_chunks(kernels, dtype, int8, "causal", alibi=True)


def _rows_alone_and_in_chunks(kernels: Kernels, dtype: torch.dtype, int8: bool, mask: str, alibi: bool) -> None:
    softcap = 0.0 if alibi else 7.0
    case = Case(((0, 700), (0, 90)), mask=mask, window=0 if mask == "causal" else 300, softcap=softcap, alibi=alibi)
    pool = Pool(kernels, case, dtype, int8)
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
    kernels: Kernels, dtype: torch.dtype, int8: bool, mask: str, window: int
) -> None:
    """Block table entries that no query sees are 0, and block 0 holds NaN: in K, in V, in the middle of a key tile."""
    case = Case(((0, 700),), mask=mask, window=window, softcap=7.0, sinks=True)
    pool = Pool(kernels, case, dtype, int8)
    k, v = (torch.randn(700, case.kv_heads, case.dim).to(dtype) for _ in range(2))
    pool.write(k, v, pool.slots(0, 0, 700), 0)
    for data in (pool.data, pool.canonical):
        data[0].view(torch.uint8).fill_(0xFF)
    q, sinks = torch.randn(700, case.heads, case.dim).to(dtype), torch.randn(case.heads).to(dtype)
    kept = pool.table.clone()
    group = KINDS["window" if mask == "sliding" else "chunk"](8, window)
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


def rotated(kernels: Kernels, x: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """The table of angles for positions from 0 on, and the heads x [rows, heads, dim] turned by it."""
    rows, heads, dim = x.shape
    table, out = torch.empty(rows, 2 * half), torch.empty_like(x)
    angles = (torch.arange(rows), 10000.0 ** (-torch.arange(half).float() / half), 1.0, half, 0)
    kernels.run("test_rope", x.dtype, x, heads * dim, *angles, rows, heads, dim, table, out)
    return table, out


def test_fused_write_equals_rope_then_write(kernels: Kernels, dtype: torch.dtype, int8: bool) -> None:
    case = replace(CASES[1], seqs=((0, 21),))
    fused, plain = Pool(kernels, case, dtype, int8), Pool(kernels, case, dtype, int8)
    plain.table = fused.table
    q, k, v = (torch.randn(21, heads, case.dim).to(dtype) for heads in (case.heads, case.kv_heads, case.kv_heads))
    qkv = torch.cat([each.flatten(1) for each in (q, k, v)], -1)
    parts = qkv.split((q[0].numel(), k[0].numel(), v[0].numel()), -1)
    half, slots = 12, fused.slots(0, 0, 21)
    table, turned = rotated(kernels, k, half)
    out = torch.full_like(q, float("nan"))
    rest = (2, 1, case.block_size, case.kv_heads, case.dim, slots, 21, case.heads, out)
    kernels.run("test_kv_write", dtype, int8, True, *parts, qkv.shape[1], table, half, fused.data, *rest)
    assert_near(out, ops.rope(q, table))
    assert_near(turned, ops.rope(k, table))
    plain.write(turned, v, slots, 1)
    assert torch.equal(fused.data.view(torch.uint8), plain.data.view(torch.uint8))


# Heads that are rotated in part, and heads that go through registers whole.
@pytest.mark.parametrize(
    ("dim", "half", "norm"),
    [(32, 12, (1e-5, 1.0, False)), (64, 32, (1e-5, 0.0, True)), (128, 64, (1e-5, 0.0, False))],
    ids=["D32", "D64", "D128"],
)
def test_norms_in_the_write_equal_norms_before_it(
    kernels: Kernels, dtype: torch.dtype, int8: bool, dim: int, half: int, norm: tuple[float, float, bool]
) -> None:
    case = replace(CASES[1], dim=dim, seqs=((0, 21),))
    fused, plain = Pool(kernels, case, dtype, int8), Pool(kernels, case, dtype, int8)
    plain.table = fused.table
    q, k = torch.randn(21, case.heads, case.dim).to(dtype), torch.randn(21, case.kv_heads, case.dim).to(dtype)
    qkv = torch.cat([each.flatten(1) for each in (q, k, k)], -1)
    parts = qkv.split((q[0].numel(), k[0].numel(), k[0].numel()), -1)
    weights = torch.randn(case.dim).to(dtype), torch.randn(case.dim).to(dtype)
    slots = fused.slots(0, 0, 21)
    normed = torch.empty_like(k)
    sizes = (21, case.kv_heads, case.dim)
    kernels.run("test_rms_norm", dtype, k, k[0].numel(), None, weights[1], *norm, *sizes, normed, None)
    table, turned = rotated(kernels, normed, half)
    out = torch.full_like(q, float("nan"))
    rest = (2, 1, case.block_size, case.kv_heads, case.dim, slots, 21, case.heads, out)
    call = (*parts, qkv.shape[1], *weights, *norm, table, half, fused.data)
    kernels.run("test_norm_rope_kv_write", dtype, int8, *call, *rest)
    assert_near(out, ops.rope(ops.rms_norm(q, weights[0], *norm), table), factor=2.0)
    assert_near(turned, ops.rope(ops.rms_norm(k, weights[1], *norm), table), factor=2.0)
    plain.write(turned, k, slots, 1)
    assert torch.equal(fused.data.view(torch.uint8), plain.data.view(torch.uint8))


def projection(
    kernels: Kernels, scheme: str, x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, tuple[Any, ...]]:
    """Return x [rows, k] times weight [n, k] by the product's own kernel, and x, weights and k for the fused one."""
    (rows, k), n, dtype = x.shape, len(weight), x.dtype
    out = torch.full((rows, n), float("nan"), dtype=dtype)
    if scheme == "plain":
        stored = packed(weight)
        kernels.run("test_linear", dtype, x, k, rows, stored, n, k, bias, out, n, False)
        return out, (x, None, stored, None, 0, None, k)
    if scheme == "int4":
        values, x_scale = ops.quantize_rows(x)
        integers, of_groups, scale = quantize_int4(weight, 32)
        stored, of_groups = packed(integers), group_panels(of_groups)
        args = (values, k, x_scale, rows, stored, of_groups, scale, n, k, 32, bias, None, out)
        kernels.run("test_linear_w4a8", dtype, *args)
        return out, (values, x_scale, stored, of_groups, 32, scale, k)
    integers, scale = ops.quantize_rows(weight)
    stored, x_scale = packed(integers), None
    if scheme == "w8a8":
        x, x_scale = ops.quantize_rows(x)
    kernels.run("test_linear_int8", dtype, x, k, x_scale, rows, stored, n, k, scale, bias, None, out)
    return out, (x, x_scale, stored, None, 0, scale, k)


@pytest.mark.parametrize("num_tokens", [1, 7, 13, 200], ids=lambda count: f"T{count}")
@pytest.mark.parametrize(
    ("scheme", "dim", "normed", "biased"),
    [
        ("plain", 32, True, False),
        ("plain", 64, False, True),
        ("plain", 48, False, False),
        ("int8", 32, True, True),
        ("w8a8", 64, False, True),
        ("int4", 48, True, False),
    ],
)
def test_the_projection_in_the_write_moves_no_bit(
    kernels: Kernels, dtype: torch.dtype, int8: bool, num_tokens: int, scheme: str, dim: int, normed: bool, biased: bool
) -> None:
    """Against the projection and the fused write as two kernels: one row, tall tiles, more rows than a block."""
    case = replace(CASES[1], dim=dim, seqs=((0, num_tokens),))
    fused, plain = Pool(kernels, case, dtype, int8), Pool(kernels, case, dtype, int8)
    plain.table = fused.table
    widths = (case.heads * dim, case.kv_heads * dim, case.kv_heads * dim)
    x, weight = torch.randn(num_tokens, 72).to(dtype), (torch.randn(sum(widths), 72) / 8).to(dtype)
    bias = torch.randn(sum(widths)).to(dtype) if biased else None
    half, slots, norm = 12, fused.slots(0, 0, num_tokens), (1e-5, 1.0, False)
    norms = (torch.randn(dim).to(dtype), torch.randn(dim).to(dtype)) if normed else (None, None)
    table = ops.rope_table(torch.arange(num_tokens), 10000.0 ** (-torch.arange(half).float() / half), 1.0)
    outs = [torch.full((num_tokens, case.heads, dim), float("nan"), dtype=dtype) for _ in range(2)]
    rest = (2, 1, case.block_size, case.kv_heads, dim, slots, num_tokens, case.heads)
    qkv, product = projection(kernels, scheme, x, weight, bias)
    call = (*product, bias, *norms, *norm, table, half, fused.data, *rest, outs[0])
    kernels.run("test_qkv_rope_kv_write", dtype, int8, *call)
    parts = qkv.split(widths, -1)
    if normed:
        call = (*parts, sum(widths), *norms, *norm, table, half, plain.data)
        kernels.run("test_norm_rope_kv_write", dtype, int8, *call, *rest, outs[1])
    else:
        kernels.run("test_kv_write", dtype, int8, True, *parts, sum(widths), table, half, plain.data, *rest, outs[1])
    assert torch.equal(*outs)
    assert torch.equal(fused.data.view(torch.uint8), plain.data.view(torch.uint8))
    assert (fused.data.view(torch.uint8) != 0xFF).any()


@pytest.mark.parametrize("block_size", [16, 32, 48], ids=lambda size: f"B{size}")
def test_nothing_behind_the_pool_is_read(kernels: Kernels, dtype: torch.dtype, int8: bool, block_size: int) -> None:
    """The pool ends where no memory is, with the last block that the sequence reads."""
    if kernels.isa.startswith("neon"):
        pytest.skip("an emulator, which takes copies of the tensors")
    case = Case(((200, 1),), dim=128, block_size=block_size)
    pool = Pool(kernels, case, dtype, int8)
    pages, size = -(-pool.data.nbytes // mmap.PAGESIZE), pool.data.nbytes
    memory = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + pages * mmap.PAGESIZE), mmap.PAGESIZE, 0) == 0
    data = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=pages * mmap.PAGESIZE - size)
    pool.data = data.view(pool.data.dtype).view(pool.data.shape)
    blocks = len(pool.data)
    pool.table = torch.arange(blocks - -(-201 // block_size), blocks, dtype=torch.int32)[None].contiguous()
    pool.max_blocks = pool.table.shape[1]
    k, v = (torch.randn(201, case.kv_heads, case.dim).to(dtype) for _ in range(2))
    pool.write(k, v, pool.slots(0, 0, 201), 1)
    starts, lengths = torch.tensor([0, 1]).int(), torch.tensor([201]).int()
    q = torch.randn(1, case.heads, case.dim).to(dtype)
    found = pool.attend(q, starts, lengths, 1, None, False)
    expected = ops.paged_attention(
        q, pool.canonical, pool.table, starts, lengths, None, 1, case.dim**-0.5, "causal", 0, 0.0
    )
    assert_near(found, expected, factor=2.0)


@pytest.mark.parametrize("block_size", [16, 32, 48], ids=lambda size: f"B{size}")
def test_blocks_pack_into_the_canonical_form_and_back(
    kernels: Kernels, dtype: torch.dtype, int8: bool, block_size: int
) -> None:
    case = replace(CASES[1], dim=80, seqs=((0, 96), (0, 40)), block_size=block_size)
    pool = Pool(kernels, case, dtype, int8)
    for layer in range(2):
        for seq, (_, new) in enumerate(case.seqs):
            k, v = (torch.randn(new, case.kv_heads, case.dim).to(dtype) for _ in range(2))
            pool.write(k, v, pool.slots(seq, 0, new), layer)
    blocks = pool.table[0, :2].contiguous()
    packed = pool.packed(blocks)
    assert torch.equal(packed, pool.canonical[blocks.long()])
    copy = Pool(kernels, case, dtype, int8)
    copy.move(False, blocks, packed)
    assert torch.equal(copy.data[blocks.long()], pool.data[blocks.long()])


def test_rows_in_int8_that_are_no_plain_numbers(kernels: Kernels, dtype: torch.dtype) -> None:
    """Zeros, ties between integers, numbers without a last bit to spare, an infinity and a NaN match the reference."""
    case = Case(((0, 6),), kv_heads=2, dim=32)
    pool = Pool(kernels, case, dtype, int8=True)
    k = torch.zeros(6, 2, 32, dtype=dtype)
    k[1] = torch.arange(-16, 16).to(dtype) + 0.5  # the scale is 16.5 / 127
    k[2, :, 0], k[2, :, 1:] = 127, (torch.arange(31) - 15.5).to(dtype)  # the scale is 1: all but one are ties
    k[3] = 1e-39 * torch.arange(32)
    k[4, 0, 7], k[4, 1, 31] = float("nan"), float("inf")
    k[5, 0, 3], k[5, 1] = float("-inf"), 3e38
    pool.write(k, k.flip(0), pool.slots(0, 0, 6), 1)
    written = torch.stack((k, k.flip(0))).isfinite().all(-1)
    block = pool.table[0, :1].contiguous()
    found, expected = (wide(each)[0, 1, :, :6] for each in (pool.packed(block), pool.canonical[block.long()]))
    assert torch.equal(found[written], expected[written])
    assert not found[~written].isfinite().any()
    out = pool.attend(
        torch.randn(6, 4, 32).to(dtype), torch.tensor([0, 6]).int(), torch.tensor([6]).int(), 1, None, False
    )
    assert not out[5].isfinite().any()


def wide(canonical: Tensor) -> Tensor:
    """Return the numbers that integers and scales stand for."""
    return canonical[..., :-4].float() * canonical[..., -4:].contiguous().view(torch.float32)
