"""The loading of the MTP layers that a model's own checkpoint carries, as a head that drafts for the model."""

from __future__ import annotations

import copy
import dataclasses
import logging
from typing import Any

import torch

from inferc.errors import ArtifactError, ConfigError, UnsupportedError
from inferc.frontend.capture import capture
from inferc.frontend.checkpoint.load import Checkpoint, HeadOf
from inferc.frontend.checkpoint.mtp_layers import mtp_layers
from inferc.frontend.heads.load import HeadReader, embedding_of, lm_head_of
from inferc.ir.program import Program, name_of
from inferc.manifest import Head
from inferc.system.own_process import uncollected

log = logging.getLogger(__name__)

EMBEDDING, LM_HEAD = "embed_tokens.weight", "shared_head.weight"


def load_mtp(of: Checkpoint, dtype: str, max_model_len: int) -> Checkpoint:
    """Return the first MTP layer of a model as a head; of several it is the one that drafts at every depth.

    dtype, max_model_len: those that the model is captured for. Raises ConfigError for a checkpoint without such layers,
    and UnsupportedError for layers that are not like those that transformers has code of.
    """
    if of.folder is None:
        raise ConfigError("--mtp: a module in memory has no MTP layers; give the folder of the model")
    layers = mtp_layers(of.config, of.tensors)
    if not layers:
        raise ConfigError(f"--mtp: {of.folder} has no MTP layers; leave it out, or give a checkpoint that has them")
    if len(layers) > 1:
        log.warning("%s has %d MTP layers: the first one drafts, and the others are left out", of.name, len(layers))
    config = _config(of)
    tensors = {name: of.tensors[name] for name in layers[0]}
    places = {name: (of.reader, name) for name in layers[0]}
    program = capture(of, dtype, max_model_len, check=False)
    for name, theirs in ((EMBEDDING, embedding_of(program, of)), (LM_HEAD, lm_head_of(program, of))):
        tensors[name], places[name] = of.tensors[theirs], (of.reader, theirs)
    with uncollected():  # it imports transformers' layers
        try:
            from inferc.frontend.heads.mtp import MtpHead
        except ImportError as error:  # of an older version
            raise UnsupportedError(
                "--mtp: the installed transformers has no code of MTP layers; upgrade it, or leave --mtp out"
            ) from error

    head = Checkpoint(config, MtpHead, tensors, HeadReader(places), folder=of.folder)
    facts = Head(
        kind="mtp",
        hidden_size=int(of.config.hidden_size),
        num_layers=int(of.config.num_hidden_layers),
        inputs=[_before_lm_head(program, of)],
        own=_before_lm_head(_captured(head, of, dtype, max_model_len), of),
        num_logits=int(of.config.vocab_size),
    )
    return dataclasses.replace(head, head=HeadOf(of, facts))


def _config(of: Checkpoint) -> Any:
    """Return the config of the first MTP layer, as transformers makes it."""
    config = copy.deepcopy(of.config)
    if not _is_known(of):  # the layer is like the last of the model
        for name in ("layer_types", "mlp_layer_types"):
            if (each := getattr(config, name, None)) is not None:
                setattr(config, f"mtp_{name}", each[-1:])
    config.first_mtp_layer = int(config.num_hidden_layers)
    config.num_mtp_layers = 1
    for name in ("mtp_layer_types", "mtp_mlp_layer_types", "mtp_per_layer_config"):
        if (each := getattr(config, name, None)) is not None:
            setattr(config, name, each[:1])
    return config.get_mtp_config()


def _is_known(of: Checkpoint) -> bool:
    """Return whether transformers knows of MTP layers in models of this family."""
    return getattr(of.config, "num_mtp_layers", None) is not None


def _captured(head: Checkpoint, of: Checkpoint, dtype: str, max_model_len: int) -> Program:
    try:
        return capture(head, dtype, max_model_len, check=False)
    except ArtifactError as error:
        if _is_known(of):
            raise
        raise UnsupportedError(
            f"--mtp: the MTP layers of {of.config.model_type} are not like those that transformers has code of"
            f" ({error}); leave it out"
        ) from error


def _before_lm_head(program: Program, of: Checkpoint) -> str:
    """Return the name of the rows that the LM head reads."""
    (logits,) = program.output().all_input_nodes
    aten = torch.ops.aten
    if logits.target != aten.linear.default:
        raise UnsupportedError(f"--mtp: {of.name} changes its logits behind the LM head, which is not built for MTP")
    rows = logits.all_input_nodes[0]
    while rows.target == aten.slice.Tensor:  # of all rows, as transformers writes it
        rows = rows.all_input_nodes[0]
    return str(name_of(rows))
