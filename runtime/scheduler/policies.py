"""The scheduling policies: the order of admission, which sequence gives way to which, and when a batch begins.

A policy gives each sequence a level, and within the level a rank in seconds; the lowest is admitted first and preempted
last. Levels are strict. Ranks include the time of arrival, so a sequence that waits long enough comes first whatever it
asks for; only levels can keep a sequence waiting for ever.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import takewhile

from inferc.errors import ConfigError
from inferc.runtime.scheduler.waiting_queue import key_of
from inferc.runtime.step.forecast import Forecast
from inferc.runtime.step.sequence import Sequence

PATIENCE = 50.0  # sjf and lpm: a second of work counts like this many seconds of waiting
LEVEL_SECONDS = 120.0  # mlq: the rank that a demotion costs
FIRST_LEVEL_TOKENS = 64  # mlq: the tokens of the first level; each next level is twice as long
PROMPT_TOKENS = 8  # mlq: this many prompt tokens count as one sampled token
NO_HURRY = 60.0  # slo: seconds to the first token of a request without `ttft_ms`
REST_SECONDS = 300.0  # slo: the additional seconds for the other tokens of a request without `tbt_ms`
# slo: a sequence that is this many tokens ahead of its `tbt_ms` may give way; ranks are renewed after as many tokens.
TURN_TOKENS = 16
NEVER = 1 << 60


class Policy:
    """The policy "first come, first served"; the other policies override what they do differently."""

    name = "fcfs"
    foresees = False  # whether it uses the forecast, which must then learn
    reranks = False  # whether ranks depend on what the cache holds
    demotes = False  # whether a running sequence's rank rises with the tokens that it gets
    preempts = False  # whether a running sequence may give way to a waiting one that has no room
    refuses = False  # whether it refuses requests that cannot meet their objectives
    # None: sequences join at any time. Otherwise batches are static: a batch begins when the one before it is done and
    # is full, or this many seconds after its first request came.
    window: float | None = None

    def level(self, seq: Sequence) -> int:
        """Return the level of a sequence; the lowest is admitted first, whatever the ranks are."""
        return 0

    def rank(self, seq: Sequence, forecast: Forecast, num_found: int) -> float:
        """Return the rank of a sequence, in seconds on the scheduler's clock.

        num_found: the number of its tokens that are in the cache.
        """
        return seq.arrived

    def changes_at(self, seq: Sequence) -> int:
        """Return the number of sampled tokens at which a running sequence gets a new rank, if the policy demotes."""
        return NEVER

    def gives_way(self, running: Sequence, waiting: Sequence) -> bool:
        """Return whether `running` is preempted if `waiting` has no room.

        It is never true of a sequence that is served first.
        """
        return False

    def last_to_give_way(self, last_first: Iterable[Sequence], waiting: Sequence) -> Sequence | None:
        """Return the last of the running sequences that gives way to `waiting`, or None.

        Sequences that are ordered before `waiting` never give way.
        """
        behind = takewhile(lambda running: key_of(running) > key_of(waiting), last_first)
        return next((running for running in behind if self.gives_way(running, waiting)), None)


class Priority(Policy):
    """The policy of strict priority classes: the higher the request's `priority`, the sooner it is served."""

    name = "priority"
    preempts = True

    def level(self, seq: Sequence) -> int:
        return -seq.params.priority

    def gives_way(self, running: Sequence, waiting: Sequence) -> bool:
        return waiting.level < running.level


class MultiLevelQueue(Policy):
    """The multi-level feedback policy: sequences that have got many tokens rank behind those that have just come.

    A long prompt begins on a lower level.

    Source: Wu et al. 2023, "Fast Distributed Inference Serving for Large Language Models" (skip-join MLFQ).
    """

    name = "mlq"
    demotes = preempts = True

    def rank(self, seq: Sequence, forecast: Forecast, num_found: int) -> float:
        return seq.arrived + LEVEL_SECONDS * level_of(served_tokens(seq.prompt_len, seq.num_output))

    def changes_at(self, seq: Sequence) -> int:
        return level_end(seq.prompt_len, seq.num_output)

    def gives_way(self, running: Sequence, waiting: Sequence) -> bool:
        # The difference must be a third of a level, or two sequences would preempt each other in turns.
        return waiting.rank + LEVEL_SECONDS / 3 < running.rank


class ShortestJobFirst(Policy):
    """The policy that ranks by predicted seconds of prefill and decode.

    Source: Fu et al. 2024, "Efficient LLM Scheduling by Learning to Rank".
    """

    name = "sjf"
    foresees = True

    def rank(self, seq: Sequence, forecast: Forecast, num_found: int) -> float:
        return seq.arrived + PATIENCE * forecast.service_seconds(seq, num_found)


class LongestPrefixMatch(Policy):
    """The policy that ranks by the seconds that the uncached part of the prompt takes.

    Source: Zheng et al. 2024, "SGLang" (cache-aware scheduling).
    """

    name = "lpm"
    foresees = reranks = True

    def rank(self, seq: Sequence, forecast: Forecast, num_found: int) -> float:
        return seq.arrived + PATIENCE * forecast.prompt_seconds(len(seq.token_ids), num_found)


class Objectives(Policy):
    """The policy that ranks by the time at which the next token is due, and refuses requests that cannot be in time.

    The first token is due by `ttft_ms`; the others are due such that they are `tbt_ms` apart on average. A running
    sequence gets ahead of that, and gives way if another would be late. A sequence gives way first of all if it has its
    first token and has no `tbt_ms`, or if its objectives are lost; its rank still depends on its arrival, so it does
    not wait for ever.

    Source: Liu and Layland 1973 (earliest deadline first); Moore 1968 (which requests to leave out), see
    slo_admission.py.
    """

    name = "slo"
    foresees = demotes = preempts = refuses = True

    def rank(self, seq: Sequence, forecast: Forecast, num_found: int) -> float:
        if seq.num_output and seq.params.tbt_ms is not None and not seq.is_lost:
            return seq.first_at + seq.num_output * seq.params.tbt_ms / 1000
        due = NO_HURRY if seq.params.ttft_ms is None else seq.params.ttft_ms / 1000
        return seq.arrived + due + (REST_SECONDS if seq.num_output else 0.0)

    def changes_at(self, seq: Sequence) -> int:
        if not seq.num_output:
            return 1
        return NEVER if seq.params.tbt_ms is None or seq.is_lost else seq.num_output + TURN_TOKENS

    def gives_way(self, running: Sequence, waiting: Sequence) -> bool:
        turn = 0.0 if running.is_lost else TURN_TOKENS * (running.params.tbt_ms or 0.0) / 1000
        return running.num_output > 0 and is_due(waiting) and waiting.rank + turn < running.rank


class Static(Policy):
    """The baseline policy of static batches: no sequence joins a batch that has begun."""

    name = "static"
    window = 0.0


class Window(Policy):
    """The baseline policy of static batches of the requests that come within some milliseconds."""

    def __init__(self, milliseconds: int) -> None:
        self.name = f"window:{milliseconds}ms"
        self.window = milliseconds / 1000


POLICIES: dict[str, Callable[[], Policy]] = {
    kind.name: kind
    for kind in (Policy, Priority, MultiLevelQueue, ShortestJobFirst, LongestPrefixMatch, Objectives, Static)
}
NAMES = (*POLICIES, "window:Nms")


def parse_policy(name: str) -> Policy:
    """Return the policy of a name; raise ConfigError if there is none."""
    if name in POLICIES:
        return POLICIES[name]()
    if (match := re.fullmatch(r"window:([1-9]\d{0,5})ms", name)) is not None:
        return Window(int(match[1]))
    raise ConfigError(f"policy is {name!r}, expected one of {', '.join(NAMES)} (as in window:50ms)")


def is_due(seq: Sequence) -> bool:
    """Return whether the request sets a time for the next token of a waiting sequence (policy slo)."""
    return not seq.is_lost and (seq.params.tbt_ms if seq.num_output else seq.params.ttft_ms) is not None


def served_tokens(prompt_len: int, num_output: int) -> int:
    """Return how many tokens a sequence has been served, counted as by policy mlq."""
    return prompt_len // PROMPT_TOKENS + num_output


def level_of(served: int) -> int:
    """Return the level of a sequence that has been served so many tokens (policy mlq); 0 is the first."""
    return (served // FIRST_LEVEL_TOKENS + 1).bit_length() - 1


def level_end(prompt_len: int, num_output: int) -> int:
    """Return the number of sampled tokens at which a sequence is demoted next (policy mlq)."""
    level = level_of(served_tokens(prompt_len, num_output))
    return FIRST_LEVEL_TOKENS * ((2 << level) - 1) - prompt_len // PROMPT_TOKENS
