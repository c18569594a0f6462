"""The cases of the attention kernels: steps that mix decode and prefill, of which each kernel computes its part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor
from triton_cases import BF16, F16, F32, SUMS, UNTOUCHED, Case, behind, dtype_name, empty, numbers, to_pool

from inferc.codegen.triton.kernels.attention_decode import decode_attention, partial_bytes
from inferc.codegen.triton.kernels.attention_plan import TILES, Cells, attention_plan, invariant_cells, plan_bytes
from inferc.codegen.triton.kernels.attention_prefill import prefill_attention
from inferc.codegen.triton.kernels.attention_tiles import AttentionShape, decode_rows, query_limit
from inferc.codegen.triton.kernels.rope import rope_kv_write
from inferc.ir.ops.attention import visible
from inferc.kv_groups import SCALE_BYTES

ops = torch.ops.inferc
LAYERS, LAYER = 2, 1
INT8 = torch.int8


@dataclass(frozen=True)
class Step:
    """A step of attention; seqs: (new, length) of each sequence."""

    seqs: tuple[tuple[int, int], ...]
    dtype: torch.dtype = F32
    heads: int = 2
    kv_heads: int = 1
    dim: int = 16
    mask: str = "causal"
    window: int = 0
    softcap: float = 0.0
    has_sinks: bool = False
    block_size: int = 16
    int8_kv: bool = False
    has_alibi: bool = False
    num_programs: int = 5
    deterministic: bool = False

    @property
    def name(self) -> str:
        shown = {name: value for name, value in vars(self).items() if value != getattr(Step, name, None)}
        if len(self.seqs) > 9:
            shown["seqs"] = len(self.seqs)
        return " ".join(f"{name} {value}" for name, value in shown.items())

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def decodes(self) -> list[bool]:
        """Return for each sequence whether it is a decode."""
        return [new <= query_limit(self.group) for new, _ in self.seqs]

    @property
    def cells(self) -> Cells:
        return invariant_cells(self.mask, self.window, 16384) if self.deterministic else TILES

    @property
    def starts(self) -> Tensor:
        return torch.tensor([0, *(new for new, _ in self.seqs)]).cumsum(0).to(torch.int32)

    @property
    def lengths(self) -> Tensor:
        return torch.tensor([length for _, length in self.seqs], dtype=torch.int32)

    @property
    def counts(self) -> dict[str, int]:
        return {"num_tokens": int(self.starts[-1]), "num_seqs": len(self.seqs)}

    @property
    def scale(self) -> float:
        return float(self.dim**-0.5)

    def shape(self) -> AttentionShape:
        """Return the shape for which the kernels are made."""
        names = ("heads", "kv_heads", "dim", "block_size", "scale", "softcap", "mask", "window", "has_sinks", "int8_kv")
        return AttentionShape(
            dtype=dtype_name(self.dtype),
            strides=(self.heads * self.dim, self.heads * self.dim),
            layers=LAYERS,
            has_alibi=self.has_alibi,
            **{name: getattr(self, name) for name in names},
        )

    def first_key(self, new: int, length: int) -> int:
        """The first key that any of a sequence's new tokens sees."""
        seen = visible(torch.arange(length - new, length), torch.arange(length), self.mask, self.window)
        return int(seen.any(0).nonzero()[0])


def cell_starts(step: Step) -> list[int]:
    """Return the first keys of all cells, up to one beyond every sequence of a test."""
    if not step.deterministic:
        return list(range(0, 20000, 64))
    if step.mask != "causal":
        size = 256
        while size < step.window / 16:
            size *= 2
        return list(range(0, 20000, size))
    starts = list(range(0, 4096, 256))
    for size in (512, 1024, 2048):
        starts += range(8 * size, 16 * size, size)
    return starts


def plan(step: Step) -> Tensor:
    """Return the plan that `attention_plan` is to make."""
    starts = [0]
    for (new, length), decodes in zip(step.seqs, step.decodes, strict=True):
        first = step.first_key(new, length)
        begin = max(start for start in cell_starts(step) if start <= first)
        tiles = -(-(length - begin) // 64)
        starts.append(starts[-1] + (tiles if decodes else 0))
    stretch = max(4, -(-starts[-1] * step.kv_heads // step.num_programs))
    made = torch.tensor([stretch, *starts], dtype=torch.int32)
    assert made.nbytes == plan_bytes(len(step.seqs))
    return made


Groups = tuple[tuple[tuple[int, ...], int], ...]


def inputs(step: Step, groups: Groups = ()) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """The tensors of a step, the result of all its rows, and the canonical cache.

    groups: sequences that share a prefix, and of how many keys, in whole blocks. Equal sequences have equal queries,
    keys and values. Blocks that no query sees were given back; block 0, and what a block holds behind its sequence's
    end, is NaN.
    """
    rows = step.dim + (SCALE_BYTES if step.int8_kv else 0)
    counts = [-(-length // step.block_size) for _, length in step.seqs]
    table = torch.zeros(len(counts), max(counts) + 1, dtype=torch.int32)
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(3)).to(torch.int32) + 1
    sizes = (sum(counts) + 1, LAYERS, 2, step.block_size, step.kv_heads)
    cache = torch.full((*sizes, rows), float("nan")).to(step.dtype)
    if step.int8_kv:
        cache = torch.full((*sizes, rows // 4), float("nan")).view(INT8)
    queries = []
    for seq, ((new, length), blocks) in enumerate(zip(step.seqs, order.split(counts), strict=True)):
        table[seq, : len(blocks)] = blocks
        at = torch.arange(length)
        slots = blocks[at // step.block_size].long() * step.block_size + at % step.block_size
        k, v = (numbers(length, step.kv_heads, step.dim, dtype=step.dtype, seed=seed) for seed in (1, 2))
        cache = ops.kv_write(cache, k, v, slots, LAYER)
        queries.append(numbers(new, step.heads * step.dim, dtype=step.dtype, seed=3 + length))
        unseen = step.first_key(new, length) // step.block_size
        cache[table[seq, :unseen].long()] = cache[0].clone()
        table[seq, :unseen] = 0
    for members, keys in groups:
        table[list(members), : keys // step.block_size] = table[members[0], : keys // step.block_size]
    q = torch.cat(queries)
    sinks = numbers(step.heads, dtype=step.dtype) if step.has_sinks else None
    slopes = 1.3 * 0.7 ** torch.arange(1, step.heads + 1) if step.has_alibi else None
    clean = cache.clone()
    clean[0] = 0
    result = ops.paged_attention(
        q.view(-1, step.heads, step.dim),
        clean,
        table,
        step.starts,
        step.lengths,
        sinks,
        LAYER,
        step.scale,
        step.mask,
        step.window,
        step.softcap,
        slopes,
    )
    tensors = {
        "q_ptr": q,
        "cache_ptr": (int8_pool(cache) if step.int8_kv else to_pool(cache))[:, LAYER],
        "block_table_ptr": table,
        "query_start_ptr": step.starts,
        "seq_lens_ptr": step.lengths,
        "max_blocks_ptr": torch.tensor([table.shape[1]], dtype=torch.int32),
        "out_ptr": empty(len(q), step.heads * step.dim, dtype=step.dtype),
        **({} if sinks is None else {"sinks_ptr": sinks}),
        **({} if slopes is None else {"alibi_ptr": slopes}),
    }
    return tensors, result.flatten(1), clean


def int8_pool(canonical: Tensor) -> Tensor:
    """Return a canonical int8 cache in the kernels' layout: the scales of each part of a block follow its rows."""
    parts = to_pool(canonical)
    rows, scales = parts[..., :-SCALE_BYTES], parts[..., -SCALE_BYTES:]
    return torch.cat((rows.flatten(-2), scales.flatten(-2)), -1)


def case(step: Step, *, prefill: bool) -> Case:
    """A launch that is to write the rows of its own sequences and no others."""
    tensors, result, _ = inputs(step)
    is_own = torch.tensor([decodes != prefill for decodes in step.decodes])
    own = is_own.repeat_interleave(step.starts.diff())
    expected = {"out_ptr": behind(torch.where(own[:, None], result, torch.tensor(UNTOUCHED).to(step.dtype)))}
    if prefill:
        source = prefill_attention(step.shape(), step.cells)
    else:
        source = decode_attention(step.shape(), step.num_programs, step.cells)
        tensors |= of_plan(plan(step), decode_rows(step.group), step)
        expected["arrived_ptr"] = torch.zeros(step.num_programs, dtype=torch.int64)
    return Case(step.name, source, tensors, expected, step.counts, SUMS if step.dtype == F32 else 1)


def of_plan(made: Tensor, rows: int, step: Step) -> dict[str, Tensor]:
    """A plan, and the scratch of those who go by it."""
    room = partial_bytes(rows, step.dim, step.num_programs, step.cells)
    return {
        "plan_ptr": made,
        "partial_ptr": torch.full((room // 4,), float("nan")),
        "arrived_ptr": torch.zeros(step.num_programs, dtype=torch.int32),
    }


MIXED = ((5, 5), (1, 9), (3, 70), (17, 40), (1, 257))
LONG = ((1, 256), (20, 300), (2, 257), (1, 700))
STEPS = (
    Step(((1, 1),), heads=1, num_programs=3),
    Step(MIXED, BF16, heads=4, kv_heads=2, dim=64),
    Step(MIXED, BF16, heads=6, kv_heads=2, dim=80, softcap=30.0, has_sinks=True),
    Step(((1, 64), (3, 65), (2, 1000)), F16, heads=8, dim=32, block_size=32, has_sinks=True, num_programs=7),
    Step(((1, 130), (2, 64)), heads=24),
    Step((*MIXED, (2, 600)), heads=4, dim=32, mask="sliding", window=7),
    Step((*MIXED, (20, 300), (3, 600)), mask="sliding", window=290, block_size=64, num_programs=4),
    Step((*MIXED, (8, 70), (40, 200)), kv_heads=2, dim=32, mask="chunked", window=16, has_sinks=True),
    Step(MIXED, BF16, heads=4, kv_heads=2, dim=64, int8_kv=True, has_sinks=True),
    Step((*LONG, (3, 129)), mask="chunked", window=128, int8_kv=True, block_size=32),
    Step(MIXED, BF16, heads=6, kv_heads=2, dim=80, has_sinks=True, has_alibi=True),
    Step((*MIXED, (20, 300)), heads=4, mask="sliding", window=290, block_size=64, int8_kv=True, has_alibi=True),
)
DETERMINISTIC = (
    Step((*LONG[:3], (1, 1500)), has_sinks=True, num_programs=2, deterministic=True),
    Step(((1, 4700),), BF16, heads=1, num_programs=40, deterministic=True),
    Step((*LONG, (2, 1000)), BF16, heads=4, kv_heads=2, mask="sliding", window=300, num_programs=4, deterministic=True),
)
TOGETHER = (
    Step(((1, 600),), F32, heads=4, kv_heads=2, deterministic=True, num_programs=9),
    Step(((2, 1100),), BF16, deterministic=True, int8_kv=True, num_programs=4),
    Step(((1, 600),), BF16, heads=4, kv_heads=2, deterministic=True, num_programs=9, has_alibi=True),
)
"""Sequences whose results are not to depend on what else the step has."""


def plan_cases() -> Iterator[Case]:
    many = Step(tuple((1 + seq % 9, 40 * seq + 9) for seq in range(300)), kv_heads=2, mask="sliding", window=1000)
    wide = Step(((1, 8500),), mask="sliding", window=8000, deterministic=True)
    for step in (*STEPS[:3], *STEPS[6:8], *DETERMINISTIC[1:], many, wide):
        expected = plan(step)
        shape = (step.kv_heads, query_limit(step.group), step.mask, step.window, step.num_programs, step.cells)
        tensors = {
            "query_start_ptr": step.starts,
            "seq_lens_ptr": step.lengths,
            "plan_ptr": torch.full_like(expected, -1),
        }
        yield Case(step.name, attention_plan(*shape), tensors, {"plan_ptr": expected.long()}, step.counts)


def decode_cases() -> Iterator[Case]:
    for step in (*STEPS, *DETERMINISTIC):
        yield case(step, prefill=False)


def prefill_cases() -> Iterator[Case]:
    for step in (*STEPS, *DETERMINISTIC[::2]):
        yield case(step, prefill=True)


def int8_write_cases() -> Iterator[Case]:
    """`rope_kv_write` into a pool of int8.

    Cosines and sines are halves, so that K has the same bytes on every device.
    """
    for dtype, tokens, heads, kv_heads, dim, half, pairs in (
        (F32, 5, 4, 2, 32, 16, "halves"),
        (BF16, 7, 3, 1, 80, 16, "neighbours_to_halves"),
        (F16, 3, 2, 2, 64, 32, "neighbours"),
    ):
        q, k = numbers(tokens, heads * dim, dtype=dtype), numbers(tokens, kv_heads * dim, dtype=dtype)
        v = numbers(tokens, kv_heads * dim, dtype=dtype, seed=1) * 9
        k[-1] = 0
        angles = torch.arange(tokens)[:, None] + torch.arange(half)
        cos, sin = (angles % 5 - 2) / 2, (angles * 2 % 5 - 2) / 2
        # To bfloat16, what is rounded on a GPU is truncated by the interpreter: nothing is to be rounded.
        table = torch.cat((cos, sin * (dtype != BF16)), 1)
        canonical = numbers(3, LAYERS, 2, 16, kv_heads, (dim + SCALE_BYTES) // 4).view(INT8)
        slots = torch.arange(tokens, dtype=torch.int64) * 7 % 48
        heads_of = [each.view(tokens, -1, dim) for each in (q, k, v)]
        rotated, cache = ops.rope_kv_write(*heads_of, table, canonical, slots, LAYER, pairs)
        strides = (heads * dim, kv_heads * dim, kv_heads * dim, 2 * half, heads * dim)
        source = rope_kv_write(dtype_name(dtype), heads, kv_heads, dim, half, pairs, strides, LAYERS, 16, int8_kv=True)
        tensors = {
            "q_ptr": q,
            "k_ptr": k,
            "v_ptr": v,
            "cache_ptr": int8_pool(canonical)[:, LAYER],
            "table_ptr": table,
            "slots_ptr": slots,
            "out_ptr": empty(tokens, heads * dim, dtype=dtype),
        }
        expected = {"out_ptr": behind(rotated.flatten(1)), "cache_ptr": int8_pool(cache)[:, LAYER].long()}
        yield Case(
            f"{tokens} x {heads}/{kv_heads} x {dim} {dtype} {pairs}", source, tensors, expected, {"num_tokens": tokens}
        )


def depend_on_their_step(run: Callable[[Case], dict[str, Tensor]]) -> list[str]:
    """The steps of TOGETHER whose sequence has other bits alone than among others.

    run: launches, returns what was written.
    """
    found = []
    for step in TOGETHER:
        alone = run(case(step, prefill=False))["out_ptr"][: step.seqs[0][0]]
        others = replace(step, seqs=((1, 300), *step.seqs, (1, 77), *step.seqs, (2, 900)))
        first, second = others.starts[1:2], others.starts[3:4]
        among = run(case(others, prefill=False))["out_ptr"]
        for start in (int(first), int(second)):
            if not torch.equal(among[start : start + len(alone)], alone):
                found.append(step.name)
    return found


CHUNKED = (
    Step(((290, 290),), BF16, has_sinks=True, deterministic=True),
    Step(((270, 270),), BF16, mask="sliding", window=30, int8_kv=True, deterministic=True),
    Step(((270, 270),), BF16, heads=4, has_alibi=True, deterministic=True),
)
"""Prompts of which a token is to have the same result however they are cut."""


def depend_on_chunks(run: Callable[[Case], dict[str, Tensor]]) -> list[str]:
    """The steps of CHUNKED of which some tokens have other bits in chunks, or one by one, than in the whole prompt."""
    found = []
    for step in CHUNKED:
        (length, _), *_ = step.seqs
        tensors, *_ = inputs(step)
        q, results = tensors["q_ptr"], []
        ends = [0, 37, 201, 205, 258, 259, length]
        for cuts in ([0, length], ends):
            out = []
            for first, last in pairwise(cuts):
                chunk = replace(step, seqs=((last - first, last),))
                made = case(chunk, prefill=not chunk.decodes[0])
                of_chunk = {"q_ptr": q[first:last].clone(), "cache_ptr": tensors["cache_ptr"]}
                made.tensors.update(of_chunk, block_table_ptr=tensors["block_table_ptr"])
                made.tensors["max_blocks_ptr"] = tensors["max_blocks_ptr"]
                out.append(run(made)["out_ptr"][: last - first])
            results.append(torch.cat(out))
        if not torch.equal(*results):
            found.append(step.name)
    return found


KERNELS: dict[str, Callable[[], Iterator[Case]]] = {
    "attention_plan": plan_cases,
    "decode_attention": decode_cases,
    "prefill_attention": prefill_cases,
    "rope_kv_write_int8": int8_write_cases,
}
"""The cases of each kernel."""
