"""The results of a TensorRT network, layer by layer on the CPU: each by what TensorRT's documentation says of it.

No GPU runs here, and TensorRT computes on nothing else. So this says whether our layers, put together, are the model;
not whether TensorRT's kernels are its layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorrt_rtx as trt
import torch
from torch import Tensor

from inferc.codegen.tensorrt.network import NAMES, Bytes

DTYPES = {getattr(trt, name): dtype for dtype, name in NAMES.items()}
ELEMENTWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "SUB": torch.sub,
    "PROD": torch.mul,
    "DIV": torch.div,
    "MAX": torch.maximum,
    "MIN": torch.minimum,
    "FLOOR_DIV": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "LESS": torch.lt,
    "GREATER": torch.gt,
    "EQUAL": torch.eq,
    "AND": torch.logical_and,
}
UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "SQRT": torch.sqrt,
    "RECIP": torch.reciprocal,
    "ABS": torch.abs,
    "ERF": torch.erf,
    "EXP": torch.exp,
    "FLOOR": torch.floor,
    "LOG": torch.log,
    "COS": torch.cos,
    "SIN": torch.sin,
}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "SIGMOID": torch.sigmoid,
    "TANH": torch.tanh,
    "GELU_ERF": torch.nn.functional.gelu,
    "GELU_TANH": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}
REDUCTIONS: dict[str, Callable[..., Tensor]] = {"AVG": torch.mean, "SUM": torch.sum, "MAX": torch.amax}


class Evaluated:
    """A network, kept after the one it was made of is gone. Called with its inputs; gives its outputs by name."""

    def __init__(self, network: Any, weights: Mapping[str, Bytes]) -> None:
        self._steps: list[tuple[Callable[..., Any], list[str], list[str]]] = []
        self.constants: dict[str, Tensor] = {}
        inputs = [network.get_input(at) for at in range(network.num_inputs)]
        self.outputs = [network.get_output(at).name for at in range(network.num_outputs)]
        self.shapes = {each.name: tuple(each.shape) for each in inputs}
        self.dtypes = {each.name: DTYPES[each.dtype] for each in inputs}
        for at in range(network.num_layers):
            layer = network.get_layer(at)
            kind = layer.type.name
            layer.__class__ = CLASSES[kind]
            results = [layer.get_output(place) for place in range(layer.num_outputs)]
            if kind == "CONSTANT":
                self.constants[results[0].name] = _constant(layer, results[0], weights)
                continue
            every = (layer.get_input(place) for place in range(layer.num_inputs))
            given = [each for each in every if each is not None]
            run = RUN[kind](layer)
            if kind == "ATTENTION_INPUT":
                continue  # its inputs are read where its output is made
            if kind == "ATTENTION_OUTPUT":
                attention = layer.attention
                given = [attention.get_input(place) for place in range(3)]
                given += [attention.mask, attention.key_value_lengths]
            self._steps.append((run, [each.name for each in given], [each.name for each in results]))

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        values = {**self.constants, **inputs}
        for name, shape in self.shapes.items():
            found = tuple(inputs[name].shape)
            assert len(found) == len(shape), (name, found, shape)
            assert all(want in (-1, size) for want, size in zip(shape, found, strict=True)), (name, found, shape)
            assert inputs[name].dtype == self.dtypes[name], (name, inputs[name].dtype)
        for run, given, results in self._steps:
            made = run(*(values[name] for name in given))
            made = made if isinstance(made, tuple) else (made,)
            values.update(zip(results, made, strict=True))
        return {name: values[name] for name in self.outputs}


def _constant(layer: Any, result: Any, weights: Mapping[str, Bytes]) -> Tensor:
    """A copy: the network points to memory of whoever made it. Of bfloat16 the bindings give no array."""
    dtype, shape = DTYPES[result.dtype], tuple(layer.shape)
    name = layer.name.removesuffix(".stored").removesuffix(".words")
    if name in weights:
        return torch.from_numpy(weights[name].data.copy()).view(dtype).reshape(shape)
    return torch.from_numpy(layer.weights.copy()).view(dtype).reshape(shape)


def _as_wide(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Computed in float32 and rounded once, as kernels do with 16 bits."""

    def run(*values: Tensor) -> Tensor:
        dtype = values[0].dtype
        if not dtype.is_floating_point:
            return function(*values)
        made = function(*(each.float() for each in values))
        return made if made.dtype == torch.bool else made.to(dtype)

    return run


def _elementwise(layer: Any) -> Callable[..., Tensor]:
    function = _as_wide(ELEMENTWISE[layer.op.name])

    def run(left: Tensor, right: Tensor) -> Tensor:
        assert left.dtype == right.dtype and left.dim() == right.dim(), (layer.name, left.dtype, right.dtype)
        return function(left, right)

    return run


def _matmul(layer: Any) -> Callable[..., Tensor]:
    turned = [each == trt.MatrixOperation.TRANSPOSE for each in (layer.op0, layer.op1)]
    assert trt.MatrixOperation.VECTOR not in (layer.op0, layer.op1)

    def product(*values: Tensor) -> Tensor:
        assert values[0].dim() == values[1].dim()
        return torch.matmul(*(each.mT if turn else each for each, turn in zip(values, turned, strict=True)))

    return _as_wide(product)


def _axis(mask: int) -> int:
    axis = mask.bit_length() - 1
    assert mask == 1 << axis, mask
    return axis


def _reduce(layer: Any) -> Callable[..., Tensor]:
    function, axis, keep = REDUCTIONS[layer.op.name], _axis(layer.axes), layer.keep_dims
    return _as_wide(lambda value: function(value, dim=axis, keepdim=keep))


def _softmax(layer: Any) -> Callable[..., Tensor]:
    axis = _axis(layer.axes)
    return _as_wide(lambda value: value.softmax(axis))


def _topk(layer: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    axis, count = _axis(layer.axes), layer.k
    assert layer.op == trt.TopKOperation.MAX

    def run(value: Tensor) -> tuple[Tensor, Tensor]:
        values, indices = value.sort(stable=True, dim=axis, descending=True)
        return values.narrow(axis, 0, count), indices.narrow(axis, 0, count).to(torch.int32)

    return run


def _gather(layer: Any) -> Callable[..., Tensor]:
    axis, mode = layer.axis, layer.mode
    assert layer.num_elementwise_dims == 0

    def run(value: Tensor, indices: Tensor) -> Tensor:
        if mode == trt.GatherMode.ELEMENT:
            return value.gather(axis, indices.long())
        assert mode == trt.GatherMode.DEFAULT
        found = value.index_select(axis, indices.long().reshape(-1))
        return found.reshape(*value.shape[:axis], *indices.shape, *value.shape[axis + 1 :])

    return run


def _shuffle(layer: Any) -> Callable[..., Tensor]:
    first, second = list(layer.first_transpose), list(layer.second_transpose)
    sizes = None if layer.reshape_dims is None else tuple(layer.reshape_dims)

    def run(value: Tensor, shape: Tensor | None = None) -> Tensor:
        value = value.permute(first[: value.dim()])
        wanted = sizes if shape is None else tuple(shape.tolist())
        if wanted is not None:
            assert 0 not in wanted, (layer.name, wanted)
            value = value.reshape(wanted)
        return value.permute(second[: value.dim()])

    return run


def _slice(layer: Any) -> Callable[..., Tensor]:
    starts, steps = tuple(layer.start), tuple(layer.stride)
    sizes = tuple(layer.shape or ())
    assert layer.mode == trt.SampleMode.STRICT_BOUNDS

    def run(value: Tensor, *shape: Tensor) -> Tensor:
        wanted = tuple(shape[-1].tolist()) if shape else sizes
        for axis, (start, step, size) in enumerate(zip(starts, steps, wanted, strict=True)):
            end = start + step * (size - 1) + 1
            assert end <= value.shape[axis], (layer.name, axis, end, value.shape)
            value = value[(slice(None),) * axis + (slice(start, end, step),)]
        return value

    return run


def _quantize(layer: Any) -> Callable[..., Tensor]:
    """Return what a QUANTIZE layer computes: its input over one scale, rounded to the output's dtype."""
    dtype = DTYPES[layer.get_output(0).dtype]

    def run(value: Tensor, scale: Tensor) -> Tensor:
        assert scale.dim() == 0
        return rounded(value.float() / scale, dtype)

    return run


def rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest number of the dtype, of two the even one, and no further than the ends."""
    if dtype == torch.float8_e4m3fn:
        return value.clamp(-448, 448).to(dtype)
    assert dtype == torch.int8
    return value.round().clamp(-128, 127).to(dtype)


def _dequantize(layer: Any) -> Callable[..., Tensor]:
    """Return the input times one scale, or times one for each of the first axis."""
    axis, dtype = layer.axis, DTYPES[layer.get_output(0).dtype]

    def run(value: Tensor, scale: Tensor) -> Tensor:
        assert scale.dim() == 0 or axis == 0
        return (value.float() * (scale.float()[:, None] if scale.dim() else scale)).to(dtype)

    return run


def _attention(layer: Any) -> Callable[..., Tensor]:
    attention = layer.attention
    assert attention.causal_kind == trt.CausalMaskKind.NONE
    assert attention.norm_op == trt.AttentionNormalizationOp.SOFTMAX

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
        """Return softmax(q k + mask) v, unscaled; a key is read where the mask is true and it is within the lengths."""
        group = q.shape[1] // k.shape[1]
        keys, values = (each.float().repeat_interleave(group, 1) for each in (k, v))
        within = torch.arange(k.shape[2])[None, None, None] < lengths[:, None, None, None]
        scores = (q.float() @ keys.mT).masked_fill(~(mask & within), -torch.inf)
        return (scores.softmax(-1) @ values).to(q.dtype)

    return run


def _kv_cache_update(layer: Any) -> Callable[..., Tensor]:
    assert layer.cache_mode == trt.KVCacheMode.LINEAR

    def run(cache: Tensor, update: Tensor, starts: Tensor) -> Tensor:
        """Write into the cache's own memory."""
        for seq, start in enumerate(starts.tolist()):
            cache[seq, :, start : start + update.shape[2]] = update[seq]
        return cache

    return run


RUN: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "ELEMENTWISE": _elementwise,
    "UNARY": lambda layer: _as_wide(UNARY[layer.op.name]),
    "ACTIVATION": lambda layer: _as_wide(ACTIVATIONS[layer.type.name]),
    "IDENTITY": lambda _: lambda value: value,
    "CAST": lambda layer: lambda value, to=DTYPES[layer.to_type]: value.to(to),
    "MATRIX_MULTIPLY": _matmul,
    "REDUCE": _reduce,
    "SOFTMAX": _softmax,
    "TOPK": _topk,
    "GATHER": _gather,
    "SHAPE": lambda _: lambda value: torch.tensor(value.shape, dtype=torch.int64),
    "SHUFFLE": _shuffle,
    "SLICE": _slice,
    "CONCATENATION": lambda layer: lambda *values, axis=layer.axis: torch.cat(values, axis),
    "SELECT": lambda _: torch.where,
    "ATTENTION_INPUT": lambda _: lambda: None,
    "ATTENTION_OUTPUT": _attention,
    "KV_CACHE_UPDATE": _kv_cache_update,
    "QUANTIZE": _quantize,
    "DEQUANTIZE": _dequantize,
}
CLASSES = {
    "CONSTANT": trt.IConstantLayer,
    "ELEMENTWISE": trt.IElementWiseLayer,
    "UNARY": trt.IUnaryLayer,
    "ACTIVATION": trt.IActivationLayer,
    "IDENTITY": trt.IIdentityLayer,
    "CAST": trt.ICastLayer,
    "MATRIX_MULTIPLY": trt.IMatrixMultiplyLayer,
    "REDUCE": trt.IReduceLayer,
    "SOFTMAX": trt.ISoftMaxLayer,
    "TOPK": trt.ITopKLayer,
    "GATHER": trt.IGatherLayer,
    "SHAPE": trt.IShapeLayer,
    "SHUFFLE": trt.IShuffleLayer,
    "SLICE": trt.ISliceLayer,
    "CONCATENATION": trt.IConcatenationLayer,
    "SELECT": trt.ISelectLayer,
    "ATTENTION_INPUT": trt.IAttentionInputLayer,
    "ATTENTION_OUTPUT": trt.IAttentionOutputLayer,
    "KV_CACHE_UPDATE": trt.IKVCacheUpdateLayer,
    "QUANTIZE": trt.IQuantizeLayer,
    "DEQUANTIZE": trt.IDequantizeLayer,
}
