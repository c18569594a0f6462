"""Beam search: the answers of the highest probability as a whole that a search of a few at a time finds.

The rules are those of transformers' `generate(num_beams=…)`, with the same scores and the same ways to end. A step of
the search is a request of one token for each beam; all beams of all prompts run in one batch, and what they begin with
is found in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from inferc.errors import RequestError
from inferc.runtime.engine.request_output import RequestOutput
from inferc.runtime.step.sampling_params import MAX_LOGPROBS, SamplingParams, changed
from inferc.runtime.text.tokenizer import Text

Likely: TypeAlias = Sequence[tuple[int, float]]  # the most likely next tokens, with their log probabilities
# Returns the most likely tokens behind each of some texts, as many as the parameters ask for.
LikelyOf: TypeAlias = Callable[[list[list[int]], SamplingParams], list[Likely]]


@dataclass(frozen=True)
class BeamSearchParams:
    """The parameters of a beam search.

    beam_width: how many beams are kept, and how many answers there are. length_penalty: an answer's score is its log
    probability over its number of tokens to this power, so above 0 longer ones gain. early_stopping: True ends with as
    many answers as beams; False when the best beam, at its length so far, could not beat the worst of these; "never"
    when it could not at its greatest length either (or now, if the penalty is not above 0). ignore_eos: end tokens end
    nothing. stop_token_ids: others that do.

    Raises RequestError for a value out of its range.
    """

    beam_width: int
    max_tokens: int = 16
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    cache_salt: str = ""
    adapter: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise RequestError(f"{name} is {value!r:.40}, expected an integer of at least 1")
        if self.early_stopping not in (True, False, "never"):
            raise RequestError(f"early_stopping is {self.early_stopping!r:.40}, expected true, false or never")
        if not isinstance(self.length_penalty, int | float) or not abs(self.length_penalty) < 100:
            raise RequestError(f"length_penalty is {self.length_penalty!r:.40}, expected a number between -100 and 100")


@dataclass(frozen=True)
class BeamSearchSequence:
    """An answer of a beam search.

    token_ids: with the end token, if one ended it. cumulative_logprob: the sum of their log probabilities. score: what
    answers are ordered by. finish_reason: "stop" or "length".
    """

    token_ids: list[int]
    cumulative_logprob: float
    score: float
    finish_reason: str
    text: str = ""


@dataclass
class BeamSearchOutput:
    """The answers to a prompt, the best first."""

    prompt_token_ids: list[int]
    sequences: list[BeamSearchSequence] = field(default_factory=list)


class BeamSearch:
    """The search of one prompt.

    ends: the tokens that end an answer. num_likely: how many likely tokens a step needs behind each beam.
    """

    def __init__(self, prompt: Sequence[int], params: BeamSearchParams, ends: Sequence[int], max_tokens: int) -> None:
        self.prompt, self._params, self._ends = list(prompt), params, frozenset(ends)
        self._max_tokens = max_tokens
        self.num_likely = max(2, 1 + len(self._ends)) * params.beam_width
        self._beams: list[tuple[list[int], float]] = [([], 0.0)]
        self.found: list[BeamSearchSequence] = []
        self.is_done = False

    @property
    def texts(self) -> list[list[int]]:
        """The token ids of each beam, with the prompt."""
        return [self.prompt + ids for ids, _ in self._beams]

    def step(self, rows: Sequence[Likely]) -> None:
        """Go on by a token; rows: the most likely tokens behind each beam, `num_likely` of them or all there are."""
        width, length = self._params.beam_width, len(self._beams[0][0]) + 1
        longest = [
            (score + logprob, beam, token)
            for beam, ((_, score), row) in enumerate(zip(self._beams, rows, strict=True))
            for token, logprob in row
        ]
        longest.sort(key=lambda each: (-each[0], each[1], each[2]))
        going_on: list[tuple[list[int], float]] = []
        ended: list[BeamSearchSequence] = []
        for rank, (score, beam, token) in enumerate(longest[: self.num_likely]):
            ids = [*self._beams[beam][0], token]
            if token not in self._ends and length < self._max_tokens:
                going_on.append((ids, score))
            elif rank < width:  # the others are there to have enough beams that go on
                reason = "stop" if token in self._ends else "length"
                ended.append(BeamSearchSequence(ids, score, score / length**self._params.length_penalty, reason))
        is_full = len(self.found) == width
        if not (is_full and self._params.early_stopping is True):
            self.found = sorted((*self.found, *ended), key=lambda each: -each.score)[:width]
        self._beams = going_on[:width]
        self.is_done = not self._beams or self._cannot_improve(length)

    def _cannot_improve(self, length: int) -> bool:
        """Return whether no beam can become better than what was found, as far as is guessed."""
        if len(self.found) < self._params.beam_width:
            return False
        if self._params.early_stopping is True:
            return True
        penalty = self._params.length_penalty
        best_length = self._max_tokens if self._params.early_stopping == "never" and penalty > 0 else length
        return bool(self._beams[0][1] / best_length**penalty <= self.found[-1].score)


def begin(
    prompt: Sequence[int], params: BeamSearchParams, ends: Sequence[int], max_model_len: int
) -> tuple[BeamSearch, SamplingParams]:
    """Return the search of a prompt, and the parameters of a request that is its step for one beam.

    ends: the model's end tokens. Raises RequestError for more likely tokens a step than a request may ask for.
    """
    stops = (*(() if params.ignore_eos else ends), *params.stop_token_ids)
    found = BeamSearch(prompt, params, stops, min(params.max_tokens, max_model_len - len(prompt)))
    if (wanted := found.num_likely) > MAX_LOGPROBS:
        raise RequestError(
            f"beam_width is {params.beam_width}: with {len(set(stops))} end tokens it needs the {wanted} likeliest"
            f" tokens of a step, and {MAX_LOGPROBS} are told; make it smaller"
        )
    step = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=wanted)
    return found, changed(step, cache_salt=params.cache_salt, adapter=params.adapter)


def search(
    prompts: Sequence[Sequence[int]],
    params: BeamSearchParams,
    ends: Sequence[int],
    max_model_len: int,
    likely_of: LikelyOf,
) -> list[BeamSearchOutput]:
    """Search for the best answers to some prompts, all of their beams in one batch a step.

    ends: the model's end tokens. Raises RequestError as `begin` does.
    """
    begun = [begin(prompt, params, ends, max_model_len) for prompt in prompts]
    searches = [each for each, _ in begun]
    while left := [each for each in searches if not each.is_done]:
        rows = iter(likely_of([text for each in left for text in each.texts], begun[0][1]))
        for each in left:
            each.step([next(rows) for _ in each.texts])
    return [BeamSearchOutput(each.prompt, each.found) for each in searches]


def with_texts(outputs: list[BeamSearchOutput], text: Text | None) -> list[BeamSearchOutput]:
    """Return answers with their texts, without end tokens and other control tokens, if there is a tokenizer."""
    if text is None:
        return outputs
    return [
        BeamSearchOutput(
            each.prompt_token_ids, [replace(one, text=text.decode(one.token_ids)) for one in each.sequences]
        )
        for each in outputs
    ]


def likely_by(generate: Callable[..., Sequence[RequestOutput]]) -> LikelyOf:
    """Return what asks `LLM.generate` for the most likely tokens behind texts."""

    def likely_of(texts: list[list[int]], params: SamplingParams) -> list[Likely]:
        answers = generate(prompt_token_ids=texts, sampling_params=params)
        return [row.top for answer in answers for row in answer.outputs[0].logprobs or ()]

    return likely_of
