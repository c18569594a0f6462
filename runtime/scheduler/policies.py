"""Policies: who is let in first, who gives way to whom, and when a batch begins.

A policy gives each sequence a level, strict, and within it a rank in seconds: the lowest is let in first and preempted
last. Ranks hold the time of arrival, so whoever waits long enough comes first whatever it asks for; only levels can keep
somebody waiting for ever.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import takewhile

from inferc.errors import ConfigError
from inferc.runtime.scheduler.waiting_queue import key_of
from inferc.runtime.step.forecast import Forecast
from inferc.runtime.step.sequence import Sequence

PATIENCE = 50.0  # sjf and lpm: a second of work costs this many of waiting
LEVEL_SECONDS = 120.0  # mlq: what a demotion costs
FIRST_LEVEL_TOKENS = 64  # mlq: of the first level; each next one is twice as long
PROMPT_TOKENS = 8  # mlq: tokens of a prompt that count as one that is sampled
NO_HURRY = 60.0  # slo: seconds to the first token of a request that says nothing
REST_SECONDS = 300.0  # slo: how much longer the rest of one may take that asks for no time between tokens
TURN_TOKENS = 16  # slo: who is so many tokens ahead of its time between them may give way, and is looked at so often
NEVER = 1 << 60


class Policy:
    """First come, first served. The others override what they do differently."""

    name = "fcfs"
    foresees = False  # asks the forecast, which therefore learns
    reranks = False  # ranks depend on what the cache holds
    demotes = False  # a running sequence's rank rises by what it gets
    preempts = False  # for want of room a running sequence may give way to a waiting one
    refuses = False  # ends early what can not meet its objective
    window: float | None = None  # seconds; not None: a batch begins when the one before it is done, this long after the
    # first of its requests came, or when it is full

    def level(self, seq: Sequence) -> int:
        """The lowest is let in first, whatever the others' ranks are."""
        return 0

    def rank(self, seq: Sequence, forecast: Forecast, num_found: int) -> float:
        """Seconds on the scheduler's clock. num_found: tokens that the cache has of the sequence."""
        return seq.arrived

    def changes_at(self, seq: Sequence) -> int:
        """The number of sampled tokens at which a running sequence's rank is asked for again, if this one demotes."""
        return NEVER

    def gives_way(self, running: Sequence, waiting: Sequence) -> bool:
        """Whether `running` is preempted if `waiting` has no room. Never of one that is served first."""
        return False

    def last_to_give_way(self, last_first: Iterable[Sequence], waiting: Sequence) -> Sequence | None:
        """Of the running ones, from the last in order on, the first that gives way; nobody before `waiting` does."""
        behind = takewhile(lambda running: key_of(running) > key_of(waiting), last_first)
        return next((running for running in behind if self.gives_way(running, waiting)), None)


class Priority(Policy):
    """Strict classes: the higher the request's `priority`, the sooner."""

    name = "priority"
    preempts = True

    def level(self, seq: Sequence) -> int:
        return -seq.params.priority

    def gives_way(self, running: Sequence, waiting: Sequence) -> bool:
        return waiting.level < running.level


class MultiLevelQueue(Policy):
    """Multi-level feedback: what has got much ranks behind what has just come; a long prompt begins on a lower level.

    Source: Wu et al. 2023, "Fast Distributed Inference Serving for Large Language Models" (skip-join MLFQ).
    """

    name = "mlq"
    demotes = preempts = True

    def rank(self, seq: Sequence, forecast: Forecast, num_found: int) -> float:
        return seq.arrived + LEVEL_SECONDS * level_of(served_tokens(seq.prompt_len, seq.num_output))

    def changes_at(self, seq: Sequence) -> int:
        return level_end(seq.prompt_len, seq.num_output)

    def gives_way(self, running: Sequence, waiting: Sequence) -> bool:
        # A third of a level's worth behind, or two sequences would take turns.
        return waiting.rank + LEVEL_SECONDS / 3 < running.rank


class ShortestJobFirst(Policy):
    """By predicted seconds of prefill and decode. Source: Fu et al. 2024, "Efficient LLM Scheduling by Learning to Rank"."""

    name = "sjf"
    foresees = True

    def rank(self, seq: Sequence, forecast: Forecast, num_found: int) -> float:
        return seq.arrived + PATIENCE * forecast.service_seconds(seq, num_found)


class LongestPrefixMatch(Policy):
    """By what is left to compute of the prompt. Source: Zheng et al. 2024, "SGLang" (cache-aware scheduling)."""

    name = "lpm"
    foresees = reranks = True

    def rank(self, seq: Sequence, forecast: Forecast, num_found: int) -> float:
        return seq.arrived + PATIENCE * forecast.prompt_seconds(len(seq.token_ids), num_found)


class Objectives(Policy):
    """By the time at which the next token is due; what can not be met is refused, so that others are met.

    The first is due by `ttft_ms`, each next one so that those after the first are `tbt_ms` apart on average: who runs gets ahead
    of that, and gives way where somebody would be late. So does, first of all, who has the first token and asks for no time between
    the others, or whose objectives are lost; its rank is still of its arrival, so it does not do so for ever.
    Source: Liu and Layland 1973 (earliest deadline first); Moore 1968 (who is left out), see slo_admission.py.
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
    """A baseline: nobody joins a batch that has begun."""

    name = "static"
    window = 0.0


class Window(Policy):
    """A baseline: static batches, of what comes within some milliseconds."""

    def __init__(self, milliseconds: int) -> None:
        self.name = f"window:{milliseconds}ms"
        self.window = milliseconds / 1000


POLICIES: dict[str, Callable[[], Policy]] = {
    kind.name: kind
    for kind in (Policy, Priority, MultiLevelQueue, ShortestJobFirst, LongestPrefixMatch, Objectives, Static)
}
NAMES = (*POLICIES, "window:Nms")


def parse_policy(name: str) -> Policy:
    """The policy of a name. Raises ConfigError for one that does not exist."""
    if name in POLICIES:
        return POLICIES[name]()
    if (match := re.fullmatch(r"window:([1-9]\d{0,5})ms", name)) is not None:
        return Window(int(match[1]))
    raise ConfigError(f"policy is {name!r}, expected one of {', '.join(NAMES)} (as in window:50ms)")


def is_due(seq: Sequence) -> bool:
    """slo: whether the next token of a waiting sequence is to be there by a time that the request gives."""
    return not seq.is_lost and (seq.params.tbt_ms if seq.num_output else seq.params.ttft_ms) is not None


def served_tokens(prompt_len: int, num_output: int) -> int:
    """mlq: what a sequence has got."""
    return prompt_len // PROMPT_TOKENS + num_output


def level_of(served: int) -> int:
    """mlq: the level of a sequence that has got as many tokens; 0 is the first."""
    return (served // FIRST_LEVEL_TOKENS + 1).bit_length() - 1


def level_end(prompt_len: int, num_output: int) -> int:
    """mlq: the number of sampled tokens at which a sequence is demoted next."""
    level = level_of(served_tokens(prompt_len, num_output))
    return FIRST_LEVEL_TOKENS * ((2 << level) - 1) - prompt_len // PROMPT_TOKENS
