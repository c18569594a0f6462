"""The run of an artifact's compiled step on prompts, for the certificate's row of the kernels."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from inferc.errors import VerifyError
from inferc.runtime.artifact.load import load_artifact
from inferc.runtime.engine.engine import Engine
from inferc.runtime.engine.load import load_engine
from inferc.runtime.runners.api import ObservableRunner
from inferc.runtime.step.sampling_params import SamplingParams
from inferc.targets import find_spec


def run_kernels(
    artifact: Path,
    prompts: list[list[int]],
    num_greedy: int,
    *,
    token_budget: int = 64,
    decoded: list[list[int]] | None = None,
) -> tuple[str, list[Tensor], list[list[int]]]:
    """Run an artifact's compiled step on prompts; return (name, logits, greedy).

    name: that of the runner; logits: one tensor [T, vocab_size] per prompt; greedy: the greedy token ids after each
    prompt, or after each of `decoded`. token_budget: the most tokens of a step; a longer prompt is computed in chunks.
    Raises VerifyError if decoding gives other tokens than a prefill of the same tokens finds most likely. There is no
    tolerance, since the bits of a row depend on its own sequence only. This does not hold for onnxruntime and TensorRT,
    so they are not checked.
    """
    loaded, decoded = load_artifact(artifact), prompts if decoded is None else decoded
    engine = load_engine(loaded, max_num_seqs=len(decoded), max_num_batched_tokens=token_budget, prefix_cache=False)
    runner = engine.runner
    assert isinstance(runner, ObservableRunner), "only compiled steps are observed"
    in_any_batch = find_spec(loaded.manifest.targets[0]).deterministic != "never"
    try:
        logits = [_scored_logits(engine, runner, prompt) for prompt in prompts]
        greedy: list[list[int]] = [[] for _ in decoded]
        params = SamplingParams(temperature=0.0, max_tokens=max(1, num_greedy), ignore_eos=True)
        for index, prompt in enumerate(decoded if num_greedy else []):
            engine.add_request(str(index), prompt, params)
        while engine.has_work:
            for output in engine.step():
                greedy[int(output.request_id)] += output.token_ids
        for prompt, tokens in zip(decoded, greedy, strict=True):
            if not in_any_batch:
                break
            again = _scored_logits(engine, runner, [*prompt, *tokens[:-1]]) if tokens else None
            if again is not None and again[len(prompt) - 1 :].numpy().argmax(-1).tolist() != tokens:
                raise VerifyError(
                    f"kernels: decoding after {len(prompt)} tokens gives {tokens}, and a prefill of the same tokens"
                    " finds others most likely: the compiled code is wrong, please report it"
                )
    finally:
        engine.close()
    return runner.name, logits, greedy


def _scored_logits(engine: Engine, runner: ObservableRunner, prompt: list[int]) -> Tensor:
    """Return the logits of every position of a prompt, observed while the engine scores it."""
    seen: list[Tensor] = []
    runner.watch_logits(lambda rows: seen.append(torch.from_numpy(rows)))
    engine.score("certificate", [*prompt, 0])  # one token more: logits are computed to score the token after them
    while engine.has_work:
        engine.step()
    engine.take_scores()
    runner.watch_logits(None)
    return torch.cat(seen)
