"""A sequence, which is one stream of tokens of a request, and the outputs that the engine reports for it."""

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
    """The ids, limits and place of one sequence; counts that change every step are in `Batch`, by slot.

    token_ids: the ids of the prompt and of the output that have reached the host. What is sampled while the sequence
    runs is in `Batch.tokens`, and is added here when it leaves.
    hashes: the hashes of its full blocks.
    root: the hash before its first block.
    num_cached: the prompt tokens that were in the cache when it was first admitted.
    level, rank, arrival: a lower tuple is served first and preempted last, see policies.py.
    arrived, admitted_at, first_at: when it arrived, was first admitted and got its first token, in seconds on the
    scheduler's clock.
    client: the number of its client (waiting_queue.py).
    adapter: the number of its LoRA adapter, or 0.
    num_found: the tokens that were in the cache at the last look-up.
    predicted: the length at which it was then expected to end.
    is_lost: its first token was late, or its objectives are given up for those of others.
    logprobs: the log probabilities of its output, if the scheduler keeps them.
    """

    request_id: str
    index: int
    arrival: int
    prompt_len: int
    token_ids: list[int]
    params: SamplingParams
    seed: int
    max_total: int  # the length at which the sequence ends, prompt included
    stop_ids: frozenset[int]
    status: Status = Status.WAITING
    slot: int | None = None
    num_preemptions: int = 0
    root: bytes = b""
    hashes: list[bytes] = field(default_factory=list)
    # shared by all sequences of the request, once one has them
    prompt_hashes: list[bytes] = field(default_factory=list)
    num_cached: int = 0
    level: int = 0
    rank: float = 0.0
    arrived: float = 0.0
    admitted_at: float = math.inf
    first_at: float = math.inf
    client: int = 0
    adapter: int = 0
    num_found: int = 0
    predicted: int = 0
    is_lost: bool = False
    logprobs: list[float] = field(default_factory=list)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.prompt_len


@dataclass(slots=True)
class Output:
    """The output of one step for one sequence: its tokens, and the end with its reason.

    A step gives a sequence one token, or several if the first of them were drafted.

    finish_reason: "stop" (an end token, which `token_ids` includes), "length", "error" (the logits are not finite; no
    token comes with it) or None.
    num_cached: the prompt tokens that were found in the prefix cache; comes with the first token.
    queue_seconds: the time from arrival to admission; comes with the first token.
    num_forgotten: tokens of the sequence that its last query did not see, if the cache evicts; it changes only with
    outputs that are more than a token.
    step: the number of the engine's step that brought the output, from 1.
    step_seconds: how long that step took on the device.
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
    """The sequence that an output belongs to."""

    @property
    def request_id(self) -> str: ...

    @property
    def index(self) -> int: ...


@dataclass(slots=True)
class StepOutputs:
    """The outputs of one step, which iterate as one Output per row: a token for each of `seqs`, and more for a few.

    The next steps have the same list object `seqs` as long as no sequence joins or leaves.

    others: by row, the Output that has more than a token (an end, log probabilities, what was cached); None for a row
    without output, whose sequence had ended meanwhile.
    """

    seqs: SequenceOf[Row]
    token_ids: I32
    others: dict[int, Output | None]
    step: int = 0  # as in Output
    step_seconds: float = 0.0

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all outputs."""
        more = sum(len(output.token_ids) for output in self.others.values() if output is not None)
        return len(self.seqs) - len(self.others) + more

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
        """The outputs of the sequences that ended."""
        return [each for each in self.others.values() if each is not None and each.finish_reason is not None]


def sequence_seed(seed: int, index: int) -> int:
    """Return the 64-bit seed of a request's sequence `index`: the request's own for the first, mixed for the others.

    Source: Steele, Lea and Flood 2014 (splitmix64's finaliser).
    """
    if index == 0:
        return seed & MASK64
    mixed = (seed + index * 0x9E3779B97F4A7C15) & MASK64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK64
    return mixed ^ (mixed >> 31)
