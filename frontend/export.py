"""The export of a causal language model of transformers as a Program: the captured graph and its weights.

All knowledge of Hugging Face module names ends here: the Program has stable names (`layers.3.attention.q_proj.weight`)
and ops, and the passes look at nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from inferc.config import ContextLength
from inferc.errors import ConfigError, ExportError, UnsupportedError
from inferc.frontend.checkpoint.bind import bind
from inferc.frontend.checkpoint.load import Checkpoint
from inferc.frontend.convert import Converter
from inferc.frontend.repeat import trace_once
from inferc.frontend.trace import torch_export as trace
from inferc.frontend.trace.buffers import initial_buffers, unsaved_buffers
from inferc.frontend.trace.eager_attention import capture_eager_attention
from inferc.frontend.trace.position_tables import simplify_position_tables
from inferc.frontend.trace.positions import first_position
from inferc.frontend.trace.rope import Overrides, fix_rope, longest_context
from inferc.ir.model_info import ModelInfo
from inferc.ir.program import Program, name_of, named_arguments

aten = torch.ops.aten
CHOICES = (aten.index.Tensor, aten.index_put.default)
PICKS = (aten.nonzero.default, aten.masked_select.default)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export_model(checkpoint: Checkpoint, dtype: str = "bfloat16", max_model_len: int | None = None) -> Program:
    """Capture a checkpoint's model: inputs token_ids and positions i64 [1, T], output (logits [1, T, vocab_size],).

    Raises ExportError if the model cannot be captured, ArtifactError if the checkpoint does not fit it.
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
            f"{type(model).__name__}: its code takes another way for more than {longest} tokens, and the longest"
            f" sequence is {length}; give --max-model-len {longest}, or fewer"
        )
    program = converter.program(exported, sections)
    _refuse_choices(program, checkpoint)
    capture_eager_attention(program)
    simplify_position_tables(program)
    facts = model_info(checkpoint, model, dtype, length)
    program.info = replace(facts, rope=ropes, ignored_tensors=binding.ignored)
    program.num_layers = program.info.num_attention_layers
    _require_positions(program, checkpoint)
    return program


def model_info(checkpoint: Checkpoint, model: Any, dtype: str, max_model_len: int) -> ModelInfo:
    """Return the facts of the model that later stages need."""
    config = checkpoint.config
    head = getattr(model.get_output_embeddings(), "weight", None)
    return ModelInfo(
        model_type=config.model_type,
        architecture=checkpoint.model_class.__name__,
        vocab_size=int(config.vocab_size),
        hidden_size=int(config.hidden_size),
        num_attention_layers=int(config.num_hidden_layers),
        max_position_embeddings=max(context_length(config).trained or 0, max_model_len),
        max_model_len=max_model_len,
        dtype=dtype,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        tied_embeddings=model.get_input_embeddings().weight is head,
    )


def context_length(config: Any) -> ContextLength:
    """Return how many positions the model was made for, and how many its rope scaling reaches.

    Raises ConfigError if the config has no valid number.
    """
    for name in ("max_position_embeddings", "seq_length", "max_seq_len"):
        trained = getattr(config, name, None)
        if trained in (None, -1):  # -1: any number, as in XLNet
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
    """Return `max_model_len`, or by default the length that the model was made for.

    Raises ConfigError if its config does not say.
    """
    length = max_model_len or context_length(config).trained
    if length is None:
        raise ConfigError("the model's config has no max_position_embeddings; give max_model_len")
    return length


def constant_buffers(model: Any, checkpoint: Checkpoint, overrides: Overrides) -> dict[str, Tensor]:
    """Return the values of the buffers that no checkpoint stores (rope frequencies), by name.

    Buffers whose values cannot be computed are absent.
    """
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
    """Raise UnsupportedError for a model that picks tokens by a condition on data.

    Models with an adapter for each language do so.
    """
    for node in program.graph.nodes:
        indices = node.args[1] if node.target in CHOICES else ()
        picks = [each for each in indices if isinstance(each, torch.fx.Node) and each.meta["val"].dtype == torch.bool]
        if picks or node.target in PICKS:
            raise UnsupportedError(
                f"{checkpoint.name}: {name_of(node)} picks tokens by a condition on data, so how many it takes is known"
                " only when it runs; expected a model that does the same for every token"
            )


def _require_positions(program: Program, checkpoint: Checkpoint) -> None:
    """Raise ExportError for a model that uses no positions, neither as an input nor by ALiBi."""
    attentions = [node for node in program.graph.nodes if node.target == torch.ops.inferc.attention.default]
    if program.input("positions").users or any(named_arguments(node)["alibi"] is not None for node in attentions):
        return
    raise ExportError(
        f"{checkpoint.name}: the captured graph never reads `positions`; expected a model that takes position_ids, or"
        " has ALiBi"
    )
