"""What a trace allows at most: of continuous batching by its lengths, of the prefix cache by its blocks."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

from inferc.runtime.scheduler.config import SchedulerConfig
from inferc.runtime.simulate.simulate import Replica, play
from inferc.runtime.simulate.trace import Trace
from inferc.runtime.step.cost import StepCost, StepWork

CAPACITIES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0, 1.25)  # of the trace's distinct blocks


@dataclass(frozen=True)
class Lengths:
    """Tokens of a request: of its prompt those that no prefix cache has, of all its prompt, and of its answer."""

    computed: float
    prompt: int
    output: int


def static_steps(requests: Sequence[Lengths], batch: int, budget: int) -> int:
    """Steps of batches in order, each over when its longest answer is; budget: tokens of a step."""
    total = 0
    for first in range(0, len(requests), batch):
        group = requests[first : first + batch]
        prompts = sum(each.computed for each in group)
        total += _steps_of(prompts, budget) + max(each.output for each in group) - 1
    return total


def continuous_steps(requests: Sequence[Lengths], batch: int, budget: int) -> int:
    """Fewest steps in which as many at once are served in order, each beginning as soon as another has ended."""
    ends = [0] * batch  # of what has each place
    for each in requests:
        heapq.heapreplace(ends, ends[0] + each.output)
    return max(*ends, _steps_of(sum(each.computed + each.output - 1 for each in requests), budget))


def over_static(requests: Sequence[Lengths], batch: int, budget: int, cost: StepCost) -> tuple[float, float]:
    """Most that continuous batching can gain: if steps took the same time whatever is in them, and as `cost` says.

    By `cost` all but the price of a step itself is the same in both.
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
    """Of prompts, what they share counted once; the last blocks as whole ones."""
    return len({block for each in trace.requests for block in each.blocks}) * trace.block_tokens


def longest_asked(trace: Trace) -> int:
    """Tokens of the longest prompt and of the longest answer: what a request may come to, for all that is known."""
    return max(each.prompt_len for each in trace.requests) + trace.longest_output


def hit_rates(
    trace: Trace, config: SchedulerConfig, vocab_size: int, cost: StepCost, capacities: Sequence[float] = CAPACITIES
) -> list[dict[str, float]]:
    """What the scheduler and cache of `config` find with caches of some sizes, simulated, beside the ideal of each."""
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
