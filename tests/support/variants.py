"""Configs of listed families that published checkpoints have and `families.py` has not: a switch that is off by default.

Each is compiled and gives transformers' logits, or is refused with a reason that names the feature.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from families import FAMILIES, OLD

WIDE = {"hidden_size": 80, "head_dim": 20}  # heads that no kernel takes as they are


@dataclass(frozen=True)
class Variant:
    """`fields` on top of those of a row of FAMILIES, or of the model type of that name where there is none."""

    of: str
    fields: dict[str, Any] = field(default_factory=dict)
    moves: bool = True  # whether the fields change the logits, of equal weights where both have them

    @property
    def model_type(self) -> str:
        return FAMILIES[self.of].model_type(self.of) if self.of in FAMILIES else self.of

    @property
    def base(self) -> dict[str, Any]:
        return FAMILIES[self.of].fields if self.of in FAMILIES else {}

    @property
    def config(self) -> dict[str, Any]:
        return {**self.base, **self.fields}


COMPILED: dict[str, Variant] = {
    "olmo: clip_qkv": Variant("olmo", {"clip_qkv": 0.5}),
    "olmoe: clip_qkv": Variant("olmoe", {"clip_qkv": 0.5}),
    "nemotron: norms with 1 + w": Variant("nemotron", {"norm_eps": 1e-5, "partial_rotary_factor": 0.5}),
    "stablelm: qk_layernorm": Variant("stablelm", {"qk_layernorm": True}),
    "llama: heads of 20": Variant("llama", WIDE),
    "gpt_neox: heads of 20": Variant("gpt_neox", WIDE),
    "phi3: heads of 20": Variant("phi3", WIDE),
    "qwen3: heads of 20, behind norms": Variant("qwen3", {"head_dim": 20}),
    "cohere: heads of 20, with norms of their own": Variant("cohere", WIDE),
    "gpt2: heads of 20, packed": Variant("gpt2", {**OLD, "n_embd": 80, "activation_function": "gelu"}),
}
