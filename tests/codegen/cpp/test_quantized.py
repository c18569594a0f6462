"""The kernels of quantized weights and rows against their ops' references, and that integers are summed exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cpp_kernels import Kernels, assert_near, group_panels, moe_experts, nan, packed, part_of
from experts import SCHEMES, as_rows, experts_of, quantized
from torch import Tensor

from inferc.ir.ops import quantize as reference

ops = torch.ops.inferc
SHAPES = (
    (1, 1, 1),
    (1, 64, 256),
    (3, 90, 33),
    (7, 65, 130),
    (12, 100, 34),
    (13, 128, 31),
    (200, 70, 519),
    (5, 40, 8195),
)


@pytest.mark.parametrize("sizes", SHAPES)
def test_linear_int8(kernels: Kernels, dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    rows, n, k = sizes
    wide_x = torch.randn(rows, k + 5).to(dtype)
    x, (weight, scale) = wide_x[:, 2 : 2 + k], quantized(n, k)
    bias, residual = torch.randn(n).to(dtype), torch.randn(rows, n).to(dtype)
    for b, r in ((None, None), (bias, None), (None, residual), (bias, residual)):
        out = nan(rows, n, dtype=dtype)
        kernels.run("test_linear_int8", dtype, x, k + 5, None, rows, packed(weight), n, k, scale, b, r, out)
        # Thousands of additions one after the other round more often than torch's in pieces.
        assert_near(out, ops.linear_int8(x, weight, scale, b, r), factor=4.0 if k > 1000 else 1.0)


def test_int8_weights_give_the_bits_of_the_same_integers_in_the_rows_type(kernels: Kernels, dtype: torch.dtype) -> None:
    for rows, n, k in SHAPES:
        x, (weight, _) = torch.randn(rows, k).to(dtype), quantized(n, k)
        out, same = nan(rows, n, dtype=dtype), nan(rows, n, dtype=dtype)
        ones = torch.ones(n)
        kernels.run("test_linear_int8", dtype, x, k, None, rows, packed(weight), n, k, ones, None, None, out)
        kernels.run("test_linear", dtype, x, k, rows, packed(weight.to(dtype)), n, k, None, same, n, False)
        assert torch.equal(out, same)


@pytest.mark.parametrize("sizes", SHAPES)
def test_linear_w8a8_is_exact(kernels: Kernels, dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    rows, n, k = sizes
    wide_x = torch.randint(-127, 128, (rows, k + 5), dtype=torch.int8)
    x, (weight, scale) = wide_x[:, 2 : 2 + k], quantized(n, k)
    x_scale = torch.rand(rows) / 73
    bias, residual = torch.randn(n).to(dtype), torch.randn(rows, n).to(dtype)
    for b, r in ((None, None), (bias, None), (None, residual), (bias, residual)):
        out = nan(rows, n, dtype=dtype)
        kernels.run("test_linear_int8", dtype, x, k + 5, x_scale, rows, packed(weight), n, k, scale, b, r, out)
        assert torch.equal(out, ops.linear_w8a8(x, x_scale, weight, scale, dtype, b, r))


@pytest.mark.parametrize("with_bias", [False, True])
def test_products_stay_float32_where_they_are_logits(kernels: Kernels, dtype: torch.dtype, with_bias: bool) -> None:
    for rows, n, k in SHAPES:
        x, (weight, scale) = torch.randn(rows, k).to(dtype), quantized(n, k)
        bias = torch.randn(n).to(dtype) if with_bias else None
        out = nan(rows, n, dtype=torch.float32)
        kernels.run("test_wide_int8", dtype, x, None, rows, packed(weight), n, k, scale, bias, out)
        assert_near(out, ops.linear_int8(x, weight, scale, bias, None, torch.float32), factor=4.0 if k > 1000 else 1.0)
        values, x_scale = ops.quantize_rows(x)
        kernels.run("test_wide_int8", dtype, values, x_scale, rows, packed(weight), n, k, scale, bias, out)
        assert torch.equal(out, ops.linear_w8a8(values, x_scale, weight, scale, torch.float32, bias))


def test_lookups_in_int8_tables(kernels: Kernels, dtype: torch.dtype) -> None:
    for n, width, rows in ((1, 1, 1), (50, 33, 7), (90, 64, 40)):
        (table, scale), ids = quantized(n, width), torch.randint(0, n, (rows,), dtype=torch.int32)
        for stored in (table, packed(table)):
            out = nan(rows, width, dtype=dtype)
            kernels.run("test_embedding_int8", dtype, stored is not table, stored, scale, n, width, ids, rows, out)
            assert torch.equal(out, ops.embedding_int8(table, scale, ids, dtype))


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_products_do_not_saturate(kernels: Kernels, sign: int) -> None:
    x, weight = torch.full((14, 4099), 127, dtype=torch.int8), torch.full((17, 4099), sign * 127, dtype=torch.int8)
    ones = torch.ones(17)
    for rows in (3, 14):
        out = nan(rows, 17, dtype=torch.float32)
        args = (x, ones, rows, packed(weight), 17, 4099, ones, None, out)
        kernels.run("test_wide_int8", torch.bfloat16, *args)
        assert torch.equal(out, torch.full((rows, 17), float(sign * 127 * 127 * 4099)))


@pytest.mark.parametrize("scaled", [False, True], ids=["int8", "w8a8"])
def test_a_row_does_not_depend_on_the_others(kernels: Kernels, dtype: torch.dtype, scaled: bool) -> None:
    rows, n, k = 205, 150, 297
    x, (weight, scale) = torch.randn(rows, k).to(dtype), quantized(n, k)
    x, x_scale = ops.quantize_rows(x) if scaled else (x, None)
    stored, alone = packed(weight), nan(rows, n, dtype=dtype)

    def run(first: int, count: int, out: Tensor) -> None:
        own = None if x_scale is None else x_scale[first:]
        kernels.run("test_linear_int8", dtype, x[first:], k, own, count, stored, n, k, scale, None, None, out)

    for row in range(rows):
        run(row, 1, alone[row])
    for count in (*range(2, 15), 100, rows):
        together = nan(count, n, dtype=dtype)
        run(0, count, together)
        assert torch.equal(together, alone[:count])


def quantize(kernels: Kernels, dtype: torch.dtype, op: int, x: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows in int8, their scales and the sums with y; args: y, weight, eps, offset, early."""
    rows, width = x.shape
    values, scale = torch.full((rows, width), 99, dtype=torch.int8), nan(rows, dtype=torch.float32)
    total = nan(rows, width, dtype=dtype)
    kernels.run("test_quantize", dtype, op, x, x.stride(0), *args, rows, width, values, scale, total)
    return values, scale, total


NONE = (None, None, 0.0, 0.0, False)


def test_quantize_rows_is_exact(kernels: Kernels, dtype: torch.dtype) -> None:
    for rows, width in ((1, 1), (5, 33), (70, 80)):
        x = (torch.randn(rows, width + 3) * 10).to(dtype)[:, 1 : 1 + width]
        values, scale, _ = quantize(kernels, dtype, 0, x, *NONE)
        expected, expected_scale = ops.quantize_rows(x)
        assert torch.equal(values, expected) and torch.equal(scale, expected_scale)


def test_ties_go_to_the_even_number(kernels: Kernels, dtype: torch.dtype) -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -127.0]]).to(dtype)
    values, scale, _ = quantize(kernels, dtype, 0, x, *NONE)
    assert values.tolist() == [[127, 0, 2, 2, 0, -2, -2, -127]] and scale.tolist() == [1.0]


def test_quotients_beside_a_tie_are_those_of_a_division(kernels: Kernels, dtype: torch.dtype) -> None:
    """Rows of scales of all sizes, their elements next to where the integer changes: one rounding more would show."""
    scales = torch.rand(400) * torch.logspace(-33, 33, 400)
    steps = torch.randint(-126, 127, (400, 64)) + 0.5
    nudge = 1.0 + torch.randint(-3, 4, (400, 64)) * 2.0**-23
    x = (steps * scales[:, None] * nudge).to(dtype)
    x[:, 0] = 127 * scales
    values, scale, _ = quantize(kernels, dtype, 0, x, *NONE)
    expected, expected_scale = ops.quantize_rows(x)
    assert torch.equal(scale, expected_scale)
    assert torch.equal(values, expected)


def test_rows_of_zeros_of_almost_nothing_and_of_what_is_no_number(kernels: Kernels, dtype: torch.dtype) -> None:
    x = torch.zeros(6, 40, dtype=dtype)
    x[1, 3], x[2, 5], x[3, 39], x[4, 20], x[5, 0] = 1e-38, -1e-44, float("nan"), float("inf"), -float("inf")
    values, scale, _ = quantize(kernels, dtype, 0, x, *NONE)
    expected, expected_scale = ops.quantize_rows(x)
    assert torch.equal(values[:3], expected[:3]) and torch.equal(scale[:3], expected_scale[:3])
    assert scale[0] == 1.0 and not values[0].any()
    assert not scale[3:].isfinite().any() and not expected_scale[3:].isfinite().any()


def near(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    """Assert that scales are within the table, and that integers differ by one step at most, next to a border."""
    assert_near(found[1].to(dtype), expected[1].to(dtype))
    assert int((found[0].int() - expected[0].int()).abs().max()) <= 1
    assert (found[0] != expected[0]).float().mean() < 0.02


@pytest.mark.parametrize(("offset", "early"), [(0.0, True), (1.0, False)])
def test_norms(kernels: Kernels, dtype: torch.dtype, offset: float, early: bool) -> None:
    for rows, width in ((1, 7), (9, 64), (33, 130)):
        x, y = (torch.randn(rows, width) * 2).to(dtype), torch.randn(rows, width).to(dtype)
        weight, how = torch.randn(width).to(dtype), (1e-5, offset, early)
        near(quantize(kernels, dtype, 1, x, None, weight, *how), ops.rms_norm_quantize(x, weight, *how), dtype)
        plain = (1e-5, 0.0, early)
        near(quantize(kernels, dtype, 1, x, None, None, *plain), ops.rms_norm_quantize(x, None, *plain), dtype)
        found, expected = quantize(kernels, dtype, 2, x, y, weight, *how), ops.rms_norm_add_quantize(x, y, weight, *how)
        near(found, expected, dtype)
        assert torch.equal(found[2], expected[2])
        bias = torch.randn(width).to(dtype)
        for w, b in ((weight, bias), (weight, None), (None, None)):
            near(quantize(kernels, dtype, 3, x, b, w, *how), ops.layer_norm_quantize(x, w, b, 1e-5), dtype)


def test_silu_mul(kernels: Kernels, dtype: torch.dtype) -> None:
    for rows, width in ((1, 7), (9, 64), (33, 130)):
        x, y = (torch.randn(rows, width) * 2).to(dtype), torch.randn(rows, width).to(dtype)
        near(quantize(kernels, dtype, 4, x, y, None, 0.0, 0.0, False), ops.silu_mul_quantize(x, y), dtype)


def test_a_fused_kernel_has_the_bits_of_the_two(kernels: Kernels, dtype: torch.dtype) -> None:
    rows, width = 19, 83
    x, y, weight = (torch.randn(rows, width).to(dtype) for _ in range(3))
    weight = weight[0].clone()
    normed, total = nan(rows, width, dtype=dtype), nan(rows, width, dtype=dtype)
    kernels.run("test_rms_norm", dtype, x, width, y, weight, 1e-5, 0.0, True, rows, 1, width, normed, total)
    fused = quantize(kernels, dtype, 2, x, y, weight, 1e-5, 0.0, True)
    apart = quantize(kernels, dtype, 0, normed, *NONE)
    assert torch.equal(fused[0], apart[0]) and torch.equal(fused[1], apart[1]) and torch.equal(fused[2], total)


EXPERTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gelu": {"activation": "gelu"},
    "clamped with biases": {"activation": "swiglu_clamped", "alpha": 1.7, "limit": 1.5, "biased": True},
    "scaled inputs": {"scale_input": True},
}


@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_moe_experts(kernels: Kernels, dtype: torch.dtype, scheme: str, name: str) -> None:
    for rows, experts, top_k, hidden, inter in (
        (1, 4, 2, 32, 16),
        (7, 8, 2, 50, 80),
        (230, 4, 3, 33, 48),
        (40, 40, 8, 64, 32),
        (9, 4, 2, 200, 144),
    ):
        weights = experts_of(scheme, dtype, experts, hidden, inter, **EXPERTS[name])
        ids, shares = ops.moe_routing(torch.randn(rows, experts), None, top_k, True)
        ids[torch.rand(rows, top_k) < 0.2] = -1  # another rank's
        given = {**as_rows(scheme, torch.randn(rows, hidden).to(dtype)), "expert_ids": ids, "expert_weights": shares}
        out = moe_experts(kernels, **given, **weights)
        expected = ops.moe_experts(**given, **weights)
        if scheme == "int8":
            assert_near(out, expected, factor=2.0)
        else:
            # An activation that lay between two integers, and now and then its neighbour in bfloat16, may be the other
            # one.
            assert torch.isfinite(out).all()
            error = (out.float() - expected.float()).abs() / max(1e-6, float(expected.abs().max()))
            assert error.max() < 0.02 and error.mean() < (2e-3 if dtype == torch.bfloat16 else 2e-5)
        for row in range(0, rows, 1 + rows // 5):
            assert torch.equal(moe_experts(kernels, **part_of(given, row, row + 1), **weights)[0], out[row])


@pytest.mark.parametrize("scheme", ["w8a8", "int4", "int4-g128"])
def test_an_expert_has_the_bits_of_two_linears(kernels: Kernels, dtype: torch.dtype, scheme: str) -> None:
    """Products, activation and what is quantized between them, each by its own kernel."""
    rows, hidden, inter, group = 13, 150, 96, SCHEMES[scheme]
    weights = experts_of(scheme, dtype, 2, hidden, inter, biased=True)
    given = as_rows(scheme, torch.randn(rows, hidden).to(dtype))
    ids, shares = torch.ones(rows, 1, dtype=torch.int32), torch.rand(rows, 1)
    found = moe_experts(kernels, **given, expert_ids=ids, expert_weights=shares, **weights)

    def product(x: Tensor, x_scale: Tensor, name: str, n: int) -> Tensor:
        weight, scale, bias = (weights[each][1] for each in (name, f"{name}_scale", f"{name}_bias"))
        out, k = nan(rows, n, dtype=dtype), x.shape[1]
        if group:
            of_groups = group_panels(weights[f"{name}_group_scale"][1])
            args = (x, k, x_scale, rows, packed(weight), of_groups, scale, n, k, group, bias, None, out)
            kernels.run("test_linear_w4a8", dtype, *args)
        else:
            kernels.run("test_linear_int8", dtype, x, k, x_scale, rows, packed(weight), n, k, scale, bias, None, out)
        return out

    both = product(given["x"], given["x_scale"], "gate_up", 2 * inter)
    gate, up = both[:, :inter].contiguous(), both[:, inter:].contiguous()
    values, scale, _ = quantize(kernels, dtype, 4, gate, up, None, 0.0, 0.0, False)
    assert torch.equal(found, (product(values, scale, "down", hidden).float() * shares).to(dtype))


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("sizes", SHAPES)
def test_linear_w4a8(kernels: Kernels, dtype: torch.dtype, sizes: tuple[int, int, int], group: int) -> None:
    rows, n, k = sizes
    wide_x = torch.randint(-127, 128, (rows, k + 5), dtype=torch.int8)
    x, x_scale = wide_x[:, 2 : 2 + k], torch.rand(rows) / 73
    weight, of_groups, scale = reference.quantize_int4(torch.randn(n, k) / k**0.5, group)
    stored = (packed(weight), group_panels(of_groups), scale)
    bias, residual = torch.randn(n).to(dtype), torch.randn(rows, n).to(dtype)
    for b, r in ((None, None), (bias, None), (bias, residual)):
        out = nan(rows, n, dtype=dtype)
        args = (x, k + 5, x_scale, rows, *stored, n, k, group, b, r, out)
        kernels.run("test_linear_w4a8", dtype, *args)
        expected = ops.linear_w4a8(x, x_scale, weight, of_groups, scale, dtype, b, r)
        assert_near(out, expected)


@pytest.mark.parametrize("k", [4099, 1 << 16])
def test_the_largest_sums_of_four_bits_do_not_saturate(kernels: Kernels, k: int) -> None:
    """Sums do not overflow: longer rows have smaller group scales. Rows have any signs, and scales have both."""
    group = 128
    groups, most = -(-k // group), reference.largest_group_scale(k)
    assert 8 * 127 * most * k < 2**31
    halves = torch.where(torch.arange(k) % 4 < 2, 127, -127).to(torch.int8)
    x = torch.stack((*[torch.full((k,), sign * 127, dtype=torch.int8) for sign in (1, -1)] * 6, halves, -halves))
    for byte, integer in ((255, 7), (0, -8)):
        weight = torch.full((17, groups * group // 2), byte, dtype=torch.uint8)
        of_groups = torch.tensor([1, -1] * 9)[:17, None].repeat(1, groups).mul(most).to(torch.int8)
        for rows in (1, 3, 7, 14):
            out = nan(rows, 17, dtype=torch.bfloat16)
            args = (packed(weight), group_panels(of_groups), torch.ones(17), 17, k, group, None, None, out)
            kernels.run("test_linear_w4a8", torch.bfloat16, x, k, torch.ones(rows), rows, *args)
            sums = x[:rows].double().sum(1)[:, None] * integer * of_groups[:, 0].double()
            assert torch.equal(out, sums.float().bfloat16())


def test_a_row_by_four_bits_does_not_depend_on_the_others(kernels: Kernels, dtype: torch.dtype) -> None:
    rows, n, k, group = 150, 150, 1100, 32
    x, x_scale = ops.quantize_rows(torch.randn(rows, k))
    weight, of_groups, scale = reference.quantize_int4(torch.randn(n, k), group)
    stored = (packed(weight), group_panels(of_groups), scale)

    def run(first: int, count: int) -> Tensor:
        out = nan(count, n, dtype=dtype)
        args = (x[first:], k, x_scale[first:], count, *stored, n, k, group, None, None, out)
        kernels.run("test_linear_w4a8", dtype, *args)
        return out

    alone = torch.cat([run(row, 1) for row in range(rows)])
    for count in (*range(2, 15), 64, 65, rows):
        assert torch.equal(run(0, count), alone[:count])
