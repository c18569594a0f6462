"""The inferc engine for the comparison: it steps the engine of an artifact."""

from __future__ import annotations

from pathlib import Path

from peers.recorder import Prompts, Recorder

from inferc.runtime.engine.engine import Engine
from inferc.runtime.engine.load import load_engine
from inferc.runtime.step.sampling_params import SamplingParams


class Inferc:
    def __init__(self, engine: Engine) -> None:
        self.engine, self.vocab_size, self.count = engine, engine.model.vocab_size, 0

    def run(self, prompts: Prompts, output_len: int) -> list[list[float]]:
        recorder = Recorder(len(prompts))
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        first = self.count
        for prompt in prompts:
            self.engine.add_request(str(self.count), list(prompt), params)
            self.count += 1
        while self.engine.has_work:
            for output in self.engine.step():
                recorder.add(int(output.request_id) - first, len(output.token_ids))
        return recorder.arrivals


def load(path: Path, format: str, threads: int, max_requests: int, max_len: int) -> Inferc:
    del format, max_len
    return Inferc(load_engine(path, num_threads=threads, max_num_seqs=max_requests, prefix_cache=False))
