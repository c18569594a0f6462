"""The families' small models from their configs alone: without weights, for what only looks at graphs."""

from __future__ import annotations

from typing import Any

import transformers
from families import FAMILIES
from random_models import SIZES

from inferc.frontend.checkpoint.load import Checkpoint, from_config
from inferc.frontend.layers import layer_kinds, shortened


def tiny_checkpoint(name: str, **fields: Any) -> Checkpoint:
    """The model of a row of FAMILIES, with other `fields` of its config."""
    family = FAMILIES[name]
    sizes = {**SIZES, "vocab_size": 320, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
    given = {key: value for key, value in {**sizes, **family.fields, **fields}.items() if value is not ...}
    config = transformers.AutoConfig.for_model(family.model_type(name), **given)
    return from_config(config, None)


def with_every_kind(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with as few layers as hold every kind of layer."""
    kinds = layer_kinds(checkpoint)
    return shortened(checkpoint, max(kinds.index(kind) for kind in kinds) + 1)
