"""A causal language model of transformers as a Program: the captured graph and its weights.

All knowledge of Hugging Face module names ends here: what leaves has stable names (`layers.3.attention.q_proj.weight`)
and ops, and the passes look at nothing else.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, fx

from inferc import weights as weight_lib
from inferc.config import ContextLength
from inferc.errors import ConfigError, ExportError
from inferc.frontend import trace
from inferc.frontend.bind import Binding, bind
from inferc.frontend.load import Checkpoint, load, load_module
from inferc.frontend.names import Names
from inferc.frontend.rope import Overrides, fix_rope, longest_context, warn_of_fixed_rope
from inferc.program import Program, new_program
from inferc.weights import Weight

aten = torch.ops.aten
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Checks of the traced example, which hold no number.
CHECKS = (
    "_assert_tensor_metadata",
    "_assert_scalar",
    "_assert_async",
    "sym_constrain_range",
    "sym_constrain_range_for_size",
)
VIEWS = ("view", "_unsafe_view", "reshape")
# Where a tensor lies is the backend's business; a clone's memory format is kept, as views depend on it.
PLACEMENT = ("device", "layout", "pin_memory", "non_blocking")


def capture(
    model: str | Path | torch.nn.Module | Checkpoint,
    dtype: str = "bfloat16",
    max_model_len: int | None = None,
    *,
    check: bool = True,
) -> Program:
    """Load `model` (folder, hub id, transformers causal LM, or what `load` returned) and capture it, checked.

    dtype is that of activations and weights; max_model_len (tokens; by default what the model was trained for) fixes a
    rope that depends on length (see rope.py), which `info["rope"]` then says and a warning. With `check` a small random copy must give the reference's logits, and a module those
    of its class and config (see check.py).
    """
    if isinstance(model, torch.nn.Module):
        checkpoint = load_module(model)
    else:
        checkpoint = model if isinstance(model, Checkpoint) else load(model)
    program = export_model(checkpoint, dtype, max_model_len)
    if check:
        from inferc.frontend.check import check_capture, check_module

        warn_of_fixed_rope(program.info["rope"])
        check_module(checkpoint)
        check_capture(program, checkpoint, max_model_len)
    return program


def export_module(module: torch.nn.Module, dtype: str = "bfloat16", max_model_len: int | None = None) -> Program:
    """`capture` of a transformers causal LM in memory, unchecked; `load_module(module).reader` reads its weights."""
    return export_model(load_module(module), dtype, max_model_len)


def export_model(checkpoint: Checkpoint, dtype: str = "bfloat16", max_model_len: int | None = None) -> Program:
    """Capture a checkpoint's model: inputs token_ids and positions i64 [1, T], output (logits [1, T, vocab_size],).

    Raises ExportError where the model cannot be captured, ArtifactError where the checkpoint does not fit it.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not known; expected one of {', '.join(DTYPES)}")
    if max_model_len is not None and max_model_len < 1:
        raise ConfigError(f"max_model_len is {max_model_len}; expected at least 1 token")
    length = sequence_length(checkpoint.config, max_model_len)
    model = trace.build(checkpoint.model_class, checkpoint.config, DTYPES[dtype], "meta")
    overrides, ropes = fix_rope(model, length)
    binding = bind(model, checkpoint)
    exported = trace.trace(model)
    program = _Converter(model, exported, binding, constant_buffers(model, checkpoint, overrides)).program()
    program.info = model_info(checkpoint, model, dtype, length)
    program.info.update(rope=ropes, ignored_tensors=binding.ignored)
    program.num_layers = program.info["num_attention_layers"]
    _require_positions(program, checkpoint)
    return program


def model_info(checkpoint: Checkpoint, model: Any, dtype: str, max_model_len: int) -> dict[str, Any]:
    """JSON-able facts of the model that later stages need."""
    config = checkpoint.config
    return {
        "model_type": config.model_type,
        "architecture": checkpoint.model_class.__name__,
        "vocab_size": int(config.vocab_size),
        "hidden_size": int(config.hidden_size),
        "num_attention_layers": int(config.num_hidden_layers),
        "max_position_embeddings": max(context_length(config).trained or 0, max_model_len),  # with its rope scaling
        "max_model_len": max_model_len,
        "dtype": dtype,
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tied_embeddings": model.get_input_embeddings().weight
        is getattr(model.get_output_embeddings(), "weight", None),
    }


def context_length(config: Any) -> ContextLength:
    """How many positions the model was made for, and how many its rope scaling reaches. Raises ConfigError."""
    for name in ("max_position_embeddings", "seq_length"):
        trained = getattr(config, name, None)
        if trained is None:
            continue
        if not isinstance(trained, int) or trained < 1:
            raise ConfigError(
                f"the model's config has {name} {trained!r}, expected at least 1; write the longest sequence it was"
                " trained on into config.json"
            )
        return ContextLength(trained, longest_context(config, trained))
    return ContextLength(None, None)


def sequence_length(config: Any, max_model_len: int | None) -> int:
    """`max_model_len`, or by default what the model was made for. Raises ConfigError if its config does not say."""
    length = max_model_len or context_length(config).trained
    if length is None:
        raise ConfigError("the model's config has no max_position_embeddings; give max_model_len")
    return length


def constant_buffers(model: Any, checkpoint: Checkpoint, overrides: Overrides) -> dict[str, Tensor]:
    """Values of the buffers that no checkpoint stores (rope frequencies), by name; those that cannot be had are absent."""
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        names = sorted(module._non_persistent_buffers_set & module._buffers.keys())
        names = [name for name in names if module._buffers[name] is not None]
        if checkpoint.module is not None:
            owner = checkpoint.module.get_submodule(path)
            values = {name: owner.get_buffer(name).detach().cpu() for name in names}
        else:
            values = _initialised(model, module, names) if names else {}
        found.update({f"{path}.{name}".lstrip("."): value for name, value in values.items()})
    return {**found, **overrides}


def _initialised(model: Any, module: Any, names: list[str]) -> dict[str, Tensor]:
    """The buffers as transformers makes them after loading: by the model's own `_init_weights`."""
    twin = copy.copy(module)
    twin._buffers = {}
    for name in names:
        old = module._buffers[name]
        empty = float("nan") if old.is_floating_point() else 1 if old.dtype == torch.bool else -7
        twin._buffers[name] = torch.full(old.shape, empty, dtype=old.dtype)
    before = {name: value.clone() for name, value in twin._buffers.items()}
    with trace.quiet(), torch.no_grad():
        model._init_weights(twin)  # its parameters too, which are on the meta device
    return {
        name: value
        for name, value in twin._buffers.items()
        if not torch.equal(value, before[name]) and not value.isnan().any()
    }


class _Converter:
    """Copies an exported graph into a Program, weights as lazy expressions."""

    def __init__(self, model: Any, exported: Any, binding: Binding, constants: dict[str, Tensor]) -> None:
        self.exported, self.binding, self.constants = exported, binding, constants
        self.names = Names(model)
        self.parameters = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
        self.first_names: dict[int, str] = {}
        for name, tensor in self.parameters.items():
            self.first_names.setdefault(id(tensor), name)
        self.out = new_program()
        self.env: dict[fx.Node, fx.Node] = {}
        self.weight_nodes: dict[str, fx.Node] = {}
        self.tokens = self.out.new_symbol(trace.HINT)

    def program(self) -> Program:
        signature = self.exported.graph_signature
        stored = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        lifted = dict(signature.inputs_to_lifted_tensor_constants)
        for node in self.exported.graph.nodes:
            if node.op == "placeholder":
                if node.name in stored:
                    self._weight(node, stored[node.name].removeprefix(f"{trace.WRAPPER}."))
                elif node.name in lifted:
                    self._constant(node, lifted[node.name], self.exported.constants[lifted[node.name]])
                else:
                    self.env[node] = self.out.graph.placeholder(node.name)
                    self._describe(self.env[node], node, node.name, None)
            elif node.op == "output":
                self.out.graph.output(tuple(self.env[arg] for arg in node.args[0]))
            elif node.op == "call_function":
                self._call(node)
            else:
                raise ExportError(f"the captured graph has a node {node.name} of kind {node.op}; expected calls only")
        self.out.drop_unused()
        self.out.graph.lint()
        return self.out

    def _call(self, node: fx.Node) -> None:
        if isinstance(node.target, torch._ops.OpOverload):
            op = node.target._schema.name.split("::")[1]
        else:
            op = str(getattr(node.target, "__name__", node.target))
        if op in CHECKS:
            return
        if self._fold(node, op):
            return
        new = self.out.graph.node_copy(node, lambda n: self.env[n])
        new.kwargs = {key: value for key, value in new.kwargs.items() if key not in PLACEMENT and not _is_device(value)}
        new.meta = {}
        path = next((entry[0] for entry in reversed(list(node.meta.get("nn_module_stack", {}).values()))), "")
        name, layer = self.names.stable(path.removeprefix(trace.WRAPPER).removeprefix("."))
        ours = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "inferc"
        self.env[node] = new
        self._describe(new, node, self.names.unique(f"{name}.{'out' if ours else op.lstrip('_')}".lstrip(".")), layer)

    def _fold(self, node: fx.Node, op: str) -> bool:
        """A transposed or reshaped weight becomes another weight: layouts are expressions, not work for every step."""
        source = self.env.get(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
        if source is None or source.op != "get_attr":
            return False
        weight = self.out.weight(source)
        if op == "clone":  # as one of the rearrangements needs it
            self.env[node] = source
            return True
        if op in VIEWS:
            shape = tuple(int(size) for size in node.meta["val"].shape)
            if shape:
                name = f"{source.target}.{'x'.join(map(str, shape))}"
                self.env[node] = self._get_attr(node, name, weight_lib.reshape(weight, shape), source.meta["layer"])
            return bool(shape)
        if op not in ("transpose", "permute", "t"):
            return False
        perm = list(range(len(weight.shape)))
        if op == "permute":
            perm = [int(axis) % len(perm) for axis in node.args[1]]  # type: ignore[union-attr, arg-type]
        else:
            first, second = (0, 1) if op == "t" else (int(node.args[1]), int(node.args[2]))  # type: ignore[arg-type]
            perm[first], perm[second] = perm[second], perm[first]
        name = f"{source.target}.{'_'.join(map(str, perm))}"
        self.env[node] = self._get_attr(node, name, weight_lib.permute(weight, tuple(perm)), source.meta["layer"])
        return True

    def _weight(self, node: fx.Node, name: str) -> None:
        tensor = self.parameters[name]
        first = self.first_names[id(tensor)]  # tied parameters share the first one's name
        stable, layer = self.names.stable(first)
        if first in self.binding.weights:
            weight = weight_lib.cast(self.binding.weights[first], tensor.dtype)
            self.env[node] = self._get_attr(node, stable, weight, layer)
        elif first in self.constants:
            self._constant(node, first, self.constants[first].to(tensor.dtype))
        elif node.users:
            raise ExportError(f"buffer {name} is in no checkpoint, and transformers' _init_weights does not compute it")

    def _constant(self, node: fx.Node, name: str, value: Tensor) -> None:
        if value.is_meta:
            raise ExportError(f"constant {name} of the model's code has no value on the meta device")
        stable, layer = self.names.stable(name)
        new = self._get_attr(node, stable, weight_lib.constant(value.reshape(-1) if value.dim() == 0 else value), layer)
        if value.dim() == 0:  # a weight has an axis, so the graph takes it off again
            view = self.out.graph.call_function(aten.view.default, (new, []))
            self._describe(view, node, self.names.unique(f"{stable}.view"), layer)
            new = view
        self.env[node] = new

    def _get_attr(self, node: fx.Node, name: str, weight: Weight, layer: int | None) -> fx.Node:
        if name not in self.weight_nodes:
            self.out.weights[name] = weight
            new = self.out.graph.get_attr(name)
            new.meta.update(val=self.out.fake(weight.shape, weight.dtype), name=name, layer=layer)
            self.weight_nodes[name] = new
        return self.weight_nodes[name]

    def _describe(self, new: fx.Node, old: fx.Node, name: str, layer: int | None) -> None:
        new.meta.update(val=self._value(old.meta.get("val")), name=name, layer=layer)

    def _value(self, value: Any) -> Any:
        """The value's fake in the new program: on the CPU, its sizes in the new program's symbol."""
        if isinstance(value, Tensor):
            with self.out.fake_mode:
                sizes, strides = ([self._size(size) for size in sizes] for sizes in (value.shape, value.stride()))
                return torch.empty_strided(sizes, strides, dtype=value.dtype)
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


def _require_positions(program: Program, checkpoint: Checkpoint) -> None:
    positions = next(node for node in program.inputs() if node.name == "positions")
    if not positions.users:
        raise ExportError(
            f"{checkpoint.name}: the captured graph never reads `positions`; expected a model that takes position_ids"
            " (ALiBi and other position biases inside attention are not built)"
        )
