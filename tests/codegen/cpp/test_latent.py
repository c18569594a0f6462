"""A pool of latents and attention over it, against the reference: many query heads, one K that holds V."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from cpp_kernels import DTYPES, Kernels, assert_near
from masses import ONE, masses_of, stored_rows
from torch import Tensor

from inferc.ir.program import dtype_name
from inferc.kv_groups import row_size

ops = torch.ops.inferc
MASKS = ("causal", "sliding", "chunked")


@dataclass(frozen=True)
class Case:
    """Sequences as (tokens cached, new tokens)."""

    seqs: tuple[tuple[int, int], ...]
    heads: int = 4
    dim: int = 48
    v_dim: int = 32
    block_size: int = 32
    mask: str = "causal"
    window: int = 0


CASES = (
    Case(((0, 1),)),
    Case(((0, 17), (5, 1), (63, 1), (64, 1), (31, 33))),
    Case(((0, 70), (600, 3), (1030, 1)), heads=16, block_size=16),
    Case(((0, 30), (520, 1)), heads=128, dim=576, v_dim=512),  # DeepSeek V3: heads go in parts
    Case(((0, 9), (300, 1)), heads=50, dim=32, v_dim=16),
    Case(((0, 90), (700, 1)), mask="sliding", window=37),
)


class Latents:
    """A pool, NaN where nothing was written, and the same content for the reference."""

    def __init__(self, kernels: Kernels, case: Case, dtype: torch.dtype, int8: bool) -> None:
        self.kernels, self.case, self.dtype, self.int8 = kernels, case, dtype, int8
        self.max_blocks = -(-max(map(sum, case.seqs)) // case.block_size)
        num_blocks = 1 + len(case.seqs) * self.max_blocks
        self.table = (torch.randperm(num_blocks - 1) + 1).view(len(case.seqs), -1).to(torch.int32)
        stored = torch.int8 if int8 else dtype
        of_token = row_size(case.dim, dtype_name(stored))
        self.pool = torch.empty((num_blocks, 2, 1, case.block_size, 1, of_token), dtype=stored)
        self.pool.view(torch.uint8).fill_(0xFF)  # NaN in float32, which scales are, and in bfloat16
        self.canonical = torch.zeros_like(self.pool)
        self.starts = torch.tensor([0, *(new for _, new in case.seqs)]).cumsum(0).to(torch.int32)
        self.lengths = torch.tensor([sum(seq) for seq in case.seqs], dtype=torch.int32)
        for index, seq in enumerate(case.seqs):
            positions = torch.arange(sum(seq))
            slots = self.table[index, positions // case.block_size].long() * case.block_size
            k = torch.randn(len(positions), 1, case.dim).to(dtype)
            self._call(True, k, None, slots + positions % case.block_size, len(positions))
            self.canonical = ops.latent_write(self.canonical, k, slots + positions % case.block_size, 1)

    def _call(
        self,
        write: bool,
        x: Tensor,
        out: Tensor | None,
        slots: Tensor | None,
        rows: int,
        room: int = 1,
        mass_from: Tensor | None = None,
        masses: Tensor | None = None,
    ) -> None:
        case, partials = self.case, torch.full((room,), float("nan"))
        where = (2, 1, case.block_size, case.dim, case.v_dim, slots, rows, self.table, self.max_blocks)
        seqs = (self.starts, self.lengths, len(case.seqs), case.heads)
        how = (case.dim**-0.5, MASKS.index(case.mask), case.window, partials, room, mass_from, masses)
        self.kernels.run("test_latent", self.dtype, self.int8, write, x, out, self.pool, *where, *seqs, *how)

    def attend(self, q: Tensor, room: int = 1, mass_from: Tensor | None = None, masses: Tensor | None = None) -> Tensor:
        out = torch.full((*q.shape[:2], self.case.v_dim), float("nan"), dtype=self.dtype)
        self._call(False, q, out, None, 0, room, mass_from, masses)
        return out

    def expected(self, q: Tensor) -> Tensor:
        case = self.case
        how = (1, case.dim**-0.5, case.mask, case.window, 0.0, case.v_dim)
        found: Tensor = ops.latent_attention(q, self.canonical, self.table, self.starts, self.lengths, *how)
        return found

    def queries(self) -> Tensor:
        return torch.randn(int(self.starts[-1]), self.case.heads, self.case.dim).to(self.dtype)


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_latent_attention(kernels: Kernels, dtype: torch.dtype, int8: bool, case: Case) -> None:
    latents = Latents(kernels, case, dtype, int8)
    q = latents.queries()
    assert_near(latents.attend(q), latents.expected(q), factor=2.0)


def test_decode_split_over_threads_gives_the_same_bits(kernels: Kernels, dtype: torch.dtype, int8: bool) -> None:
    latents = Latents(kernels, Case(((1300, 1),), heads=50, dim=64, v_dim=48), dtype, int8)
    q = latents.queries()
    assert torch.equal(latents.attend(q, room=200_000), latents.attend(q))


def test_a_row_does_not_depend_on_its_neighbours(kernels: Kernels, dtype: torch.dtype, int8: bool) -> None:
    latents = Latents(kernels, Case(((40, 20),), heads=20), dtype, int8)
    q = latents.queries()
    together = latents.attend(q)
    latents.starts = torch.tensor([0, 1], dtype=torch.int32)
    for row in (0, 7, 19):
        latents.lengths = torch.tensor([41 + row], dtype=torch.int32)
        assert torch.equal(latents.attend(q[row : row + 1].contiguous())[0], together[row])


def test_blocks_are_told_what_attention_gave_them(kernels: Kernels, dtype: torch.dtype, int8: bool) -> None:
    case = Case(((40, 3), (520, 1)), heads=50, dim=64, v_dim=48)
    latents = Latents(kernels, case, dtype, int8)
    q, masses = latents.queries(), torch.zeros((2, latents.max_blocks), dtype=torch.int64)
    latents.attend(q, mass_from=torch.tensor([1, 3]).int(), masses=masses)
    for seq, (rows, length) in enumerate(((slice(1, 3), 43), (slice(3, 4), 521))):
        keys = stored_rows(latents.canonical[latents.table[seq].long(), 1, 0].flatten(0, 1), case.dim)[:length]
        expected = masses_of(q[rows], keys, length - (rows.stop - rows.start), case.block_size, case.dim**-0.5)
        assert (masses[seq, : len(expected)] / ONE - expected).abs().max() < 1e-4 * case.heads
        assert not masses[seq, len(expected) :].any()


def test_blocks_move_in_the_canonical_form(kernels: Kernels, dtype: torch.dtype, int8: bool) -> None:
    latents = Latents(kernels, Case(((0, 66),)), dtype, int8)
    blocks = latents.table[0, :2].contiguous()
    canonical = torch.zeros_like(latents.pool[:2])
    sizes = (2, 32, 48)
    kernels("test_move_latents", DTYPES.index(dtype), int8, True, latents.pool, *sizes, blocks, 2, canonical)
    assert torch.equal(canonical[:, 1], latents.canonical[blocks.long(), 1])
    other = torch.full_like(latents.pool, -1)
    kernels("test_move_latents", DTYPES.index(dtype), int8, False, other, *sizes, blocks, 2, canonical)
    assert torch.equal(other[blocks.long(), 1], latents.pool[blocks.long(), 1])
