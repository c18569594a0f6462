"""The run of an artifact's compiled step on prompts, for the certificate's row of the kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from inferc.errors import VerifyError
from inferc.runtime.artifact.load import load_artifact
from inferc.runtime.engine.engine import Engine
from inferc.runtime.engine.load import load_engine
from inferc.runtime.runners.api import ObservableRunner
from inferc.runtime.step.plan import F32
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
        logits = [_scored(engine, runner, prompt, torch.from_numpy) for prompt in prompts]
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
            again = _scored(engine, runner, [*prompt, *tokens[:-1]], _most_likely) if tokens else None
            if again is not None and again[len(prompt) - 1 :].tolist() != tokens:
                raise VerifyError(
                    f"kernels: decoding after {len(prompt)} tokens gives {tokens}, and a prefill of the same tokens"
                    " finds others most likely: the compiled code is wrong, please report it"
                )
    finally:
        engine.close()
    return runner.name, logits, greedy


def _scored(engine: Engine, runner: ObservableRunner, prompt: list[int], keep: Callable[[F32], Tensor]) -> Tensor:
    """Return what `keep` makes of the logits of each position of a prompt, which are seen while the engine scores it.

    The result is filled as the rows come: logits of a large vocabulary are not held twice.
    """
    found: Tensor | None = None
    count = 0

    def watch(rows: F32) -> None:
        nonlocal found, count
        kept = keep(rows)
        if found is None:
            found = kept.new_empty(len(prompt), *kept.shape[1:])
        found[count : count + len(kept)] = kept
        count += len(kept)

    runner.watch_logits(watch)
    engine.score("certificate", [*prompt, 0])  # one token more: logits are computed to score the token after them
    while engine.has_work:
        engine.step()
    engine.take_scores()
    runner.watch_logits(None)
    assert found is not None and count == len(prompt), "every position is scored once"
    return found


def _most_likely(rows: F32) -> Tensor:
    return torch.from_numpy(rows.argmax(-1))
