"""A burst of requests that all arrive at once, and the share of the KV cache's memory that they leave unused."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from inferc.kv_groups import CacheGroup
from inferc.runtime.engine.engine import Engine, ModelLimits
from inferc.runtime.scheduler.config import SchedulerConfig
from inferc.runtime.scheduler.scheduler import Scheduler
from inferc.runtime.simulate.simulate import CostRunner, VirtualClock
from inferc.runtime.simulate.trace import Trace
from inferc.runtime.step.cost import StepCost
from inferc.runtime.step.sampling_params import SamplingParams

SYSTEM_LEN, OWN_LEN = 512, (32, 256)
MIN_OUTPUT, TYPICAL_OUTPUT, MAX_OUTPUT = 16, 80, 224
TRACE_SEQS, TRACE_BUDGET = 16, 512


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    output_len: int

    @property
    def length(self) -> int:
        return len(self.prompt) + self.output_len


def generate(
    engine: Engine, requests: Sequence[Request], salt: str = "", after_step: Callable[[], None] = lambda: None
) -> list[list[int]]:
    """Generate the greedy tokens of each request, as many as it asks for.

    salt: cache salt; prefixes are shared only between runs with the same salt.
    """
    for index, request in enumerate(requests):
        params = SamplingParams(temperature=0.0, max_tokens=request.output_len, ignore_eos=True, cache_salt=salt)
        engine.add_request(str(index), request.prompt, params)
    answers: list[list[int]] = [[] for _ in requests]
    while engine.has_work:
        for output in engine.step():
            answers[int(output.request_id)] += output.token_ids
        after_step()
    return answers


@dataclass
class KVUse:
    """The use of token slots in the KV cache, summed over steps.

    needed: slots of tokens whose K and V are stored, or follow with the rest of a prompt that is being computed.
    held: slots in the blocks of running sequences; a shared block counts for each sequence.
    reserved: slots if each sequence had a contiguous range of `max_model_len` instead.
    """

    num_steps: int = 0
    num_seqs: int = 0
    needed: int = 0
    held: int = 0
    reserved: int = 0

    def add(self, scheduler: Scheduler) -> None:
        """Count the slots of the running sequences; the model must have a single KV group without a window."""
        batch, cache, slots = scheduler.batch, scheduler.cache, scheduler.batch.order
        held = cache.ends[0, slots] * cache.block_size
        known = np.maximum(batch.num_computed[slots], batch.num_known[slots])
        self.num_steps += bool(len(slots))
        self.num_seqs += len(slots)
        self.needed += int(np.minimum(known, held).sum())
        self.held += int(held.sum())
        self.reserved += len(slots) * scheduler.config.max_model_len

    @property
    def seqs_at_once(self) -> float:
        return self.num_seqs / max(1, self.num_steps)

    @property
    def unused_of_blocks(self) -> float:
        """The share of the held slots that are empty."""
        return 1 - self.needed / self.held

    @property
    def unused_of_reserved(self) -> float:
        return 1 - self.needed / self.reserved


def workload(count: int, vocab_size: int, scale: float = 1.0) -> list[Request]:
    """Make requests, every other one with the system prompt first; most answers are short and some are long.

    scale: factor of all lengths.
    """
    rng = np.random.default_rng(0)

    def ids(length: float) -> list[int]:
        return rng.integers(10, vocab_size, max(1, int(scale * length))).tolist()  # type: ignore[no-any-return]

    system, requests = ids(SYSTEM_LEN), []
    for index in range(count):
        output_len = scale * float(np.clip(TYPICAL_OUTPUT * rng.lognormal(0.0, 0.7), MIN_OUTPUT, MAX_OUTPUT))
        own = ids(float(rng.integers(*OWN_LEN)))
        requests.append(Request([*(system if index % 2 else []), *own], max(2, int(output_len))))
    return requests


def lengths(requests: Sequence[Request]) -> dict[str, Any]:
    prompts, outputs = [len(each.prompt) for each in requests], [each.output_len for each in requests]
    return {
        "requests": len(requests),
        "mean_prompt": statistics.mean(prompts),
        "max_prompt": max(prompts),
        "mean_output": statistics.mean(outputs),
        "max_output": max(outputs),
    }


def use_on_trace(trace: Trace, block_size: int) -> dict[str, Any]:
    """Return the unused share of the KV cache for a burst with a trace's lengths, by scheduler and cache alone."""
    longest, clock = trace.longest, VirtualClock()
    num_blocks = 1 + TRACE_SEQS * -(-longest // block_size)
    config = SchedulerConfig(TRACE_SEQS, TRACE_BUDGET, longest, (num_blocks,), block_size, (CacheGroup(1),))
    engine = Engine(CostRunner(StepCost(), clock), ModelLimits(2, longest), config, clock=clock)
    requests = [Request([1] * each.prompt_len, each.output_len) for each in trace.requests]
    use = KVUse()
    generate(engine, requests, after_step=lambda: use.add(engine.scheduler))
    return {
        **lengths(requests),
        "max_model_len": longest,
        "kv_unused": use.unused_of_blocks,
        "kv_unused_if_reserved": use.unused_of_reserved,
    }
