"""The transformers engine for the comparison: `generate` on a static batch of prompts of equal length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peers.recorder import Prompts, Recorder
from transformers import AutoModelForCausalLM
from transformers.utils import logging


class Streamer:
    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.calls = recorder, 0

    def put(self, _: torch.Tensor) -> None:
        if self.calls:  # the first call brings the prompt
            for request in range(len(self.recorder.arrivals)):
                self.recorder.add(request)
        self.calls += 1

    def end(self) -> None:
        pass


class Transformers:
    def __init__(self, model: Any) -> None:
        self.model, self.vocab_size = model, model.config.vocab_size

    def run(self, prompts: Prompts, output_len: int) -> list[list[float]]:
        recorder, ids = Recorder(len(prompts)), torch.tensor(prompts)
        options = {"do_sample": False, "min_new_tokens": output_len, "max_new_tokens": output_len, "pad_token_id": 0}
        with torch.inference_mode():
            self.model.generate(ids, attention_mask=torch.ones_like(ids), streamer=Streamer(recorder), **options)
        return recorder.arrivals


def load(path: Path, format: str, threads: int, max_requests: int, max_len: int) -> Transformers:
    del max_requests, max_len
    logging.set_verbosity_error()
    torch.set_num_threads(threads)
    dtype = getattr(torch, format)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa")
    return Transformers(model.eval())
