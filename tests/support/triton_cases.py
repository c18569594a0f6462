"""Every Triton kernel over a sweep of shapes: its inputs, and what its op's reference makes of them.

The same cases run under Triton's interpreter, which needs no GPU, and on one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inferc.codegen.triton.aot.launch import evaluate_grid
from inferc.codegen.triton.aot.source import Source
from inferc.codegen.triton.kernels.gather_rows import gather_rows
from inferc.codegen.triton.kernels.rms_norm import rms_norm, weight_order
from inferc.codegen.triton.kernels.rope import rope_kv_write, rope_table
from inferc.codegen.triton.kernels.silu_mul import silu_mul
from inferc.ir import ops as _ops  # noqa: F401  (defines torch.ops.inferc)

ops = torch.ops.inferc
UNTOUCHED = 77.0  # what outputs hold before: rows behind the step's last keep it
# Relative to 1 + |reference|: a rounding of the result's dtype, a few in float32. The interpreter truncates to
# bfloat16.
TOLERANCE = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 4e-7, torch.int64: 0.0}
SUMS = 5  # times as much in float32, of products over k or keys, which are added up in another order
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@dataclass
class Case:
    """A case of one launch. tensors: by argument of the kernel; expected: of those that it writes."""

    name: str
    source: Source
    tensors: dict[str, Tensor]
    expected: dict[str, Tensor]
    counts: dict[str, int]
    roundings: int = 1

    def __post_init__(self) -> None:
        numbers = [self.counts.get(name, 0) for name in ("num_tokens", "num_rows", "num_seqs")]
        self.tensors["counts_ptr"] = torch.tensor([*numbers, 0], dtype=torch.int32)
        for name, kind in self.source.signature.items():
            if kind.startswith("*") and name not in self.tensors:  # what this specialisation does not read
                self.tensors[name] = torch.zeros(16)
        for name in self.source.aligned:
            assert name not in self.tensors or not misaligned(self.tensors[name]), f"{self.name}: {name}"

    def arguments(self, tensors: dict[str, Tensor]) -> list[Any]:
        """Return the arguments in the order of the signature."""
        return [tensors[name] for name in self.source.signature]

    def grid(self, spare: int = 0) -> tuple[int, int, int]:
        """Return the launch's grid; spare: of a graph that was captured for so many tokens, rows and sequences more."""
        counts = {name: count + spare for name, count in self.counts.items()}
        return evaluate_grid(self.source.grid, {**self.source.constants, **counts})

    def errors(self, written: dict[str, Tensor], *, truncated: bool = False) -> list[tuple[float, float]]:
        """(largest error relative to 1 + |expected|, tolerance) of each output; truncated: to bfloat16, not rounded."""
        found = []
        for name, expected in self.expected.items():
            error = (written[name].double() - expected.double()).abs() / (1 + expected.double().abs())
            each = TOLERANCE[expected.dtype] * (2 if truncated and expected.dtype == BF16 else 1)
            found.append((float(error.max()), each * self.roundings))
        return found


def misaligned(tensor: Tensor) -> bool:
    """Return whether a tensor starts at no multiple of 16 bytes of its storage."""
    return tensor.storage_offset() * tensor.itemsize % 16 != 0


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def numbers(*sizes: int, dtype: torch.dtype = F32, seed: int = 0) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed + sum(sizes))).to(dtype)


def empty(*sizes: int, dtype: torch.dtype) -> Tensor:
    """An output, with a row that nothing may write to behind its last."""
    return torch.full((sizes[0] + 1, *sizes[1:]), UNTOUCHED).to(dtype)


def behind(expected: Tensor) -> Tensor:
    """`expected` as `empty` is left."""
    last = torch.full((1, *expected.shape[1:]), UNTOUCHED).to(expected.dtype)
    return torch.cat((expected, last))


def gather_rows_cases() -> Iterator[Case]:
    for dtype, rows, width in ((F32, 1, 1), (BF16, 3, 96), (BF16, 5, 1025), (F16, 2, 2048), (torch.int64, 4, 1)):
        table = numbers(11, width).mul(9).to(dtype)
        index = torch.arange(rows, dtype=torch.int32) * 7 % 11
        source = gather_rows(dtype_name(dtype), "rows", width, width, width)
        tensors = {"table_ptr": table, "index_ptr": index, "out_ptr": empty(rows, width, dtype=dtype)}
        yield Case(f"{rows}x{width} {dtype}", source, tensors, {"out_ptr": behind(table[index])}, {"num_rows": rows})


def silu_mul_cases() -> Iterator[Case]:
    for dtype in (F32, BF16, F16):
        large = ((5, 8192), (17, 14336)) if dtype == BF16 else ()
        for rows, width in ((1, 1), (1, 96), (3, 1000), (5, 1024), (2, 1025), (7, 2500), *large):
            packed = (numbers(rows, 2 * width) * 4).to(dtype)
            gate, up = packed[:, :width], packed[:, width:]
            unaligned = ("up_ptr",) if misaligned(up) else ()
            source = silu_mul(dtype_name(dtype), "tokens", width, (2 * width, 2 * width, width), unaligned)
            tensors = {"gate_ptr": gate, "up_ptr": up, "out_ptr": empty(rows, width, dtype=dtype)}
            expected = {"out_ptr": behind(ops.silu_mul(gate, up))}
            yield Case(f"{rows}x{width} {dtype}", source, tensors, expected, {"num_tokens": rows})


def rms_norm_cases() -> Iterator[Case]:
    for dtype, rows, width, offset, early, weighs, adds in (
        (F32, 1, 16, 0.0, True, True, False),
        (BF16, 3, 96, 0.0, True, True, False),
        (BF16, 2, 1000, 1.0, False, True, False),
        (BF16, 4, 4096, 0.0, True, True, True),
        (F32, 5, 65, 1.0, True, True, True),
        (BF16, 2, 128, 0.0, False, False, False),
    ):
        x, residual = numbers(rows, width, dtype=dtype), numbers(rows, width, dtype=dtype, seed=1)
        weight = numbers(width, dtype=dtype) if weighs else None
        out, total = empty(rows, width, dtype=dtype), empty(rows, width, dtype=dtype)
        how = weight_order(weighs, early)
        source = rms_norm(dtype_name(dtype), "tokens", width, (width,) * 4, 1e-5, offset, how, adds)
        tensors = {"x_ptr": x, "out_ptr": out}
        if weight is not None:
            tensors["weight_ptr"] = weight
        if adds:
            tensors.update(residual_ptr=residual, sum_ptr=total)
            normed, added = ops.rms_norm_add(x, residual, weight, 1e-5, offset, early)
            expected = {"out_ptr": behind(normed), "sum_ptr": behind(added)}
        else:
            expected = {"out_ptr": behind(ops.rms_norm(x, weight, 1e-5, offset, early))}
        name = f"{rows}x{width} {dtype} offset {offset} how {how} adds {adds}"
        rounded = 3 if how == 1 else 2 if adds else 1  # the sum, the norm, its weight
        yield Case(name, source, tensors, expected, {"num_tokens": rows}, roundings=rounded)


def rope_table_cases() -> Iterator[Case]:
    for rows, half, scaling in ((1, 1, 1.0), (5, 32, 1.0), (3, 24, 1.5)):
        positions = torch.arange(rows, dtype=torch.int64) * 977
        inv_freq = 10000.0 ** -(torch.arange(half) / half)
        tensors = {"positions_ptr": positions, "inv_freq_ptr": inv_freq, "out_ptr": empty(rows, 2 * half, dtype=F32)}
        expected = {"out_ptr": behind(ops.rope_table(positions, inv_freq, scaling))}
        yield Case(f"{rows}x{half}", rope_table(half, 2 * half, scaling), tensors, expected, {"num_tokens": rows})


def to_pool(canonical: Tensor) -> Tensor:
    """Return a canonical cache in the kernels' layout.

    Canonical: [blocks, layers, 2, block_size, kv heads, dim]; kernels: [blocks, layers, kv heads, 2, block_size, dim].
    """
    return canonical.permute(0, 1, 4, 2, 3, 5).contiguous()


def rope_kv_write_cases() -> Iterator[Case]:
    for dtype, tokens, heads, kv_heads, dim, half, pairs, how in (
        (F32, 1, 1, 1, 2, 1, "halves", 0),
        (BF16, 5, 4, 2, 64, 32, "halves", 0),
        (BF16, 3, 8, 1, 80, 16, "halves", 1),
        (BF16, 4, 2, 2, 64, 16, "neighbours", 0),
        (F32, 3, 6, 3, 24, 12, "neighbours_to_halves", 2),
    ):
        packed = numbers(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
        q, k, v = packed.split([heads * dim, kv_heads * dim, kv_heads * dim], -1)
        as_heads = [part.reshape(tokens, -1, dim) for part in (q, k, v)]
        norms = [numbers(dim, dtype=dtype, seed=seed) for seed in (1, 2)]
        table = ops.rope_table(torch.arange(tokens) * 31, 100.0 ** -(torch.arange(half) / half), 1.0)
        canonical = numbers(3, 2, 2, 4, kv_heads, dim, dtype=dtype)
        slots = torch.arange(tokens, dtype=torch.int64) * 5 % 12
        if how:
            scaled = (1e-6, 1.0, how == 1)
            rotated, cache = ops.norm_rope_kv_write(*as_heads, *norms, *scaled, table, canonical, slots, 1, pairs)
        else:
            rotated, cache = ops.rope_kv_write(*as_heads, table, canonical, slots, 1, pairs)
        stride = packed.stride(0)
        pool = to_pool(canonical)[:, 1]
        given = {"q_ptr": q, "k_ptr": k, "v_ptr": v, "cache_ptr": pool}
        source = rope_kv_write(
            dtype_name(dtype),
            heads,
            kv_heads,
            dim,
            half,
            pairs,
            (stride, stride, stride, 2 * half, heads * dim),
            2,
            4,
            1e-6,
            1.0,
            how,
            tuple(name for name, value in given.items() if misaligned(value)),
        )
        tensors = {
            **given,
            "table_ptr": table,
            "slots_ptr": slots,
            "out_ptr": empty(tokens, heads * dim, dtype=dtype),
            **dict(zip(("q_weight_ptr", "k_weight_ptr"), norms, strict=True)),
        }
        expected = {"out_ptr": behind(rotated.flatten(1)), "cache_ptr": to_pool(cache)[:, 1]}
        name = f"{tokens} x {heads}/{kv_heads} x {dim} {dtype} {pairs} {half} how {how}"
        rounded = 3 if how else 1  # the norm, its weight, the rotation
        yield Case(name, source, tensors, expected, {"num_tokens": tokens}, roundings=rounded)


KERNELS: dict[str, Callable[[], Iterator[Case]]] = {
    "gather_rows": gather_rows_cases,
    "silu_mul": silu_mul_cases,
    "rms_norm": rms_norm_cases,
    "rope_table": rope_table_cases,
    "rope_kv_write": rope_kv_write_cases,
}
"""The cases of each kernel."""
