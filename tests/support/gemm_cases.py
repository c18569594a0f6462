"""The cases of the matrix products: every variant by rows, dtypes and int8, shapes that no tile divides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import torch
from torch import Tensor
from triton_cases import BF16, F16, F32, SUMS, Case, behind, dtype_name, empty, misaligned, numbers, ops, to_pool

from inferc.codegen.triton.aot.source import Source
from inferc.codegen.triton.calls.matmul import invariant
from inferc.codegen.triton.kernels.linear import linear
from inferc.codegen.triton.kernels.linear_silu_mul import linear_silu_mul
from inferc.codegen.triton.kernels.qkv_rope_kv_write import qkv_rope_kv_write
from inferc.codegen.triton.kernels.rms_norm import weight_order

FAR = 99.0  # a bias in float16: far from zero roundings on the way are large, and sums of eighths are exact


def eighths(*sizes: int, seed: int = 0) -> Tensor:
    return (numbers(*sizes, seed=seed) * 8).round().div(8).to(F16)


def inputs(rows: int, k: int, dtype: torch.dtype) -> Tensor:
    return eighths(rows, k) if dtype == F16 else numbers(rows, k, dtype=dtype)


def biases(n: int, dtype: torch.dtype) -> Tensor:
    return FAR + eighths(n) if dtype == F16 else numbers(n, dtype=dtype)


def weights(n: int, k: int, dtype: torch.dtype, int8: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """A weight, and it as arguments of a kernel: except in float16, products are about as large as x."""
    if not int8:
        weight = eighths(n, k, seed=1) if dtype == F16 else (numbers(n, k, seed=1) / k**0.5).to(dtype)
        return weight, {"weight_ptr": weight}
    weight = (numbers(n, k, seed=1) * 40).clamp(-127, 127).to(torch.int8)
    return weight, {"weight_ptr": weight, "scale_ptr": (1.5 + numbers(n).cos()) / 40 / k**0.5}


def linear_cases() -> Iterator[Case]:
    for dtype, out_dtype, rows, n, k, bias, adds, up_to, int8 in (
        (BF16, BF16, 1, 64, 64, False, False, 16, False),
        (BF16, F32, 3, 100, 72, False, False, 16, False),
        (F16, F16, 16, 32, 1024, True, True, 16, False),
        (BF16, BF16, 17, 96, 192, True, False, 32, False),
        (BF16, BF16, 33, 130, 100, True, True, 64, False),
        (BF16, BF16, 100, 70, 128, False, True, 128, False),
        (BF16, BF16, 1030, 130, 96, True, True, None, False),
        (F32, F32, 5, 70, 40, True, True, 16, False),
        (F32, F32, 65, 16, 96, False, False, None, False),
        (BF16, BF16, 16, 50, 320, True, True, 16, True),
        (BF16, F32, 31, 64, 256, False, False, 32, True),
        (BF16, BF16, 64, 40, 384, False, True, 64, True),
        (BF16, BF16, 130, 200, 50, True, False, None, True),
        (F32, F32, 37, 40, 50, True, True, 64, True),
    ):
        x = inputs(rows, k + 3, dtype)[:, 3:] if rows == 17 else inputs(rows, k, dtype)
        weight, tensors = weights(n, k, dtype, int8)
        shift = biases(n, dtype) if bias else None
        far = FAR if dtype == F16 else 0.0
        residual = (numbers(rows, n + 8, seed=2) - far).to(dtype)[:, :n] if adds else None
        if int8:
            expected = ops.linear_int8(x, weight, tensors["scale_ptr"], shift, residual, out_dtype)
        else:
            expected = x.float() @ weight.float().T + (0.0 if shift is None else shift.float())
            expected = expected.to(out_dtype) if residual is None else residual + expected.to(out_dtype)
        source = linear(
            dtype_name(dtype),
            dtype_name(out_dtype),
            "tokens",
            n,
            k,
            (x.stride(0), n + 8, n),
            bias,
            adds,
            up_to,
            int8,
            ("x_ptr",) if misaligned(x) else (),
        )
        tensors.update(x_ptr=x, out_ptr=empty(rows, n, dtype=out_dtype))
        tensors.update({} if shift is None else {"bias_ptr": shift})
        tensors.update({} if residual is None else {"residual_ptr": residual})
        name = f"{rows}x{n}x{k} {dtype} to {out_dtype} bias {bias} adds {adds} up to {up_to} int8 {int8}"
        roundings = SUMS if out_dtype == F32 else 3 if adds and dtype == BF16 else 1
        yield Case(name, source, tensors, {"out_ptr": behind(expected)}, {"num_tokens": rows}, roundings=roundings)


def linear_silu_mul_cases() -> Iterator[Case]:
    for dtype, rows, n, k, bias, up_to, int8 in (
        (BF16, 1, 64, 64, False, 16, False),
        (F16, 19, 50, 136, True, 32, False),
        (BF16, 64, 40, 128, False, 64, False),
        (BF16, 140, 70, 64, True, None, False),
        (F32, 5, 24, 40, True, 16, False),
        (BF16, 9, 70, 256, True, 16, True),
        (BF16, 32, 64, 192, False, 32, True),
        (BF16, 40, 50, 320, True, 64, True),
        (BF16, 128, 24, 100, False, 128, True),
        (BF16, 130, 72, 96, False, None, True),
        (F32, 19, 24, 50, True, 32, True),
        (F32, 3, 40, 64, False, None, True),
    ):
        x = inputs(rows, k, dtype)
        weight, tensors = weights(2 * n, k, dtype, int8)
        shift = biases(2 * n, dtype) if bias else None
        expected = ops.linear_silu_mul(x, weight, shift, tensors.get("scale_ptr"))
        source = linear_silu_mul(dtype_name(dtype), "tokens", n, k, (k, n), bias, up_to, int8)
        tensors.update(x_ptr=x, out_ptr=empty(rows, n, dtype=dtype), **({} if shift is None else {"bias_ptr": shift}))
        name = f"{rows}x{n}x{k} {dtype} bias {bias} up to {up_to} int8 {int8}"
        roundings = SUMS if dtype == F32 else 1 if dtype == F16 else 3  # both products, and theirs
        yield Case(name, source, tensors, {"out_ptr": behind(expected)}, {"num_tokens": rows}, roundings=roundings)


def qkv_rope_kv_write_cases() -> Iterator[Case]:
    for dtype, tokens, heads, kv_heads, dim, half, pairs, how, k, bias, up_to, int8 in (
        (BF16, 1, 4, 2, 64, 32, "halves", 0, 64, False, 16, False),
        (BF16, 3, 8, 1, 80, 16, "halves", 1, 72, True, 16, False),
        (F16, 19, 3, 1, 80, 16, "neighbours_to_halves", 0, 64, True, 32, False),
        (BF16, 35, 2, 2, 128, 64, "neighbours", 0, 64, True, 64, False),
        (BF16, 130, 2, 1, 64, 32, "halves", 1, 96, False, None, False),
        (F32, 3, 6, 3, 24, 12, "neighbours_to_halves", 2, 40, False, 16, False),
        (F32, 33, 1, 1, 16, 8, "neighbours", 2, 32, True, None, False),
        (BF16, 5, 2, 1, 256, 128, "halves", 2, 128, False, 16, True),
        (BF16, 70, 4, 2, 32, 16, "halves", 0, 64, True, None, True),
    ):
        n = (heads + 2 * kv_heads) * dim
        x = inputs(tokens, k, dtype)
        weight, tensors = weights(n, k, dtype, int8)
        shift = biases(n, dtype) if bias else None
        norms = [numbers(dim, dtype=dtype, seed=seed) for seed in (1, 2)] if how else [None, None]
        table = ops.rope_table(torch.arange(tokens) * 31, 100.0 ** -(torch.arange(half) / half), 1.0)
        canonical = numbers(tokens // 2 + 2, 2, 2, 4, kv_heads, dim, dtype=dtype)
        slots = torch.randperm(4 * len(canonical), generator=torch.Generator().manual_seed(1))[:tokens]
        q, cache = ops.qkv_rope_kv_write(
            x,
            weight,
            shift,
            *norms,
            1e-6,
            1.0,
            how == weight_order(True, True),
            table,
            canonical,
            slots,
            1,
            heads,
            pairs,
            None,
            tensors.get("scale_ptr"),
        )
        source = qkv_rope_kv_write(
            dtype_name(dtype),
            heads,
            kv_heads,
            dim,
            half,
            pairs,
            k,
            (k, 2 * half, heads * dim),
            2,
            4,
            bias,
            up_to,
            int8,
            1e-6,
            1.0,
            how,
        )
        pool = to_pool(canonical)[:, 1]
        out = empty(tokens, heads * dim, dtype=dtype)
        tensors.update(x_ptr=x, table_ptr=table, cache_ptr=pool, slots_ptr=slots, out_ptr=out)
        tensors.update({} if shift is None else {"bias_ptr": shift})
        tensors.update({f"{of}_weight_ptr": each for of, each in zip("qk", norms, strict=True) if each is not None})
        expected = {"out_ptr": behind(q.flatten(1)), "cache_ptr": to_pool(cache)[:, 1]}
        shape = f"{tokens} x {heads}/{kv_heads} x {dim} of {k} {dtype}"
        name = f"{shape} {pairs} {half} how {how} bias {bias} up to {up_to} int8 {int8}"
        # Of the product, the norm, its weight and the rotation, which adds two errors.
        roundings = 2 * SUMS if dtype == F32 else 6 if how else 2 if dtype == F16 else 3
        yield Case(name, source, tensors, expected, {"num_tokens": tokens}, roundings=roundings)


def depend_on_their_step(run: Callable[[Case], dict[str, Tensor]]) -> list[str]:
    """The products of which rows in the invariant order have other bits among fewer, or elsewhere in a step.

    run: launches, returns what was written.
    """
    kinds = product((False, True), (BF16, F32), (False, True))
    return [f"gated {gated} {dtype} int8 {int8}" for gated, dtype, int8 in kinds if _depends(run, gated, dtype, int8)]


def _depends(run: Callable[[Case], dict[str, Tensor]], gated: bool, dtype: torch.dtype, int8: bool) -> bool:
    n, k = 40, 192
    x, (_, given) = inputs(150, k, dtype), weights(2 * n if gated else n, k, dtype, int8)

    def source(up_to: int | None) -> Source:
        of = dtype_name(dtype)
        if gated:
            return linear_silu_mul(of, "tokens", n, k, (k, n), False, up_to, int8)
        return linear(of, of, "tokens", n, k, (k, n, n), False, False, up_to, int8)

    def results(x: Tensor) -> Tensor:
        tensors = {**given, "x_ptr": x.clone(), "out_ptr": empty(len(x), n, dtype=dtype)}
        case = Case("", invariant(source, "tokens"), tensors, {}, {"num_tokens": len(x)})
        return run(case)["out_ptr"][: len(x)]

    whole = results(x)
    steps = [(whole[:rows], results(x[:rows])) for rows in (1, 16, 70)]
    steps.append((whole, results(x.roll(7, 0)).roll(-7, 0)))
    return any(not torch.equal(*each) for each in steps)


KERNELS: dict[str, Callable[[], Iterator[Case]]] = {
    "linear": linear_cases,
    "linear_silu_mul": linear_silu_mul_cases,
    "qkv_rope_kv_write": qkv_rope_kv_write_cases,
}
"""The cases of each kernel."""
