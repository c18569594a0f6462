"""Every header kernel against its op's reference, over odd shapes, on each instruction set and storage type."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cpp_kernels import DTYPES, Kernels, assert_near, moe_experts, nan, packed, part_of

from inferc.ir.ops import rope_pairs
from inferc.ir.ops.experts import GROUP_SCORES, SCORES

ops = torch.ops.inferc


def test_linear(kernels: Kernels, dtype: torch.dtype) -> None:
    for rows, n, k in (
        (1, 1, 1),
        (1, 16, 64),
        (3, 90, 33),
        (7, 65, 130),
        (12, 100, 34),
        (13, 128, 31),
        (200, 70, 48),
        (193, 17, 96),
    ):
        wide_x = torch.randn(rows, k + 5).to(dtype)
        x, weight, bias = wide_x[:, 2 : 2 + k], (torch.randn(n, k) / k**0.5).to(dtype), torch.randn(n).to(dtype)
        for with_bias, wide in ((False, False), (True, False), (False, True)):
            out = nan(rows, n, dtype=torch.float32 if wide else dtype)
            args = (x, k + 5, rows, packed(weight), n, k, bias if with_bias else None, out, n, wide)
            kernels.run("test_linear", dtype, *args)
            expected = x.float() @ weight.float().T + (bias.float() if with_bias else 0.0)
            assert_near(out, expected.to(out.dtype))


def test_linear_add(kernels: Kernels, dtype: torch.dtype) -> None:
    for rows, n, k in ((1, 1, 1), (3, 90, 33), (12, 100, 34), (200, 70, 48)):
        x, weight, bias = (
            torch.randn(rows, k).to(dtype),
            (torch.randn(n, k) / k**0.5).to(dtype),
            torch.randn(n).to(dtype),
        )
        residual, out = torch.randn(rows, n).to(dtype), nan(rows, n, dtype=dtype)
        for each in (None, bias):
            kernels.run("test_linear_add", dtype, x, rows, packed(weight), n, k, each, residual, out)
            assert_near(out, ops.linear_add(x, weight, each, residual))
        kernels.run("test_linear_add", dtype, x, rows, packed(weight), n, k, bias, residual, residual)  # in place
        assert torch.equal(residual, out)


def test_linear_silu_mul(kernels: Kernels, dtype: torch.dtype) -> None:
    for rows, width, k in (
        (1, 16, 1),
        (1, 80, 64),
        (3, 48, 33),
        (9, 96, 130),
        (12, 16, 34),
        (35, 208, 96),
        (300, 48, 64),
    ):
        wide_x = torch.randn(rows, k + 5).to(dtype)
        x, weight = wide_x[:, 2 : 2 + k], (torch.randn(2 * width, k) / k**0.5).to(dtype)
        for bias in (None, torch.randn(2 * width).to(dtype)):
            out = nan(rows, width, dtype=dtype)
            args = (x, k + 5, rows, packed(weight), width, k, bias, out)
            kernels.run("test_linear_silu_mul", dtype, *args)
            assert_near(out, ops.linear_silu_mul(x, weight, bias))


def test_layer_norm(kernels: Kernels, dtype: torch.dtype) -> None:
    for rows, parts, width in ((1, 1, 1), (5, 1, 33), (3, 4, 16), (70, 2, 80)):
        wide = (torch.randn(rows, parts * width + 3) * 2 + 1).to(dtype)
        heads = wide[:, : parts * width].reshape(rows, parts, width)
        for own in (False, True):
            shape = (parts, width) if own else (width,)
            weight, bias, out = (
                torch.randn(shape).to(dtype),
                torch.randn(shape).to(dtype),
                nan(rows, parts * width, dtype=dtype),
            )
            for w, b in ((weight, bias), (weight, None), (None, None)):
                args = (w, b, 1e-5, rows, parts, width, width if own else 0, out)
                kernels.run("test_layer_norm", dtype, wide, wide.shape[1], *args)
                assert_near(out.view(rows, parts, width), ops.layer_norm(heads, w, b, 1e-5))


def test_functions(kernels: Kernels) -> None:
    x = torch.cat((torch.linspace(-12, 12, 1003), torch.tensor([0.0, -0.0, 1e-6, 60.0, -60.0])))
    gelu = torch.nn.functional.gelu
    expected = (
        torch.erf(x),
        gelu(x),
        gelu(x, approximate="tanh"),
        torch.sigmoid(x),
        torch.tanh(x),
        torch.floor(x),
        x.abs().log(),
        x.abs().rsqrt(),
    )
    for function, wanted in enumerate(expected):
        out = nan(*x.shape, dtype=torch.float32)
        kernels("test_function", kernels.threads, function, x, len(x), out)
        torch.testing.assert_close(out, wanted, rtol=2e-6, atol=1e-6)


def test_linear_of_long_rows_is_cut_along_k(kernels: Kernels, dtype: torch.dtype) -> None:
    k = 8192 // dtype.itemsize + 70
    x, weight = torch.randn(9, k).to(dtype), (torch.randn(20, k) / k**0.5).to(dtype)
    out = nan(9, 20, dtype=torch.float32)
    kernels.run("test_linear", dtype, x, k, 9, packed(weight), 20, k, None, out, 20, True)
    assert_near(out, x.float() @ weight.float().T)


def test_a_row_of_linear_does_not_depend_on_the_others(kernels: Kernels, dtype: torch.dtype) -> None:
    rows, n, k = 211, 150, 97
    x, weight = torch.randn(rows, k).to(dtype), packed(torch.randn(n, k).to(dtype))
    alone = nan(rows, n, dtype=dtype)
    for row in range(rows):
        kernels.run("test_linear", dtype, x[row], k, 1, weight, n, k, None, alone[row], n, False)
    for count in (*range(2, 15), 100, rows):
        together = nan(count, n, dtype=dtype)
        kernels.run("test_linear", dtype, x, k, count, weight, n, k, None, together, n, False)
        assert torch.equal(together, alone[:count])


@pytest.mark.parametrize(("offset", "early"), [(0.0, True), (0.0, False), (1.0, False), (1.0, True)])
def test_rms_norm(kernels: Kernels, dtype: torch.dtype, offset: float, early: bool) -> None:
    for rows, parts, width in ((1, 1, 1), (5, 1, 33), (3, 4, 16), (70, 2, 80)):
        wide = torch.randn(rows, parts * width + 3).to(dtype)
        weight, out = torch.randn(width).to(dtype), nan(rows, parts * width, dtype=dtype)
        args = (None, weight, 1e-5, offset, early, rows, parts, width, out, None)
        kernels.run("test_rms_norm", dtype, wide, wide.shape[1], *args)
        heads = wide[:, : parts * width].reshape(rows, parts, width)
        assert_near(out.view(rows, parts, width), ops.rms_norm(heads, weight, 1e-5, offset, early))


def test_rms_norm_add(kernels: Kernels, dtype: torch.dtype) -> None:
    for rows, width in ((1, 7), (9, 64), (33, 130)):
        x, residual = torch.randn(rows, width).to(dtype), torch.randn(rows, width).to(dtype)
        weight, out, total = torch.randn(width).to(dtype), nan(rows, width, dtype=dtype), nan(rows, width, dtype=dtype)
        args = (x, width, residual, weight, 1e-6, 0.0, True, rows, 1, width)
        kernels.run("test_rms_norm", dtype, *args, out, total)
        normed, added = ops.rms_norm_add(x, residual, weight, 1e-6)
        assert torch.equal(total, added)
        assert_near(out, normed)
        kernels.run("test_rms_norm", dtype, *args, total, total)  # nobody wants the sum
        assert torch.equal(total, out)


def test_elementwise(kernels: Kernels, dtype: torch.dtype) -> None:
    for rows, width in ((1, 1), (3, 47), (130, 64)):
        both = torch.randn(rows, 2 * width + 1).to(dtype) * 3
        a, b = both[:, :width], both[:, width : 2 * width]
        gated = ops.silu_mul(a, b), ops.gelu_mul(a, b, "none"), ops.gelu_mul(a, b, "tanh")
        products = (a + b, a * b, gated[0], a + 0.3, a * 0.3, gated[1], gated[2])
        for op, expected in enumerate(products):
            out = nan(rows, width, dtype=dtype)
            args: tuple[Any, ...] = (a, both.shape[1], b, both.shape[1], rows, width, out)
            kernels("test_zip", kernels.threads, DTYPES.index(dtype), op, *args)
            assert_near(out, expected)


def test_lookups(kernels: Kernels, dtype: torch.dtype) -> None:
    for n, width, rows in ((1, 1, 1), (50, 33, 7), (90, 64, 40)):
        table, ids = torch.randn(n, width).to(dtype), torch.randint(0, n, (rows,), dtype=torch.int32)
        for stored in (table, packed(table)):
            out = nan(rows, width, dtype=dtype)
            kernels.run("test_embedding", dtype, stored is not table, stored, n, width, ids, rows, out)
            assert torch.equal(out, table[ids.long()])
        out = nan(rows, width, dtype=dtype)
        kernels.run("test_index_select", dtype, table, width, ids, rows, width, out)
        assert torch.equal(out, table[ids.long()])


@pytest.mark.parametrize("pairs", rope_pairs)
def test_rope(kernels: Kernels, dtype: torch.dtype, pairs: str) -> None:
    for rows, heads, dim, half in ((1, 1, 16, 8), (5, 3, 64, 32), (9, 2, 32, 10)):
        x, positions = torch.randn(rows, heads, dim).to(dtype), torch.randint(0, 40000, (rows,))
        inv_freq = 10000.0 ** (-torch.arange(half).float() / half)
        out, table = nan(rows, heads, dim, dtype=dtype), nan(rows, 2 * half, dtype=torch.float32)
        args = (positions, inv_freq, 1.5, half, rope_pairs.index(pairs), rows, heads, dim, table, out)
        kernels.run("test_rope", dtype, x, heads * dim, *args)
        expected = ops.rope_table(positions, inv_freq, 1.5)
        assert_near(table, expected)
        assert_near(out, ops.rope(x, expected, pairs))


ROUTINGS: dict[str, dict[str, Any]] = {
    "softmax": {"renormalize": False},
    "renormalized": {"renormalize": True},
    "sigmoid with a bias": {"renormalize": True, "score": "sigmoid", "scale": 2.5, "biased": True},
    "softmax of the chosen": {"renormalize": False, "score": "chosen_softmax"},
    "sigmoid of the chosen": {"renormalize": False, "score": "chosen_sigmoid", "scale": 0.5},
    "softmax of those near": {"renormalize": False, "score": "near_softmax", "margin": 0.4},
    "best groups": {"renormalize": False, "num_groups": 4, "topk_groups": 2},
    "groups by their two best": {
        "renormalize": True,
        "score": "sigmoid",
        "biased": True,
        "num_groups": 4,
        "topk_groups": 3,
        "group_score": "top2_sum",
    },
}


@pytest.mark.parametrize("name", ROUTINGS)
def test_moe_routing(kernels: Kernels, dtype: torch.dtype, name: str) -> None:
    plain = {"score": "softmax", "scale": 1.0, "num_groups": 1, "topk_groups": 1, "group_score": "max", "margin": 0.0}
    how = {**plain, **ROUTINGS[name]}
    biased = how.pop("biased", False)
    for rows, experts, top_k in ((1, 8, 2), (7, 40, 8), (130, 16, 3)):
        logits, bias = torch.randn(rows, experts).to(dtype), torch.randn(experts) * 0.2 if biased else None
        logits[0, :] = 0.5  # a tie: the lower ids win
        ids, weights = torch.full((rows, top_k), -1, dtype=torch.int32), nan(rows, top_k, dtype=torch.float32)
        score, group = SCORES.index(how["score"]), GROUP_SCORES.index(how["group_score"])
        sizes = (experts, top_k, how["num_groups"], how["topk_groups"])
        kernels.run(
            "test_moe_routing",
            dtype,
            logits,
            bias,
            rows,
            score,
            group,
            *sizes,
            how["renormalize"],
            how["scale"],
            how["margin"],
            ids,
            weights,
        )
        expected_ids, expected_weights = ops.moe_routing(logits, bias, top_k, **how)
        assert torch.equal(ids, expected_ids)
        assert_near(weights, expected_weights)


EXPERTS: dict[str, dict[str, Any]] = {
    "silu": {},
    "gelu": {"activation": "gelu"},
    "gelu_tanh": {"activation": "gelu_tanh"},
    "clamped with biases": {"activation": "swiglu_clamped", "alpha": 1.7, "limit": 1.5, "biased": True},
    "scaled inputs": {"scale_input": True},
}


@pytest.mark.parametrize("name", EXPERTS)
def test_moe_experts(kernels: Kernels, dtype: torch.dtype, name: str) -> None:
    how = {"activation": "silu", "alpha": 1.0, "limit": 0.0, "scale_input": False, **EXPERTS[name]}
    biased = how.pop("biased", False)
    for rows, experts, top_k, hidden, inter in (
        (1, 4, 2, 32, 16),
        (7, 8, 2, 50, 80),
        (230, 4, 3, 33, 48),
        (40, 40, 8, 64, 32),
    ):
        x = torch.randn(rows, hidden).to(dtype)
        gate_up = (torch.randn(experts, 2 * inter, hidden) / hidden**0.5).to(dtype)
        down = (torch.randn(experts, hidden, inter) / inter**0.5).to(dtype)
        biases = [torch.randn(experts, size).to(dtype) if biased else None for size in (2 * inter, hidden)]
        ids, weights = ops.moe_routing(torch.randn(rows, experts), None, top_k, True)
        weights_of = {"gate_up": gate_up, "down": down, "gate_up_bias": biases[0], "down_bias": biases[1], **how}

        given = {"x": x, "expert_ids": ids, "expert_weights": weights}
        out = moe_experts(kernels, **given, **weights_of)
        assert_near(out, ops.moe_experts(x, ids, weights, gate_up, down, *biases, **how), factor=2.0)
        for row in range(0, rows, 9):
            assert torch.equal(moe_experts(kernels, **part_of(given, row, row + 1), **weights_of)[0], out[row])


def test_head_linear(kernels: Kernels, dtype: torch.dtype) -> None:
    for rows, heads, n, k in ((1, 1, 1, 1), (3, 4, 48, 20), (200, 2, 33, 64)):
        x, weight = torch.randn(rows, heads, k).to(dtype), (torch.randn(heads, n, k) / k**0.5).to(dtype)
        out = nan(rows, heads, n, dtype=dtype)
        kernels.run("test_head_linear", dtype, x, rows, heads, packed(weight), n, k, out)
        assert_near(out, ops.head_linear(x, weight))


def test_cat(kernels: Kernels, dtype: torch.dtype) -> None:
    for rows, heads, first, second in ((1, 1, 1, 1), (5, 3, 16, 7), (70, 4, 2, 33)):
        a, b = torch.randn(rows, heads, first).to(dtype), torch.randn(rows, heads, second).to(dtype)
        for shared in (False, True):
            part = b[:, :1].contiguous() if shared else b
            out = nan(rows, heads, first + second, dtype=dtype)
            kernels.run("test_cat", dtype, a, first, part, second, shared, rows, heads, out)
            assert torch.equal(out, torch.cat((a, part.expand_as(b)), -1))


def test_resize_heads(kernels: Kernels, dtype: torch.dtype) -> None:
    for rows, heads, had, size in ((1, 1, 1, 16), (5, 3, 100, 112), (70, 2, 33, 7), (3, 4, 16, 16)):
        x, out = torch.randn(rows, heads, had).to(dtype), nan(rows, heads, size, dtype=dtype)
        kernels.run("test_resize_heads", dtype, x, rows, heads, had, size, out)
        assert torch.equal(out, ops.resize_heads(x, size))
        assert torch.equal(out[..., : min(had, size)], x[..., :size]) and not out[..., had:].any()


def test_exp_is_within_an_ulp_and_exact_at_zero(kernels: Kernels) -> None:
    x = torch.cat((torch.linspace(-87.0, 88.5, 200_001), torch.tensor([0.0, -0.0])))
    out = torch.empty_like(x)
    kernels("test_exp", x, len(x), out)
    expected = x.double().exp()
    ulp = torch.pow(2.0, (torch.frexp(expected).exponent - 24).double())
    assert float(((out.double() - expected).abs() / ulp).max()) < 1.3
    assert out[-2:].tolist() == [1.0, 1.0]
    ends = torch.tensor([-float("inf"), -200.0, 100.0, float("inf"), float("nan")])
    out = torch.empty_like(ends)
    kernels("test_exp", ends, len(ends), out)
    assert out[:4].tolist() == [0.0, 0.0, float("inf"), float("inf")] and out[4].isnan()


def test_rounding_to_bfloat16_is_torchs(kernels: Kernels) -> None:
    bits = torch.randint(-(2**31), 2**31, (100_003,)).to(torch.int32)
    x = torch.cat((bits.view(torch.float32), torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan")])))
    out = torch.empty(len(x), dtype=torch.bfloat16)
    kernels("test_round", x, len(x), out)
    expected = x.to(torch.bfloat16)
    same = (out.view(torch.int16) == expected.view(torch.int16)) | (out.isnan() & expected.isnan())
    assert same.all()


def test_threads_meet_at_every_barrier(kernels: Kernels) -> None:
    assert kernels("test_barriers", kernels.threads, 2000) == 0


@pytest.mark.parametrize(("total", "grain"), [(0, 1), (1, 1), (1, 4), (2, 1), (7, 3), (64, 4), (1000, 1)])
@pytest.mark.parametrize("early", [0, 1])
def test_every_item_is_handed_out_once(kernels: Kernels, total: int, grain: int, early: int) -> None:
    counts = torch.zeros(total + 1, dtype=torch.int32)
    for _ in range(50):
        counts.zero_()
        assert kernels("test_each", kernels.threads, total, grain, early, counts) == 0
        assert counts.tolist() == [1] * total + [0]
