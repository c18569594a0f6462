import json
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from graphs import Example, example, random, rows
from torch import Tensor, ops

from inferc import config
from inferc.ir import program as program_lib
from inferc.ir import weights as weight_lib
from inferc.manifest_types import Quantization
from inferc.passes.quantize.round_to_nearest import Quantize
from inferc.passes.quantize.schemes import SCHEMES
from inferc.passes.verify import verify

aten, inferc = ops.aten, ops.inferc
INT8, W8A8 = Quantize(SCHEMES["int8"]), Quantize(SCHEMES["w8a8"])
BF16 = torch.bfloat16


def test_the_command_line_knows_every_scheme() -> None:
    assert set(get_args(config.Quantize)) == set(SCHEMES)


def dequantized(made: Example) -> tuple[Tensor, ...]:
    """The results of the program with float32 weights that are what the integers mean."""
    weights = {}
    for name, value in made.reader.tensors.items():
        if value.dim() > 1:
            expression = weight_lib.source(name, tuple(value.shape), value.dtype)
            values = weight_lib.read_whole(weight_lib.int8_values(expression), made.reader)
            scales = weight_lib.read_whole(weight_lib.int8_scales(expression), made.reader)
            value = values * scales[..., None]
        weights[name] = value
    return replace(made, reader=type(made.reader)(weights)).run()


def check(made: Example, each: Quantize, count: int, golden: str, expected: tuple[Tensor, ...]) -> None:
    """Check the example, expecting the results of the dequantized weights."""
    before = made.run()
    made.check(each, count, golden, tolerance=1.0)
    torch.testing.assert_close(made.run(), expected, rtol=1e-5, atol=1e-5)
    for found, was in zip(made.run(), before):
        assert (found - was).abs().max() < 0.05 * was.abs().max()


def projections(x: Any, residual: Any, qkv: Any, bias: Any, o: Any) -> Any:
    both = aten.linear.default(x, qkv, bias)
    return aten.slice.Tensor(both, -1, 0, 4), inferc.linear_add.default(x, o, None, residual)


def projected() -> Example:
    weights = {"qkv": random(12, 8), "bias": random(12), "o": random(6, 8, seed=1)}
    return example(projections, {"x": rows(8), "residual": rows(6)}, weights)


def test_rows_stay_as_they_are_for_kernels_that_round_them() -> None:
    golden = """
        %x: float32[s0, 8] = input
        %residual: float32[s0, 6] = input
        %0: float32[s0, 12] = inferc.linear_int4(%x, @qkv.int4, @qkv.int4_group_scale, @qkv.int4_scale, @bias)
        %1: float32[s0, 4] = aten.slice.Tensor(%0, -1, 0, 4)
        %2: float32[s0, 6] = inferc.linear_int4(%x, @o.int4, @o.int4_group_scale, @o.int4_scale, None, %residual)
        return (%1, %2)
    """
    projected().check(Quantize(SCHEMES["int4"], rows_of=()), 2, golden, tolerance=1.0)
    made = projected()
    assert Quantize(SCHEMES["w8a8"], rows_of=("head",))(made.program) == 2
    assert "linear_int8(%x" in made.program.to_text() and "quantize_rows" not in made.program.to_text()


def test_int8_weights_of_projections() -> None:
    golden = """
        %x: float32[s0, 8] = input
        %residual: float32[s0, 6] = input
        %0: float32[s0, 12] = inferc.linear_int8(%x, @qkv.int8, @qkv.scale, @bias)
        %1: float32[s0, 4] = aten.slice.Tensor(%0, -1, 0, 4)
        %2: float32[s0, 6] = inferc.linear_int8(%x, @o.int8, @o.scale, None, %residual)
        return (%1, %2)
    """
    made = projected()
    check(made, INT8, 2, golden, dequantized(projected()))
    found = {name: str(weight) for name, weight in made.program.weights.items()}
    expected = {"qkv.int8": "int8_values(qkv)", "qkv.scale": "int8_scales(qkv)", "bias": "bias"}
    assert found == {**expected, "o.int8": "int8_values(o)", "o.scale": "int8_scales(o)"}
    assert made.program.info.quantization == Quantization("int8", 2, {})


def test_rows_that_several_products_read_are_quantized_once() -> None:
    golden = """
        %x: float32[s0, 8] = input
        %residual: float32[s0, 6] = input
        %0: (int8[s0, 8], float32[s0]) = inferc.quantize_rows(%x)
        %1: int8[s0, 8] = getitem(%0, 0)
        %2: float32[s0] = getitem(%0, 1)
        %3: float32[s0, 12] = inferc.linear_w8a8(%1, %2, @qkv.int8, @qkv.scale, float32, @bias)
        %4: float32[s0, 4] = aten.slice.Tensor(%3, -1, 0, 4)
        %5: float32[s0, 6] = inferc.linear_w8a8(%1, %2, @o.int8, @o.scale, float32, None, %residual)
        return (%4, %5)
    """
    same = projected()
    values, scale = inferc.quantize_rows(same.inputs["x"])
    check(
        projected(), W8A8, 2, golden, dequantized(replace(same, inputs={**same.inputs, "x": values * scale[:, None]}))
    )


def test_projections_in_four_bits() -> None:
    golden = """
        %x: float32[s0, 40] = input
        %residual: float32[s0, 6] = input
        %0: (int8[s0, 40], float32[s0]) = inferc.quantize_rows(%x)
        %1: int8[s0, 40] = getitem(%0, 0)
        %2: float32[s0] = getitem(%0, 1)
        %3: float32[s0, 12] = inferc.linear_w4a8(%1, %2, @qkv.int4, @qkv.int4_group_scale, @qkv.int4_scale, float32, \
@bias)
        %4: float32[s0, 4] = aten.slice.Tensor(%3, -1, 0, 4)
        %5: float32[s0, 6] = inferc.linear_w4a8(%1, %2, @o.int4, @o.int4_group_scale, @o.int4_scale, float32, None, \
%residual)
        return (%4, %5)
    """
    weights = {"qkv": random(12, 40), "bias": random(12), "o": random(6, 40, seed=1)}
    made = example(projections, {"x": rows(40), "residual": rows(6)}, weights)
    made.check(Quantize(SCHEMES["int4"]), 2, golden, tolerance=3.0)  # of sums near 20
    found = {name: (str(weight), weight.shape) for name, weight in made.program.weights.items()}
    assert found["qkv.int4"] == ("int4_values(qkv, 32)", (12, 32))
    assert found["o.int4_group_scale"] == ("int4_group_scales(o, 32)", (6, 2))
    assert found["o.int4_scale"] == ("int4_scales(o, 32)", (6,))


def test_a_quantized_program_is_saved_and_loaded() -> None:
    made = projected()
    W8A8(made.program)
    loaded = program_lib.from_json(json.loads(json.dumps(program_lib.to_json(made.program))))
    assert loaded.to_text() == made.program.to_text() and loaded.weights == made.program.weights
    for found, expected in zip(replace(made, program=loaded).run(), made.run()):
        assert torch.equal(found, expected)


def made_experts() -> Example:
    def graph(x: Any, ids: Any, share: Any, gate_up: Any, down: Any) -> Any:
        return inferc.moe_experts.default(x, ids, share, gate_up, down)

    inputs = {"x": rows(8), "ids": torch.tensor([[0, 2]] * 5, dtype=torch.int32), "share": rows(2).abs()}
    return example(graph, inputs, {"gate_up": random(4, 12, 8), "down": random(4, 8, 6)})


def test_experts_in_int8() -> None:
    golden = """
        %x: float32[s0, 8] = input
        %ids: int32[s0, 2] = input
        %share: float32[s0, 2] = input
        %0: float32[s0, 8] = inferc.moe_experts(%x, %ids, %share, @gate_up.int8, @down.int8, None, None, 'silu', 1.0, \
0.0, False, @gate_up.scale, @down.scale)
        return (%0)
    """
    check(made_experts(), INT8, 1, golden, dequantized(made_experts()))


@pytest.mark.parametrize(("scheme", "kind"), [("w8a8", ""), ("int4", "4")])
def test_experts_on_quantized_rows(scheme: str, kind: str) -> None:
    weights = {"": "@gate_up.int8, @down.int8", "4": "@gate_up.int4, @down.int4"}[kind]
    scales = {"": "@gate_up.scale, @down.scale", "4": "@gate_up.int4_scale, @down.int4_scale"}[kind]
    of_groups = {"": "", "4": ", @gate_up.int4_group_scale, @down.int4_group_scale"}[kind]
    golden = f"""
        %x: float32[s0, 8] = input
        %ids: int32[s0, 2] = input
        %share: float32[s0, 2] = input
        %0: (int8[s0, 8], float32[s0]) = inferc.quantize_rows(%x)
        %1: int8[s0, 8] = getitem(%0, 0)
        %2: float32[s0] = getitem(%0, 1)
        %3: float32[s0, 8] = inferc.moe_experts(%1, %ids, %share, {weights}, None, None, 'silu', 1.0, 0.0, False, \
{scales}, %2, float32{of_groups})
        return (%3)
    """
    before, made = made_experts().run()[0], made_experts()
    made.check(Quantize(SCHEMES[scheme]), 1, golden, tolerance=float(before.abs().max()))
    error = (made.run()[0] - before).pow(2).mean().sqrt() / before.pow(2).mean().sqrt()
    assert 1e-4 < error < (0.03 if scheme == "w8a8" else 0.3)
    groups = {name: weight.shape for name, weight in made.program.weights.items()}
    if kind:
        assert groups["gate_up.int4"] == (4, 12, 16) and groups["down.int4_group_scale"] == (4, 8, 1)


def tied(token_ids: Any, embed: Any) -> Any:
    hidden = aten.embedding.default(embed, token_ids)
    return hidden, inferc.lm_head.default(hidden, embed, None)


def made_tied() -> Example:
    return example(tied, {"token_ids": torch.tensor([3, 0, 8, 3, 1])}, {"embed": random(9, 8)})


def test_a_tied_embedding_and_lm_head_read_the_same_integers() -> None:
    golden = """
        %token_ids: int64[s0] = input
        %0: float32[s0, 8] = inferc.embedding_int8(@embed.int8, @embed.scale, %token_ids, float32)
        %1: float32[s0, 9] = inferc.linear_int8(%0, @embed.int8, @embed.scale, None, None, float32)
        return (%0, %1)
    """
    made = made_tied()
    check(made, INT8, 2, golden, dequantized(made_tied()))
    assert list(made.program.weights) == ["embed.int8", "embed.scale"]


def test_the_rows_of_the_lm_head_are_quantized_too() -> None:
    golden = """
        %token_ids: int64[s0] = input
        %0: float32[s0, 8] = inferc.embedding_int8(@embed.int8, @embed.scale, %token_ids, float32)
        %1: (int8[s0, 8], float32[s0]) = inferc.quantize_rows(%0)
        %2: int8[s0, 8] = getitem(%1, 0)
        %3: float32[s0] = getitem(%1, 1)
        %4: float32[s0, 9] = inferc.linear_w8a8(%2, %3, @embed.int8, @embed.scale, float32)
        return (%0, %4)
    """
    made_tied().check(W8A8, 2, golden, tolerance=0.05)


def test_projections_alone_are_in_fp8() -> None:
    golden = """
        %x: float32[s0, 8] = input
        %residual: float32[s0, 6] = input
        %0: (float8_e4m3fn[s0, 8], float32[s0]) = inferc.quantize_rows_fp8(%x)
        %1: float8_e4m3fn[s0, 8] = getitem(%0, 0)
        %2: float32[s0] = getitem(%0, 1)
        %3: float32[s0, 12] = inferc.linear_fp8(%1, %2, @qkv.fp8, @qkv.scale, float32, @bias)
        %4: float32[s0, 4] = aten.slice.Tensor(%3, -1, 0, 4)
        %5: float32[s0, 6] = inferc.linear_fp8(%1, %2, @o.fp8, @o.scale, float32, None, %residual)
        return (%4, %5)
    """
    fp8, made = Quantize(SCHEMES["fp8"]), projected()
    before = made.run()
    made.check(fp8, 2, golden, tolerance=1.0)
    for found, was in zip(made.run(), before):
        error = (found - was).pow(2).mean().sqrt() / was.pow(2).mean().sqrt()
        assert 1e-3 < error < 0.05
    for others, reason, count in ((made_tied(), "embedding and LM head", 2), (made_experts(), "experts", 1)):
        others.check_untouched(fp8)
        assert others.program.info.quantization == Quantization("fp8", 0, {reason: count})


def test_what_stays_is_counted_with_the_reason() -> None:
    def graph(positions: Any, x: Any, embed: Any, router: Any, gate: Any, heads: Any, up: Any) -> Any:
        h = aten.add.Tensor(aten.embedding.default(embed, positions), x)
        scores = aten.mul.Tensor(aten.linear.default(h, router), 2.0)
        chosen = inferc.moe_routing.default(scores, None, 2, True)
        wide = inferc.linear_wide.default(h, gate)
        each = inferc.head_linear.default(aten.view.default(h, [-1, 2, 4]), heads)
        of_no_weight = aten.linear.default(h, aten.relu.default(up))
        return chosen, wide, each, of_no_weight

    weights = {"embed": random(9, 8), "router": random(4, 8), "gate": random(4, 8)}
    weights = {**weights, "heads": random(2, 3, 4), "up": random(6, 8)}

    def results(**values: Any) -> Any:
        chosen, *rest = graph(**values)
        return chosen[0], chosen[1], *rest

    def traced(positions: Any, x: Any, embed: Any, router: Any, gate: Any, heads: Any, up: Any) -> Any:
        return results(positions=positions, x=x, embed=embed, router=router, gate=gate, heads=heads, up=up)

    made = example(traced, {"positions": torch.arange(5), "x": rows(8)}, weights)
    made.check_untouched(INT8)
    assert isinstance(made.program.info.quantization, Quantization)
    assert made.program.info.quantization.kept == {
        "tables of positions": 1,
        "routers": 2,
        "products by a matrix for each head": 1,
        "products by what is no weight": 1,
    }


def test_a_weight_that_is_read_twice_is_stored_once_and_bfloat16_stays_the_result() -> None:
    def graph(x: Any, y: Any, w: Any) -> Any:
        return aten.linear.default(x, w), aten.linear.default(y, w)

    inputs = {"x": rows(8, dtype=BF16), "y": rows(8, dtype=BF16, seed=1)}
    made = example(graph, inputs, {"w": random(6, 8, dtype=BF16)})
    assert W8A8(made.program) == 2
    verify(made.program)
    assert list(made.program.weights) == ["w.int8", "w.scale"]
    assert [value.dtype for value in made.run()] == [BF16, BF16]
