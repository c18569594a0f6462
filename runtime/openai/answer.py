"""What was generated as OpenAI's objects, whatever carries them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from inferc.errors import InfercError, ObjectiveError, RequestError
from inferc.runtime.engine.llm import CompletionOutput
from inferc.runtime.openai import fields as openai_fields
from inferc.runtime.openai.request import FIXED, FIXED_OF_EMBEDDINGS, SAMPLING, OpenAIRequest
from inferc.runtime.step.plan import Logprobs

LEAST_LOGPROB = -9999.0  # JSON has no infinity
NOTHING = CompletionOutput(0, finish_reason="length")  # where nothing was to be generated
FIELDS = frozenset(
    (
        *(*SAMPLING, *FIXED, *FIXED_OF_EMBEDDINGS, *openai_fields.COMPLETION, *openai_fields.CHAT),
        *(*openai_fields.RESPONSE, *openai_fields.TOKENIZE, *openai_fields.DETOKENIZE, *openai_fields.EMBEDDING),
    )
)

Token: TypeAlias = tuple[str, list[int] | None]  # its text, and its bytes where they are known
TokenOf: TypeAlias = Callable[[int], Token]


@dataclass(frozen=True)
class EchoedPrompt:
    """A prompt that is told again: rows of each token but the first, where its log probabilities were asked for."""

    text: str
    token_ids: Sequence[int]
    rows: Sequence[Logprobs] | None = None
    offsets: Sequence[int] = ()  # of each token in the text, where that was asked for

    @property
    def scored(self) -> list[tuple[int, Logprobs | None]]:
        """Its tokens with their log probabilities."""
        rows = [None] * len(self.token_ids) if self.rows is None else [None, *self.rows]
        return list(zip(self.token_ids, rows, strict=True))


def prompt_offsets(text: str, token_ids: Sequence[int], token: TokenOf, special: Collection[int]) -> list[int]:
    """Where each token of a prompt begins in its text, in characters.

    Special tokens that the text does not have (the tokenizer adds them, BOS for example) take no place, nor does a first space of its.
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
    """Tokens of a prompt, those of them that were found in the prefix cache, and those of its answer."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Answer:
    """What one prompt was answered with; cached_tokens of it were found in the prefix cache."""

    prompt_tokens: int
    cached_tokens: int
    outputs: Sequence[CompletionOutput]

    @property
    def usage(self) -> Usage:
        num_tokens = sum(len(output.token_ids) for output in self.outputs)
        return Usage(self.prompt_tokens, self.cached_tokens, num_tokens)


def response_body(
    request: OpenAIRequest, answers: Sequence[Answer], name: str, model: str, created: int, token: TokenOf
) -> dict[str, Any]:
    """The object that answers a whole request, without what it tells of its prompts; `answers` in the order of these.

    name: makes its id; created: seconds since 1970. token: what a token id stands for, asked where there are log
    probabilities.
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
    """A choice of a whole answer, without its index."""
    choice = _chat_choice(output, token) if request.kind == "chat" else _completion_choice(output, token)
    if request.return_token_ids:
        choice["token_ids"] = output.token_ids
    return choice


def prompt_rows(rows: Sequence[Logprobs], token: TokenOf) -> list[dict[str, Any]]:
    """Log probabilities of a prompt's tokens but the first, by token id, as vLLM has them."""
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
    """The HTTP status and the object that tell of an error."""
    status, kind = 500, "server_error"
    if isinstance(error, RequestError):
        status, kind = 400, "invalid_request_error"
    elif isinstance(error, ObjectiveError):
        status, kind = 429, "rate_limit_error"
    return status, {"error": {"message": str(error), "type": kind, "param": field_of(str(error)), "code": None}}


def field_of(message: str) -> str | None:
    """The field that a message of ours begins with, if it does."""
    found = re.match(r"([a-z_]+)(?:[.\[].{0,200}?)?(?::| is )", message, re.DOTALL)
    return found[1] if found is not None and found[1] in FIELDS else None


def usage_body(usages: Sequence[Usage]) -> dict[str, Any]:
    """The sum of them, as OpenAI tells it."""
    prompt_tokens = sum(usage.prompt_tokens for usage in usages)
    output_tokens = sum(usage.output_tokens for usage in usages)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
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
    """Lists with an entry for each token: of a text's first one nothing is known (None).

    The chosen token is among its `top_logprobs`. known: where in the text the first tokens begin; offset: where those behind them do.
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
    """By the tokens' texts; of two with the same text the likelier."""
    found: dict[str, float] = {}
    for each, value in (*row.top, (row.token_id, row.logprob)):
        name = _name(each, token)
        found[name] = max(finite(value), found.get(name, LEAST_LOGPROB))
    return found


def _name(token_id: int, token: TokenOf) -> str:
    """A token's text; of one that is a part of a character its bytes, as OpenAI's completions have it."""
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
