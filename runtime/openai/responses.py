"""The conversion of OpenAI's Responses API, text and calls: a request becomes a chat, and the answer its objects.

Nothing is stored, so references to stored objects are refused, as are unsupported features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from inferc.errors import RequestError, shown
from inferc.runtime.engine.request_output import CompletionOutput
from inferc.runtime.openai import fields as openai_fields
from inferc.runtime.openai import request as openai_request
from inferc.runtime.openai.answer import Usage
from inferc.runtime.openai.fields import NOTHING, check_fields
from inferc.runtime.openai.reasoning import limit_of, shown_of
from inferc.runtime.openai.request import (
    OpenAIRequest,
    chat_request,
    max_tokens_of,
    sampling_of,
    with_tools,
)
from inferc.runtime.openai.response_format import of_format
from inferc.runtime.openai.response_input import input_messages
from inferc.runtime.openai.response_items import State
from inferc.runtime.openai.unknown_fields import warnings_of
from inferc.runtime.step.sampling_params import check_integer, check_num_top, check_text
from inferc.runtime.tools.choices import chosen_of
from inferc.runtime.tools.tools import Tools, check_is_function, checked_functions, has_tools

RESPONSES, INPUT_TOKENS = "/v1/responses", "/v1/responses/input_tokens"
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
OF_REASONING_FIXED: dict[str, tuple[Any, ...]] = {"context": (None, "auto"), "mode": (None, "standard")}
SUMMARIES = ("summary", "generate_summary")  # the second is an older name
SUMMARY_IGNORED = "reasoning.summary was ignored, as none is made: a reasoning item has its whole text as content"
NO_TOOLS = msgspec.Raw(b"[]")
OF_A_TOOL = ("type", "name", "description", "parameters", "strict")


@dataclass(frozen=True)
class ResponseRequest:
    """A checked request of the Responses API: the chat that it asks for, and what the response repeats of its body.

    tools: the list of them as JSON, since every event that has the response repeats it.
    """

    chat: OpenAIRequest
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    parallel_tool_calls: bool = True
    tool_choice: Any = "auto"
    top_logprobs: int = 0
    user: str | None = None
    text_format: Mapping[str, Any] = field(default_factory=lambda: {"type": "text"})
    tools: msgspec.Raw = field(default_factory=lambda: NO_TOOLS)


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
    _check_texts(body)
    limit = body.get("max_output_tokens")
    if limit is not None:
        check_integer("max_output_tokens", limit, 1, 2**31 - 1)
    messages, top = input_messages(body), body.get("top_logprobs") or 0
    wants_logprobs = _wants_logprobs(body)
    sampling = sampling_of({**body, "tool_choice": None}, is_served=True, takes_tools=True, takes_reasoning=True)
    named = body.get("max_completion_tokens") if limit is None else limit
    sampling["max_tokens"] = max_tokens_of(named, body.get("max_tokens"))
    if wants_logprobs:
        sampling["logprobs"] = top
    text_format = (body.get("text") or {}).get("format") or {}
    if (form := of_format(text_format, "text.format")) is not None:
        sampling["structured_outputs"] = form
    tools, listed = _tools(body)
    if wants_logprobs and tools is not None and tools.choice != "none":
        raise RequestError(f"include: {LOGPROBS} is not built beside tools that may be called; leave one of them out")
    chat = with_tools(chat_request({**body, **_effort(body)}, messages, sampling, True, defaults or {}), tools)
    warnings = warnings_of(body, openai_fields.RESPONSE, openai_fields.BESIDE_RESPONSE, FIXED, openai_request.FIXED)
    chat = replace(chat, reasoning=shown_of(body), max_reasoning_tokens=limit_of(body))
    chat = replace(chat, streams_reasoning=body.get("stream_reasoning") is not False)
    return ResponseRequest(
        replace(chat, warnings=(*warnings, *_summary_warnings(body))),
        body.get("instructions"),
        limit,
        body.get("metadata") or {},
        body.get("parallel_tool_calls") is not False,
        _choice(body, tools),
        top,
        body.get("user"),
        text_format or {"type": "text"},
        listed,
    )


def _tools(body: Mapping[str, Any]) -> tuple[Tools | None, msgspec.Raw]:
    """Return the tools that a body offers, None if it offers none, and the list of them that the response repeats."""
    given, choice = body.get("tools"), body.get("tool_choice")
    if not has_tools(given, choice):
        return None, NO_TOOLS
    functions = checked_functions(
        [(f"tools[{index}]", _tool(f"tools[{index}]", tool)) for index, tool in enumerate(given or ())]
    )
    chosen = chosen_of(choice, functions, is_nested=False)
    optional = {"description": None, "parameters": None, "strict": True}
    listed = [{"type": "function", **optional, **function} for function in functions.values()]
    try:
        encoded = msgspec.json.encode(listed)
    except (ValueError, RecursionError, OverflowError) as error:
        raise RequestError(f"tools: they cannot be repeated in an answer: {error}; send plain JSON") from None
    is_parallel = body.get("parallel_tool_calls") is not False
    return Tools(functions, chosen.choice, chosen.only, is_parallel, chosen.allowed), msgspec.Raw(encoded)


def _choice(body: Mapping[str, Any], tools: Tools | None) -> Any:
    """Return the choice of a tool as the response repeats it."""
    if tools is None:
        return body.get("tool_choice") or "auto"
    if tools.allowed is not None:
        listed = [{"type": "function", "name": name} for name in tools.allowed]
        return {"type": "allowed_tools", "mode": tools.choice, "tools": listed}
    return tools.choice if tools.only is None else {"type": "function", "name": tools.only}


def _tool(where: str, tool: Any) -> Mapping[str, Any]:
    """Return the function that a tool is, as a chat has it."""
    if not isinstance(tool, Mapping):
        raise RequestError(f"{where}: expected an object of type function with a name, found {shown(tool)}")
    check_is_function(where, tool)
    for name, value in tool.items():
        if name not in OF_A_TOOL and value:
            raise RequestError(f"{where}.{name:.40} is {shown(value)}, which is not built yet; leave it out")
    return {name: tool[name] for name in OF_A_TOOL if name != "type" and tool.get(name) is not None}


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


def _summary_warnings(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the warning for a body that asks for a summary of reasoning; or raise RequestError."""
    asked = body.get("reasoning") or {}
    for name, allowed in OF_REASONING_FIXED.items():
        if asked.get(name) not in allowed:
            raise RequestError(f"reasoning.{name} is {shown(asked[name])}, which is not built yet; leave it out")
    for name in SUMMARIES:
        if asked.get(name) not in (None, "auto", "concise", "detailed"):
            raise RequestError(f"reasoning.{name} is {shown(asked[name])}; expected auto, concise or detailed")
    return (SUMMARY_IGNORED,) if any(asked.get(name) for name in SUMMARIES) else ()


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


# ------------------------------------------------------------------------------------------------- objects


@dataclass(frozen=True)
class ResponseHead:
    """The common fields of every object of one response.

    temperature and top_p: the values in use.
    """

    id: str
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
            "tools": request.tools,
            "top_logprobs": request.top_logprobs,
            "top_p": self.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else response_usage(usage),
            "user": request.user,
            **({"warnings": request.chat.warnings} if request.chat.warnings else {}),
        }


def status_of(output: CompletionOutput) -> State:
    return "incomplete" if output.finish_reason == "length" else "completed"


def response_usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
    }
