"""Hugging Face `generate` on the CPU, measured as `inferc bench latency` and `throughput` measure: prints their JSON.

One request: a run of the whole length warms up, the medians of the next ones count. Several: a batch of two tokens each
warms up, and all requests, a batch of `--concurrency` at a time, count as a whole.

Run by `benchmarks/cpu_vs_transformers.py`, in a process of its own so that neither side's threads disturb the other.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from inferc.runtime.bench import REPEATS


@dataclass
class Run:
    """A call of `generate` as its streamer saw it, in seconds. `arrivals` of the prompt, then of each token."""

    start: float = field(default_factory=time.perf_counter)
    arrivals: list[float] = field(default_factory=list)

    def put(self, token_ids: torch.Tensor) -> None:
        self.arrivals.append(time.perf_counter())

    def end(self) -> None:
        pass

    @property
    def ttft(self) -> float:
        return self.arrivals[1] - self.start

    @property
    def itl(self) -> float:
        return (self.arrivals[-1] - self.arrivals[1]) / (len(self.arrivals) - 2)

    @property
    def whole(self) -> float:
        return self.arrivals[-1] - self.start


def run(model: torch.nn.Module, batch: int, input_len: int, output_len: int, seed: int) -> Run:
    """Generate exactly `output_len` tokens after `input_len` random ones, `batch` times at once."""
    generator = torch.Generator().manual_seed(seed)
    vocab_size = model.config.vocab_size  # type: ignore[union-attr]
    token_ids = torch.randint(0, vocab_size, (batch, input_len), generator=generator)  # type: ignore[arg-type]
    times = Run()
    model.generate(  # type: ignore[operator]
        token_ids,
        attention_mask=torch.ones_like(token_ids),
        do_sample=False,
        min_new_tokens=output_len,
        max_new_tokens=output_len,
        pad_token_id=0,
        streamer=times,
    )
    assert len(times.arrivals) == 1 + output_len, len(times.arrivals)
    return times


def measure(model: torch.nn.Module, input_len: int, output_len: int, concurrency: int, requests: int) -> list[Run]:
    """The runs that count, after one that warms up."""
    is_alone = concurrency == 1
    with torch.inference_mode():
        run(model, concurrency, input_len, output_len if is_alone else 2, seed=0)
        count = REPEATS if is_alone else requests // concurrency
        return [run(model, concurrency, input_len, output_len, seed) for seed in range(1, count + 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--requests", type=int, help="in all, if several run at once; 4 times --concurrency")
    args = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(args.threads)
    start = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=getattr(torch, args.dtype), attn_implementation="sdpa"
    )
    model.eval()
    load_seconds = time.perf_counter() - start
    requests = args.requests or 4 * args.concurrency
    runs = measure(model, args.input_len, args.output_len, args.concurrency, requests)
    tokens = len(runs) * args.concurrency * args.output_len
    result = {
        "load_seconds": load_seconds,
        "prefill_tokens_per_s": args.concurrency * args.input_len / statistics.median(one.ttft for one in runs),
        "decode_tokens_per_s": args.concurrency / statistics.median(one.itl for one in runs),
        "output_tokens_per_s": tokens / sum(one.whole for one in runs),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
