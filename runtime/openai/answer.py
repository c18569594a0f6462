"""The conversion of generated output into OpenAI's response objects, independent of their transport."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from inferc.errors import InfercError, ObjectiveError, RequestError
from inferc.runtime.engine.request_output import CompletionOutput
from inferc.runtime.openai import fields as openai_fields
from inferc.runtime.openai.request import FIXED, SAMPLING, OpenAIRequest
from inferc.runtime.openai.text_requests import FIXED_OF_EMBEDDINGS
from inferc.runtime.step.plan import Logprobs

LEAST_LOGPROB = -9999.0  # JSON has no infinity
NOTHING = CompletionOutput(0, finish_reason="length")  # the output of a request that generates nothing
FIELDS = frozenset(
    (
        *SAMPLING,
        *FIXED,
        *FIXED_OF_EMBEDDINGS,
        *openai_fields.COMPLETION,
        *openai_fields.CHAT,
        *openai_fields.RESPONSE,
        *openai_fields.TOKENIZE,
        *openai_fields.DETOKENIZE,
        *openai_fields.EMBEDDING,
    )
)

Token: TypeAlias = tuple[str, list[int] | None]  # (its text, its bytes or None if they are unknown)
TokenOf: TypeAlias = Callable[[int], Token]


@dataclass(frozen=True)
class EchoedPrompt:
    """A prompt that the response repeats.

    rows: for each token but the first, if log probabilities were requested.
    """

    text: str
    token_ids: Sequence[int]
    rows: Sequence[Logprobs] | None = None
    offsets: Sequence[int] = ()  # where each token begins in the text, if requested

    @property
    def scored(self) -> list[tuple[int, Logprobs | None]]:
        """Return the prompt's tokens with their log probabilities."""
        rows = [None] * len(self.token_ids) if self.rows is None else [None, *self.rows]
        return list(zip(self.token_ids, rows, strict=True))


def prompt_offsets(text: str, token_ids: Sequence[int], token: TokenOf, special: Collection[int]) -> list[int]:
    """Return where each token of a prompt begins in its text, in characters.

    Special tokens that are not in the text (which the tokenizer adds, such as BOS) have no width, nor has a leading
    space that the tokenizer adds.
    """
    data = text.encode(errors="surrogatepass")
    starts = [index for index, char in enumerate(text) for _ in range(len(char.encode(errors="surrogatepass")))]
    starts.append(len(text))
    offsets, at = [], 0
    for token_id in token_ids:
        name, known = token(token_id)
        spelled = name.encode(errors="surrogatepass") if known is None else bytes(known)
        offsets.append(starts[at])
        if not at and not data.startswith(spelled) and data.startswith(spelled.removeprefix(b" ")):
            spelled = spelled.removeprefix(b" ")
        if data.startswith(spelled, at) or token_id not in special:
            at = min(at + len(spelled), len(data))
    return offsets


@dataclass(frozen=True)
class Usage:
    """The token counts of a prompt, of its part that was found in the prefix cache, and of its outputs.

    reasoning_tokens: of the outputs' reasoning; None: it is not told from the text.
    """

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int | None = None


@dataclass(frozen=True)
class Answer:
    """The outputs for one prompt, with its token counts; cached_tokens were found in the prefix cache.

    reasoning: that of each output, and how many tokens it has together; None: it is not told from the text.
    prompt_rows: the log probabilities of the prompt's tokens but the first, if they were asked for.
    """

    prompt_tokens: int
    cached_tokens: int
    outputs: Sequence[CompletionOutput]
    reasoning: Sequence[str] = ()
    reasoning_tokens: int | None = None
    prompt_rows: Sequence[Logprobs] = ()

    @property
    def usage(self) -> Usage:
        num_tokens = sum(len(output.token_ids) for output in self.outputs)
        return Usage(self.prompt_tokens, self.cached_tokens, num_tokens, self.reasoning_tokens)


def response_body(
    request: OpenAIRequest, answers: Sequence[Answer], name: str, model: str, created: int, token: TokenOf
) -> dict[str, Any]:
    """Return the response object of a whole request, without any echo of its prompts.

    answers: in the order of the prompts; name: makes its id; created: seconds since 1970; token: returns what a token
    id stands for, called where there are log probabilities.
    """
    is_chat = request.kind == "chat"
    choices = [
        choice_body(request, output, token)
        for answer in answers
        for output in answer.outputs or (NOTHING,) * request.num_outputs
    ]
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{name}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": created,
        "model": model,
        "choices": [{"index": index, **choice} for index, choice in enumerate(choices)],
        "usage": usage_body([answer.usage for answer in answers]),
    }


def choice_body(request: OpenAIRequest, output: CompletionOutput, token: TokenOf) -> dict[str, Any]:
    """Return a choice of a whole response, without its index."""
    choice = _chat_choice(output, token) if request.kind == "chat" else _completion_choice(output, token)
    if request.return_token_ids:
        choice["token_ids"] = output.token_ids
    return choice


def prompt_rows(rows: Sequence[Logprobs], token: TokenOf) -> list[dict[str, Any]]:
    """Return the log probabilities of a prompt's tokens except the first, by token id, in vLLM's form."""
    return [
        {
            str(each): {"logprob": finite(value), "rank": rank, "decoded_token": token(each)[0]}
            for each, value, rank in _with_ranks(row)
        }
        for row in rows
    ]


def _with_ranks(row: Logprobs) -> list[tuple[int, float, int]]:
    top = [(each, value, rank) for rank, (each, value) in enumerate(row.top, 1)]
    return top if any(each == row.token_id for each, _ in row.top) else [*top, (row.token_id, row.logprob, row.rank)]


def error_body(error: InfercError) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and the response object of an error."""
    status, kind = 500, "server_error"
    if isinstance(error, RequestError):
        status, kind = 400, "invalid_request_error"
    elif isinstance(error, ObjectiveError):
        status, kind = 429, "rate_limit_error"
    return status, {"error": {"message": str(error), "type": kind, "param": field_of(str(error)), "code": None}}


def field_of(message: str) -> str | None:
    """Return the field that an error message of inferc begins with, or None."""
    found = re.match(r"([a-z_]+)(?:[.\[].{0,200}?)?(?::| is )", message, re.DOTALL)
    return found[1] if found is not None and found[1] in FIELDS else None


def usage_body(usages: Sequence[Usage]) -> dict[str, Any]:
    """Return the sum of the usages as OpenAI's object."""
    prompt_tokens = sum(usage.prompt_tokens for usage in usages)
    output_tokens = sum(usage.output_tokens for usage in usages)
    reasoning = [usage.reasoning_tokens for usage in usages if usage.reasoning_tokens is not None]
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
        **({"completion_tokens_details": {"reasoning_tokens": sum(reasoning)}} if reasoning else {}),
    }


def _completion_choice(output: CompletionOutput, token: TokenOf) -> dict[str, Any]:
    rows = None if output.logprobs is None else [(row.token_id, row) for row in output.logprobs]
    return {
        "text": output.text,
        "logprobs": None if rows is None else completion_logprobs(rows, token),
        "finish_reason": output.finish_reason,
    }


def completion_logprobs(
    rows: Sequence[tuple[int, Logprobs | None]], token: TokenOf, offset: int = 0, known: Sequence[int] = ()
) -> dict[str, Any]:
    """Return OpenAI's lists of log probabilities, with an entry per token; that of a text's first token is None.

    The chosen token is among its `top_logprobs`. known: where in the text the first tokens begin; offset: where the
    tokens after those begin.
    """
    names = [_name(each, token) for each, _ in rows]
    offsets = list(known)
    for each, _ in rows[len(known) :]:
        offsets.append(offset)
        offset += len(token(each)[0])
    return {
        "tokens": names,
        "token_logprobs": [None if row is None else finite(row.logprob) for _, row in rows],
        "top_logprobs": [None if row is None else _top(row, token) for _, row in rows],
        "text_offset": offsets,
    }


def _top(row: Logprobs, token: TokenOf) -> dict[str, float]:
    """Return the log probabilities by token text; of two tokens with the same text, the likelier one's."""
    found: dict[str, float] = {}
    for each, value in (*row.top, (row.token_id, row.logprob)):
        name = _name(each, token)
        found[name] = max(finite(value), found.get(name, LEAST_LOGPROB))
    return found


def _name(token_id: int, token: TokenOf) -> str:
    """Return a token's text, or its bytes if it is part of a character, in the notation of OpenAI's completions."""
    text, data = token(token_id)
    if data is not None and "\ufffd" in text and text.encode() != bytes(data):
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
    return text


def _chat_choice(output: CompletionOutput, token: TokenOf) -> dict[str, Any]:
    return {
        "message": {"role": "assistant", "content": output.text, "refusal": None},
        "logprobs": None if output.logprobs is None else chat_logprobs(output.logprobs, token),
        "finish_reason": output.finish_reason,
    }


def chat_logprobs(rows: Sequence[Logprobs], token: TokenOf) -> dict[str, Any]:
    content = [
        {
            **chat_logprob(row.token_id, row.logprob, token),
            "top_logprobs": [chat_logprob(each, value, token) for each, value in row.top],
        }
        for row in rows
    ]
    return {"content": content, "refusal": None}


def chat_logprob(token_id: int, logprob: float, token: TokenOf) -> dict[str, Any]:
    text, data = token(token_id)
    return {"token": text, "logprob": finite(logprob), "bytes": data}


def finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
