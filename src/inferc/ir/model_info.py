"""The facts of a model that come with its Program: its sizes, and what passes have made of it."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType

from inferc.ir.adapter_sites import Adapters
from inferc.manifest_types import Quantization


class FixedRope(Struct, frozen=True):
    """A rope whose frequencies depend on length, fixed for sequences of up to `max_model_len` tokens.

    differs_up_to: up to which length transformers would use other frequencies; 0: up to none.
    """

    module: str
    kind: str
    max_model_len: int
    differs_up_to: int


class ModelInfo(Struct, frozen=True, kw_only=True):
    """The facts of a model; those that are not set do not hold of the program, and are not saved with it."""

    model_type: str = ""
    architecture: str = ""
    vocab_size: int = 0
    hidden_size: int = 0
    num_attention_layers: int = 0
    max_position_embeddings: int = 0  # with the positions that its rope scaling adds
    max_model_len: int = 0
    dtype: str = ""
    num_parameters: int = 0
    tied_embeddings: bool = False
    rope: list[FixedRope] = []
    ignored_tensors: list[str] = []  # those of the checkpoint that the model does not read
    # The place of this program among those of all ranks.
    ep_rank: int | UnsetType = UNSET
    ep_size: int | UnsetType = UNSET
    hidden_out: bool | UnsetType = UNSET  # whether its result is the hidden rows, for the next pipeline stage
    pp_stage: int | UnsetType = UNSET
    pp_size: int | UnsetType = UNSET
    tp_rank: int | UnsetType = UNSET
    tp_size: int | UnsetType = UNSET
    quantization: Quantization | UnsetType = UNSET
    adapters: Adapters | UnsetType = UNSET  # the room for LoRA adapters, of a program that has any
