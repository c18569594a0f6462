"""Compiled models with random weights in sizes that no published checkpoint has, for benchmarks that need them."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import make_model
from cpu import fresh, prepared

VOCAB_SIZE = 4096  # vocabulary of the tokenizer; small, so that the LM head does not hide the cost of the layers


@dataclass(frozen=True)
class Llama:
    """The sizes of a Llama with tied embedding and LM head."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int

    @property
    def name(self) -> str:
        return "llama-{}x{}-{}layers-{}of{}heads".format(*astuple(self))

    @property
    def config(self) -> make_model.Config:
        sizes = (self.hidden, self.intermediate, self.layers, self.heads, self.kv_heads)
        rest: make_model.Config = {
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "max_position_embeddings": 1 << 20,
        }
        return make_model.llama(*sizes, vocab_size=VOCAB_SIZE, mlp_bias=False, **rest)

    def compiled(self, format: str, work: Path, max_model_len: int) -> Path:
        """Return the artifact with random weights, and make it if it does not exist."""
        return compiled(f"{self.name}-{max_model_len}", self.config, format, work, max_model_len)

    def facts(self, max_model_len: int) -> dict[str, Any]:
        """Return the facts about the model for a result file."""
        count = sum(weight.num_elements for weight in make_model.weights_of(self.config))
        return {"model": self.name, "parameters": count, "max_model_len": max_model_len}


def compiled(name: str, config: make_model.Config, format: str, work: Path, max_model_len: int) -> Path:
    """Return the artifact of a model with random weights, and make it and the model if they do not exist.

    A name must always stand for the same config.
    """
    work = work.resolve()
    model = work / name
    if not model.exists():
        partial = fresh(model.with_name(f"{name}.partial"))
        partial.mkdir(parents=True)
        make_model.write_configs(partial, config, "bfloat16")
        for _ in make_model.write_weights(partial, list(make_model.weights_of(config)), "bfloat16", seed=0):
            pass
        partial.rename(model)
    return prepared(name, "inferc", format, None, work, max_model_len)
