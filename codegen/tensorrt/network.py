"""A TensorRT network under construction, which the functions of all ops add to.

The network is strongly typed: every tensor has the dtype that its layer gives it, and is cast where another dtype is
needed. Elementwise layers need operands of one rank, so operands of a smaller rank get axes of 1 in front.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from inferc.codegen.construction import Construction
from inferc.codegen.tensorrt.adapter import Building
from inferc.ir.program import Program, dtype_name, name_of

NAMES = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int8: "int8",
    torch.float8_e4m3fn: "fp8",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.bool: "bool",
}
WEIGHT_TYPES = {dtype_name(dtype): name for dtype, name in NAMES.items()}

Tensor = Any  # the ITensor of the package that is installed


class Bytes:
    """A weight's bytes, row-major, in memory that outlives the build."""

    def __init__(self, dtype: str, shape: tuple[int, ...], data: NDArray[np.uint8]) -> None:
        self.dtype, self.shape, self.data = dtype, shape, data


class TensorRTNetwork(Construction[Tensor]):
    """The TensorRT tensors of the program's nodes, and methods that add layers on them.

    capacity: the number of tokens that a sequence has room for in the caches, which TensorRT needs as a constant.
    """

    def __init__(self, building: Building, program: Program, weights: Mapping[str, Bytes], capacity: int) -> None:
        super().__init__(program)
        self.capacity = capacity
        self.trt, self.network = building.library.module, building.network
        self._checked = building.library.checked
        self.weights = weights
        self._alive: list[NDArray[Any]] = []  # the constants' memory, which the network points to

    # ------------------------------------------------------------------------------------------- values

    def dtype(self, dtype: torch.dtype) -> Any:
        return getattr(self.trt, NAMES[dtype])

    def value(self, node: Any) -> Any:
        """Return the tensor of an argument that is a node; None stays None."""
        if node is None:
            return None
        if node.op == "get_attr" and node not in self.values:
            name = str(node.target)
            self.values[node] = self.shared(("weight", name), lambda: self._weight(name))
        return self.values[node]

    def give(self, node: fx.Node, value: Tensor) -> None:
        """Set the tensor of a node that is made elsewhere; for a weight, of every node that reads this weight."""
        self.values[node] = value
        if node.op == "get_attr":
            self._kept["weight", str(node.target)] = value

    def has(self, node: fx.Node) -> bool:
        return node in self.values

    def _weight(self, name: str) -> Tensor:
        stored = self.weights[name]
        return self._constant(name, stored.dtype, stored.shape)

    def _constant(self, name: str, dtype: str, shape: tuple[int, ...], suffix: str = "") -> Tensor:
        """Return a constant of a weight's bytes, read as `dtype` and `shape`."""
        count = int(np.prod(shape, dtype=np.int64))
        weights = self.trt.Weights(getattr(self.trt, WEIGHT_TYPES[dtype]), self.weights[name].data.ctypes.data, count)
        return self.add("constant", shape, weights, name=name + suffix)

    def dequantized(self, weight: fx.Node, scale: fx.Node, dtype: torch.dtype) -> Tensor:
        """Return an int8 weight [..., n, k] times the scales of its rows [..., n], in `dtype`.

        The integers are an input, or a constant of the plan right in front of the layer that dequantizes them.
        """

        def make() -> Tensor:
            shape = [int(size) for size in weight.meta["val"].shape]
            # In float16 the scales of weights with small magnitudes would lose bits.
            of_scales = torch.float32 if dtype == torch.float16 else dtype
            scales = self.view(self.cast(self.value(scale), of_scales), -1)
            layer = self.layer("dequantize", self._stored(weight), scales, self.dtype(dtype))
            layer.axis = 0
            return self.view(layer.get_output(0), *shape)

        return self.shared(("dequantized", str(weight.target), dtype), make)

    def dequantized_by(self, weight: fx.Node, unit: float, dtype: torch.dtype) -> Tensor:
        """Return a weight [n, k] in int8 or fp8 times one number."""

        def make() -> Tensor:
            return self.add("dequantize", self._stored(weight), self.number(unit, 0), self.dtype(dtype))

        return self.shared(("dequantized by", str(weight.target), unit, dtype), make)

    def _stored(self, weight: fx.Node) -> Tensor:
        """Return a weight [..., k] as [n, k], from an input or from a constant of the plan."""
        *outer, size = (int(each) for each in weight.meta["val"].shape)
        if self.has(weight):
            return self.value(weight) if len(outer) == 1 else self.view(self.value(weight), -1, size)
        name, dtype = str(weight.target), dtype_name(weight.meta["val"].dtype)
        return self.shared(("stored", name), lambda: self._constant(name, dtype, (math.prod(outer), size), ".stored"))

    def packed_rows(self, weight: fx.Node, ids: Tensor) -> Tensor:
        """Look up rows of an int8 table, and return them as float32 [T, k].

        TensorRT has no lookup in int8 and might dequantize the whole table, so four elements are read as one int32 and
        separated by arithmetic.
        """
        stored = self.weights[str(weight.target)]
        rows, size = stored.shape

        def make() -> Tensor:
            return self._constant(str(weight.target), "int32", (rows, size // 4), ".words")

        left = self.view(self.gather(self.shared(("words", str(weight.target)), make), ids, 0), -1, size // 4, 1)
        parts = []
        for _ in range(4):  # the lowest byte first
            rest = self.elementwise("FLOOR_DIV", left, self.number(256, 3, torch.int32))
            byte = self.elementwise("SUB", left, self.elementwise("PROD", rest, self.number(256, 3, torch.int32)))
            parts.append(byte)
            left = rest
        unsigned = self.cast(self.view(self.concat(parts, 2), -1, size), torch.float32)
        is_negative = self.elementwise("GREATER", unsigned, self.number(127.5, 2))
        return self.where(is_negative, self.elementwise("SUB", unsigned, self.number(256.0, 2)), unsigned)

    def input(self, node: fx.Node) -> None:
        """Add an input of the program: symbolic sizes stay free, except for the capacity of the caches."""
        value = node.meta["val"]
        shape = [size if isinstance(size, int) else -1 for size in value.shape]
        if value.dim() == 4:
            shape[2] = self.capacity
        self.values[node] = self.network.add_input(self.unique(node.name), self.dtype(value.dtype), tuple(shape))

    def named_input(self, name: str) -> Tensor:
        return self.values[self.program.input(name)]

    def output(self, value: Tensor, name: str) -> None:
        """Make a layer's result an output of the network without a copy.

        A copy would separate a cache from the memory that it is in.
        """
        value.name = self.unique(name)
        self.network.mark_output(value)

    def emit(self, node: fx.Node, call: Callable[[TensorRTNetwork, fx.Node], Any]) -> None:
        """Store what `call` makes of a node; the layers that it adds get names from the node."""
        self._node = node
        made = self.values[node] = call(self, node)
        with self._checked(f"node {name_of(node)}"):  # TensorRT checks layers only when their shapes are read
            wanted = node.meta["val"]
            if isinstance(made, tuple):
                for value, want in zip(made, wanted, strict=True):
                    self._check(node, value, want)
            else:
                self._check(node, made, wanted)
        self._node = None

    def _check(self, node: fx.Node, value: Tensor, want: torch.Tensor) -> None:
        """Assert that a call made a tensor of the node's shape and dtype."""
        found = (*value.shape,)
        fits = len(found) == want.dim() and all(
            size == each for size, each in zip(found, want.shape, strict=True) if isinstance(each, int) and size != -1
        )
        assert fits and value.dtype == self.dtype(want.dtype), (
            f"{name_of(node)}: {found} {value.dtype}, expected {want}"
        )

    # ------------------------------------------------------------------------------------------- layers

    def layer(self, kind: str, *args: Any, name: str | None = None) -> Any:
        """Call `add_{kind}` of the network; raise UnsupportedError with the node's name if TensorRT refuses."""
        where = name_of(self._node) if self._node is not None else "shared"
        with self._checked(f"node {where}, layer {kind}") as checked:
            made = checked.made(getattr(self.network, f"add_{kind}")(*args))
            made.name = self.unique(f"{where}.{kind}" if name is None else name)
        return made

    def add(self, kind: str, *args: Any, name: str | None = None) -> Tensor:
        """Add a layer with one result, and return the result."""
        return self.layer(kind, *args, name=name).get_output(0)

    def constant(self, value: Any, dtype: type[np.generic] = np.int64) -> Tensor:
        """Return a number, or an array of any shape, as a constant."""
        array = np.array(value, dtype, order="C")
        key = (array.dtype.str, array.shape, array.tobytes())

        def make() -> Tensor:
            self._alive.append(array)
            return self.add("constant", array.shape, self.trt.Weights(array), name=f"constant.{len(self._alive)}")

        return self.shared(key, make)

    def number(self, value: float, rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return one number as a constant that can be combined with tensors of `rank`."""
        if not dtype.is_floating_point:
            return self.constant(np.full((1,) * rank, value), np.int64 if dtype == torch.int64 else np.int32)
        made = self.constant(np.full((1,) * rank, value), np.float32)
        return self.shared(("number", value, rank, dtype), lambda: self.cast(made, dtype))

    def cast(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        to = self.dtype(dtype)
        return value if value.dtype == to else self.add("cast", value, to)

    def wide(self, node: fx.Node) -> Tensor:
        """Return the node's value in float32."""
        return self.cast(self.value(node), torch.float32)

    # ------------------------------------------------------------------------------------------ operators

    def elementwise(self, kind: str, left: Tensor, right: Tensor) -> Tensor:
        """Add a layer of a kind of ElementWiseOperation; axes of 1 are broadcast, a smaller rank gets them in front."""
        rank = max(len(left.shape), len(right.shape))
        operation = getattr(self.trt.ElementWiseOperation, kind)
        return self.add("elementwise", self.to_rank(left, rank), self.to_rank(right, rank), operation)

    def mul(self, left: Tensor, right: Tensor) -> Tensor:
        return self.elementwise("PROD", left, right)

    def plus(self, left: Tensor, right: Tensor) -> Tensor:
        return self.elementwise("SUM", left, right)

    def times(self, value: Tensor, number: float) -> Tensor:
        """Multiply a float32 tensor by a number."""
        return value if number == 1.0 else self.mul(value, self.number(number, len(value.shape)))

    def unary(self, kind: str, value: Tensor) -> Tensor:
        return self.add("unary", value, getattr(self.trt.UnaryOperation, kind))

    def activation(self, kind: str, value: Tensor) -> Tensor:
        return self.add("activation", value, getattr(self.trt.ActivationType, kind))

    def where(self, condition: Tensor, left: Tensor, right: Tensor) -> Tensor:
        rank = max(len(each.shape) for each in (condition, left, right))
        return self.add("select", *(self.to_rank(each, rank) for each in (condition, left, right)))

    def matmul(self, left: Tensor, right: Tensor, *, transposed: bool = False) -> Tensor:
        """Multiply matrices in the last two axes; if `transposed`, `right` is [..., n, k]."""
        operation = self.trt.MatrixOperation
        how = operation.TRANSPOSE if transposed else operation.NONE
        rank = max(len(left.shape), len(right.shape))
        left, right = self.to_rank(left, rank), self.to_rank(right, rank)
        return self.add("matrix_multiply", left, operation.NONE, right, how)

    def reduce(self, kind: str, value: Tensor, axis: int, *, keep: bool = True) -> Tensor:
        return self.add("reduce", value, getattr(self.trt.ReduceOperation, kind), 1 << axis, keep)

    def softmax(self, value: Tensor, axis: int) -> Tensor:
        layer = self.layer("softmax", value)
        layer.axes = 1 << axis
        return layer.get_output(0)

    def gather(self, value: Tensor, indices: Tensor, axis: int) -> Tensor:
        return self.add("gather", value, indices, axis)

    def concat(self, values: list[Tensor], axis: int) -> Tensor:
        layer = self.layer("concatenation", values)
        layer.axis = axis % len(values[0].shape)
        return layer.get_output(0)

    # --------------------------------------------------------------------------------------------- shapes

    def to_rank(self, value: Tensor, rank: int) -> Tensor:
        missing = rank - len(value.shape)
        if not missing:
            return value
        return self.view(value, *([1] * missing), *value.shape)

    def view(self, value: Tensor, *sizes: int | Tensor) -> Tensor:
        """Reshape a tensor; a size is a number, -1 for what is left, or an int64 [1] known when the step runs."""
        is_static = all(isinstance(size, int) for size in sizes) and sizes.count(-1) <= 1
        shape = None if is_static else self.shape_of(sizes, value)
        layer = self.layer("shuffle", value)
        if shape is None:
            layer.reshape_dims = sizes
        else:
            layer.set_input(1, shape)
        return layer.get_output(0)

    def shape_of(self, sizes: tuple[int | Tensor, ...], value: Tensor) -> Tensor:
        """Return a shape as a tensor.

        sizes: as in `view`. A -1 becomes the size of the axis of `value` at the same place counted from the end.
        """
        rank = len(value.shape)
        parts = []
        for place, size in enumerate(sizes):
            if isinstance(size, int) and size == -1:
                parts.append(self.size(value, rank - len(sizes) + place))
            else:
                parts.append(self.constant([size]) if isinstance(size, int) else size)
        return self.concat(parts, 0)

    def size(self, value: Tensor, axis: int) -> Tensor:
        """Return the size of an axis as int64 [1], known when the step runs."""
        return self.gather(self.add("shape", value), self.constant([axis], np.int32), 0)

    def transpose(self, value: Tensor, *order: int) -> Tensor:
        layer = self.layer("shuffle", value)
        layer.first_transpose = order
        return layer.get_output(0)

    def part(self, value: Tensor, axis: int, start: int, end: int, step: int = 1) -> Tensor:
        """Return the elements [start, end) of an axis, in steps of `step`."""
        rank = len(value.shape)
        axis %= rank
        starts, steps, sizes = [0] * rank, [1] * rank, list(value.shape)
        starts[axis], steps[axis], sizes[axis] = start, step, -(-(end - start) // step)
        shape = self.shape_of(tuple(sizes), value) if min(sizes) < 0 else None
        layer = self.layer("slice", value, starts, [max(size, 0) for size in sizes], steps)
        if shape is not None:
            layer.set_input(2, shape)
        return layer.get_output(0)
