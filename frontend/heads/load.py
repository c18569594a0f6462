"""The loading of a head's folder, beside the model that it drafts for.

Two forms of config.json are read: that of `speculators` (the decoder layer under `transformer_layer_config`), and that
of the authors of EAGLE-3 (a config of Llama with more fields). What a head's checkpoint leaves out, because the model
has it (the embedding), is read from the model's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inferc.errors import ArtifactError, ConfigError, UnsupportedError
from inferc.frontend.capture import capture
from inferc.frontend.checkpoint import unreadable
from inferc.frontend.checkpoint.load import CONFIG_FILE, Checkpoint, HeadOf, find_folder, load
from inferc.frontend.checkpoint.safetensors import TensorSpec, read_folder
from inferc.ir.layer_borders import value_before
from inferc.ir.program import Program
from inferc.ir.weights import TensorReader
from inferc.manifest import Head
from inferc.system.own_process import uncollected

TO_DRAFT, IS_DRAFTED = "d2t", "t2d"  # how far a drafted id is from the model's own, and which ids are drafted
EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
OLD_LAYER = "midlayer."  # the name of the layer in checkpoints of EAGLE-3's authors


@dataclass(frozen=True)
class HeadReader:
    """A reader of tensors of several checkpoints; `places`: by name, the reader and the name there."""

    places: Mapping[str, tuple[TensorReader, str]]

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        reader, theirs = self.places[name]
        return reader.rows(theirs, start, stop)


def load_head(path: str | Path, model: str | Path) -> Checkpoint:
    """Open the folder of an EAGLE-3 head, and that of the model that it drafts for.

    Raises ConfigError, UnsupportedError or ArtifactError, as `load` does, for what is no such head, for a head of
    another model, and for tensors that are missing.
    """
    folder = find_folder(path)
    raw = _read_config(folder)
    of = load(model)
    config = _config(raw, folder, of)
    program = capture(of, "float32", check=False)
    layers = _layers(raw, int(of.config.num_hidden_layers), folder)
    config.num_hidden_inputs = len(layers)
    own = read_folder(folder)
    places: dict[str, tuple[TensorReader, str]] = {}
    tensors: dict[str, TensorSpec] = {}
    for name, spec in own.tensors.items():
        ours = name.removeprefix("model.").replace(OLD_LAYER, "layers.0.")
        places[ours], tensors[ours] = (own, name), spec
    token_ids = _token_ids(tensors, HeadReader(places), config, folder)
    for name in (TO_DRAFT, IS_DRAFTED):
        tensors.pop(name, None)
    for name in (EMBEDDING, LM_HEAD) if token_ids is None else (EMBEDDING,):
        if name not in tensors:
            theirs = embedding_of(program, of) if name == EMBEDDING else lm_head_of(program, of)
            tensors[name], places[name] = of.tensors[theirs], (of.reader, theirs)
    with uncollected():  # it imports transformers' Llama
        from inferc.frontend.heads.eagle3 import OWN, OWN_NORMED, Eagle3Head

    facts = Head(
        kind="eagle3",
        hidden_size=int(of.config.hidden_size),
        num_layers=int(of.config.num_hidden_layers),
        inputs=[str(value_before(program, layer).meta["name"]) for layer in layers],
        own=OWN_NORMED if config.norm_output else OWN,
        num_logits=int(config.draft_vocab_size),
    )
    return Checkpoint(config, Eagle3Head, tensors, HeadReader(places), folder=folder, head=HeadOf(of, facts, token_ids))


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise ConfigError(unreadable.folder_without_config(folder))
    try:
        raw = json.loads(file.read_text())
    except ValueError as error:
        raise ConfigError(f"{file}: not JSON ({error}); mend it, or fetch it anew if it was cut short") from error
    kind = raw.get("speculators_model_type") if isinstance(raw, dict) else None
    if kind not in (None, "eagle3"):
        raise UnsupportedError(f"{folder}: a head of the kind {kind}, which is not built; expected eagle3")
    names = raw.get("architectures") if isinstance(raw, dict) else None
    if kind is None and not any("eagle3" in str(name).lower() for name in names or ()):
        raise ConfigError(
            f"{file}: no head that drafts: expected speculators_model_type eagle3, or an architecture named Eagle3;"
            " compile a model without --head-of"
        )
    found: dict[str, Any] = raw
    return found


def _config(raw: dict[str, Any], folder: Path, of: Checkpoint) -> Any:
    """Return the config of the head: that of its decoder layer, with the fields that `Eagle3Head` reads."""
    with uncollected():
        from transformers import LlamaConfig

    is_nested = "transformer_layer_config" in raw
    layer = raw["transformer_layer_config"] if is_nested else raw
    kind = layer.get("model_type")
    if kind != "llama":
        raise UnsupportedError(f"{folder}: its layer is of model_type {kind}; expected llama, as most heads have it")
    for field in ("fc_norm", "norm_per_layer"):
        if raw.get(field):
            raise UnsupportedError(f"{folder}: {field} in config.json is not built; use a head without it")
    try:
        config = LlamaConfig.from_dict({key: value for key, value in layer.items() if key != "architectures"})
    except Exception as error:  # a config class may raise anything
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{folder}: not a valid config ({type(error).__name__}: {reason})") from error
    if config.num_hidden_layers != 1:
        raise UnsupportedError(f"{folder}: a head of {config.num_hidden_layers} layers; expected 1")
    config.tie_word_embeddings = False
    config.target_hidden_size = int(raw.get("target_hidden_size") or config.hidden_size)
    config.draft_vocab_size = int(raw.get("draft_vocab_size") or config.vocab_size)
    config.norm_before_residual = bool(raw.get("norm_before_residual", is_nested))
    config.norm_before_fc = bool(raw.get("norm_before_fc"))
    config.norm_output = bool(raw.get("norm_output"))
    for what, found, expected in (
        ("hidden rows of", config.target_hidden_size, int(of.config.hidden_size)),
        ("a vocabulary of", config.vocab_size, int(of.config.vocab_size)),
    ):
        if found != expected:
            raise ConfigError(
                f"{folder} was made for {what} {found}, and {of.name} has {expected}; it is of another model"
            )
    return config


def _layers(raw: dict[str, Any], count: int, folder: Path) -> list[int]:
    """Return the layers whose input the head reads, by config.json or as the paper chooses them."""
    inner = raw.get("eagle_config") or {}
    name = "eagle_aux_hidden_state_layer_ids"
    found = raw.get(name) or inner.get(name)
    layers = list(found or (2, count // 2, count - 3))
    wrong = [layer for layer in layers if not isinstance(layer, int) or not 0 < layer < count]
    if wrong:
        why = f"{name} in config.json" if found else "as EAGLE-3 chooses them, for config.json names none"
        raise ConfigError(
            f"{folder}: it reads the inputs of layers {', '.join(map(str, layers))} ({why}), and the model has"
            f" {count} layers; expected 1 to {count - 1}"
        )
    return layers


def _token_ids(tensors: Mapping[str, TensorSpec], reader: TensorReader, config: Any, folder: Path) -> Tensor | None:
    """Return the model's ids of the tokens that the head can draft, or None for all in their order."""
    count, vocab_size = config.draft_vocab_size, config.vocab_size
    if TO_DRAFT not in tensors:
        if count == vocab_size:
            return None
        raise ArtifactError(
            f"{folder}: no tensor {TO_DRAFT}, which names the {count} of {vocab_size} tokens that it drafts; the"
            " checkpoint is incomplete"
        )
    (shape, dtype) = tensors[TO_DRAFT]
    if shape != (count,) or dtype.is_floating_point:
        raise ArtifactError(f"{folder}: {TO_DRAFT} has the shape {list(shape)}; expected [{count}] whole numbers")
    ids = torch.arange(count) + reader.rows(TO_DRAFT, 0, count).long()
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(ids.unique()) != count:
        raise ArtifactError(
            f"{folder}: {TO_DRAFT} gives ids up to {int(ids.max())}, or one twice; expected {count} different ones of"
            f" the {vocab_size} of the model"
        )
    return ids.int()


def embedding_of(program: Program, of: Checkpoint) -> str:
    """Return the name of the model's embedding in its checkpoint."""
    token_ids = program.input("token_ids")
    found = [node.args[0] for node in token_ids.users if node.target == torch.ops.aten.embedding.default]
    return _tensor(program, found[0] if found else None, of, EMBEDDING)


def lm_head_of(program: Program, of: Checkpoint) -> str:
    """Return the name of the model's LM head in its checkpoint."""
    (logits,) = program.output().all_input_nodes
    is_product = logits.target == torch.ops.aten.linear.default
    return _tensor(program, logits.args[1] if is_product else None, of, LM_HEAD)


def _tensor(program: Program, node: Any, of: Checkpoint, name: str) -> str:
    """Return the checkpoint's name of the tensor that a node reads as it is stored."""
    weight = program.weight(node) if isinstance(node, torch.fx.Node) and node.op == "get_attr" else None
    while weight is not None and weight.op == "cast":
        weight = weight.args[0]
    if weight is None or weight.args or weight.name not in of.tensors:
        raise ArtifactError(f"the head has no {name}, and {of.name} has none that could take its place")
    return str(weight.name)
