"""Measure the host time of a step: the cost of scheduling, planning and applying results, without the model.

python benchmarks/host_time.py [--num-seqs 64] [--steps 2000] [--attention full|window|mixed] [--no-prefix-cache]

A null model answers at once with random ids, so that all time is host time. The results are medians per decode-only
step, in microseconds: `schedule` makes the plan, `update` applies the results, `engine` is all of `Engine.step`.
`events` encodes the results of a step for the pipe of an engine process, as under `inferc serve`. `text` is
detokenization, which runs on another thread or in another process while the next step runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np

from inferc.config import DEFAULT_BLOCK_SIZE as BLOCK_SIZE
from inferc.kv_groups import CacheGroup, WindowCacheGroup
from inferc.runtime.engine.engine import Engine, ModelLimits
from inferc.runtime.engine.messages import EventWriter
from inferc.runtime.scheduler.config import SchedulerConfig
from inferc.runtime.step.plan import F32, I32, StepPlan, StepResult
from inferc.runtime.step.sampling_params import SamplingParams
from inferc.runtime.text.text_stream import TextStream
from inferc.runtime.text.tokenizer import Text

VOCAB_SIZE = 4096
PROMPT_LEN = 128
FULL, WINDOW = CacheGroup(1024), WindowCacheGroup(1024, window=1024)
GROUPS = {"full": (FULL,), "window": (WINDOW,), "mixed": (FULL, WINDOW)}
MODEL = Path(__file__).parents[1] / "examples" / "models" / "tiny-llama"


class NullRunner:
    """A runner that answers every step with random ids and does nothing else."""

    def __init__(self, num_rows: int) -> None:
        self._ids = np.random.default_rng(0).integers(10, VOCAB_SIZE, (64, num_rows)).astype(np.int32)
        self._plans: list[StepPlan] = []
        self._count = 0

    def submit(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def wait(self) -> StepResult:
        self._count += 1
        return StepResult(self._ids[self._count % 64, : len(self._plans.pop(0).logits_rows)])

    def reset_slot(self, slot: int, prompt_ids: I32 | None, output_ids: I32 | None = None) -> None:
        del slot, prompt_ids, output_ids

    def score(self, plan: StepPlan, target_ids: I32) -> tuple[F32, I32]:
        return np.zeros(len(target_ids), np.float32), np.zeros(plan.num_tokens, np.int32)

    def close(self) -> None:
        self._plans.clear()


def make_engine(num_seqs: int, steps: int, attention: str, prefix_cache: bool) -> Engine:
    max_model_len = PROMPT_LEN + 2 * steps
    num_blocks = 1 + num_seqs * -(-max_model_len // BLOCK_SIZE)
    groups = GROUPS[attention]
    config = SchedulerConfig(
        num_seqs,
        max(512, num_seqs),
        max_model_len,
        (num_blocks,) * len(groups),
        BLOCK_SIZE,
        groups,
        prefix_cache=prefix_cache,
    )
    engine = Engine(NullRunner(num_seqs), ModelLimits(VOCAB_SIZE, max_model_len, (1, 6)), config)
    rng = np.random.default_rng(1)
    for i in range(num_seqs):
        prompt = rng.integers(10, VOCAB_SIZE, PROMPT_LEN).tolist()
        engine.add_request(str(i), prompt, SamplingParams(max_tokens=None, ignore_eos=False, temperature=0.8, seed=i))
    while engine.scheduler.num_running < num_seqs:
        engine.step()
    for _ in range(20):
        engine.step()
    return engine


def measure(num_seqs: int, steps: int, attention: str, prefix_cache: bool) -> dict[str, float]:
    """Return the median microseconds of a decode-only step, by part."""
    engine = make_engine(num_seqs, steps, attention, prefix_cache)
    parts: dict[str, list[float]] = {"schedule": [], "update": [], "engine": [], "events": [], "text": []}
    text, writer = Text(MODEL), EventWriter()
    streams = [TextStream(text, SamplingParams(stop=("\n\n\n",))) for _ in range(num_seqs)]
    for _ in range(steps):
        before = engine.stats()
        started = time.perf_counter()
        outputs = engine.step()
        stepped = time.perf_counter()
        list(writer.encode(outputs))
        written = time.perf_counter()
        for output in outputs:
            streams[int(output.request_id)].push(output.token_ids, output.finish_reason)
        parts["text"].append(time.perf_counter() - written)
        parts["events"].append(written - stepped)
        parts["engine"].append(stepped - started)
        after = engine.stats()
        parts["schedule"].append(after.schedule_seconds - before.schedule_seconds)
        parts["update"].append(after.update_seconds - before.update_seconds)
    return {name: round(statistics.median(values) * 1e6, 1) for name, values in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-seqs", type=int, default=64)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--attention", choices=GROUPS, default="full", help="the model's KV groups")
    parser.add_argument("--prefix-cache", action=argparse.BooleanOptionalAction, default=True)
    options = vars(parser.parse_args())
    print(json.dumps({**options, **measure(**options)}))


if __name__ == "__main__":
    main()
