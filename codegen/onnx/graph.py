"""An ONNX graph in the making: what all calls write into."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from onnx_ir.tape import Tape
from torch import Tensor, fx

from inferc.ir.program import Program, name_of
from inferc.manifest import StoredWeight

OPSET = 24  # the first with TensorScatter, and Attention that is told how much of its cache is filled
DTYPES = {
    torch.float32: ir.DataType.FLOAT,
    torch.float16: ir.DataType.FLOAT16,
    torch.bfloat16: ir.DataType.BFLOAT16,
    torch.int8: ir.DataType.INT8,
    torch.uint8: ir.DataType.UINT8,
    torch.int32: ir.DataType.INT32,
    torch.int64: ir.DataType.INT64,
    torch.bool: ir.DataType.BOOL,
}

MICROSOFT = "com.microsoft"  # the domain of onnxruntime's own ops
AXES = {("token_ids", 0): "num_tokens", ("starts", 0): "num_seqs", ("logits_rows", 0): "num_rows"}


class OnnxGraph:
    """Values of the program's nodes as ONNX values, and ops on them. Weights stay where the artifact has them."""

    def __init__(self, program: Program, weights: Mapping[str, StoredWeight]) -> None:
        self.program, self._weights = program, weights
        self.tape = Tape()
        self.values: dict[fx.Node, Any] = {}  # ir.Value, or a tuple of them
        self.inputs: list[ir.Value] = []
        self.initializers: list[ir.Value] = []
        self.domains: set[str] = {""}
        self._axes = _axes(program)
        self._kept: dict[Any, ir.Value] = {}
        self._names: set[str] = set()
        self._node: fx.Node | None = None

    # ------------------------------------------------------------------------------------------- values

    def value(self, node: Any) -> Any:
        """Of an argument that is a node; None stays None."""
        if node is None:
            return None
        if node.op == "get_attr" and node not in self.values:
            stored = self._weights[str(node.target)]
            self.values[node] = self.weight(node, stored.physical_shape, getattr(torch, stored.dtype))
        return self.values[node]

    def weight(self, node: fx.Node, shape: tuple[int, ...], dtype: torch.dtype | ir.DataType) -> ir.Value:
        """The stored bytes of a weight as a tensor of this shape and dtype; several may be of the same bytes."""
        name = str(node.target)
        key = ("weight", name, shape, dtype)
        if key not in self._kept:
            stored, sizes = self._weights[name], ir.Shape(shape)
            kind = DTYPES[dtype] if isinstance(dtype, torch.dtype) else dtype
            if (size := math.prod(shape) * kind.bitwidth // 8) != stored.num_bytes:
                raise ValueError(f"{name}: {stored.num_bytes} bytes are stored, expected {size}")
            tensor = ir.ExternalTensor(stored.file, stored.offset, stored.num_bytes, kind, shape=sizes, name=name)
            made = ir.Value(name=self.unique(name), shape=sizes, type=ir.TensorType(kind), const_value=tensor)
            self.initializers.append(made)
            self._kept[key] = made
        return self._kept[key]

    def input(self, node: fx.Node) -> None:
        value = node.meta["val"]
        made = ir.Value(name=self.unique(node.name), shape=self._shape(value), type=ir.TensorType(DTYPES[value.dtype]))
        self.inputs.append(made)
        self.values[node] = made

    def unique(self, name: str) -> str:
        """A name that no other value or node has."""
        found, count = name, 1
        while found in self._names:
            found, count = f"{name}.{count}", count + 1
        self._names.add(found)
        return found

    def emit(self, node: fx.Node, call: Callable[[OnnxGraph, fx.Node], Any]) -> None:
        """What the call makes of a node, named as people know it."""
        self._node = node
        made = call(self, node)
        self.values[node] = made
        self._node = None
        value = node.meta["val"]
        for each, like in [(made, value)] if isinstance(value, Tensor) else zip(made, value, strict=True):
            each.shape, each.type = self._shape(like), ir.TensorType(DTYPES[like.dtype])

    def _shape(self, value: Tensor) -> ir.Shape:
        return ir.Shape([size if isinstance(size, int) else self._axes.get(str(size)) for size in value.shape])

    # ---------------------------------------------------------------------------------------------- ops

    def op(self, kind: str, *inputs: ir.Value | None, domain: str = "", **attributes: Any) -> ir.Value:
        """One op with one result."""
        (made,) = self.ops(kind, *inputs, count=1, domain=domain, **attributes)
        return made

    def ops(
        self, kind: str, *inputs: ir.Value | None, count: int, domain: str = "", **attributes: Any
    ) -> Sequence[ir.Value]:
        """One op with several results."""
        self.domains.add(domain)
        while inputs and inputs[-1] is None:  # onnxruntime reads the bias of a LayerNormalization that says it has none
            inputs = inputs[:-1]
        name = self.unique(f"{name_of(self._node) if self._node is not None else 'shared'}.{kind}")
        made = self.tape.op_multi_out(kind, inputs, attributes, num_outputs=count, domain=domain, name=name)
        for index, each in enumerate(made):
            each.name = self.unique(f"{name}.out{index or ''}")
        return made

    def constant(self, value: Any, dtype: type[np.generic] = np.int64) -> ir.Value:
        """A number or a list of them."""
        array = np.array(value, dtype)
        return self._constant((array.dtype.str, array.shape, array.tobytes()), array)

    def zero_points(self, weight: fx.Node, count: int) -> ir.Value:
        """What DequantizeLinear subtracts of rows in int8, written out for each weight: where the processor has no VNNI
        onnxruntime makes both unsigned, and by itself adds one zero for all rows, or one twice that weights share."""
        return self._constant(("zero points", str(weight.target)), np.zeros(count, np.int8))

    def _constant(self, key: Any, array: NDArray[Any]) -> ir.Value:
        if key not in self._kept:
            kept = ir.Value(
                name=self.unique(f"constant.{len(self._kept)}"),
                shape=ir.Shape(array.shape),
                type=ir.TensorType(ir.DataType.from_numpy(array.dtype)),
                const_value=ir.tensor(array),
            )
            self._kept[key] = kept
            self.initializers.append(kept)
        return self._kept[key]

    def shared(self, key: Any, make: Callable[[], ir.Value]) -> ir.Value:
        """A value that several calls need; the first makes it."""
        if key not in self._kept:
            before, self._node = self._node, None
            self._kept[key] = make()
            self._node = before
        return self._kept[key]

    def cast(self, value: ir.Value, before: torch.dtype, after: torch.dtype) -> ir.Value:
        return value if before == after else self.op("Cast", value, to=DTYPES[after].value)

    def wide(self, node: fx.Node) -> ir.Value:
        """The node's value in float32."""
        return self.cast(self.value(node), node.meta["val"].dtype, torch.float32)

    def named_input(self, name: str) -> ir.Value:
        """An input of the step."""
        found: ir.Value = self.value(self.program.input(name))
        return found

    def reshape(self, value: ir.Value, *sizes: int) -> ir.Value:
        """sizes: 0 keeps an axis, one -1 takes what is left."""
        return self.op("Reshape", value, self.constant(list(sizes)))


def _axes(program: Program) -> dict[str, str]:
    """The names of symbolic sizes, by the inputs that have them."""
    found = {}
    for node in program.inputs():
        for axis, size in enumerate(node.meta["val"].shape):
            if not isinstance(size, int) and (name := AXES.get((node.name, axis))):
                found[str(size)] = name
            elif not isinstance(size, int) and node.meta["val"].dim() == 4 and axis == 2:
                found[str(size)] = "capacity"
    return found
