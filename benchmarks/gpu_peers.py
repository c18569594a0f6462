"""The speed of PyTorch and transformers at the same shapes on the same GPU, with random weights made there."""

from __future__ import annotations

import time
from typing import Any

import torch
from make_model import SHAPES
from transformers import AutoConfig, AutoModelForCausalLM


def random_module(shape: str) -> Any:
    """Return the transformers model of a shape in bfloat16, with random weights made on the GPU."""
    config = AutoConfig.for_model(
        **{key: value for key, value in SHAPES[shape].config.items() if key != "architectures"}
    )
    config.dtype = torch.bfloat16
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.eval()


def compiled_decode(shape: str, prompt: int = 128, count: int = 256) -> dict[str, Any]:
    """Measure one sequence with a static cache and the forward pass compiled with CUDA graphs."""
    model = random_module(shape)
    ids = torch.full((1, prompt), 5, device="cuda")
    options = {"do_sample": False, "cache_implementation": "static", "pad_token_id": 0, "eos_token_id": None}
    started = time.perf_counter()
    model.generate(ids, max_new_tokens=8, **options)
    model.generate(ids, max_new_tokens=count, **options)
    torch.cuda.synchronize()
    warm = time.perf_counter() - started
    times = {}
    for tokens in (1, count):
        started = time.perf_counter()
        model.generate(ids, min_new_tokens=tokens, max_new_tokens=tokens, **options)
        torch.cuda.synchronize()
        times[tokens] = time.perf_counter() - started
    rate = (count - 1) / (times[count] - times[1])
    return {"transformers_tokens_per_s": round(rate, 1), "transformers_warm_s": round(warm, 1)}


def continuous_batching(shape: str, seqs: int, prompt: int, count: int) -> dict[str, Any]:
    """Measure transformers' own continuous batching."""
    from transformers import GenerationConfig

    model = random_module(shape)
    model.set_attn_implementation("sdpa_paged")
    prompts = [[5 + index % 7] * prompt for index in range(seqs)]
    config = GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=0)
    model.generate_batch(inputs=prompts[:2], generation_config=config)
    torch.cuda.synchronize()
    started = time.perf_counter()
    outputs = model.generate_batch(inputs=prompts, generation_config=config)
    torch.cuda.synchronize()
    spent = time.perf_counter() - started
    tokens = sum(len(output.generated_tokens) for output in outputs.values())
    return {"transformers_tokens_per_s": round(tokens / spent, 1), "transformers_tokens": tokens}
