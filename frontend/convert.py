"""The conversion of an exported graph into a Program, with stable names and weights as lazy expressions."""

from __future__ import annotations

from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, fx

from inferc.errors import ExportError
from inferc.frontend.checkpoint.bind import Binding
from inferc.frontend.names import Names
from inferc.frontend.repeat import Section
from inferc.frontend.trace import torch_export as trace
from inferc.ir import weights as weight_lib
from inferc.ir.program import Program, arguments, new_program
from inferc.ir.weights import Weight

aten = torch.ops.aten
VIEWS = ("view", "_unsafe_view", "reshape")
# The backend decides where a tensor lies. A clone's memory format is kept, since views depend on it.
PLACEMENT = ("device", "layout", "pin_memory", "non_blocking")


class Converter:
    """A converter that copies an exported graph into a Program, with weights as lazy expressions."""

    def __init__(self, model: Any, binding: Binding, constants: dict[str, Tensor]) -> None:
        self.binding, self.constants = binding, constants
        self.names = Names(model)
        self.parameters = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
        self.first_names: dict[int, str] = {}
        for name, tensor in self.parameters.items():
            self.first_names.setdefault(id(tensor), name)
        self.out = new_program()
        self.env: dict[fx.Node, fx.Node] = {}  # the node last written for a node of the exported graph
        self.inputs: dict[tuple[fx.Node, int], fx.Node] = {}  # the node written for a placeholder, by `step`
        self.carried: dict[fx.Node, fx.Node] = {}  # nodes to read instead, while a section is repeated
        self.step = 0  # by how many layers the section that is being written is moved
        self.weight_nodes: dict[str, fx.Node] = {}
        self.values: dict[Any, Tensor] = {}
        self.tokens = self.out.new_symbol(trace.HINT)

    def program(self, exported: Any, sections: list[Section]) -> Program:
        """Return the Program of `exported`, whose nodes are in `sections` (see repeat.py)."""
        stored = trace.stored(exported)
        lifted = dict(exported.graph_signature.inputs_to_lifted_tensor_constants)
        constants = {name: (path, exported.constants[path]) for name, path in lifted.items()}
        for section in sections:
            for turn in range(section.times):
                self.step = turn * section.step
                again = section.carried.items() if turn else ()
                self.carried = {node: self.env[before] for node, before in again if before in self.env}
                for node in section.nodes:
                    self._node(node, stored, constants)
        self.out.drop_unused()
        self.out.graph.lint()
        return self.out

    def _node(self, node: fx.Node, stored: dict[str, str], constants: dict[str, tuple[str, Tensor]]) -> None:
        if node.op == "placeholder":
            if node.name in stored:
                self._weight(node, self.names.moved(stored[node.name], self.step))
            elif node.name in constants:
                self._constant(node, *constants[node.name])
            else:
                self.env[node] = self.out.graph.placeholder(node.name)
                self._describe(self.env[node], node, node.name, None)
            if node in self.env:
                self.inputs[node, self.step] = self.env[node]
        elif node.op == "output":
            self.out.graph.output(tuple(self._read(arg) for arg in node.args[0]))  # type: ignore[union-attr, arg-type]
        elif node.op == "call_function":
            self._call(node)
        else:
            raise ExportError(f"the captured graph has a node {node.name} of kind {node.op}; expected calls only")

    def _read(self, node: fx.Node) -> fx.Node:
        return self.carried.get(node) or self.inputs.get((node, self.step)) or self.env[node]

    def _call(self, node: fx.Node) -> None:
        op = trace.op_name(node)
        if self._fold(node, op):
            return
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), self._read)
        kwargs = {key: value for key, value in kwargs.items() if key not in PLACEMENT and not _is_device(value)}
        new = self.out.graph.create_node("call_function", node.target, args, kwargs)
        name, layer = self.names.stable(self.names.moved(trace.module_path(node), self.step))
        ours = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "inferc"
        self.env[node] = new
        self._describe(new, node, self.names.unique(f"{name}.{'out' if ours else op.lstrip('_')}".lstrip(".")), layer)

    def _fold(self, node: fx.Node, op: str) -> bool:
        """Replace a transposed, reshaped or sliced weight by another weight, and tell whether that was done.

        This makes the layout an expression, evaluated once, instead of work in every step.
        """
        source = self._read(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
        if source is None or source.op != "get_attr":
            return False
        weight = self.out.weight(source)
        if op == "clone":  # it serves one of the rearrangements below
            self.env[node] = source
            return True
        if op in VIEWS:
            shape = tuple(int(size) for size in node.meta["val"].shape)
            if shape:
                name = f"{source.target}.{'x'.join(map(str, shape))}"
                self.env[node] = self._get_attr(name, weight_lib.reshape(weight, shape), source.meta["layer"])
            return bool(shape)
        if op == "slice":
            return self._fold_slice(node, source, weight)
        if op not in ("transpose", "permute", "t"):
            return False
        perm = list(range(len(weight.shape)))
        if op == "permute":
            perm = [int(axis) % len(perm) for axis in node.args[1]]  # type: ignore[union-attr, arg-type]
        else:
            first, second = (0, 1) if op == "t" else (int(node.args[1]), int(node.args[2]))  # type: ignore[arg-type]
            perm[first], perm[second] = perm[second], perm[first]
        name = f"{source.target}.{'_'.join(map(str, perm))}"
        self.env[node] = self._get_attr(name, weight_lib.permute(weight, tuple(perm)), source.meta["layer"])
        return True

    def _fold_slice(self, node: fx.Node, source: fx.Node, weight: Weight) -> bool:
        _, dim, start, stop, step = arguments(node)
        if not all(each is None or isinstance(each, int) for each in (start, stop)):
            return False  # the slice has as many rows as there are tokens
        dim %= len(weight.shape)
        start, stop = slice(start, stop).indices(weight.shape[dim])[:2]
        if step != 1 or stop <= start:
            return False
        part = weight_lib.slice_(weight, dim, start, stop)
        self.env[node] = self._get_attr(f"{source.target}.{dim}_{start}_{stop}", part, source.meta["layer"])
        return True

    def _weight(self, node: fx.Node, name: str) -> None:
        tensor = self.parameters[name]
        first = self.first_names[id(tensor)]  # tied parameters share the name of the first one
        stable, layer = self.names.stable(first)
        if first in self.binding.weights:
            self._bind(node, stable, weight_lib.cast(self.binding.weights[first], tensor.dtype), layer)
        elif first in self.constants:
            self._constant(node, first, self.constants[first].to(tensor.dtype))
        elif node.users:
            raise ExportError(f"buffer {name} is in no checkpoint, and transformers' _init_weights does not compute it")

    def _constant(self, node: fx.Node, name: str, value: Tensor) -> None:
        if value.is_meta:
            raise ExportError(f"constant {name} of the model's code has no value on the meta device")
        stable, layer = self.names.stable(name)
        self._bind(node, stable, weight_lib.constant(value if value.dim() else value.reshape(1)), layer)

    def _bind(self, node: fx.Node, stable: str, weight: Weight, layer: int | None) -> None:
        """Map a node of the exported graph to a `get_attr` node that reads this weight."""
        is_number = not node.meta["val"].dim()
        if is_number and not weight.shape:
            weight = weight_lib.reshape(weight, (1,))
        new = self._get_attr(stable, weight, layer)
        if is_number:  # a weight of a program has at least one axis, so the graph removes it again
            view = self.out.graph.call_function(aten.view.default, (new, []))
            self._describe(view, node, self.names.unique(f"{stable}.view"), layer)
            new = view
        self.env[node] = new

    def _get_attr(self, name: str, weight: Weight, layer: int | None) -> fx.Node:
        if name not in self.weight_nodes:
            self.out.weights[name] = weight
            new = self.out.graph.get_attr(name)
            new.meta.update(val=self.out.fake(weight.shape, weight.dtype), name=name, layer=layer)
            self.weight_nodes[name] = new
        return self.weight_nodes[name]

    def _describe(self, new: fx.Node, old: fx.Node, name: str, layer: int | None) -> None:
        new.meta.update(val=self._value(old.meta.get("val")), name=name, layer=layer)

    def _value(self, value: Any) -> Any:
        """Return the value's fake tensor in the new program: on the CPU, with sizes in the program's own symbol."""
        if isinstance(value, Tensor):
            key = (value.dtype, str(value.shape), str(value.stride()))
            if key not in self.values:
                with self.out.fake_mode:
                    sizes, strides = ([self._size(size) for size in sizes] for sizes in (value.shape, value.stride()))
                    self.values[key] = torch.empty_strided(sizes, strides, dtype=value.dtype)
            return self.values[key]
        if isinstance(value, (tuple, list)):
            return tuple(self._value(item) for item in value)
        return self._size(value) if isinstance(value, torch.SymInt) else value

    def _size(self, size: int | torch.SymInt) -> int | torch.SymInt:
        if isinstance(size, int):
            return size
        expression = size.node.expr
        symbols = sorted(expression.free_symbols, key=str)
        if len(symbols) > 1:
            raise ExportError(f"a size of the captured graph is {expression}; expected the number of tokens alone")
        return sympy.lambdify(symbols, expression)(self.tokens) if symbols else int(expression)


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device)
