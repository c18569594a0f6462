"""A sequence: one stream of tokens of a request, and what the engine reports of it."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Protocol

from inferc.runtime.step.plan import I32, Logprobs
from inferc.runtime.step.sampling_params import SamplingParams

MASK64 = (1 << 64) - 1


class Status(enum.Enum):
    WAITING = "waiting"  # holds no blocks: new, or preempted
    RUNNING = "running"  # holds a slot and blocks
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """Ids, limits and place of one sequence. Counts that change every step live in `Batch`, by slot.

    `token_ids` are the prompt's and the output's ids that have reached the host; what is sampled while it runs is in
    `Batch.tokens`, and joins them when it leaves. `hashes` are those of its full blocks,
    `root` what comes before the first; `num_cached` tokens of the prompt were found in the cache as it was first let in.
    A lower (`level`, `rank`, `arrival`) is served first and preempted last, see policies.py; `arrived` is its time on the
    scheduler's clock, in seconds, `admitted_at` when it was first let in, `first_at` that of its first token. `client` is the number of who asked (waiting_queue.py),
    `num_found` what of it was found in the cache as it was last looked for, `predicted` the length at which it was then
    expected to end. `is_lost`: its first token was late, or its objectives are given up for those of others. `logprobs` are
    those of its output, where the scheduler keeps them.
    """

    request_id: str
    index: int
    arrival: int
    prompt_len: int
    token_ids: list[int]
    params: SamplingParams
    seed: int
    max_total: int  # length at which the sequence ends, prompt included
    stop_ids: frozenset[int]
    status: Status = Status.WAITING
    slot: int | None = None
    num_preemptions: int = 0
    root: bytes = b""
    hashes: list[bytes] = field(default_factory=list)
    prompt_hashes: list[bytes] = field(default_factory=list)  # of all sequences of the request, once one has them
    num_cached: int = 0
    level: int = 0
    rank: float = 0.0
    arrived: float = 0.0
    admitted_at: float = math.inf
    first_at: float = math.inf
    client: int = 0
    num_found: int = 0
    predicted: int = 0
    is_lost: bool = False
    logprobs: list[float] = field(default_factory=list)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.prompt_len


@dataclass(slots=True)
class Output:
    """What one step brought for one sequence: at most one token, and the end with its reason.

    finish_reason: "stop" (an end token, which `token_ids` includes), "length", "error" (its logits are not finite; no
    token comes with it) or None. num_cached comes with the first token: of the prompt, the tokens that were found in the
    prefix cache; so does queue_seconds, from its arrival until it was let in. num_forgotten: tokens of the sequence that its last query did not see, where the cache evicts; it changes with
    no other outputs than those that are more than a token. step: which of the engine's steps brought it, from 1, and how long
    that took on the device.
    """

    request_id: str
    index: int
    token_ids: list[int]
    finish_reason: str | None = None
    logprobs: list[Logprobs] | None = None
    num_cached: int | None = None
    num_forgotten: int = 0
    queue_seconds: float | None = None
    step: int = 0
    step_seconds: float = 0.0


class Row(Protocol):
    """Whose output it is."""

    @property
    def request_id(self) -> str: ...

    @property
    def index(self) -> int: ...


@dataclass(slots=True)
class StepOutputs:
    """What one step brought, to be iterated as an Output a row: a token of each of `seqs`, and of few of them more.

    The same list of `seqs` comes again in the next steps, as long as nobody joins or leaves.

    others: by row, the Output that has more than a token (an end, log probabilities, what was cached); None for a row that
    brought nothing, of a sequence that had ended meanwhile.
    """

    seqs: SequenceOf[Row]
    token_ids: I32
    others: dict[int, Output | None]
    step: int = 0  # as in Output
    step_seconds: float = 0.0

    def __len__(self) -> int:
        return len(self.seqs) - sum(output is None for output in self.others.values())

    def __iter__(self) -> Iterator[Output]:
        others = self.others
        for row, (seq, token) in enumerate(zip(self.seqs, self.token_ids.tolist(), strict=True)):
            if row not in others:
                yield Output(seq.request_id, seq.index, [token], step=self.step, step_seconds=self.step_seconds)
            elif (output := others[row]) is not None:
                output.step, output.step_seconds = self.step, self.step_seconds
                yield output

    @property
    def ends(self) -> list[Output]:
        """Of sequences that ended."""
        return [each for each in self.others.values() if each is not None and each.finish_reason is not None]


def sequence_seed(seed: int, index: int) -> int:
    """The seed of a request's sequence `index`, 64 bits: the request's own for the first, mixed for the others.

    Source: Steele, Lea and Flood 2014 (splitmix64's finaliser).
    """
    if index == 0:
        return seed & MASK64
    mixed = (seed + index * 0x9E3779B97F4A7C15) & MASK64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK64
    return mixed ^ (mixed >> 31)
