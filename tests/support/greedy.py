"""The tokens that Hugging Face gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers


def greedy_of_hugging_face(folder: Path, prompts: list[list[int]], count: int) -> list[list[int]]:
    """The tokens that follow each prompt on its own, in float32, by a model that is read from its folder."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return greedy_of(model, prompts, count)


def greedy_of(model: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    """The most likely tokens after each prompt, whatever the model's own defaults ask for; end tokens end nothing."""
    model.eval().generation_config.eos_token_id = None
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        how = {"do_sample": False, "repetition_penalty": 1.0, "max_new_tokens": count, "pad_token_id": 0}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **how)
        found.append(out[0, len(prompt) :].tolist())
    return found
