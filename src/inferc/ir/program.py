"""The IR: an fx graph of core ATen ops and `torch.ops.inferc.*`, with its weights as lazy expressions.

Node conventions, which every pass keeps:

- inputs are placeholders named as in the step struct (`token_ids`, `positions`, …); weights are `get_attr` nodes whose
  target is a key of `Program.weights`;
- `node.meta["val"]` is a fake tensor (or a tuple of them, or a SymInt); symbolic axes come from `Program.shape_env`;
- `node.meta["name"]` is the stable name that people see (`layers.3.attention.out`), `node.meta["layer"]` the layer's
  index, or None outside of layers;
- `node.meta["kernel"]`, once chosen, is the name of the kernel that runs the node, and `node.meta["place"]` says where
  in the arena the value lies (`T+1024`: 1024 bytes per row into the pool of token rows).

The output is `(hidden, logits)` once the head is split off: the nodes that `hidden` needs are the `step` entry point,
the rest is `sample`.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from inferc import kv_groups as kv_pools
from inferc.ir import ops as _ops  # noqa: F401  (defines torch.ops.inferc)
from inferc.ir import weights as weight_lib
from inferc.ir.model_info import ModelInfo
from inferc.ir.weights import Weight

MASK_KINDS = {"causal": "full", "sliding": "window", "chunked": "chunk"}
"""The kind of KV group that each mask of `inferc.attention` needs."""


@dataclass(frozen=True)
class KVGroup:
    """A group of layers that share kind, window, dtype and bytes per token of K and V.

    A layer that reads another layer's K and V stores none of its own and is in no group. Kind and window say how long a
    token is needed, by the widest mask among the layers that read it; kv_groups.py says what a kind means for blocks.
    """

    kind: str  # "full", "window", "chunk" or "latent"
    layers: tuple[int, ...]  # the model layers that store K and V in this group, in the order of the group's layers
    num_kv_heads: int
    head_dim: int
    window: int  # 0 for "full"
    dtype: torch.dtype

    @property
    def row_size(self) -> int:
        """The number of elements stored per token by one head of K or of V, or by a latent."""
        return kv_pools.row_size(self.head_dim, dtype_name(self.dtype))

    @property
    def elements_per_token(self) -> int:
        """The number of elements stored per token by one layer.

        A layer stores K and V of every head, or one latent that includes V.
        """
        return self.num_parts * self.num_kv_heads * self.row_size

    @property
    def num_parts(self) -> int:
        """The number of tensors per token and layer: two for K and V, one for a latent."""
        return kv_pools.num_parts(self.kind)

    @property
    def bytes_per_token(self) -> int:
        return len(self.layers) * self.elements_per_token * self.dtype.itemsize


@dataclass
class Program:
    """A graph and its weights, which passes edit in place."""

    graph: fx.Graph
    weights: dict[str, Weight]
    shape_env: ShapeEnv
    fake_mode: FakeTensorMode
    name: str = "model"
    num_layers: int = 0
    kv_groups: tuple[KVGroup, ...] = ()
    block_size: int = 0  # 0 until the KV cache rewrite
    info: ModelInfo = ModelInfo()  # noqa: RUF009 (frozen)
    types: dict[Any, Any] = field(default_factory=dict, repr=False)  # result types of calls, cached by passes.rewrite

    def inputs(self) -> list[fx.Node]:
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    def input(self, name: str) -> fx.Node:
        """Return the input of that name, which must exist."""
        return next(node for node in self.inputs() if node.name == name)

    def output(self) -> fx.Node:
        node: fx.Node = next(node for node in reversed(self.graph.nodes) if node.op == "output")
        return node

    def weight(self, node: fx.Node) -> Weight:
        """Return the weight expression that a `get_attr` node reads."""
        return self.weights[str(node.target)]

    def add_weight(self, name: str, weight: Weight, before: fx.Node) -> fx.Node:
        """Add a new weight and return the node that reads it, placed before `before`."""
        self.weights[name] = weight
        with self.graph.inserting_before(before):
            node = self.graph.get_attr(name)
        node.meta.update(val=self.fake(weight.shape, weight.dtype), name=name, layer=before.meta.get("layer"))
        return node

    def fake(self, shape: Iterable[int | torch.SymInt], dtype: torch.dtype) -> Tensor:
        """Create a fake tensor of this program, for `meta["val"]`."""
        with self.fake_mode:
            return torch.empty(tuple(shape), dtype=dtype)

    def new_symbol(self, hint: int) -> torch.SymInt:
        """Create a fresh symbolic axis (number of tokens, sequences, …)."""
        context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
        return self.fake_mode.from_tensor(torch.empty(hint), symbolic_context=context).shape[0]  # type: ignore[return-value]

    def drop_unused(self) -> None:
        """Remove dead nodes, then the weights that no node reads."""
        self.graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
        used = {str(node.target) for node in self.graph.nodes if node.op == "get_attr"}
        for name in [name for name in self.weights if name not in used]:
            del self.weights[name]

    def run(
        self,
        inputs: dict[str, Tensor],
        read_weight: Callable[[str], Tensor],
        *,
        calls: Mapping[Any, Callable[..., Any]] | None = None,
        observe: Callable[[fx.Node, Any], None] | None = None,
    ) -> Any:
        """Run the graph with the ops' references (the oracle); return what the output node returns.

        `calls` replaces the function of some targets (caches written in place); `observe` sees every call's result.
        """
        calls = calls or {}
        values: dict[fx.Node, Any] = {}
        left = {node: len(node.users) for node in self.graph.nodes}
        for node in self.graph.nodes:
            if node.op == "placeholder":
                values[node] = inputs[node.name]
            elif node.op == "get_attr":
                values[node] = read_weight(str(node.target))
            elif node.op == "output":
                return fx.map_arg(node.args[0], lambda n: values[n])
            else:
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values[n])
                values[node] = calls.get(node.target, node.target)(*args, **kwargs)
                if observe is not None:
                    observe(node, values[node])
                for read in node.all_input_nodes:  # drop each value after its last use
                    left[read] -= 1
                    if not left[read]:
                        del values[read]
        raise AssertionError("graph without an output")

    def to_text(self) -> str:
        """Return the program as text, one line per node.

        Values and symbols are numbered in order, so that goldens are stable.
        """
        return Printer(self).text()


def new_program(name: str = "model") -> Program:
    """Create an empty program with its own symbols."""
    shape_env = ShapeEnv()
    return Program(fx.Graph(), {}, shape_env, FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True), name)


# ------------------------------------------------------------------------------------------------ text


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def target_name(target: Any) -> str:
    """Return the printed name of a call's target.

    `inferc.silu_mul` for an op's default overload, `aten.add.Tensor` for another, `getitem` for a function.
    """
    if isinstance(target, torch._ops.OpOverload):
        namespace, name = target._schema.name.split("::")
        overload = target._schema.overload_name
        return f"{namespace}.{name}" + (f".{overload}" if overload else "")
    return str(getattr(target, "__name__", target))


def name_of(node: fx.Node) -> str:
    """Return the stable name of a node that people see, in messages and comments."""
    return str(node.meta.get("name", node.name))


def arguments(node: fx.Node) -> list[Any]:
    """Return all arguments of a call in the order of its schema, defaults filled in."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return [*node.args, *node.kwargs.values()]
    given = list(node.args)
    for parameter in node.target._schema.arguments[len(given) :]:
        given.append(node.kwargs.get(parameter.name, parameter.default_value))
    return given


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of an op's call by their names in its schema, defaults filled in."""
    schema = node.target._schema  # type: ignore[union-attr]
    return dict(zip((each.name for each in schema.arguments), arguments(node), strict=True))


def argument(node: fx.Node, name: str) -> Any:
    """Return one argument of an op's call by its name in the schema, or its default."""
    return named_arguments(node)[name]


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return `nodes` and all nodes that they are computed from."""
    found: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo.extend(node.all_input_nodes)
    return found


class Printer:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.values: dict[fx.Node, str] = {}
        self.symbols: dict[str, str] = {}
        self.sizes: dict[Any, str] = {}  # printed sizes by sympy expression; a program has few distinct ones
        self.num_calls = 0

    def text(self) -> str:
        lines = []
        for node in self.program.graph.nodes:
            if node.op == "output":
                lines.append(f"return {self.arg(node.args[0])}")
            elif node.op == "placeholder":
                self.values[node] = f"%{node.name}"
                lines.append(f"{self.values[node]}: {self.type(node.meta.get('val'))} = input")
            elif node.op == "get_attr":
                self.values[node] = f"@{node.target}"
            else:
                self.values[node] = f"%{self.num_calls}"
                self.num_calls += 1
                args = [self.arg(arg) for arg in node.args]
                args += [f"{key}={self.arg(value)}" for key, value in node.kwargs.items()]
                notes = [f"segment {node.meta['segment']}"] if "segment" in node.meta else []
                notes += [str(node.meta[key]) for key in ("kernel", "place") if key in node.meta]
                note = f"  # {', '.join(notes)}" if notes else ""
                kind = self.type(node.meta.get("val"))
                lines.append(f"{self.values[node]}: {kind} = {target_name(node.target)}({', '.join(args)}){note}")
        return "\n".join(lines) + "\n"

    def type(self, value: Any) -> str:
        if isinstance(value, Tensor):
            return f"{dtype_name(value.dtype)}[{', '.join(self.size(size) for size in value.shape)}]"
        if isinstance(value, (tuple, list)):
            return "(" + ", ".join(self.type(item) for item in value) + ")"
        return self.size(value) if isinstance(value, (int, torch.SymInt)) else "?"

    def size(self, size: int | torch.SymInt) -> str:
        if isinstance(size, int):
            return str(size)
        expression = size.node.expr
        if expression not in self.sizes:
            for symbol in sorted(expression.free_symbols, key=str):
                self.symbols.setdefault(str(symbol), f"s{len(self.symbols)}")
            names = {symbol: sympy.Symbol(self.symbols[str(symbol)]) for symbol in expression.free_symbols}
            self.sizes[expression] = str(expression.subs(names, simultaneous=True))
        return self.sizes[expression]

    def arg(self, arg: Any) -> str:
        if isinstance(arg, fx.Node):
            return self.values.get(arg, f"<{arg.name}>")
        if isinstance(arg, (tuple, list)):
            inner = ", ".join(self.arg(item) for item in arg)
            return f"[{inner}]" if isinstance(arg, list) else f"({inner})"
        if isinstance(arg, torch.dtype):
            return dtype_name(arg)
        if isinstance(arg, torch.SymInt):
            return self.size(arg)
        return repr(arg)


def copy(program: Program) -> Program:
    """Return a program that passes may edit while `program` stays as it is.

    The two share symbols and types of calls, so that what one has inferred the other knows.
    """
    twin = replace(program, graph=fx.Graph(), weights=dict(program.weights))
    nodes: dict[fx.Node, fx.Node] = {}
    for node in program.graph.nodes:
        nodes[node] = twin.graph.node_copy(node, nodes.__getitem__)
    return twin


# ------------------------------------------------------------------------------------------------ JSON


META = ("name", "layer", "segment", "kernel", "place")  # the keys of a node's meta that are saved besides `val`


def to_json(program: Program) -> dict[str, Any]:
    """Return the whole program as JSON-able data, which `from_json` reads back."""
    nodes = []
    for node in program.graph.nodes:
        entry: dict[str, Any] = {"op": node.op, "id": node.name, "args": _arg_json(list(node.args))}
        if node.op in ("get_attr", "placeholder"):
            entry["target"] = str(node.target)
        elif node.op == "call_function":
            entry["target"] = target_name(node.target)
        if node.kwargs:
            entry["kwargs"] = _arg_json(dict(node.kwargs))
        if "val" in node.meta:
            entry["val"] = _value_json(node.meta["val"])
        entry.update({key: node.meta[key] for key in META if key in node.meta})
        nodes.append(entry)
    groups = [
        {**group.__dict__, "layers": list(group.layers), "dtype": dtype_name(group.dtype)}
        for group in program.kv_groups
    ]
    return {
        "name": program.name,
        "num_layers": program.num_layers,
        "block_size": program.block_size,
        "info": msgspec.to_builtins(program.info),
        "kv_groups": groups,
        "symbols": {str(symbol): int(value) for symbol, value in _hints(program).items()},
        "weights": {name: weight_lib.to_json(weight) for name, weight in program.weights.items()},
        "nodes": nodes,
    }


def from_json(data: dict[str, Any]) -> Program:
    program = new_program(data["name"])
    program.num_layers, program.block_size = data["num_layers"], data["block_size"]
    program.info = msgspec.convert(data["info"], ModelInfo)
    program.kv_groups = tuple(
        KVGroup(**{**group, "layers": tuple(group["layers"]), "dtype": getattr(torch, group["dtype"])})
        for group in data["kv_groups"]
    )
    program.weights = {name: weight_lib.from_json(weight) for name, weight in data["weights"].items()}
    symbols = {name: program.new_symbol(hint) for name, hint in data["symbols"].items()}
    nodes: dict[str, fx.Node] = {}
    values: dict[str, Any] = {}  # fake tensors by type, shared by all nodes of that type
    for entry in data["nodes"]:
        args = _arg_load(entry["args"], nodes, symbols)
        kwargs = _arg_load(entry.get("kwargs", {}), nodes, symbols)
        if entry["op"] == "placeholder":
            node = program.graph.placeholder(entry["target"])
        elif entry["op"] == "get_attr":
            node = program.graph.get_attr(entry["target"])
        elif entry["op"] == "output":
            node = program.graph.output(args[0])
        else:
            node = program.graph.create_node(
                "call_function", find_target(entry["target"]), tuple(args), kwargs, entry["id"]
            )
        if "val" in entry:
            key = repr(entry["val"])
            if key not in values:
                values[key] = _value_load(entry["val"], program, symbols)
            node.meta["val"] = values[key]
        node.meta.update({key: entry[key] for key in META if key in entry})
        nodes[entry["id"]] = node
    return program


def find_target(name: str) -> Any:
    """Return the op or function that `target_name` printed as `name`."""
    if name == "getitem":
        return operator.getitem
    namespace, op, *overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), op), overload[0] if overload else "default")


def _hints(program: Program) -> dict[Any, Any]:
    used = set()
    for node in program.graph.nodes:
        value = node.meta.get("val")
        for item in value if isinstance(value, (tuple, list)) else (value,):
            sizes = item.shape if isinstance(item, Tensor) else (item,)
            for size in sizes:
                if isinstance(size, torch.SymInt):
                    used |= size.node.expr.free_symbols
    hints = program.shape_env.backed_var_to_val
    return {symbol: hints[symbol] for symbol in sorted(used, key=str)}


def _size_json(size: int | torch.SymInt) -> int | str:
    return size if isinstance(size, int) else str(size.node.expr)


def _size_load(size: int | str, symbols: dict[str, torch.SymInt]) -> int | torch.SymInt:
    if isinstance(size, int):
        return size
    return _size_of(ast.parse(size, mode="eval").body, symbols)


SIZE_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _size_of(node: ast.expr, symbols: dict[str, torch.SymInt]) -> int | torch.SymInt:
    """Compute a size from the text that sympy wrote; raise ValueError for anything but arithmetic."""
    if isinstance(node, ast.BinOp) and type(node.op) in SIZE_OPERATORS:
        left, right = (_size_of(each, symbols) for each in (node.left, node.right))
        return SIZE_OPERATORS[type(node.op)](left, right)  # type: ignore[no-any-return]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_size_of(node.operand, symbols)
    if isinstance(node, ast.Name) and node.id in symbols:
        return symbols[node.id]
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    raise ValueError(
        f"a size may hold {', '.join(symbols) or 'no symbols'}, integers, + - * // and %, not {ast.unparse(node)}"
    )


def _value_json(value: Any) -> Any:
    if isinstance(value, Tensor):
        return {"dtype": dtype_name(value.dtype), "shape": [_size_json(size) for size in value.shape]}
    if isinstance(value, (tuple, list)):
        return [_value_json(item) for item in value]
    return _size_json(value)


def _value_load(value: Any, program: Program, symbols: dict[str, torch.SymInt]) -> Any:
    if isinstance(value, dict):
        return program.fake([_size_load(size, symbols) for size in value["shape"]], getattr(torch, value["dtype"]))
    if isinstance(value, list):
        return tuple(_value_load(item, program, symbols) for item in value)
    return _size_load(value, symbols)


def _arg_json(arg: Any) -> Any:
    if isinstance(arg, fx.Node):
        return {"node": arg.name}
    if isinstance(arg, tuple):
        return {"tuple": [_arg_json(item) for item in arg]}
    if isinstance(arg, list):
        return [_arg_json(item) for item in arg]
    if isinstance(arg, dict):
        return {"dict": {key: _arg_json(item) for key, item in arg.items()}}
    if isinstance(arg, torch.dtype):
        return {"dtype": dtype_name(arg)}
    if isinstance(arg, torch.memory_format):
        return {"memory_format": str(arg).removeprefix("torch.")}
    if isinstance(arg, torch.SymInt):
        return {"size": _size_json(arg)}
    if arg is None or isinstance(arg, (bool, int, float, str)):
        return arg
    raise TypeError(f"cannot save argument {arg!r} of type {type(arg).__name__}")


def _arg_load(arg: Any, nodes: dict[str, fx.Node], symbols: dict[str, torch.SymInt]) -> Any:
    if isinstance(arg, list):
        return [_arg_load(item, nodes, symbols) for item in arg]
    if not isinstance(arg, dict):
        return arg
    if "node" in arg:
        return nodes[arg["node"]]
    if "tuple" in arg:
        return tuple(_arg_load(item, nodes, symbols) for item in arg["tuple"])
    if "dict" in arg:
        return {key: _arg_load(item, nodes, symbols) for key, item in arg["dict"].items()}
    if "dtype" in arg:
        return getattr(torch, arg["dtype"])
    if "memory_format" in arg:
        return getattr(torch, arg["memory_format"])
    if "size" in arg:
        return _size_load(arg["size"], symbols)
    return {}
