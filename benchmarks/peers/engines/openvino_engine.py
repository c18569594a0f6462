"""The OpenVINO GenAI engine for the comparison, which steps its continuous-batching pipeline."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import openvino
import openvino_genai
from peers.recorder import Prompts, Recorder


class OpenVINO:
    def __init__(self, pipeline: openvino_genai.ContinuousBatchingPipeline, vocab_size: int) -> None:
        self.pipeline, self.vocab_size, self.count = pipeline, vocab_size, 0

    def run(self, prompts: Prompts, output_len: int) -> list[list[float]]:
        recorder = Recorder(len(prompts))
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = output_len
        config.ignore_eos, config.do_sample = True, False
        handles = []
        for prompt in prompts:
            ids = openvino.Tensor(np.array([prompt], np.int64))
            handles.append(self.pipeline.add_request(self.count, ids, config))
            self.count += 1
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            for request, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        recorder.add(request, len(output.generated_ids))
        return recorder.arrivals


def load(path: Path, format: str, threads: int, max_requests: int, max_len: int) -> OpenVINO:
    del format
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 4
    scheduler.max_num_seqs = max_requests
    scheduler.max_num_batched_tokens = max(2048, max_len)
    scheduler.enable_prefix_caching = False
    properties = {"INFERENCE_NUM_THREADS": threads}
    pipeline = openvino_genai.ContinuousBatchingPipeline(str(path), scheduler, "CPU", properties)
    return OpenVINO(pipeline, int(json.loads((path / "config.json").read_text())["vocab_size"]))
