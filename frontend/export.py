"""A causal language model of transformers as a Program: the captured graph and its weights.

All knowledge of Hugging Face module names ends here: what leaves has stable names (`layers.3.attention.q_proj.weight`)
and ops, and the passes look at nothing else.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inferc.config import ContextLength
from inferc.errors import ConfigError, ExportError, UnsupportedError
from inferc.frontend.checkpoint.bind import bind
from inferc.frontend.checkpoint.load import Checkpoint, load, load_module
from inferc.frontend.convert import Converter
from inferc.frontend.repeat import trace_once
from inferc.frontend.trace import torch_export as trace
from inferc.frontend.trace.buffers import initial_buffers, unsaved_buffers
from inferc.frontend.trace.eager_attention import capture_eager_attention
from inferc.frontend.trace.position_tables import simplify_position_tables
from inferc.frontend.trace.positions import first_position
from inferc.frontend.trace.rope import Overrides, fix_rope, longest_context, warn_of_fixed_rope
from inferc.ir import program as program_lib
from inferc.ir.program import Program, name_of, named_arguments

aten = torch.ops.aten
CHOICES = (aten.index.Tensor, aten.index_put.default)
PICKS = (aten.nonzero.default, aten.masked_select.default)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def capture(
    model: str | Path | torch.nn.Module | Checkpoint,
    dtype: str = "bfloat16",
    max_model_len: int | None = None,
    *,
    check: bool = True,
) -> Program:
    """Load `model` (folder, hub id, transformers causal LM, or what `load` returned) and capture it, checked.

    dtype is that of activations and weights; max_model_len (tokens; by default what the model was trained for) fixes a
    rope that depends on length (see rope.py), which `info["rope"]` then says and a warning. With `check` a small random
    copy must give the reference's logits, and a module those of its class and config (see check.py).

    What was captured last is kept, so that compiling a model for several targets traces it once; modules in memory,
    whose code may have changed, are captured anew.
    """
    if isinstance(model, torch.nn.Module):
        checkpoint = load_module(model)
    else:
        checkpoint = model if isinstance(model, Checkpoint) else load(model)
    key = None if checkpoint.module is not None else _key(checkpoint, dtype, max_model_len)
    kept = _KEPT.get(key, check)
    program = kept or export_model(checkpoint, dtype, max_model_len)
    if check:
        from inferc.frontend.check import check_capture, check_module

        warn_of_fixed_rope(program.info["rope"])
        if kept is None:
            check_module(checkpoint)
            check_capture(program, checkpoint, max_model_len)
    if kept is None:
        _KEPT.put(key, check, program)
    return program


def forget_captures() -> None:
    """Capture anew what was captured before, as after a change of the code that captures."""
    _KEPT.programs.clear()


class _Kept:
    """The programs that were captured last, as text, since whoever gets one changes it."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.programs: OrderedDict[str, tuple[bool, str]] = OrderedDict()

    def get(self, key: str | None, checked: bool) -> Program | None:
        was_checked, text = self.programs.get(key or "", (False, ""))
        if not text or was_checked < checked:
            return None
        self.programs.move_to_end(key or "")
        return program_lib.from_json(json.loads(text))

    def put(self, key: str | None, checked: bool, program: Program) -> None:
        if key is None:
            return
        self.programs[key] = (checked, json.dumps(program_lib.to_json(program)))
        self.programs.move_to_end(key)
        if len(self.programs) > self.most:
            self.programs.popitem(last=False)


_KEPT = _Kept(most=32)


def _key(checkpoint: Checkpoint, dtype: str, max_model_len: int | None) -> str | None:
    """The key under which a capture is kept: all that a program is made of, without the weights' values and the folder's name.

    None, and nothing is kept, where values matter too: they decide whether tensors that are tied and stored both stay tied.
    """
    if getattr(checkpoint.config, "tie_word_embeddings", False):
        tied = getattr(checkpoint.model_class, "_tied_weights_keys", None) or ()
        if any(re.search(f"{pattern}$", name) for pattern in tied for name in checkpoint.tensors):
            return None
    tensors = sorted((name, list(shape), str(kind)) for name, (shape, kind) in checkpoint.tensors.items())
    kind = checkpoint.model_class
    config = json.loads(checkpoint.config.to_json_string(use_diff=False))
    config.pop("_name_or_path", None)
    return json.dumps([kind.__module__, kind.__qualname__, dtype, max_model_len, tensors, config])


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
    converter = Converter(model, binding, constant_buffers(model, checkpoint, overrides))
    exported, sections = trace_once(model)
    if length > (longest := trace.longest(exported)):
        raise ExportError(
            f"{type(model).__name__}: its code takes another way for more than {longest} tokens, and the longest sequence is"
            f" {length}; give --max-model-len {longest}, or fewer"
        )
    program = converter.program(exported, sections)
    _refuse_choices(program, checkpoint)
    capture_eager_attention(program)
    simplify_position_tables(program)
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
    for name in ("max_position_embeddings", "seq_length", "max_seq_len"):
        trained = getattr(config, name, None)
        if trained in (None, -1):  # -1: any number, as XLNet has it
            continue
        if not isinstance(trained, int) or trained < 1:
            raise ConfigError(
                f"the model's config has {name} {trained!r}, expected at least 1; write the longest sequence it was"
                " trained on into config.json"
            )
        trained -= first_position(config)
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
        if checkpoint.module is not None:
            owner = checkpoint.module.get_submodule(path)
            values = {name: owner.get_buffer(name).detach().cpu() for name in unsaved_buffers(module)}
        else:
            values = initial_buffers(model, path)
        found.update({f"{path}.{name}".lstrip("."): value for name, value in values.items()})
    return {**found, **overrides}


def _refuse_choices(program: Program, checkpoint: Checkpoint) -> None:
    """Raise UnsupportedError for a model that picks tokens by a condition on data, as one adapter for each language does."""
    for node in program.graph.nodes:
        indices = node.args[1] if node.target in CHOICES else ()
        picks = [each for each in indices if isinstance(each, torch.fx.Node) and each.meta["val"].dtype == torch.bool]
        if picks or node.target in PICKS:
            raise UnsupportedError(
                f"{checkpoint.name}: {name_of(node)} picks tokens by a condition on data, so how many it takes is known only when it"
                " runs; expected a model that does the same for every token"
            )


def _require_positions(program: Program, checkpoint: Checkpoint) -> None:
    """Raise ExportError for a model that knows no positions: they come as an input, or by ALiBi."""
    attentions = [node for node in program.graph.nodes if node.target == torch.ops.inferc.attention.default]
    if program.input("positions").users or any(named_arguments(node)["alibi"] is not None for node in attentions):
        return
    raise ExportError(
        f"{checkpoint.name}: the captured graph never reads `positions`; expected a model that takes position_ids, or"
        " has ALiBi"
    )
