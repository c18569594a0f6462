"""Sequences that an engine runs together, without a thread: who shares a step is then the same in every run."""

from itertools import count

from inferc.runtime.engine.engine import Engine
from inferc.runtime.step.sampling_params import SamplingParams

NAMES = count()


def run_together(engine: Engine, prompts: list[list[int]], max_tokens: int = 5) -> list[list[int]]:
    """The greedy ids of prompts that begin in one step, until nothing moves any more."""
    names = [f"r{next(NAMES)}" for _ in prompts]
    for name, prompt in zip(names, prompts, strict=True):
        engine.add_request(name, prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))
    found: dict[str, list[int]] = {name: [] for name in names}
    steps = 0
    while engine.has_work:
        for output in engine.step():
            found[output.request_id] += output.token_ids
        engine.scheduler.check_integrity()
        steps += 1
        assert steps < 20_000, "nothing moves on"
    return list(found.values())
