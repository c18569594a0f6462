"""The onnxruntime-genai engine for the comparison, which runs a static batch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnxruntime_genai as og
from peers.recorder import Prompts, Recorder


class OnnxRuntime:
    def __init__(self, model: og.Model, vocab_size: int) -> None:
        self.model, self.vocab_size = model, vocab_size

    def run(self, prompts: Prompts, output_len: int) -> list[list[float]]:
        recorder = Recorder(len(prompts))
        length = len(prompts[0]) + output_len
        params = og.GeneratorParams(self.model)
        params.set_search_options(batch_size=len(prompts), do_sample=False, min_length=length, max_length=length)
        generator = og.Generator(self.model, params)
        generator.append_tokens(np.array(prompts, np.int32))
        for _ in range(output_len):
            generator.generate_next_token()
            for request in range(len(prompts)):
                recorder.add(request)
        return recorder.arrivals


def load(path: Path, format: str, threads: int, max_requests: int, max_len: int) -> OnnxRuntime:
    del format, max_requests, max_len
    config = json.loads((path / "genai_config.json").read_text())
    og_config = og.Config(str(path))
    og_config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
    return OnnxRuntime(og.Model(og_config), int(config["model"]["vocab_size"]))
