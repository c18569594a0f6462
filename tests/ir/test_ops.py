"""Our ops' references against plain PyTorch, and their fake kernels against their references."""

from typing import Any

import pytest
import torch
from graphs import random
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from inferc.ir import ops as reference
from inferc.ir.ops import quantize

inferc = torch.ops.inferc
F = torch.nn.functional
TABLE = reference.rope_table(torch.arange(5), random(2).abs(), 1.0)
CACHE = random(4, 2, 2, 4, 2, 4)
SLOTS = torch.arange(4, 9)
PLACES = (torch.tensor([[1, 2]]), torch.tensor([0, 5]), torch.tensor([5]))
IDS = torch.tensor([[0, 1]] * 5, dtype=torch.int32)
PLACEMENT = torch.zeros(4, 1, dtype=torch.int32)
INT8 = (random(6, 8) * 40).to(torch.int8)
FP8 = random(6, 8).to(torch.float8_e4m3fn)
BYTES = (random(7, 16).abs() * 100).to(torch.uint8)
ADAPTER_IDS, ADAPTERS = torch.tensor([1, 0, 2, 1, 1], dtype=torch.int32), random(3, 200)
CALLS: dict[str, tuple[Any, ...]] = {
    "rms_norm": (random(5, 8), random(8), 1e-5),
    "rms_norm_add": (random(5, 8), random(5, 8), random(8), 1e-5),
    "rope_table": (torch.arange(5), random(4), 1.5),
    "rope": (random(5, 2, 8), TABLE),
    "attention": (random(1, 4, 5, 8), random(1, 2, 5, 8), random(1, 2, 5, 6), None, 0.5, "causal", 0, 0.0),
    "kv_write": (CACHE, random(5, 2, 4), random(5, 2, 4), SLOTS, 1),
    "rope_kv_write": (random(5, 4, 4), random(5, 2, 4), random(5, 2, 4), TABLE, CACHE, SLOTS, 1),
    "norm_rope_kv_write": (
        random(5, 4, 4),
        random(5, 2, 4),
        random(5, 2, 4),
        random(4),
        random(4),
        1e-5,
        0.0,
        True,
        TABLE,
        CACHE,
        SLOTS,
        1,
    ),
    "qkv_rope_kv_write": (
        random(5, 6),
        random(32, 6),
        random(32),
        random(4),
        random(4),
        1e-5,
        0.0,
        True,
        TABLE,
        CACHE,
        SLOTS,
        1,
        4,
        "halves",
    ),
    "qkv_rope_kv_write of integers": (
        INT8[:5],
        BYTES.repeat(5, 1)[:32],
        None,
        None,
        None,
        0.0,
        0.0,
        False,
        TABLE.bfloat16(),
        CACHE.bfloat16(),
        SLOTS,
        1,
        4,
        "halves",
        random(5).abs(),
        random(32).abs(),
        INT8[0, :1].expand(32, 1),
        torch.bfloat16,
    ),
    "paged_attention": (random(5, 4, 4), CACHE, *PLACES, None, 0, 0.5, "causal", 0, 0.0),
    "layer_norm": (random(5, 8), random(8), random(8), 1e-5),
    "linear_wide": (random(5, 8).bfloat16(), random(6, 8).bfloat16()),
    "head_linear": (random(5, 2, 8), random(2, 6, 8)),
    "resize_heads": (random(5, 2, 20), 32),
    "linear_add": (random(5, 8), random(6, 8), None, random(5, 6)),
    "linear_silu_mul": (random(5, 8), random(6, 8), random(6)),
    "linear_silu_mul of integers": (random(5, 8).bfloat16(), INT8, random(6).bfloat16(), random(6).abs()),
    "pointwise": ([random(5, 6), random(5, 1).bfloat16()], "x0 * x1 + 1.0", torch.bfloat16),
    "latent_write": (CACHE[:, :, :1, :, :1], random(5, 1, 4), SLOTS, 1),
    "latent_attention": (random(5, 3, 4), CACHE[:, :, :1, :, :1], *PLACES, 0, 0.5, "causal", 0, 0.0, 2),
    "silu_mul": (random(5, 6), random(5, 6)),
    "gelu_mul": (random(5, 6), random(5, 6), "tanh"),
    "moe_routing": (random(5, 4), random(4), 2, True, "sigmoid", 2.5, 2, 1, "top2_sum"),
    "moe_experts": (
        random(5, 8),
        torch.zeros(5, 2, dtype=torch.int32),
        random(5, 2),
        random(4, 12, 8),
        random(4, 8, 6),
    ),
    "dense_write": (random(2, 3, 7, 4), random(6, 3, 4), torch.tensor([0, 2])),
    "dense_attention": (
        random(6, 4, 4),
        random(2, 2, 7, 4),
        random(2, 2, 7, 5),
        torch.tensor([3, 5]),
        None,
        0.5,
        "causal",
        0,
        0.0,
    ),
    "dense_write_attention": (
        random(6, 4, 4),
        random(6, 2, 4),
        random(6, 2, 4),
        random(2, 2, 7, 4),
        random(2, 2, 7, 4),
        torch.tensor([0, 2]),
        torch.tensor([3, 5]),
        random(4),
        0.5,
        "sliding",
        3,
        0.0,
    ),
    "dense_latent_attention": (
        random(6, 4, 8),
        random(2, 1, 7, 8),
        torch.tensor([3, 5]),
        0.5,
        "sliding",
        2,
        0.0,
        6,
    ),
    "lm_head": (random(5, 8), random(9, 8), None),
    "lora_shrink": (random(5, 8), ADAPTER_IDS, None, ADAPTERS, [0, 1], [0, 20], 4),
    "lora_lookup": (torch.tensor([0, 3, 2, 1, 0], dtype=torch.int32), ADAPTER_IDS, ADAPTERS, 0, 0, 4, 6),
    "lora_expand": (random(5, 9), random(5, 8), ADAPTER_IDS, None, ADAPTERS, [0, 1], [8, 28], [0, 4], [4, 9], 4),
    "quantize_rows": (random(5, 8).bfloat16(),),
    "embedding_int8": (INT8, random(6).abs(), torch.tensor([[5, 0], [2, 2]]), torch.bfloat16),
    "linear_int8": (random(5, 8).bfloat16(), INT8, random(6).abs(), random(6).bfloat16()),
    "linear_int4": (random(5, 8).bfloat16(), BYTES, INT8[0, :7, None], random(7).abs(), random(7).bfloat16()),
    "linear_w8a8": (INT8[:5], random(5).abs(), INT8, random(6).abs(), torch.bfloat16, None, random(5, 6).bfloat16()),
    "quantize_rows_fp8": (random(5, 8).bfloat16(),),
    "linear_fp8": (FP8[:5], random(5).abs(), FP8, random(6).abs(), torch.bfloat16, None, random(5, 6).bfloat16()),
    "linear_w4a8": (
        INT8[:5],
        random(5).abs(),
        BYTES,
        INT8[0, :7, None],
        random(7).abs(),
        torch.bfloat16,
        random(7).bfloat16(),
    ),
    "rms_norm_quantize": (random(5, 8), random(8), 1e-5),
    "rms_norm_add_quantize": (random(5, 8), random(5, 8), random(8), 1e-5),
    "layer_norm_quantize": (random(5, 8), random(8), None, 1e-5),
    "silu_mul_quantize": (random(5, 6), random(5, 6)),
    "all_reduce": (random(5, 8), "tp", 1),
    "all_gather": (random(5, 8), "tp", 0, [8], -1),
    "expert_choose": (IDS, torch.arange(5), PLACEMENT, 0),
    "expert_dispatch": (random(5, 8), IDS, random(5, 2), torch.arange(5), PLACEMENT, "ep", 0, 1),
    "expert_combine": (random(5, 8), IDS, torch.arange(5), PLACEMENT, "ep", 0, 1),
}


def types(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    return [types(each) for each in value]


def faked(mode: FakeTensorMode, arg: Any) -> Any:
    if isinstance(arg, list):
        return [faked(mode, each) for each in arg]
    return mode.from_tensor(arg) if isinstance(arg, Tensor) else arg


@pytest.mark.parametrize("name", CALLS)
def test_the_fake_kernel_has_the_references_type(name: str) -> None:
    op = getattr(inferc, name.split()[0]).default
    real = op(*CALLS[name])
    with FakeTensorMode() as mode:
        fake = op(*(faked(mode, arg) for arg in CALLS[name]))
    assert types(fake) == types(real)


def test_every_op_is_covered_here() -> None:
    names = {
        schema.name.removeprefix("inferc::") for schema in torch._C._jit_get_all_schemas() if "inferc::" in schema.name
    }
    assert names == {name.split()[0] for name in CALLS}


def test_an_adapter_adds_its_two_matrices_to_the_columns_of_its_sites() -> None:
    """A row of `adapters` holds, for a site of 8 inputs and 3 outputs: A [2, 8], then the transposed B [2, 3]."""
    x, y, adapters = random(4, 8), random(4, 7), random(3, 22)
    ids, rows = torch.tensor([9, 2, 0, 1, 2], dtype=torch.int32), torch.tensor([1, 2, 4, 3], dtype=torch.int32)
    shrunk = inferc.lora_shrink(x, ids, rows, adapters, [0], [0], 2)
    found = inferc.lora_expand(y, shrunk, ids, rows, adapters, [0], [8], [3], [6], 2)
    for row, adapter in enumerate((2, 0, 2, 1)):
        expected = y[row].clone()
        if adapter:
            a, b = adapters[adapter, :16].view(2, 8), adapters[adapter, 16:].view(2, 3).T
            expected[3:6] += b @ (a @ x[row])
        torch.testing.assert_close(found[row], expected)


def test_rms_norm_is_torchs_in_float32_and_rounds_once_or_twice() -> None:
    x, weight = random(5, 8), random(8, seed=1)
    torch.testing.assert_close(reference.rms_norm(x, weight, 1e-5), F.rms_norm(x, (8,), weight, 1e-5))
    shifted = reference.rms_norm(x, weight, 1e-5, weight_offset=1.0)
    torch.testing.assert_close(shifted, F.rms_norm(x, (8,), weight + 1, 1e-5))
    x, weight = x.bfloat16(), weight.bfloat16()
    once = reference.rms_norm(x, weight, 1e-5, round_before_scale=False)
    torch.testing.assert_close(once, F.rms_norm(x.float(), (8,), weight.float(), 1e-5).bfloat16(), rtol=0, atol=0)
    twice = F.rms_norm(x.float(), (8,), None, 1e-5).bfloat16() * weight
    torch.testing.assert_close(reference.rms_norm(x, weight, 1e-5), twice, rtol=0, atol=0)


def pairs_of(x: Tensor, neighbours: bool) -> tuple[Tensor, Tensor]:
    return (x[..., 0:4:2], x[..., 1:4:2]) if neighbours else (x[..., :2], x[..., 2:4])


@pytest.mark.parametrize("pairs", reference.rope_pairs)
def test_rope_rotates_pairs_by_their_angle_and_leaves_the_rest(pairs: str) -> None:
    positions, inv_freq, x = torch.tensor([0, 3, 8]), torch.tensor([1.0, 0.25]), random(3, 2, 6)
    out = reference.rope(x, reference.rope_table(positions, inv_freq, 1.0), pairs)
    first, second = pairs_of(x, pairs != "halves")
    turned = torch.complex(first, second) * torch.polar(torch.ones(()), positions[:, None] * inv_freq)[:, None]
    torch.testing.assert_close(torch.complex(*pairs_of(out, pairs == "neighbours")), turned)
    torch.testing.assert_close(out[..., 4:], x[..., 4:])


def test_layer_norm_is_torchs_in_float32_and_rounds_once() -> None:
    x, weight, bias = random(5, 2, 8), random(8, seed=1), random(8, seed=2)
    expected = F.layer_norm(x, (8,), weight, bias, 1e-5)
    torch.testing.assert_close(reference.layer_norm(x, weight, bias, 1e-5), expected)
    by_head = reference.layer_norm(x, torch.stack((weight, 2 * weight)), None, 1e-5)
    torch.testing.assert_close(by_head[:, 1], 2 * F.layer_norm(x[:, 1], (8,), weight, None, 1e-5))
    rounded = reference.layer_norm(x.bfloat16(), weight.bfloat16(), None, 1e-5)
    wide = F.layer_norm(x.bfloat16().float(), (8,), weight.bfloat16().float(), None, 1e-5)
    torch.testing.assert_close(rounded, wide.bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("x0 * 0.5 - x1 / 2.0", lambda x, y: x * 0.5 - y / 2),
        ("t0 = tanh(x0); t0 * t0 + -x1", lambda x, y: torch.tanh(x) ** 2 - y),
        ("where(x0 > x1, x0, 0.0)", lambda x, y: torch.where(x > y, x, 0.0)),
        ("where(x0 < 0.25, min(x0, x1), max(x1, 0.5))", lambda x, y: torch.where(x < 0.25, x.minimum(y), y.clamp(0.5))),
        ("gelu(x0) + gelu_tanh(x1)", lambda x, y: F.gelu(x) + F.gelu(y, approximate="tanh")),
        ("sigmoid(x0) * silu(x1)", lambda x, y: torch.sigmoid(x) * F.silu(y)),
        ("sqrt(abs(x0)) + rsqrt(exp(x1)) + log(1.0 + abs(x1))", None),
        ("floor(x0 * 4.0) + erf(x1)", lambda x, y: torch.floor(4 * x) + torch.erf(y)),
    ],
)
def test_pointwise_computes_its_expression(expression: str, expected: Any) -> None:
    x, y = random(5, 6), random(5, 1, seed=1)
    found = reference.pointwise([x, y], expression, torch.float32)
    wanted = expected(x, y) if expected else x.abs().sqrt() + y.exp().rsqrt() + y.abs().log1p()
    torch.testing.assert_close(found, wanted.expand(5, 6))


@pytest.mark.parametrize("expression", ["", "x0; x1", "x0 if x1 else x0", "__import__('os')", "x0 ** 2.0"])
def test_pointwise_takes_nothing_but_arithmetic(expression: str) -> None:
    with pytest.raises((ValueError, KeyError)):
        reference.pointwise([random(5, 6), random(5, 6)], expression, torch.float32)


@pytest.mark.parametrize(("mask", "window"), [("causal", 0), ("sliding", 3), ("chunked", 4)])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_attention_is_torchs_under_each_mask(mask: str, window: int, softcap: float) -> None:
    q, k, v = random(1, 4, 9, 8), random(1, 2, 9, 8, seed=1), random(1, 2, 9, 8, seed=2)
    got = reference.attention(q, k, v, None, 0.5, mask, window, softcap)
    rows = torch.arange(9)
    seen = rows[:, None] >= rows
    if mask == "sliding":
        seen &= rows[:, None] - rows < window
    elif mask == "chunked":
        seen &= rows[:, None] // window == rows // window
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    if softcap:
        scores = (softcap * torch.tanh(q @ k.mT * 0.5 / softcap)).masked_fill(~seen, -torch.inf)
        expected = scores.softmax(-1) @ v
    else:
        expected = F.scaled_dot_product_attention(q, k, v, seen, scale=0.5)
    torch.testing.assert_close(got, expected.transpose(1, 2))
    rows_form = (x[0].transpose(0, 1) for x in (q, k[:, ::2], v[:, ::2]))
    torch.testing.assert_close(inferc.attention.default(*rows_form, None, 0.5, mask, window, softcap), got[0])


def test_alibi_adds_a_slope_for_each_position_between_key_and_query() -> None:
    q, k, v = random(1, 4, 9, 8), random(1, 2, 9, 8, seed=1), random(1, 2, 9, 8, seed=2)
    slopes, rows = torch.tensor([0.5, 0.3, 0.2, 0.0]), torch.arange(9)
    got = reference.attention(q, k, v, None, 0.5, "causal", 0, 0.0, slopes)
    bias = (slopes[:, None, None] * (rows - rows[:, None])).masked_fill(rows > rows[:, None], -torch.inf)
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    torch.testing.assert_close(got, F.scaled_dot_product_attention(q, k, v, bias, scale=0.5).transpose(1, 2))
    rows_form = (x[0].transpose(0, 1) for x in (q, k[:, ::2], v[:, ::2]))
    torch.testing.assert_close(inferc.attention.default(*rows_form, None, 0.5, "causal", 0, 0.0, slopes), got[0])


def test_sinks_take_their_share_of_the_softmax() -> None:
    q, k, v, sinks = random(1, 2, 3, 4), random(1, 2, 3, 4), random(1, 2, 3, 4), torch.tensor([1.0, -1.0])
    got = reference.attention(q, k, v, sinks, 0.5, "causal", 0, 0.0)
    first = (q[0, :, 0] * k[0, :, 0]).sum(-1) * 0.5
    share = first.exp() / (first.exp() + sinks.exp())
    torch.testing.assert_close(got[0, 0], share[:, None] * v[0, :, 0])


@pytest.mark.parametrize("alibi", [None, torch.tensor([0.5, 0.3, 0.2, 0.1])], ids=["plain", "alibi"])
@pytest.mark.parametrize(("mask", "window"), [("causal", 0), ("sliding", 3), ("chunked", 4)])
def test_paged_attention_is_attention_of_each_sequence(mask: str, window: int, alibi: torch.Tensor | None) -> None:
    """Two sequences in scattered blocks of 2 tokens, the first of them with 4 tokens cached before."""
    lengths, blocks = (7, 5), ([5, 1, 3, 8], [2, 7, 4])
    caches = torch.zeros(9, 1, 2, 2, 2, 4)
    full = [[random(n, heads, 4, seed=seed + n) for seed, heads in enumerate((4, 2, 2))] for n in lengths]
    new = [slice(4, 7), slice(0, 5)]
    for (_, k, v), table in zip(full, blocks, strict=True):
        slots = torch.tensor([table[i // 2] * 2 + i % 2 for i in range(len(k))])
        caches = reference.kv_write(caches, k, v, slots, 0)
    q = torch.cat([each[0][rows] for each, rows in zip(full, new, strict=True)])
    tables = torch.tensor([blocks[0], [*blocks[1], 0]], dtype=torch.int32)
    starts, seq_lens = torch.tensor([0, 3, 8], dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)
    got = reference.paged_attention(q, caches, tables, starts, seq_lens, None, 0, 0.5, mask, window, 0.0, alibi)
    expected = [
        inferc.attention.default(*each, None, 0.5, mask, window, 0.0, alibi)[rows]
        for each, rows in zip(full, new, strict=True)
    ]
    torch.testing.assert_close(got, torch.cat(expected))


def test_kv_write_leaves_its_argument_and_the_in_place_form_does_not() -> None:
    cache, k, v = torch.zeros(3, 1, 2, 2, 1, 4), random(2, 1, 4), random(2, 1, 4, seed=1)
    slots = torch.tensor([5, 2])
    written = inferc.kv_write.default(cache, k, v, slots, 0)
    assert not cache.any()
    torch.testing.assert_close(written[2, 0, 0, 1], k[0])
    torch.testing.assert_close(written[1, 0, 1, 0], v[1])
    assert reference.kv_write_in_place(cache, k, v, slots, 0) is cache
    torch.testing.assert_close(cache, written)


def test_routing_prefers_the_lower_id_of_equals_and_experts_weigh_their_results() -> None:
    ids, weights = reference.moe_routing(torch.tensor([[1.0, 3.0, 3.0, 0.0]]), None, 2, True)
    assert ids.tolist() == [[1, 2]]
    torch.testing.assert_close(weights, torch.tensor([[0.5, 0.5]]))
    x, gate_up, down = random(1, 8), random(4, 12, 8, seed=1), random(4, 8, 6, seed=2)

    def expert(index: int) -> Tensor:
        gate, up = F.linear(x, gate_up[index]).chunk(2, -1)
        return F.linear(F.silu(gate) * up, down[index])

    torch.testing.assert_close(reference.moe_experts(x, ids, weights, gate_up, down), (expert(1) + expert(2)) / 2)


def test_a_step_without_sampled_rows_chooses_no_experts() -> None:
    """A prompt's first chunk has none, and the last layer runs on those alone."""
    ids, weights = reference.moe_routing(random(0, 4), random(4), 2, True, "sigmoid", 2.5, 2, 1, "top2_sum")
    assert ids.shape == weights.shape == (0, 2)
    assert reference.moe_experts(random(0, 8), ids, weights, random(4, 12, 8), random(4, 8, 6)).shape == (0, 8)


def test_routing_among_those_near_is_transformers_own() -> None:
    from transformers.models.phimoe.modeling_phimoe import sparsemixer

    logits = random(40, 7) * torch.logspace(-2, 1, 40)[:, None]
    ids, weights = reference.moe_routing(logits, None, 2, False, "near_softmax", margin=0.4)
    expected, chosen = sparsemixer(logits, 0.2, training=False)
    assert torch.equal(ids.long(), chosen)
    torch.testing.assert_close(weights, expected)
    assert ((weights < 1) & (weights > 0.5)).any()


def test_quantized_rows_are_within_half_a_step() -> None:
    x = random(7, 33) * torch.logspace(-3, 3, 7)[:, None]
    values, scale = reference.quantize_rows(x)
    assert values.dtype == torch.int8 and int(values.abs().max(1).values.min()) == 127
    assert ((values * scale[:, None] - x).abs() <= scale[:, None] * 0.5001).all()


def test_int8_products_are_those_of_what_the_integers_mean() -> None:
    (values, scale), (rows, row_scale) = reference.quantize_rows(random(6, 40)), reference.quantize_rows(random(5, 40))
    weight, x, bias, residual = values * scale[:, None], random(5, 40, seed=3), random(6), random(5, 6)
    found = reference.linear_int8(x, values, scale, bias, residual)
    torch.testing.assert_close(found, residual + F.linear(x, weight, bias))
    wide = reference.linear_int8(x.bfloat16(), values, scale, dtype=torch.float32)
    torch.testing.assert_close(wide, F.linear(x.bfloat16().float(), weight))
    found = reference.embedding_int8(values, scale, torch.tensor([[5, 0], [2, 2]]), torch.bfloat16)
    assert torch.equal(found, weight[torch.tensor([[5, 0], [2, 2]])].bfloat16())
    found = reference.linear_w8a8(rows, row_scale, values, scale, torch.float32, bias, residual)
    torch.testing.assert_close(found, residual + F.linear(rows * row_scale[:, None], weight, bias))


def test_fp8_rounds_to_the_nearest_and_multiplies_what_that_means() -> None:
    x = torch.tensor([[448.0, 17.0, -19.0, 2.0**-9, 0.3], [0.0] * 5, [-896.0, 1.0, 0.0, 0.0, 0.0]])
    values, scale = reference.quantize_rows_fp8(x)
    assert values.dtype == torch.float8_e4m3fn and scale.tolist() == [1.0, 1.0, 2.0]
    assert values.float().tolist()[0] == [448.0, 16.0, -20.0, 2.0**-9, 0.3125], "ties to even, three bits, denormals"
    assert values.float().tolist()[1:] == [[0.0] * 5, [-448.0, 0.5, 0.0, 0.0, 0.0]]
    broken = torch.tensor([[1.0, torch.nan], [torch.inf, 2.0], [1.0, 2.0]])
    assert reference.quantize_rows_fp8(broken)[1].isfinite().tolist() == [False, False, True]
    (rows, row_scale), (weight, of_weight) = (reference.quantize_rows_fp8(random(size, 40)) for size in (5, 6))
    bias, residual = random(6), random(5, 6)
    found = reference.linear_fp8(rows, row_scale, weight, of_weight, torch.float32, bias, residual)
    x, w = (values.float() * scale[:, None] for values, scale in ((rows, row_scale), (weight, of_weight)))
    torch.testing.assert_close(found, residual + F.linear(x, w, bias))


@pytest.mark.parametrize("group", [32, 64])
def test_products_by_four_bits_are_those_of_what_the_integers_mean(group: int) -> None:
    weight, (rows, row_scale), k = random(6, 100), reference.quantize_rows(random(5, 100)), 100
    values, of_groups, scale = quantize.quantize_int4(weight, group)
    groups = -(-k // group)
    assert values.shape == (6, groups * group // 2) and of_groups.shape == (6, groups) and scale.shape == (6,)
    assert of_groups.dtype == torch.int8 and of_groups.abs().amax(1).tolist() == [127] * 6
    integers = quantize.unpack_int4(values, k)
    each = (of_groups * scale[:, None]).repeat_interleave(group, 1)[:, :k]
    off = (integers * each - weight).abs() / each.abs()
    assert off[integers < 7].max() < 0.51 and off.max() < 1.01  # what would be 8 is 7
    assert int(integers.min()) == -8
    found = reference.linear_w4a8(rows, row_scale, values, of_groups, scale, torch.float32, None, random(5, 6))
    torch.testing.assert_close(found, random(5, 6) + F.linear(rows * row_scale[:, None], integers * each))
    x, bias = random(5, 100, seed=3), random(6)
    found = reference.linear_int4(x, values, of_groups, scale, bias, random(5, 6))
    torch.testing.assert_close(found, random(5, 6) + F.linear(x, integers * each, bias))


def test_a_group_of_zeros_is_zeros_in_four_bits() -> None:
    values, of_groups, scale = quantize.quantize_int4(torch.zeros(2, 40), 32)
    assert torch.equal(quantize.unpack_int4(values, 40), torch.zeros(2, 40, dtype=torch.int8))
    assert not of_groups.any() and torch.equal(scale, torch.ones(2))


def test_a_group_of_small_weights_keeps_a_scale() -> None:
    """The smallest there is, if a neighbour in its row is a thousand times as large; and a row's infinity is seen."""
    weight = torch.cat((torch.full((1, 32), 1000.0), torch.full((1, 32), -0.9)), 1)
    values, of_groups, _ = quantize.quantize_int4(weight, 32)
    assert of_groups.tolist() == [[-127, 1]] and quantize.unpack_int4(values, 64)[0, 32:].tolist() == [-1] * 32
    weight[0, 3] = float("inf")
    assert not torch.isfinite(quantize.quantize_int4(weight, 32)[2]).any()


@pytest.mark.parametrize(("k", "most"), [(64, 127), (16643, 127), (18944, 111), (1 << 16, 32), (1 << 24, 1)])
def test_longer_rows_have_smaller_scales_of_groups(k: int, most: int) -> None:
    assert quantize.largest_group_scale(k) == most


def test_experts_with_int8_weights_are_those_of_what_the_integers_mean() -> None:
    x, ids, weights = random(5, 8), torch.tensor([[0, 1]] * 5, dtype=torch.int32), random(5, 2)
    gate_up, down = random(2, 12, 8), random(2, 8, 6)
    (a, a_scale), (b, b_scale) = (reference.quantize_rows(each.flatten(0, 1)) for each in (gate_up, down))
    a, a_scale, b, b_scale = a.view(2, 12, 8), a_scale.view(2, 12), b.view(2, 8, 6), b_scale.view(2, 8)
    found = reference.moe_experts(x, ids, weights, a, b, gate_up_scale=a_scale, down_scale=b_scale)
    same = reference.moe_experts(x, ids, weights, a * a_scale[..., None], b * b_scale[..., None])
    torch.testing.assert_close(found, same)
