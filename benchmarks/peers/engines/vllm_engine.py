"""The vLLM engine for the comparison: its CPU backend, stepped in this process."""

from __future__ import annotations

from pathlib import Path

import torch
from peers.recorder import Prompts, Recorder
from vllm import EngineArgs, LLMEngine, SamplingParams, TokensPrompt


class VLLM:
    def __init__(self, engine: LLMEngine) -> None:
        self.engine, self.vocab_size = engine, engine.model_config.get_vocab_size()

    def run(self, prompts: Prompts, output_len: int) -> list[list[float]]:
        recorder = Recorder(len(prompts))
        params = SamplingParams(
            temperature=0.0, max_tokens=output_len, min_tokens=output_len, ignore_eos=True, detokenize=False
        )
        for index, prompt in enumerate(prompts):
            self.engine.add_request(str(index), TokensPrompt(prompt_token_ids=list(prompt)), params)
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                request = int(output.request_id.split("-")[0])
                recorder.add(request, len(output.outputs[0].token_ids) - len(recorder.arrivals[request]))
        return recorder.arrivals


def load(path: Path, format: str, threads: int, max_requests: int, max_len: int) -> VLLM:
    torch.set_num_threads(threads)
    return VLLM(
        LLMEngine.from_engine_args(
            EngineArgs(
                model=str(path),
                dtype=format,
                max_model_len=max_len + 16,
                max_num_seqs=max(max_requests, 2),
                enable_prefix_caching=False,
                disable_log_stats=True,
            )
        )
    )
