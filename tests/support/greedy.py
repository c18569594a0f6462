"""The tokens that Hugging Face gives."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers


def greedy_of_hugging_face(folder: Path, prompts: list[list[int]], count: int) -> list[list[int]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        how = {"do_sample": False, "max_new_tokens": count, "pad_token_id": 0}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **how)
        found.append(out[0, len(prompt) :].tolist())
    return found
