"""OpenAI's request bodies as what inferc serves, and what was generated as OpenAI's objects, whatever carries the two.

A field that would change the answer and is not built is refused by its name. A field that is not known is left alone:
clients send some that mean something to OpenAI's own platform only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from inferc.errors import InfercError, ObjectiveError, RequestError
from inferc.runtime.llm import CompletionOutput
from inferc.runtime.sampling_params import from_request
from inferc.runtime.step import Logprobs

COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
URLS = (COMPLETIONS, CHAT, EMBEDDINGS)
MAX_PROMPTS = 2048  # of one request, as OpenAI has it
LEAST_LOGPROB = -9999.0  # JSON has no infinity

# Fields that are SamplingParams by the same name.
SAMPLING = (
    *("n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "skip_special_tokens", "cache_salt"),
    *("include_stop_str_in_output", "allowed_token_ids", "cache_priority", "ttft_ms", "tbt_ms"),
)
FLAGS = ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output")
NOTHING: tuple[Any, ...] = (None, False, "", [], {})
NOT_BUILT = (
    *("tools", "functions", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("json_schema", "regex", "ebnf", "grammar", "structural_tag", "audio", "prediction", "web_search_options"),
    *("chat_template", "chat_template_kwargs", "documents", "continue_final_message", "prompt_embeds", "lora_path"),
    *("bad_words", "logits_processors", "use_beam_search", "echo", "suffix", "priority", "return_token_ids"),
)
# The same with values that ask for no more than there is.
FIXED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(NOT_BUILT, NOTHING),
    "tool_choice": (None, "none", "auto"),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {}, {"type": "text"}),
    "modalities": (None, [], ["text"]),
    "reasoning_effort": (None, "none"),
    "prompt_logprobs": (None,),
    "truncate_prompt_tokens": (None,),
    "add_generation_prompt": (None, True),
}

Prompt: TypeAlias = str | list[int] | list[dict[str, str]]
Token: TypeAlias = tuple[str, list[int] | None]  # its text, and its bytes where they are known
TokenOf: TypeAlias = Callable[[int], Token]


@dataclass(frozen=True)
class OpenAIRequest:
    """prompts: texts, lists of token ids, or one conversation. sampling: fields of SamplingParams that were said."""

    kind: Literal["completion", "chat"]
    prompts: tuple[Prompt, ...]
    sampling: Mapping[str, Any]

    @property
    def num_outputs(self) -> int:
        """Of each prompt."""
        return int(self.sampling.get("n", 1))


@dataclass(frozen=True)
class Answer:
    """What one prompt was answered with; cached_tokens of it were found in the prefix cache."""

    prompt_tokens: int
    cached_tokens: int
    outputs: Sequence[CompletionOutput]


def parse_request(url: str, body: Mapping[str, Any]) -> OpenAIRequest:
    """What a body asks for. Raises RequestError, which names the field at fault."""
    if url == EMBEDDINGS:
        raise RequestError(
            f"{url}: the model does not allow embeddings, it generates text; use {COMPLETIONS} or {CHAT}"
        )
    for name, allowed in FIXED.items():
        if body.get(name) not in allowed:
            raise RequestError(f"{name} is {body[name]!r:.80}, which is not built yet; leave it out")
    sampling = {name: body[name] for name in SAMPLING if body.get(name) is not None}
    for name in FLAGS:
        _check_flag(name, sampling.get(name, False))
    if body.get("logit_bias") is not None:
        sampling["logit_bias"] = _logit_bias(body["logit_bias"])
    if body.get("best_of") not in (None, 1, sampling.get("n", 1)):
        raise RequestError(f"best_of is {body['best_of']!r:.80}, which is not built yet; leave it out")
    read = _chat if url == CHAT else _completion
    request = read(body, sampling)
    from_request(request.sampling)  # raises what is wrong with a value
    return request


def _completion(body: Mapping[str, Any], sampling: dict[str, Any]) -> OpenAIRequest:
    if body.get("add_special_tokens") is False:
        raise RequestError("add_special_tokens is False, which is not built yet; give the prompt as token ids")
    if (limit := _max_tokens(body)) is not None:
        sampling["max_tokens"] = limit
    if body.get("logprobs") is not None and body["logprobs"] is not False:
        sampling["logprobs"] = body["logprobs"]
    return OpenAIRequest("completion", tuple(_prompts(body.get("prompt"))), sampling)


def _chat(body: Mapping[str, Any], sampling: dict[str, Any]) -> OpenAIRequest:
    if body.get("add_special_tokens") is True:
        raise RequestError("add_special_tokens is True, which is not built yet; the chat template writes its own")
    sampling["max_tokens"] = _max_tokens(body)  # None: as many as fit
    _check_flag("logprobs", body.get("logprobs") or False)
    if body.get("logprobs"):
        sampling["logprobs"] = body.get("top_logprobs") or 0
    elif body.get("top_logprobs"):
        raise RequestError(f"top_logprobs is {body['top_logprobs']!r:.80} without logprobs; set logprobs to true")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError(f"messages: expected a list of at least one message, found {messages!r:.80}")
    return OpenAIRequest("chat", ([_message(index, each) for index, each in enumerate(messages)],), sampling)


def _check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise RequestError(f"{name}: expected true or false, found {value!r:.80}")


def _max_tokens(body: Mapping[str, Any]) -> int | None:
    names = [name for name in ("max_completion_tokens", "max_tokens") if body.get(name) is not None]
    if len(names) == 2 and body[names[0]] != body[names[1]]:
        raise RequestError(f"{names[0]} is {body[names[0]]!r:.40} and {names[1]} {body[names[1]]!r:.40}; leave one out")
    return body[names[0]] if names else None


def _logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise RequestError(f"logit_bias: expected an object from token id to bias, found {value!r:.80}")
    for key in value:
        if not re.fullmatch(r"[0-9]{1,10}", key):
            raise RequestError(f"logit_bias: a key is a token id, found {key!r:.80}")
    return {int(key): bias for key, bias in value.items()}


def _prompts(value: Any) -> list[str | list[int]]:
    if isinstance(value, str) or _is_ids(value):
        return [value]
    if isinstance(value, list) and value and all(isinstance(each, str) or _is_ids(each) for each in value):
        if len(value) > MAX_PROMPTS:
            raise RequestError(
                f"prompt: found {len(value)} prompts, at most {MAX_PROMPTS} are allowed; use more requests"
            )
        return value
    raise RequestError(f"prompt: expected a text, a list of token ids, or a list of either, found {value!r:.80}")


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _message(index: int, message: Any) -> dict[str, str]:
    """A message of text. What else one can hold (calls of tools, audio, a name) is refused unless it is empty."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"{where}: expected an object with a role and a content, found {message!r:.80}")
    for name, value in message.items():
        if name not in ("role", "content") and value:
            raise RequestError(f"{where}.{name} is {value!r:.80}, which is not built yet; leave it out")
    content = message.get("content")
    texts = []
    for part in content if isinstance(content, list) else [{"type": "text", "text": content}]:
        if not isinstance(part, Mapping) or part.get("type") != "text":
            found = part.get("type") if isinstance(part, Mapping) else part
            raise RequestError(f"{where}.content: this model takes text parts only, found {found!r:.80}")
        if not isinstance(text := part.get("text"), str):
            raise RequestError(f"{where}.content: expected text, found {text!r:.80}")
        texts.append(text)
    return {"role": message["role"], "content": "".join(texts)}


# ----------------------------------------------------------------------------------------------- answers


def response_body(
    request: OpenAIRequest, answers: Sequence[Answer], name: str, model: str, created: int, token: TokenOf
) -> dict[str, Any]:
    """The object that answers a whole request, `answers` in the order of its prompts.

    name: makes its id; created: seconds since 1970. token: what a token id stands for, asked where there are log
    probabilities.
    """
    is_chat = request.kind == "chat"
    outputs = [output for answer in answers for output in answer.outputs]
    choice = _chat_choice if is_chat else _completion_choice
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{name}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": created,
        "model": model,
        "choices": [{"index": index, **choice(output, token)} for index, output in enumerate(outputs)],
        "usage": _usage(answers),
    }


def error_body(error: InfercError) -> tuple[int, dict[str, Any]]:
    """The HTTP status and the object that tell of an error."""
    status, kind = 500, "server_error"
    if isinstance(error, RequestError):
        status, kind = 400, "invalid_request_error"
    elif isinstance(error, ObjectiveError):
        status, kind = 429, "rate_limit_error"
    return status, {"error": {"message": str(error), "type": kind, "param": _field_of(str(error)), "code": None}}


def _field_of(message: str) -> str | None:
    """The field that a message of ours begins with, if it does."""
    found = re.match(r"([a-z_]+)(?:\[\d+\])?(?:\.[a-z_]+)?(?::| is )", message)
    known = (
        *SAMPLING,
        *FIXED,
        "prompt",
        "messages",
        "logprobs",
        "top_logprobs",
        "logit_bias",
        "max_tokens",
        "best_of",
        "stream",
    )
    return found[1] if found is not None and found[1] in known else None


def _usage(answers: Sequence[Answer]) -> dict[str, Any]:
    prompt_tokens = sum(answer.prompt_tokens for answer in answers)
    output_tokens = sum(len(output.token_ids) for answer in answers for output in answer.outputs)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(answer.cached_tokens for answer in answers)},
    }


def _completion_choice(output: CompletionOutput, token: TokenOf) -> dict[str, Any]:
    logprobs = None if output.logprobs is None else _completion_logprobs(output.logprobs, token)
    return {"text": output.text, "logprobs": logprobs, "finish_reason": output.finish_reason}


def _completion_logprobs(rows: Sequence[Logprobs], token: TokenOf) -> dict[str, Any]:
    """Lists with a row for each token; the chosen one is among its `top_logprobs`, and offsets begin with the answer."""
    tokens = [token(row.token_id)[0] for row in rows]
    offsets, length = [], 0
    for text in tokens:
        offsets.append(length)
        length += len(text)
    return {
        "tokens": tokens,
        "token_logprobs": [_finite(row.logprob) for row in rows],
        "top_logprobs": [
            {token(each)[0]: _finite(value) for each, value in (*row.top, (row.token_id, row.logprob))} for row in rows
        ],
        "text_offset": offsets,
    }


def _chat_choice(output: CompletionOutput, token: TokenOf) -> dict[str, Any]:
    rows = None
    if output.logprobs is not None:
        rows = [
            {
                **_chat_logprob(row.token_id, row.logprob, token),
                "top_logprobs": [_chat_logprob(each, value, token) for each, value in row.top],
            }
            for row in output.logprobs
        ]
    return {
        "message": {"role": "assistant", "content": output.text, "refusal": None},
        "logprobs": None if rows is None else {"content": rows, "refusal": None},
        "finish_reason": output.finish_reason,
    }


def _chat_logprob(token_id: int, logprob: float, token: TokenOf) -> dict[str, Any]:
    text, data = token(token_id)
    return {"token": text, "logprob": _finite(logprob), "bytes": data}


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
