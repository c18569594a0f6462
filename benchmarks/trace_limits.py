"""The upper bounds that a trace sets: for continuous batching by its lengths, for the prefix cache by its blocks."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

from inferc.runtime.scheduler.config import SchedulerConfig
from inferc.runtime.simulate.simulate import Replica, play
from inferc.runtime.simulate.trace import Trace
from inferc.runtime.step.cost import StepCost, StepWork

CAPACITIES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0, 1.25)  # KV cache sizes, as shares of the trace's distinct blocks


@dataclass(frozen=True)
class Lengths:
    """The token counts of a request: prompt tokens that are not cached, all prompt tokens, and answer tokens."""

    computed: float
    prompt: int
    output: int


def static_steps(requests: Sequence[Lengths], batch: int, budget: int) -> int:
    """Return the steps of static batches in order, each as long as its longest answer; budget: tokens per step."""
    total = 0
    for first in range(0, len(requests), batch):
        group = requests[first : first + batch]
        prompts = sum(each.computed for each in group)
        total += _steps_of(prompts, budget) + max(each.output for each in group) - 1
    return total


def continuous_steps(requests: Sequence[Lengths], batch: int, budget: int) -> int:
    """Return the fewest steps of `batch` concurrent requests in order, each starting as soon as another has ended."""
    ends = [0] * batch  # the step at which each batch slot becomes free
    for each in requests:
        heapq.heapreplace(ends, ends[0] + each.output)
    return max(*ends, _steps_of(sum(each.computed + each.output - 1 for each in requests), budget))


def over_static(requests: Sequence[Lengths], batch: int, budget: int, cost: StepCost) -> tuple[float, float]:
    """Return the largest gain of continuous batching: if all steps took the same time, and by the step costs `cost`.

    By `cost`, everything except the fixed cost per step is the same in both.
    """
    steps = [count(requests, batch, budget) for count in (static_steps, continuous_steps)]
    outputs = sum(each.output for each in requests)
    work = StepWork(
        sum(each.computed for each in requests) + outputs - len(requests),
        outputs,
        sum(each.output * (each.prompt + each.output / 2) for each in requests),
        sum(each.computed * (each.prompt - each.computed / 2) for each in requests),
    )
    price = float(cost.prices[0])
    same = cost.seconds(work) - price
    static, continuous = (same + price * count for count in steps)
    return steps[0] / steps[1], static / continuous


def _steps_of(num_tokens: float, budget: int) -> int:
    return max(1, int(-(-num_tokens // budget)))


def distinct_tokens(trace: Trace) -> int:
    """Return the number of distinct prompt tokens: shared blocks count once, and last blocks count as full."""
    return len({block for each in trace.requests for block in each.blocks}) * trace.block_tokens


def longest_asked(trace: Trace) -> int:
    """Return the longest prompt plus the longest answer in tokens: an upper bound of any request's length."""
    return max(each.prompt_len for each in trace.requests) + trace.longest_output


def hit_rates(
    trace: Trace, config: SchedulerConfig, vocab_size: int, cost: StepCost, capacities: Sequence[float] = CAPACITIES
) -> list[dict[str, float]]:
    """Simulate the prefix cache hit rates of `config` at several cache sizes, beside the ideal rate of each size."""
    rows = []
    for share in capacities:
        blocks = -(-max(int(share * distinct_tokens(trace)), longest_asked(trace)) // config.block_size)
        replica = Replica.simulated(replace(config, num_blocks=(1 + blocks,)), vocab_size, cost)
        played = play([replica], trace)
        tokens = blocks * config.block_size
        rows.append(
            {
                "kv_tokens": tokens,
                "simulated": played.cached_tokens / played.prompt_tokens,
                "ideal": trace.hit_rate(tokens // trace.block_tokens),
            }
        )
    return rows
