"""Lazy weights: every chunking gives the same tensor, and packed layouts hold what they say."""

import json

import pytest
import torch
from graphs import Tensors, random
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from inferc.errors import UnsupportedError
from inferc.ir import weights as lib
from inferc.ir.ops.quantize import quantize_int4, quantize_rows
from inferc.ir.weights import LAYOUTS, Layout, Weight, materialize, physical_shape, read_rows, read_whole

A, B, C = random(20, 6), random(13, 6, seed=1), random(4, 5, 6, seed=2)
READER = Tensors({"a": A, "b": B, "c": C})
a, b, c = (lib.source(name, tuple(value.shape), value.dtype) for name, value in READER.tensors.items())
EXPRESSIONS: list[tuple[Weight, Tensor]] = [
    (a, A),
    (lib.constant(B), B),
    (lib.cast(a, torch.bfloat16), A.bfloat16()),
    (lib.slice_(a, 0, 3, 17), A[3:17]),
    (lib.slice_(a, 1, 1, 4), A[:, 1:4]),
    (lib.concat((a, b)), torch.cat((A, B))),
    (lib.concat((a, a), dim=1), torch.cat((A, A), 1)),
    (lib.concat((lib.slice_(b, 0, 0, 5), lib.cast(lib.slice_(a, 0, 5, 9), torch.float32))), torch.cat((B[:5], A[5:9]))),
    (lib.stack((a, a, a)), torch.stack((A, A, A))),
    (lib.permute(a, (1, 0)), A.T),
    (lib.permute(c, (0, 2, 1)), C.transpose(1, 2)),
    (lib.reshape(c, (20, 6)), C.reshape(20, 6)),
    (lib.elementwise((a,), "x0 + 1", torch.bfloat16), (A + 1).bfloat16()),
    (lib.elementwise((c, lib.slice_(a, 0, 2, 7)), "x0 * x1", torch.float32), C * A[2:7]),
    (lib.elementwise((lib.slice_(a, 0, 3, 4), b), "x0 - x1", torch.float32), A[3:4] - B),
    (lib.padded(a, 0, 25), torch.nn.functional.pad(A, (0, 0, 0, 5))),
    (lib.padded(c, 1, 8), torch.nn.functional.pad(C, (0, 0, 0, 3))),
    (lib.int8_values(lib.padded(b, 0, 16)), quantize_rows(torch.nn.functional.pad(B, (0, 0, 0, 3)))[0]),
    (lib.int8_scales(a), A.abs().amax(1) / 127),
    (lib.int8_values(a), (A / (A.abs().amax(1, keepdim=True) / 127)).round().to(torch.int8)),
    (lib.fp8_scales(lib.concat((a, b))), torch.cat((A, B)).abs().amax(1) / 448),
    (lib.fp8_values(c), (C / (C.abs().amax(2, keepdim=True) / 448)).to(torch.float8_e4m3fn)),
    (lib.int4_values(a, 32), quantize_int4(A, 32)[0]),
    (lib.int4_group_scales(lib.concat((a, b)), 32), quantize_int4(torch.cat((A, B)), 32)[1]),
    (lib.int4_scales(lib.concat((a, b)), 32), quantize_int4(torch.cat((A, B)), 32)[2]),
    (lib.int8_scales(lib.concat((a, b))), torch.cat((A, B)).abs().amax(1) / 127),
    (lib.int8_scales(c), C.abs().amax(2) / 127),
    (lib.int8_values(c), (C / (C.abs().amax(2, keepdim=True) / 127)).round().to(torch.int8)),
]


@pytest.mark.parametrize(
    ("weight", "expected"), EXPRESSIONS, ids=lambda value: str(value) if isinstance(value, Weight) else ""
)
def test_expressions_read_whole_in_rows_and_in_chunks(weight: Weight, expected: Tensor) -> None:
    assert (weight.shape, weight.dtype) == (tuple(expected.shape), expected.dtype)
    assert torch.equal(read_whole(weight, READER), expected)
    assert torch.equal(read_rows(weight, READER, 1, 3), expected[1:3])
    for chunk_bytes in (1, 100, 1 << 20):
        assert torch.equal(torch.cat(list(materialize(weight, READER, chunk_bytes))), expected)
    assert lib.from_json(json.loads(json.dumps(lib.to_json(weight)))) == weight
    assert all(leaf.op in ("source", "constant", "zeros") for leaf in weight.sources())


PANELS = sorted(name for name, layout in LAYOUTS.items() if isinstance(layout, Layout))


@given(st.integers(1, 40), st.integers(1, 9), st.sampled_from(PANELS), st.integers(1, 4000))
@settings(max_examples=60, deadline=None)
def test_panels_hold_each_element_once_whatever_the_chunks(n: int, k: int, name: str, chunk_bytes: int) -> None:
    layout, value = LAYOUTS[name], torch.arange(1.0, n * k + 1).view(n, k)
    assert isinstance(layout, Layout)
    packed = lib.pack(lib.source("w", (n, k), torch.float32), name)
    stored = torch.cat(list(materialize(packed, Tensors({"w": value}), chunk_bytes)))
    assert tuple(stored.shape) == physical_shape(packed) == layout.physical_shape((n, k))
    row, column = torch.meshgrid(torch.arange(n), torch.arange(k), indexing="ij")
    assert torch.equal(stored[row // 16, column // layout.k_unit, row % 16, column % layout.k_unit], value)
    assert float(stored.sum()) == float(value.sum())  # the padding is zero


def test_pairs_of_gate_and_up() -> None:
    value = torch.arange(2.0 * 6 * 3).view(2, 6, 3)
    packed = lib.pack(lib.source("w", (2, 6, 3), torch.float32), "pairs")
    stored = torch.cat(list(materialize(packed, Tensors({"w": value}), chunk_bytes=1)))
    assert physical_shape(packed) == (2, 6, 3)
    assert torch.equal(stored, value[:, [0, 3, 1, 4, 2, 5]])


def test_stacked_experts_are_packed_one_by_one() -> None:
    packed = lib.pack(lib.stack((a, lib.slice_(lib.concat((a, b)), 0, 13, 33))), "panel16_k2")
    stored = torch.cat(list(materialize(packed, READER, chunk_bytes=1)))
    assert stored.shape == (2, 2, 3, 16, 2)
    assert torch.equal(stored[1], LAYOUTS["panel16_k2"].pack(torch.cat((A, B))[13:33]))
    assert torch.equal(read_whole(packed, READER)[0], A)


def test_int8_is_symmetric_rounds_ties_to_even_and_takes_rows_of_zeros() -> None:
    value = torch.tensor([[127.0, 0.5, 1.5, -2.5, -127.0], [0.0] * 5, [1e-45, 0, 0, 0, 0], [-3.0, 3.0, 1.0, 0, 0]])
    w = lib.source("w", (4, 5), torch.float32)
    values = read_whole(lib.int8_values(w), Tensors({"w": value}))
    scales = read_whole(lib.int8_scales(w), Tensors({"w": value}))
    assert values.tolist() == [[127, 0, 2, -2, -127], [0] * 5, [0] * 5, [-127, 127, 42, 0, 0]]
    assert scales[:3].tolist() == [1.0, 1.0, 1.0]
    half = (value[3] - values[3] * scales[3]).abs()
    assert float(half.max()) <= float(scales[3]) / 2


def test_a_weight_with_a_nan_shows_in_its_scale() -> None:
    value = torch.tensor([[1.0, float("nan")], [float("inf"), 2.0], [1.0, 2.0]])
    scales = read_whole(lib.int8_scales(lib.source("w", (3, 2), torch.float32)), Tensors({"w": value}))
    assert scales.isfinite().tolist() == [False, False, True]


def test_quantizing_holds_no_more_rows_than_a_chunk_has() -> None:
    class Watched(Tensors):
        most = 0

        def rows(self, name: str, start: int, stop: int) -> Tensor:
            self.most = max(self.most, stop - start)
            return super().rows(name, start, stop)

    reader = Watched({"w": random(256, 64)})
    w = lib.source("w", (256, 64), torch.float32)
    for weight in (
        lib.int8_scales(w),
        lib.int8_values(w),
        lib.fp8_values(w),
        lib.pack(lib.int8_values(w), "panel16_k4"),
    ):
        list(materialize(weight, reader, chunk_bytes=32 * 64 * 4))
    assert reader.most == 32


def test_a_tensor_without_an_axis_is_refused_by_name() -> None:
    scale = lib.cast(lib.source("model.scale", (), torch.float32), torch.bfloat16)
    reader = Tensors({"model.scale": torch.tensor(2.0)})
    for read in (read_whole, lambda weight, reader: list(materialize(weight, reader))):
        with pytest.raises(UnsupportedError, match="tensor model.scale is a single number"):
            read(scale, reader)


def test_an_unknown_layout_is_named() -> None:
    with pytest.raises(KeyError, match="unknown layout 'rows'; known: panel16_k1, panel16_k2, panel16_k4"):
        lib.pack(a, "rows")
