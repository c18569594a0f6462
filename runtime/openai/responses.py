"""The conversion of OpenAI's Responses API, text only: a request becomes a chat, and the answer its objects.

Nothing is stored, so references to stored objects are refused, as are unsupported features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from inferc.errors import RequestError, shown
from inferc.runtime.engine.request_output import CompletionOutput
from inferc.runtime.openai import fields as openai_fields
from inferc.runtime.openai import request as openai_request
from inferc.runtime.openai.answer import TokenOf, Usage, chat_logprobs
from inferc.runtime.openai.fields import NOTHING, check_fields
from inferc.runtime.openai.request import OpenAIRequest, chat_request, max_tokens_of, sampling_of
from inferc.runtime.openai.response_format import of_format
from inferc.runtime.openai.unknown_fields import warnings_of
from inferc.runtime.step.sampling_params import check_integer, check_num_top, check_text

RESPONSES = "/v1/responses"
LOGPROBS = "message.output_text.logprobs"
# The accepted values of `include`. A text answer can include log probabilities and has none of the others.
INCLUDES = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
)
MAX_METADATA, MAX_METADATA_NAME, MAX_METADATA_VALUE = 16, 64, 512  # entries, characters: OpenAI's limits
STORED = ("previous_response_id", "conversation")
# Unsupported fields, with the values that are accepted because they ask for nothing unsupported.
FIXED: dict[str, tuple[Any, ...]] = {
    "background": NOTHING,
    "prompt": NOTHING,
    "truncation": (None, "disabled"),
    "n": (None, 1),
    "echo": NOTHING,
    "prompt_logprobs": (None,),
    "return_token_ids": NOTHING,
    "messages": NOTHING,
    "logprobs": NOTHING,
}
INNER_FIXED: dict[str, dict[str, tuple[Any, ...]]] = {
    "reasoning": {"summary": (None,), "generate_summary": (None,)},
}
ROLES = ("user", "assistant", "system", "developer")
OF_A_MESSAGE = ("type", "role", "content", "id", "status", "phase")
PARTS = ("input_text", "output_text")

State: TypeAlias = Literal["in_progress", "completed", "incomplete", "failed"]


@dataclass(frozen=True)
class ResponseRequest:
    """A checked request of the Responses API: the chat that it asks for, and what the response repeats of its body."""

    chat: OpenAIRequest
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    parallel_tool_calls: bool = True
    tool_choice: Any = "auto"
    top_logprobs: int = 0
    user: str | None = None
    text_format: Mapping[str, Any] = field(default_factory=lambda: {"type": "text"})


def parse_response_request(body: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> ResponseRequest:
    """Convert a body into a request and check all of it. Raises RequestError naming the faulty field.

    defaults: of sampling.
    """
    check_fields(body, openai_fields.RESPONSE)
    for name in STORED:
        if body.get(name) is not None:
            raise RequestError(f"{name} is {shown(body[name])}, and nothing is stored here; send all of it as input")
    for name, allowed in FIXED.items():
        if body.get(name) not in allowed:
            raise RequestError(f"{name} is {shown(body[name])}, which is not built yet; leave it out")
    check_fields(body, openai_fields.BESIDE_RESPONSE)
    for name, inner in INNER_FIXED.items():
        _check_inner(name, body.get(name), inner)
    _check_texts(body)
    limit = body.get("max_output_tokens")
    if limit is not None:
        check_integer("max_output_tokens", limit, 1, 2**31 - 1)
    messages, top = _messages(body), body.get("top_logprobs") or 0
    wants_logprobs = _wants_logprobs(body)
    sampling = sampling_of(body, is_served=True)
    named = body.get("max_completion_tokens") if limit is None else limit
    sampling["max_tokens"] = max_tokens_of(named, body.get("max_tokens"))
    if wants_logprobs:
        sampling["logprobs"] = top
    text_format = (body.get("text") or {}).get("format") or {}
    if (form := of_format(text_format, "text.format")) is not None:
        sampling["structured_outputs"] = form
    chat = chat_request({**body, **_effort(body)}, messages, sampling, True, defaults or {})
    return ResponseRequest(
        replace(
            chat,
            warnings=warnings_of(
                body, openai_fields.RESPONSE, openai_fields.BESIDE_RESPONSE, FIXED, openai_request.FIXED
            ),
        ),
        body.get("instructions"),
        limit,
        body.get("metadata") or {},
        body.get("parallel_tool_calls") is not False,
        body.get("tool_choice") or "auto",
        top,
        body.get("user"),
        text_format or {"type": "text"},
    )


def _effort(body: Mapping[str, Any]) -> dict[str, str]:
    """Return the variable of the chat template that `reasoning.effort` sets, if it does."""
    effort = (body.get("reasoning") or {}).get("effort")
    if effort is not None and not isinstance(effort, str):
        raise RequestError(f"reasoning.effort: expected a text, found {shown(effort)}")
    return {} if effort is None else {"reasoning_effort": effort}


def _check_texts(body: Mapping[str, Any]) -> None:
    """Check that the texts which every event repeats are valid, and short except for the instructions."""
    metadata = body.get("metadata") or {}
    if len(metadata) > MAX_METADATA:
        raise RequestError(f"metadata: found {len(metadata)} entries, at most {MAX_METADATA} are allowed")
    texts = [("metadata", key, MAX_METADATA_NAME) for key in metadata]
    texts += [("metadata", value, MAX_METADATA_VALUE) for value in metadata.values()]
    texts.append(("user", body.get("user") or "", MAX_METADATA_VALUE))
    for name, text, most in texts:
        if len(text) > most:
            raise RequestError(f"{name}: found a text of {len(text)} characters, at most {most} are allowed")
        check_text(name, text)
    check_text("instructions", body.get("instructions") or "")


def _check_inner(name: str, value: Mapping[str, Any] | None, allowed: Mapping[str, tuple[Any, ...]]) -> None:
    if value is None:
        return
    for inner, values in allowed.items():
        if value.get(inner) not in values:
            raise RequestError(f"{name}.{inner} is {shown(value[inner])}, which is not built yet; leave it out")


def _wants_logprobs(body: Mapping[str, Any]) -> bool:
    include, top = body.get("include") or (), body.get("top_logprobs")
    for each in include:
        if each not in INCLUDES:
            raise RequestError(f"include: {shown(each)} is unknown; known: {', '.join(INCLUDES)}")
    wants = LOGPROBS in include
    if top is not None:
        check_num_top("top_logprobs", top)
    if top and not wants:
        raise RequestError(f"top_logprobs is {top}, and include has no {LOGPROBS}; add it")
    return wants


# --------------------------------------------------------------------------------------------------- input


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the conversation. System messages at its start are merged, since templates read only one."""
    given, instructions = body.get("input"), body.get("instructions")
    if isinstance(given, str):
        messages = [{"role": "user", "content": given}]
    elif isinstance(given, list) and given:
        messages = [_message(f"input[{index}]", item) for index, item in enumerate(given)]
    else:
        raise RequestError(f"input: expected a text or a list of at least one item, found {shown(given)}")
    count = next((at for at, each in enumerate(messages) if each["role"] != "system"), len(messages))
    first = [*([instructions] if instructions else []), *(each["content"] for each in messages[:count])]
    system = [{"role": "system", "content": "\n\n".join(first)}] if first else []
    return [*system, *messages[count:]]


def _message(where: str, item: Any) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        raise RequestError(f"{where}: expected an object, found {shown(item)}")
    kind = item.get("type") or "message"
    if kind == "item_reference":
        raise RequestError(f"{where}: it refers to an item that was stored, and nothing is stored here; send the item")
    if kind != "message":
        raise RequestError(f"{where}: items of type {shown(kind)} are not built yet; send messages alone")
    for name, value in item.items():
        if name not in OF_A_MESSAGE and value:
            raise RequestError(f"{where}.{name:.40} is {shown(value)}, which is not built yet; leave it out")
    role = item.get("role")
    if role not in ROLES:
        raise RequestError(f"{where}: its role is {shown(role)}; expected one of {', '.join(ROLES)}")
    return {"role": "system" if role == "developer" else str(role), "content": _text(where, item.get("content"))}


def _text(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where}.content: expected a text or a list of parts, found {shown(content)}")
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") not in PARTS:
            found = part.get("type") if isinstance(part, Mapping) else part
            raise RequestError(f"{where}.content: this model takes {' and '.join(PARTS)} only, found {shown(found)}")
        if not isinstance(text := part.get("text"), str):
            raise RequestError(f"{where}.content: expected text, found {shown(text)}")
        texts.append(text)
    return "".join(texts)


# ------------------------------------------------------------------------------------------------- objects


@dataclass(frozen=True)
class ResponseHead:
    """The common fields of every object of one response.

    temperature and top_p: the values in use.
    """

    id: str
    message_id: str
    created: int
    model: str
    request: ResponseRequest
    temperature: float
    top_p: float

    def response(
        self,
        status: State,
        output: Sequence[Mapping[str, Any]] = (),
        usage: Usage | None = None,
        error: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the response in its present state. usage: None while it is unknown."""
        request = self.request
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": None,
            "metadata": request.metadata,
            "model": self.model,
            "output": list(output),
            "parallel_tool_calls": request.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": request.chat.template.get("reasoning_effort"), "summary": None},
            "store": False,
            "temperature": self.temperature,
            "text": {"format": request.text_format},
            "tool_choice": request.tool_choice,
            "tools": [],
            "top_logprobs": request.top_logprobs,
            "top_p": self.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else response_usage(usage),
            "user": request.user,
            **({"warnings": request.chat.warnings} if request.chat.warnings else {}),
        }

    def message(self, status: State, content: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
        """Return the only item of the response's output."""
        return {
            "id": self.message_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": list(content),
        }


def status_of(output: CompletionOutput) -> State:
    return "incomplete" if output.finish_reason == "length" else "completed"


def text_part(output: CompletionOutput, token: TokenOf) -> dict[str, Any]:
    rows = chat_logprobs(output.logprobs or (), token)["content"]
    return {"type": "output_text", "text": output.text, "annotations": [], "logprobs": rows}


def response_usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
    }
