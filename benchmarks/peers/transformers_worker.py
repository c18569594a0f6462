"""One run of Hugging Face `generate` on the CPU: prints the JSON that `inferc bench` prints for the same work.

Run by `benchmarks/cpu_vs_transformers.py`, in a process of its own so that neither side's threads disturb the other.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging


def run(model: torch.nn.Module, batch: int, input_len: int, output_len: int, seed: int) -> float:
    """Seconds for `generate` of exactly `output_len` tokens after `input_len` random ones, `batch` times at once."""
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(100, 4000, (batch, input_len), generator=generator)
    start = time.perf_counter()
    out = model.generate(  # type: ignore[operator]
        token_ids,
        attention_mask=torch.ones_like(token_ids),
        do_sample=False,
        min_new_tokens=output_len,
        max_new_tokens=output_len,
        pad_token_id=0,
    )
    seconds = time.perf_counter() - start
    assert out.shape[1] == input_len + output_len, out.shape
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=1)
    args = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(args.threads)
    start = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=getattr(torch, args.dtype), attn_implementation="sdpa"
    )
    model.eval()
    load_seconds = time.perf_counter() - start
    with torch.inference_mode():
        run(model, args.concurrency, 16, 4, seed=0)
        prefill = run(model, args.concurrency, args.input_len, 1, seed=1)
        whole = run(model, args.concurrency, args.input_len, args.output_len, seed=1)
    tokens = args.concurrency * args.output_len
    result = {
        "load_seconds": load_seconds,
        "prefill_tokens_per_s": args.concurrency * args.input_len / prefill,
        "decode_tokens_per_s": args.concurrency * (args.output_len - 1) / (whole - prefill),
        "output_tokens_per_s": tokens / whole,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
