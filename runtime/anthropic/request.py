"""The conversion of Anthropic's Messages API into inferc's requests: a message is the answer to a chat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from inferc.errors import RequestError, nearest, shown
from inferc.runtime.anthropic.conversation import conversation_of
from inferc.runtime.anthropic.fields import BESIDE, COUNT, FIXED, IGNORED, MESSAGE, OTHERWISE
from inferc.runtime.openai import request as openai_request
from inferc.runtime.openai.fields import check_fields
from inferc.runtime.openai.reasoning import MAX_LIMIT, Thinking, limit_of, shown_of
from inferc.runtime.openai.request import (
    OpenAIRequest,
    chat_request,
    not_built,
    sampling_of,
    with_tools,
)
from inferc.runtime.openai.response_format import of_format
from inferc.runtime.openai.unknown_fields import warnings_of
from inferc.runtime.step.sampling_params import check_integer
from inferc.runtime.tools.choices import Choice, named
from inferc.runtime.tools.tools import Tools, checked_functions

MESSAGES_URL, COUNT_URL = "/v1/messages", "/v1/messages/count_tokens"
THINKING = ("enabled", "adaptive", "disabled")
CHOICES: dict[str, Choice] = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}
# Fields of a tool beside those that the model sees. That its input is held to the schema, and comes as it is written,
# needs no asking for.
OF_TOOLS = ("type", "name", "description", "input_schema", "cache_control", "strict", "eager_input_streaming")
INNER: dict[str, tuple[str, ...]] = {
    "metadata": ("user_id",),
    "thinking": ("type", "budget_tokens", "display"),
    "output_config": ("format", "effort"),
    "tool_choice": ("type", "name", "disable_parallel_tool_use"),
}


def parse_messages(
    body: Mapping[str, Any], defaults: Mapping[str, Any] | None = None, counts: bool = False
) -> OpenAIRequest:
    """Convert a body into a request and check all of it. Raises RequestError naming the faulty field.

    defaults: of sampling. counts: only the tokens of the conversation are counted, so it needs no max_tokens.
    """
    for name, ours in OTHERWISE.items():
        if body.get(name) is not None:
            raise RequestError(f"{name} is {shown(body[name])}, which this API calls {ours}; send that")
    check_fields(body, COUNT if counts else MESSAGE)
    for name, allowed in FIXED.items():
        if body.get(name) not in allowed:
            raise not_built(name, body[name])
    check_fields(body, BESIDE)
    for name, known in INNER.items():
        _check_inner(name, body.get(name) or {}, known)
    config = body.get("output_config") or {}
    sampling = sampling_of({**body, "tool_choice": None}, is_served=True, takes_tools=True, takes_reasoning=True)
    sampling["max_tokens"] = body.get("max_tokens")
    if body.get("stop_sequences"):
        sampling["stop"] = body["stop_sequences"]
    if config.get("format") and (form := of_format(config["format"], "output_config.format")) is not None:
        sampling["structured_outputs"] = form
    tools = _tools(body)
    said = {**body, "reasoning_effort": config.get("effort") or body.get("reasoning_effort")}
    request = with_tools(chat_request(said, conversation_of(body), sampling, True, defaults or {}), tools)
    return replace(
        _with_thinking(request, body),
        warnings=warnings_of(body, MESSAGE, BESIDE, FIXED, IGNORED, openai_request.FIXED),
        generates=not counts,
    )


def _with_thinking(request: OpenAIRequest, body: Mapping[str, Any]) -> OpenAIRequest:
    """Return the request with the reasoning that a body asks for; without asking, an answer shows none."""
    config, limit, shown_where = body.get("thinking") or {}, limit_of(body), shown_of(body)
    thinking = _thinking(config) if config else None
    if thinking is not None and thinking.budget is not None and limit not in (None, thinking.budget):
        raise RequestError(f"thinking.budget_tokens is {thinking.budget} and another limit is {limit}; leave one out")
    is_wanted = thinking is not None and thinking.is_on and config.get("display") != "omitted"
    if shown_where == "apart" and not is_wanted and not body.get("include_reasoning"):
        shown_where = "left_out"
    request = replace(request, streams_reasoning=body.get("stream_reasoning") is not False)
    return replace(request, reasoning=shown_where, max_reasoning_tokens=limit, thinking=thinking)


def _thinking(config: Mapping[str, Any]) -> Thinking:
    kind, budget, display = config.get("type"), config.get("budget_tokens"), config.get("display")
    if kind not in THINKING:
        expected = nearest(kind, THINKING) if isinstance(kind, str) else f"expected one of {', '.join(THINKING)}"
        raise RequestError(f"thinking.type is {shown(kind)}; {expected}")
    if display not in (None, "summarized", "omitted"):
        raise RequestError(f"thinking.display is {shown(display)}; expected summarized or omitted")
    if kind == "enabled":
        check_integer("thinking.budget_tokens", budget, 1, MAX_LIMIT, "send adaptive for no limit")
    elif budget is not None:
        raise RequestError(f"thinking.budget_tokens is {shown(budget)}, and the type is {kind}; send type enabled")
    return Thinking(kind != "disabled", budget)


def _check_inner(name: str, value: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Check the fields of an object within a body, of which only the choice of a tool has more than texts."""
    for inner, found in value.items():
        if inner not in known and found:
            raise RequestError(f"{name}.{inner:.40} is {shown(found)}, which is not built yet; leave it out")
    for inner in ("user_id", "effort"):
        if value.get(inner) is not None and not isinstance(value[inner], str):
            raise RequestError(f"{name}.{inner}: expected a text, found {shown(value[inner])}")


def _tools(body: Mapping[str, Any]) -> Tools | None:
    """Return the tools that a body offers; None if it offers none. Raises RequestError for wrong ones."""
    given, choice = body.get("tools"), body.get("tool_choice") or {"type": "auto"}
    kind, is_single = choice.get("type"), choice.get("disable_parallel_tool_use") or False
    if not isinstance(kind, str) or kind not in CHOICES:
        hint = nearest(kind, CHOICES) if isinstance(kind, str) else f"expected one of {', '.join(CHOICES)}"
        raise RequestError(f"tool_choice.type is {shown(kind)}; {hint}")
    if type(is_single) is not bool:
        raise RequestError(f"tool_choice.disable_parallel_tool_use: expected true or false, found {shown(is_single)}")
    if not given:
        if CHOICES[kind] == "required":
            raise RequestError(f"tool_choice is {shown(choice)}, and there are no tools; send tools, or leave it out")
        return None
    checked = [(f"tools[{index}]", _tool(f"tools[{index}]", tool)) for index, tool in enumerate(given)]
    functions = {name: _function(tool) for name, tool in checked_functions(checked, "input_schema").items()}
    return Tools(functions, CHOICES[kind], _only(choice, functions), not is_single)


def _only(choice: Mapping[str, Any], functions: Mapping[str, Any]) -> str | None:
    """Return the one tool that a choice of type tool names; None for a choice of another type."""
    kind, name = choice.get("type"), choice.get("name")
    if kind != "tool" and name is not None:
        raise RequestError(f"tool_choice.name is {shown(name)}, and its type is {shown(kind)}; send type tool")
    if kind != "tool":
        return None
    if not isinstance(name, str):
        raise RequestError(f"tool_choice.name: expected the name of a tool, found {shown(name)}")
    return named(name, functions)


def _tool(where: str, tool: Any) -> Mapping[str, Any]:
    if not isinstance(tool, Mapping):
        raise RequestError(f"{where}: expected an object with a name and an input_schema, found {shown(tool)}")
    if (kind := tool.get("type")) not in (None, "custom"):
        raise RequestError(f"{where}.type is {shown(kind)}; expected custom: Anthropic's own tools are not built")
    if tool.get("input_schema") is None:
        raise RequestError(f"{where}.input_schema is missing; give the JSON Schema of the tool's input")
    for name, value in tool.items():
        if name not in OF_TOOLS and value and (name, value) != ("allowed_callers", ["direct"]):
            raise RequestError(f"{where}.{name:.40} is {shown(value)}, which is not built yet; leave it out")
    return tool


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool as OpenAI has its function, which is what chat templates read."""
    described = {"description": tool["description"]} if tool.get("description") is not None else {}
    return {"name": tool["name"], **described, "parameters": tool["input_schema"]}
