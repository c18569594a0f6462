"""The answer to a prompt of `inferc.LLM`, and the request that it grows in."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from inferc.errors import RequestError
from inferc.runtime.engine.absent import OF_COMPLETION_OUTPUT, OF_REQUEST_OUTPUT, absent
from inferc.runtime.engine.prompts import ParsedPrompt
from inferc.runtime.engine.scoring import Score
from inferc.runtime.engine.token_logprobs import TokenLogprobs
from inferc.runtime.step.plan import Logprobs
from inferc.runtime.step.sampling_params import SamplingParams
from inferc.runtime.text.spelled import spelled
from inferc.runtime.text.text_stream import TextStream
from inferc.runtime.text.tokenizer import Text
from inferc.runtime.tools.call_reader import Call


@dataclass
class CompletionOutput:
    """The state of one sequence of a request; `stop` is the stop string or end token that ended it.

    num_forgotten_tokens: tokens of the prompt and the answer that the last token did not see (`kv_evict`): above 0, the
    answer is not the model's own.
    new_text: what a stream's latest piece added to `text`.
    tool_calls: the calls of tools in the answer, where a conversation offered tools.
    reasoning: the reasoning of an answer to a conversation, if the model wrote any.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop: str | int | None = None
    logprobs: list[Logprobs] | None = None
    num_forgotten_tokens: int = 0
    new_text: str = ""
    tool_calls: list[Call] = field(default_factory=list)
    reasoning: str = ""
    stop_token_ids: tuple[int, ...] = field(default=(), repr=False, compare=False)  # those of the request

    @property
    def cumulative_logprob(self) -> float | None:
        """The log probability of all tokens together; None unless SamplingParams asked for logprobs."""
        return None if self.logprobs is None else sum(row.logprob for row in self.logprobs)

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or stop token of the request that ended the sequence; None for the model's own end token."""
        return self.stop if isinstance(self.stop, str) or self.stop in self.stop_token_ids else None

    def finished(self) -> bool:
        """Return whether the sequence has ended."""
        return self.finish_reason is not None

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise absent(self, name, OF_COMPLETION_OUTPUT)


@dataclass
class RequestOutput:
    """The answer to one prompt: `params.n` outputs.

    prompt: None if the prompt was given as token ids.
    num_cached_tokens: the number of prompt tokens that were found in the prefix cache.
    prompt_logprobs: those of each token of the prompt, None for the first, if SamplingParams asked for them.
    request_id: the name by which the engine knows the request.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    prompt_logprobs: list[Logprobs | None] | None = None
    request_id: str = field(default="", compare=False)

    @property
    def is_finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)

    @property
    def finished(self) -> bool:
        """True if all outputs have ended, by the name that vLLM has for it."""
        return self.is_finished

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise absent(self, name, OF_REQUEST_OUTPUT)


@dataclass(frozen=True)
class EmbeddingOutput:
    """The vector of a text."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True)
class EmbeddingRequestOutput:
    """The answer to one prompt whose vector was asked for; `outputs` holds it."""

    request_id: str = field(compare=False)
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass
class OpenRequest:
    """A request and what is there of its answer; ids: those of the engine, once it is started.

    asked: the parameters by which its outputs are chosen from those that are computed, if not all of them are returned.
    """

    params: SamplingParams
    answer: RequestOutput
    streams: list[TextStream]
    text: Text | None = None
    id: str = ""
    score_id: str = ""
    asked: SamplingParams | None = None
    is_counted: bool = False

    @staticmethod
    def begin(
        text: Text | None, prompt: ParsedPrompt, params: SamplingParams, marks: Mapping[int, str] | None = None
    ) -> OpenRequest:
        """Make a request of a prompt; raises RequestError for text without a tokenizer. marks: as in TextStream."""
        if params.stop and text is None:
            raise RequestError("stop strings need a tokenizer, which this artifact does not have; use stop_token_ids")
        if prompt.cache_salt is not None:
            params = replace(params, cache_salt=prompt.cache_salt)
        params = copy.copy(params)  # they may be changed while the request runs
        if text is not None:
            params = spelled(text, params)
        ids = prompt_ids(text, prompt)
        outputs = [CompletionOutput(index, stop_token_ids=params.stop_token_ids) for index in range(params.n)]
        answer = RequestOutput(prompt.text, ids, outputs)
        streams = [] if text is None else [TextStream(text, params, marks) for _ in outputs]
        return OpenRequest(params, answer, streams, text)

    @property
    def is_done(self) -> bool:
        """True if the answer is finished, and the prompt is scored if that was asked for."""
        waits = self.params.prompt_logprobs is not None and self.answer.prompt_logprobs is None
        return self.answer.is_finished and not waits

    def add_score(self, score: Score) -> None:
        count = self.params.prompt_logprobs
        self.answer.prompt_logprobs = [None, *(TokenLogprobs.of(row, self.text, count) for row in score.rows)]

    def add_logprobs(self, output: CompletionOutput, rows: list[Logprobs]) -> None:
        output.logprobs = output.logprobs or []
        output.logprobs.extend(TokenLogprobs.of(row, self.text) for row in rows)

    def clear_new_text(self) -> None:
        for output in self.answer.outputs:
            output.new_text = ""


def required(text: Text | None) -> Text:
    """Return an artifact's tokenizer; raise RequestError if it has none."""
    if text is None:
        raise RequestError("this artifact has no tokenizer: give prompts as token ids, and read token_ids")
    return text


def prompt_ids(text: Text | None, prompt: ParsedPrompt) -> list[int]:
    """Return the token ids of a prompt; raise RequestError for a text without a tokenizer."""
    return required(text).encode(prompt.text or "") if prompt.token_ids is None else prompt.token_ids
