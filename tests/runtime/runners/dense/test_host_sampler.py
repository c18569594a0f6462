"""The sampler in numpy on rows behind drafted tokens: each is that of a step of its own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from inferc.runtime.runners.dense.host_sampler import HostSampler
from inferc.runtime.step.plan import F32, I32, SampleRows, StepPlan, StepResult

VOCAB, ROWS = 200, 5
PROMPT: I32 = np.array([1, 5], np.int32)


def sampler() -> HostSampler:
    made = HostSampler(2, VOCAB)
    made.reset_slot(0, PROMPT, np.array([9], np.int32))
    return made


def rows_of(count: int, first: int, temperature: float) -> SampleRows:
    rows = SampleRows.greedy(np.zeros(count, np.int32))
    return replace(
        rows,
        temperature=np.full(count, temperature, np.float32),
        repetition_penalty=np.full(count, 1.3, np.float32),
        frequency_penalty=np.full(count, 0.7, np.float32),
        seeds=np.full(count, 3, np.uint64),
        counters=np.arange(first, first + count, dtype=np.uint64),
    )


def run(sampler: HostSampler, logits: F32, inputs: list[int], first: int, temperature: float) -> StepResult:
    places = np.arange(len(logits), dtype=np.int32)
    none = np.zeros(0, np.int32)
    sample = rows_of(len(logits), first, temperature)
    ids = np.array(inputs, np.int32)
    return sampler.sample(StepPlan(ids, places.astype(np.int64), none, none, none, places, (), (), sample), logits)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_behind_drafted_tokens_are_those_of_a_step_each(temperature: float) -> None:
    logits = np.random.default_rng(1).normal(size=(ROWS + 1, VOCAB)).astype(np.float32)
    alone = sampler()
    chosen = [int(run(alone, logits[row : row + 1], [0], row, temperature).token_ids[0]) for row in range(ROWS + 1)]
    for num_right in range(ROWS):
        together = sampler()
        wrong = [(token + 1) % VOCAB for token in chosen[num_right : ROWS - 1]]
        found = run(together, logits[:ROWS], [0, *chosen[:num_right], *wrong], 0, temperature)
        assert found.token_ids[: num_right + 1].tolist() == chosen[: num_right + 1]
        after = run(together, logits[num_right + 1 : num_right + 2], [0], num_right + 1, temperature)
        assert after.token_ids.tolist() == [chosen[num_right + 1]], "penalties count what was chosen, and no more"


def test_a_drafted_token_that_was_right_is_counted_once() -> None:
    logits = np.zeros((2, VOCAB), np.float32)
    logits[:, 40], logits[1, 41] = 10.0, 6.6  # 10 / 1.3 - 0.7 is above it, and less another 0.7 below
    found = run(sampler(), logits, [0, 40], 0, 0.0)
    assert found.token_ids.tolist() == [40, 40]
