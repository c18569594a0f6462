"""The Triton kernels of what a dense Llama does without, over a sweep of shapes: as triton_cases has the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import expert_cases
import torch
from triton_cases import BF16, F16, F32, Case, behind, dtype_name, empty, misaligned, numbers, ops, to_pool

from inferc.codegen.triton.kernels.concat import concat
from inferc.codegen.triton.kernels.embedding_int8 import embedding_int8
from inferc.codegen.triton.kernels.head_rows import head_input, keep_rows
from inferc.codegen.triton.kernels.kv_write import kv_write
from inferc.codegen.triton.kernels.layer_norm import norm_parts
from inferc.codegen.triton.kernels.pointwise import pointwise
from inferc.codegen.triton.kernels.resize_heads import resize_heads
from inferc.codegen.triton.kernels.rms_norm import weight_order
from inferc.codegen.triton.kernels.rope_apply import rope_apply
from inferc.ir.ops.pointwise import FUNCTIONS

I32, I64 = torch.int32, torch.int64


def norm_parts_cases() -> Iterator[Case]:
    for dtype, rows, parts, width, how, centers, bias, own in (  # own: weights of each part
        (F32, 1, 1, 16, 2, True, True, False),
        (BF16, 3, 1, 1000, 2, True, True, False),
        (F32, 5, 1, 65, 0, True, False, False),
        (BF16, 2, 1, 4096, 2, True, False, False),
        (BF16, 3, 5, 80, 2, True, False, True),
        (F16, 2, 3, 64, 2, True, True, True),
        (BF16, 3, 5, 80, 1, False, False, False),
        (F32, 2, 3, 24, 2, False, False, False),
        (BF16, 4, 2, 128, 0, False, False, False),
        (BF16, 3, 1, 1000, 1, False, False, False),
        (F32, 2, 1, 65, 2, False, False, False),
    ):
        packed = numbers(rows, (parts + 1) * width, dtype=dtype) + 0.5
        x = packed[:, width:]
        sizes = (parts, width) if own else (width,)
        weight = numbers(*sizes, dtype=dtype) if how else None
        shift = numbers(*sizes, dtype=dtype, seed=1) if bias else None
        out = empty(rows, parts * width, dtype=dtype)
        as_parts = x.reshape(rows, parts, width)
        adds = parts == 1 and not centers
        residual = numbers(rows, parts * width, dtype=dtype, seed=4)
        if adds:
            as_parts = as_parts + residual.view_as(as_parts)
        if centers:
            expected = ops.layer_norm(as_parts, weight, shift, 1e-5)
        else:
            expected = ops.rms_norm(as_parts, weight, 1e-5, 1.0, how == 1)
        source = norm_parts(
            dtype_name(dtype),
            "rows",
            (parts, width),
            (packed.stride(0), *(parts * width,) * 2, width if own else 0),
            1e-5,
            weight_order(how > 0, how == 1),
            offset=0.0 if centers else 1.0,
            adds=adds,
            centers=centers,
            has_bias=bias,
            unaligned=("x_ptr",) if misaligned(x) else (),
        )
        tensors = {"x_ptr": x, "residual_ptr": residual, "out_ptr": out}
        tensors.update(
            {} if weight is None else {"weight_ptr": weight}, **({} if shift is None else {"bias_ptr": shift})
        )
        name = f"{rows}x{parts}x{width} {dtype} how {how} centers {centers} bias {bias} own {own} adds {adds}"
        roundings = (3 + adds if how == 1 else 1) * (
            2 if dtype == F32 else 1
        )  # a mean and a mean of squares, in another order
        written = {"out_ptr": behind(expected.flatten(1))}
        yield Case(name, source, tensors, written, {"num_rows": rows}, roundings=roundings)


EVERY = {  # of one input, near where each is interesting
    **{
        name: f"{name}(x0)" for name in sorted(FUNCTIONS) if name not in ("log", "max", "min", "rsqrt", "sqrt", "where")
    },
    **{name: f"{name}(abs(x0) + 0.001)" for name in ("log", "rsqrt", "sqrt")},
    "copy": "x0",
    "small tanh": "tanh(x0 / 1000.0) * 1000.0",
    "relu squared": "t0 = max(x0, 0.0); t0 * t0",
    "clamp": "min(max(x0, -0.5), 0.25) - 2.5",
    "choice": "where(x0 > 0.5, -x0, where(x0 < -0.5, 1.0, x0 / 3.0))",
    "temperature": "(log(1.0 + floor(((abs(x0) + 1.0) / 2))) * 0.1) + 1.0",
}


def pointwise_cases() -> Iterator[Case]:
    for index, (name, expression) in enumerate(EVERY.items()):
        rows, width = ((1, 1), (3, 1000), (2, 1025))[index % 3]
        x = numbers(rows, width) * 3
        yield _pointwise(name, expression, [x], [(width, 0, 1)], F32, (1, width))
    gate, up = (numbers(5, 96, dtype=BF16, seed=seed) for seed in (1, 2))
    plain = [(96, 0, 1)] * 2
    for dtype in (BF16, F16, F32):
        pair = [gate.to(dtype), up.to(dtype)]
        yield _pointwise("add", "x0 + x1", pair, plain, dtype, (1, 96))
        yield _pointwise("geglu", "gelu_tanh(x0) * x1", pair, plain, dtype, (1, 96))
    one, each = numbers(5, 1, dtype=BF16), numbers(5, 4, dtype=BF16)
    weight, of_parts = numbers(24, dtype=BF16), numbers(4, 1)
    yield _pointwise(
        "gate of a row",
        "x2 + (sigmoid(x0) * x1)",
        [one, gate, up],
        [(1, 0, 0), *plain],
        BF16,
        (1, 96),
    )
    positions = torch.arange(5, dtype=I64) * 8190
    text = "(log(1.0 + floor(((x0 + 1.0) / 8192))) * 0.1) + 1.0"
    yield _pointwise("positions", text, [positions[:, None]], [(1, 0, 0)], F32, (1, 1))
    heads = gate.view(5, 4, 24)
    strides = [(96, 24, 1), (4, 1, 0), (0, 0, 1), (0, 1, 0)]
    inputs = [heads, each.view(5, 4, 1), weight, of_parts]
    yield _pointwise("heads", "x0 * x1 + x2 - x3", inputs, strides, BF16, (4, 24))
    square = numbers(5, 4, 4)
    yield _pointwise("as many as wide", "x0 * x1", [square, square[:, :, :1]], [(16, 4, 1), (16, 4, 0)], F32, (4, 4))
    many = [numbers(2, 40, seed=seed) for seed in range(8)]
    text = " + ".join(f"x{at} * {at + 0.1}" for at in range(8))
    yield _pointwise("eight inputs", text, many, [(40, 0, 1)] * 8, BF16, (1, 40))


def _pointwise(
    name: str,
    expression: str,
    inputs: list[torch.Tensor],
    strides: list[tuple[int, int, int]],
    dtype: torch.dtype,
    sizes: tuple[int, int],
) -> Case:
    expected = ops.pointwise(inputs, expression, dtype).flatten(1)
    rows, width = expected.shape
    kinds = [dtype_name(each.dtype) for each in inputs]
    source = pointwise(expression, kinds, dtype_name(dtype), "tokens", sizes, strides, width)
    tensors = {f"x{at}_ptr": each for at, each in enumerate(inputs)}
    tensors["out_ptr"] = empty(rows, width, dtype=dtype)
    roundings = 8 if dtype == F32 else 1  # of the library's functions
    return Case(f"{name} {dtype}", source, tensors, {"out_ptr": behind(expected)}, {"num_tokens": rows}, roundings)


def rope_cases() -> Iterator[Case]:
    for dtype, rows, heads, dim, half, pairs in (
        (F32, 1, 1, 2, 1, "halves"),
        (BF16, 5, 4, 64, 32, "halves"),
        (BF16, 3, 2, 80, 16, "halves"),
        (BF16, 3, 2, 64, 16, "neighbours"),
        (F32, 4, 3, 24, 12, "neighbours_to_halves"),
        (F16, 2, 1, 40, 4, "halves"),
    ):
        packed = numbers(rows, (heads + 1) * dim, dtype=dtype)
        x = packed[:, dim:]
        table = ops.rope_table(torch.arange(rows) * 31, 100.0 ** -(torch.arange(half) / half), 1.0)
        source = rope_apply(
            dtype_name(dtype),
            "tokens",
            heads,
            dim,
            half,
            pairs,
            (packed.stride(0), 2 * half, heads * dim),
            ("x_ptr",) if misaligned(x) else (),
        )
        out = empty(rows, heads * dim, dtype=dtype)
        expected = {"out_ptr": behind(ops.rope(x.reshape(rows, heads, dim), table, pairs).flatten(1))}
        tensors = {"x_ptr": x, "table_ptr": table, "out_ptr": out}
        yield Case(f"{rows}x{heads}x{dim} {dtype} {pairs} {half}", source, tensors, expected, {"num_tokens": rows})


def resize_heads_cases() -> Iterator[Case]:
    for dtype, rows, heads, had, size in ((F32, 1, 1, 1, 16), (BF16, 5, 3, 100, 112), (F16, 3, 2, 33, 7)):
        packed = numbers(rows, (heads + 1) * had, dtype=dtype)
        x = packed[:, had:]
        strides, unaligned = (packed.stride(0), heads * size), ("x_ptr",) if misaligned(x) else ()
        source = resize_heads(dtype_name(dtype), "tokens", heads, (had, size), strides, unaligned)
        expected = {"out_ptr": behind(ops.resize_heads(x.reshape(rows, heads, had), size).flatten(1))}
        tensors = {"x_ptr": x, "out_ptr": empty(rows, heads * size, dtype=dtype)}
        yield Case(f"{rows}x{heads}x{had} to {size} {dtype}", source, tensors, expected, {"num_tokens": rows})


def kv_write_cases() -> Iterator[Case]:
    for dtype, tokens, kv_heads, dim in ((F32, 1, 1, 2), (BF16, 5, 2, 64), (F16, 3, 3, 24)):
        packed = numbers(tokens, 3 * kv_heads * dim, dtype=dtype)
        k, v = packed[:, kv_heads * dim :].split(kv_heads * dim, -1)
        canonical = numbers(3, 2, 2, 4, kv_heads, dim, dtype=dtype)
        slots = torch.arange(tokens, dtype=I64) * 5 % 12
        as_heads = [each.reshape(tokens, kv_heads, dim) for each in (k, v)]
        expected = {"cache_ptr": to_pool(ops.kv_write(canonical, *as_heads, slots, 1))[:, 1]}
        given = {"k_ptr": k, "v_ptr": v, "cache_ptr": to_pool(canonical)[:, 1]}
        unaligned = tuple(name for name, value in given.items() if misaligned(value))
        source = kv_write(dtype_name(dtype), kv_heads, dim, (packed.stride(0),) * 2, 2, 4, unaligned)
        tensors = {**given, "slots_ptr": slots}
        yield Case(f"{tokens}x{kv_heads}x{dim} {dtype}", source, tensors, expected, {"num_tokens": tokens})


def embedding_int8_cases() -> Iterator[Case]:
    for dtype, kind, rows, width in ((F32, I32, 1, 1), (BF16, I64, 3, 96), (F16, I32, 5, 1025)):
        table = numbers(11, width).mul(40).clamp(-127, 127).to(torch.int8)
        scale, index = numbers(11).abs(), torch.arange(rows, dtype=kind) * 7 % 11
        tensors = {"table_ptr": table, "scale_ptr": scale, "index_ptr": index}
        tensors["out_ptr"] = empty(rows, width, dtype=dtype)
        expected = {"out_ptr": behind(ops.embedding_int8(table, scale, index, dtype))}
        source = embedding_int8(dtype_name(dtype), dtype_name(kind), "tokens", width, width)
        yield Case(f"{rows}x{width} {dtype}", source, tensors, expected, {"num_tokens": rows})


def concat_cases() -> Iterator[Case]:
    for dtype, rows, widths in ((F32, 1, (1, 1)), (BF16, 3, (96, 40)), (F16, 2, (1000, 1025)), (BF16, 5, (4096, 4096))):
        packed = numbers(rows, sum(widths) + 8, dtype=dtype)
        x, other = packed[:, : widths[0]], packed[:, packed.shape[1] - widths[1] :]
        unaligned = ("other_ptr",) if misaligned(other) else ()
        strides = (packed.stride(0), packed.stride(0), sum(widths) + 3)
        source = concat(dtype_name(dtype), "tokens", widths, strides, unaligned)
        out = empty(rows, strides[2], dtype=dtype)
        expected = out.clone()
        expected[:rows, : sum(widths)] = torch.cat((x, other), -1)
        tensors = {"x_ptr": x, "other_ptr": other, "out_ptr": out}
        yield Case(f"{rows}x{widths} {dtype}", source, tensors, {"out_ptr": expected}, {"num_tokens": rows})


KEPT_ROWS = 9  # that a store of the cases has


def keep_rows_cases() -> Iterator[Case]:
    for dtype, rows, width, column, stride, kept_stride, has_rows in (
        (F32, 1, 16, 0, 16, 16, False),
        (BF16, 5, 96, 96, 129, 288, False),
        (BF16, 4, 2500, 2500, 2564, 7500, False),
        (BF16, 3, 96, 0, 96, 96, True),
    ):
        x, kept = numbers(7, stride, dtype=dtype), empty(KEPT_ROWS - 1, kept_stride, dtype=dtype)
        chosen, order = (torch.arange(rows, dtype=torch.int32) * step % 7 for step in (3, 5))
        order[rows // 2] = order[0] if rows == 1 else -1  # one that nobody wants
        expected = kept.clone()
        for at, number in enumerate(order.tolist()):
            if number >= 0:
                expected[number, column : column + width] = x[chosen[at] if has_rows else at, :width]
        source = keep_rows(dtype_name(dtype), "rows" if has_rows else "tokens", kept_stride, has_rows=has_rows)
        place = torch.tensor([stride, column, width], dtype=torch.int32)
        tensors = {"x_ptr": x, "numbers_ptr": order, "kept_ptr": kept, "place_ptr": place}
        if has_rows:
            tensors["rows_ptr"] = chosen
        counts = {"num_rows" if has_rows else "num_tokens": rows}
        yield Case(f"{rows}x{width} {dtype} rows {has_rows}", source, tensors, {"kept_ptr": expected}, counts)


def head_input_cases() -> Iterator[Case]:
    for dtype, rows, given, own in ((F32, 1, 3, 1), (BF16, 4, 288, 96), (F16, 5, 3000, 1000)):
        of_model, of_head = (numbers(KEPT_ROWS, width, dtype=dtype) for width in (given, own))
        order = torch.tensor([4, -1, 0, -KEPT_ROWS, KEPT_ROWS - 1][:rows], dtype=torch.int32)
        out = empty(rows, given + own + 5, dtype=dtype)
        expected = out.clone()
        expected[:rows, : given + own] = 0
        for at, number in enumerate(order.tolist()):
            if number >= 0:
                expected[at, :given] = of_model[number]
            else:
                expected[at, given : given + own] = of_head[-1 - number]
        source = head_input(dtype_name(dtype), given, own, given + own + 5)
        tensors = {"given_ptr": of_model, "own_ptr": of_head, "numbers_ptr": order, "out_ptr": out}
        yield Case(f"{rows}x{given}+{own} {dtype}", source, tensors, {"out_ptr": expected}, {"num_tokens": rows})


KERNELS: dict[str, Callable[[], Iterator[Case]]] = {
    "norm_parts": norm_parts_cases,
    "pointwise": pointwise_cases,
    "rope": rope_cases,
    "resize_heads": resize_heads_cases,
    "kv_write": kv_write_cases,
    "embedding_int8": embedding_int8_cases,
    "concat": concat_cases,
    "keep_rows": keep_rows_cases,
    "head_input": head_input_cases,
    **expert_cases.KERNELS,
}
"""The cases of each kernel."""
