"""An ONNX graph under construction, which the functions of all ops add to."""

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

from inferc.codegen.construction import Construction
from inferc.ir.program import Program, name_of
from inferc.manifest_types import StoredWeight

OPSET = 24  # the first with TensorScatter, and with an Attention that takes the filled length of its cache
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


class OnnxGraph(Construction[ir.Value]):
    """The ONNX values of the program's nodes, and methods that add ops on them.

    The weights stay in the artifact's files.
    """

    def __init__(self, program: Program, weights: Mapping[str, StoredWeight]) -> None:
        super().__init__(program)
        self._weights = weights
        self.tape = Tape()
        self.inputs: list[ir.Value] = []
        self.initializers: list[ir.Value] = []
        self.domains: set[str] = {""}
        self._axes = _axes(program)

    # ------------------------------------------------------------------------------------------- values

    def value(self, node: Any) -> Any:
        """Return the ONNX value of an argument that is a node; None stays None."""
        if node is None:
            return None
        if node.op == "get_attr" and node not in self.values:
            stored = self._weights[str(node.target)]
            self.values[node] = self.weight(node, stored.physical_shape, getattr(torch, stored.dtype))
        return self.values[node]

    def weight(self, node: fx.Node, shape: tuple[int, ...], dtype: torch.dtype | ir.DataType) -> ir.Value:
        """Return a weight's stored bytes as a tensor of this shape and dtype.

        Several tensors may refer to the same bytes. Raises ValueError if the sizes do not agree.
        """
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

    def emit(self, node: fx.Node, call: Callable[[OnnxGraph, fx.Node], Any]) -> None:
        """Store what `call` makes of a node; the ops that it adds get names from the node."""
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
        """Add an op with one result."""
        (made,) = self.ops(kind, *inputs, count=1, domain=domain, **attributes)
        return made

    def ops(
        self, kind: str, *inputs: ir.Value | None, count: int, domain: str = "", **attributes: Any
    ) -> Sequence[ir.Value]:
        """Add an op with several results."""
        self.domains.add(domain)
        # onnxruntime reads the bias of a LayerNormalization even if its name is empty, so empty inputs at the end go.
        while inputs and inputs[-1] is None:
            inputs = inputs[:-1]
        name = self.unique(f"{name_of(self._node) if self._node is not None else 'shared'}.{kind}")
        made = self.tape.op_multi_out(kind, inputs, attributes, num_outputs=count, domain=domain, name=name)
        for index, each in enumerate(made):
            each.name = self.unique(f"{name}.out{index or ''}")
        return made

    def constant(self, value: Any, dtype: type[np.generic] = np.int64) -> ir.Value:
        """Return a number or a list of numbers as a constant."""
        array = np.array(value, dtype)
        return self._constant((array.dtype.str, array.shape, array.tobytes()), array)

    def zero_points(self, weight: fx.Node, count: int) -> ir.Value:
        """Return the zero points that DequantizeLinear subtracts from int8 rows, written out for each weight.

        Where the processor has no VNNI, onnxruntime makes the rows and the zero points unsigned. Left to itself it adds
        one zero point for all rows, or changes one twice that several weights share.
        """
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

    def cast(self, value: ir.Value, before: torch.dtype, after: torch.dtype) -> ir.Value:
        return value if before == after else self.op("Cast", value, to=DTYPES[after].value)

    def wide(self, node: fx.Node) -> ir.Value:
        """Return the node's value in float32."""
        return self.cast(self.value(node), node.meta["val"].dtype, torch.float32)

    def named_input(self, name: str) -> ir.Value:
        """Return the value of the step's input of this name."""
        found: ir.Value = self.value(self.program.input(name))
        return found

    def reshape(self, value: ir.Value, *sizes: int) -> ir.Value:
        """Reshape a value; a size of 0 keeps an axis, and one size may be -1 for what is left."""
        return self.op("Reshape", value, self.constant(list(sizes)))


def _axes(program: Program) -> dict[str, str]:
    """Return the names of symbolic sizes, found from the inputs that have them."""
    found = {}
    for node in program.inputs():
        for axis, size in enumerate(node.meta["val"].shape):
            if not isinstance(size, int) and (name := AXES.get((node.name, axis))):
                found[str(size)] = name
            elif not isinstance(size, int) and node.meta["val"].dim() == 4 and axis == 2:
                found[str(size)] = "capacity"
    return found
