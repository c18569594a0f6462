"""The export of a causal language model by torch.export, on the meta device."""

from __future__ import annotations

import copy
import importlib.metadata
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from typing import Any

import torch
from torch import Tensor, fx

from inferc.errors import ConfigError, ExportError, InfercError
from inferc.frontend.trace import dense_experts, interfaces, packed_attention, sparse_mixer
from inferc.frontend.trace.literals import Literals
from inferc.frontend.trace.positions import first_position, takes_positions
from inferc.system.own_process import uncollected

HINT = 7  # tokens in the traced example: no size of a real model, so that no other size is mistaken for it
LONGEST = 2**31 - 1  # tokens: no model takes more
WRAPPER = "model"  # attribute of _Logits: the first part of every module path in the exported program


class _Logits(torch.nn.Module):
    """A module that maps token ids and positions, which count from 0, to logits, without a cache."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.first = model, first_position(model.config)

    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        ids = positions + self.first if self.first else positions
        extra = {"position_ids": ids} if takes_positions(type(self.model)) else {}
        logits: Tensor = self.model(input_ids=token_ids, use_cache=False, **extra).logits
        return logits


class _HeadLogits(torch.nn.Module):
    """A module that maps token ids, positions and the hidden rows of another model to the logits of a head."""

    def __init__(self, head: Any) -> None:
        super().__init__()
        self.model = head

    def forward(self, token_ids: Tensor, positions: Tensor, hidden_in: Tensor) -> Tensor:
        logits: Tensor = self.model(token_ids, positions, hidden_in)
        return logits


def build(model_class: type[Any], config: Any, dtype: torch.dtype, device: str, attention: str | None = "eager") -> Any:
    """Build `model_class` from a copy of `config`, in `dtype` and eval mode; on "cpu" it has random weights.

    attention: transformers' name of an attention implementation, or None for the one that it would choose.
    """
    config = copy.deepcopy(config)
    config.use_cache = False
    with quiet(), torch.device(device):
        try:
            model = model_class._from_config(config, dtype=dtype, attn_implementation=attention)
        except InfercError:
            raise
        except Exception as error:  # a model class may raise anything
            name = _unknown_name(error, config)
            if name:
                raise ConfigError(
                    f"{model_class.__name__} cannot be built: {name}; correct the field, or upgrade transformers"
                ) from error
            raise ConfigError(
                f"{model_class.__name__} cannot be built from its config ({_first_line(error)}); is config.json"
                " damaged?"
            ) from error
    return model.eval().requires_grad_(False)


def _unknown_name(error: Exception, config: Any) -> str:
    """Return a message about a name in a config that no table of transformers has.

    The message is empty if the error has another cause.
    """
    key = error.args[0] if isinstance(error, KeyError) and error.args else None
    field = _field_of(config.to_dict(), key) if isinstance(key, str) else ""
    version = importlib.metadata.version("transformers")
    return f"transformers {version} knows no {key!r} ({field} in config.json)" if field else ""


def _field_of(fields: Mapping[str, Any], value: str) -> str:
    """Return the names, joined by dots, of the first field with this value, or "" without one."""
    for name, found in fields.items():
        if found == value:
            return str(name)
        if isinstance(found, Mapping) and (inner := _field_of(found, value)):
            return f"{name}.{inner}"
    return ""


def trace(model: Any) -> Any:
    """Trace `model` (on the meta device) to an ExportedProgram with inputs token_ids and positions, i64 [1, T].

    A head (inferc.frontend.heads) also has the input hidden_in [1, T, hidden_width], in its own dtype.
    """
    interfaces.register()
    interfaces.use(model)
    dense_experts.use(model)
    sparse_mixer.use(model)
    packed_attention.use(model)
    examples = {name: torch.zeros(1, HINT, dtype=torch.long, device="meta") for name in ("token_ids", "positions")}
    width = getattr(model, "hidden_width", None)
    if width is not None:
        examples["hidden_in"] = torch.zeros(1, HINT, width, dtype=model.dtype, device="meta")
    wrapper = (_Logits if width is None else _HeadLogits)(model).eval()
    try:
        # torch prints the whole graph when it fails; the exception has the reason.
        with quiet(), uncollected(), torch.no_grad(), redirect_stderr(StringIO()), Literals():
            exported = _export(wrapper, examples)
        with quiet(), uncollected(), redirect_stderr(StringIO()):
            return exported.run_decompositions({})
    except InfercError as error:
        raise type(error)(f"{type(model).__name__}: {error}") from error
    except Exception as error:  # the model's code or torch may raise anything
        if isinstance(error.__cause__, InfercError):
            raise error.__cause__ from error
        raise ExportError(
            f"{type(model).__name__} cannot be captured: {type(error).__name__}: {_first_line(error)}; its code"
            " branches on data or on the number of tokens, or goes past transformers' attention interface"
        ) from error


def _export(wrapper: torch.nn.Module, examples: dict[str, Tensor]) -> Any:
    """Export with a symbolic number of tokens; raise whatever the model's code or torch raises."""

    def export(tokens: Any) -> Any:
        shapes = {name: {1: tokens} for name in examples}
        return torch.export.export(wrapper, tuple(examples.values()), dynamic_shapes=shapes, strict=False)

    try:
        return export(torch.export.Dim("T", min=2))
    except torch._dynamo.exc.UserError as error:
        # torch may not be able to prove a guard that always holds, such as T * min(64, 64 * T) == 64 * T.
        if "Constraints violated" not in str(error):
            raise
        exported = export(torch.export.Dim.AUTO)
        inputs = _inputs(exported)
        if any(isinstance(node.meta["val"].shape[1], int) for node in inputs):
            raise
        if max(_bounds(exported, node.meta["val"].shape[1])[0] for node in inputs) > 2:
            raise  # fewer tokens would take another path than the traced one
        return exported


def longest(exported: Any) -> int:
    """Return the most tokens for which the traced code is the model's, or LONGEST if there is no limit.

    torch records the path of the traced example and the lengths for which it holds: code that branches on the number of
    tokens takes another path beyond, and a table of positions ends.
    """
    inputs = _inputs(exported)
    return min(_bounds(exported, node.meta["val"].shape[1])[1] for node in inputs)


def _inputs(exported: Any) -> list[fx.Node]:
    """Return the placeholders of what the traced module was given, without those of parameters and buffers."""
    given = set(exported.graph_signature.user_inputs)
    return [node for node in exported.graph.nodes if node.op == "placeholder" and node.name in given]


def _bounds(exported: Any, num_tokens: torch.SymInt) -> tuple[int, int]:
    """Return the fewest and the most tokens for which the trace holds."""
    bounds = exported.range_constraints.get(num_tokens.node.expr)
    if bounds is None:
        return 0, LONGEST
    return int(bounds.lower), int(bounds.upper) if bounds.upper < LONGEST else LONGEST


def op_name(node: fx.Node) -> str:
    """Return `add` for a call of `aten.add.Tensor`, in any namespace, or "" for a node that is no call."""
    if node.op != "call_function":
        return ""
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target._schema.name.split("::")[1])
    return str(getattr(node.target, "__name__", node.target))


def stored(exported: Any) -> dict[str, str]:
    """Return the paths of parameters and buffers, by the name of their placeholder."""
    signature = exported.graph_signature
    both = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    return {name: path.removeprefix(f"{WRAPPER}.") for name, path in both.items()}


def module_path(node: fx.Node) -> str:
    """Return the path of the innermost module that a call was made in."""
    path = next((str(entry[0]) for entry in reversed(list(node.meta.get("nn_module_stack", {}).values()))), "")
    return path.removeprefix(WRAPPER).removeprefix(".")


@contextmanager
def quiet() -> Iterator[None]:
    """Silence torch's and transformers' messages within the context, while a model is built and traced."""
    from transformers.utils import logging as transformers_logging

    loggers = [logging.getLogger(name) for name in ("transformers", "torch.export", "torch._export")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*LeafSpec.*", category=FutureWarning)
        warnings.filterwarnings("ignore", message=r".*", category=DeprecationWarning, module=r"torch\..*|copyreg")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        bars = transformers_logging.is_progress_bar_enabled()
        transformers_logging.disable_progress_bar()
        try:
            yield
        finally:
            if bars:
                transformers_logging.enable_progress_bar()
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
