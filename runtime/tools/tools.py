"""The tools that a request offers to the model, in OpenAI's form, and the grammar that holds an answer to them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias

from inferc.chat.calls import SLOTS
from inferc.errors import RequestError, nearest, shown
from inferc.runtime.grammar.tags import ARGUMENTS, LABEL
from inferc.runtime.step.sampling_params import SamplingParams
from inferc.runtime.step.structured_outputs import StructuredOutputs
from inferc.runtime.text.tokenizer import Text
from inferc.runtime.tools.answer_calls import AnswerCalls

MAX_TOOLS = 128  # OpenAI's limit
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
CHOICES = ("none", "auto", "required")

Choice: TypeAlias = Literal["none", "auto", "required"]
Format: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Tools:
    """The tools of a request.

    - functions: each tool's function as the request has it, by name.
    - choice: whether the answer may have calls, must have one, or may not; only: the one tool that it must call.
    - is_parallel: the answer may have more than one call.
    """

    functions: Mapping[str, Mapping[str, Any]]
    choice: Choice = "auto"
    only: str | None = None
    is_parallel: bool = True

    @property
    def for_template(self) -> list[dict[str, Any]]:
        """The tools as a chat template reads them."""
        return [{"type": "function", "function": dict(function)} for function in self.functions.values()]

    def held_to(self, calls: AnswerCalls) -> StructuredOutputs:
        """Return the form of an answer with these tools, for a model that writes calls in a form of its own.

        Its text is free, if the answer may have one, and its calls are of the tools and under their schemas.
        """
        tag: Any = {"type": "structural_tag", "format": self._format(calls)}
        return StructuredOutputs(structural_tag=tag, label="tools")

    def _format(self, calls: AnswerCalls) -> Format:
        written = _Written(calls)
        form, begin = calls.form, calls.form.before[:1]
        if self.choice == "none":
            return written.free() if written.is_token(begin) else {"type": "any_text", "excludes": [written.trigger]}
        is_parallel = self.is_parallel and form.joint is not None
        names = [self.only] if self.only is not None else list(self.functions)
        named = [self._call(written, name) for name in names]
        one = found = _any([_sequence(_text(name), *parts) for name, parts in zip(names, named, strict=True)])
        if written.is_plain:
            found = {
                "type": "tags_with_separator",
                "tags": [_tag(name, parts) for name, parts in zip(names, named, strict=True)],
                "separator": form.joint or "",
                "at_least_one": True,
                "stop_after_first": not is_parallel,
            }
        elif is_parallel:
            found = _sequence(found, {"type": "star", "content": _sequence(*written.texts(form.joint or ""), found)})
        if self.choice == "required":
            return _sequence(*written.texts(form.before), found, *written.texts(form.after))
        # Where nothing says that calls end, each begins as the first one does.
        behind = [found if form.after else one, *written.texts(form.after)]
        if written.is_token(begin):
            return {
                "type": "token_triggered_tags",
                "trigger_tokens": [written.tokens[begin]],
                "tags": [_tag(written.texts(begin)[0], [*written.texts(form.before[1:]), *behind])],
                "exclude_tokens": [token for mark, token in written.tokens.items() if mark != begin],
                "stop_after_first": not is_parallel,
            }
        tags = [{"type": "tag", "begin": form.before, "content": found, "end": form.after}]
        if not written.is_plain:
            head, *rest = written.texts(form.before)
            tags = [_tag(head["value"], [*rest, *behind])]
        elif not form.after:
            tags = [{**tag, "begin": form.before + tag["begin"]} for tag in found["tags"]]
        return {
            "type": "triggered_tags",
            "triggers": [written.trigger],
            "tags": tags,
            "stop_after_first": not is_parallel,
        }

    def _call(self, written: _Written, name: str) -> list[Format]:
        """Return what stands behind the name of a call."""
        schema, tags = _arguments(self.functions[name].get("parameters") or {}), written.calls.form.arguments
        content: Format = {"type": "json_schema", "json_schema": schema, LABEL: f"the parameters of {name}"}
        if tags is not None:
            content = {**content, "type": ARGUMENTS, "tags": asdict(tags)}
        return [*written.texts(written.calls.form.between), content]


class _Written:
    """The texts of a form of calls as formats: control tokens by their ids, what the model chooses by its pattern."""

    def __init__(self, calls: AnswerCalls) -> None:
        self.calls = calls
        self.tokens = {mark: token for token, mark in calls.marks.items()}
        self._parts = re.compile(f"([{''.join((*SLOTS, *self.tokens))}])")

    @property
    def is_plain(self) -> bool:
        """True if all is text."""
        return not self.tokens and self.calls.form.ids in ("ours", "short")

    @property
    def trigger(self) -> str:
        """The text that says that a call follows."""
        return replace(self.calls.form, before=self._parts.split(self.calls.form.before)[0]).trigger

    def is_token(self, mark: str) -> bool:
        return mark in self.tokens

    def texts(self, text: str) -> list[Format]:
        """Return the formats of a text, one after the other."""
        return [self._format(part) for part in self._parts.split(text) if part]

    def _format(self, part: str) -> Format:
        if part in self.tokens:
            return {"type": "token", "token": self.tokens[part]}
        return {"type": "regex", "pattern": SLOTS[part]} if part in SLOTS else _text(part)

    def free(self) -> Format:
        """Return the format of any text without control tokens."""
        return {"type": "any_tokens", "exclude_tokens": list(self.tokens.values())}


def _tag(begin: str | Format, parts: list[Format]) -> Format:
    """Return a tag that begins with a text, or a token; it ends with the last part if that is one."""
    if isinstance(begin, str) and parts[0].get("type") == "const_string":
        begin, parts = begin + parts[0]["value"], parts[1:]
    end: str | Format = ""
    if len(parts) > 1 and parts[-1]["type"] in ("const_string", "token"):
        *parts, last = parts
        end = last["value"] if last["type"] == "const_string" else last
    content = parts[0] if len(parts) == 1 else _sequence(*parts)
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _any(ways: list[Format]) -> Format:
    return ways[0] if len(ways) == 1 else {"type": "or", "elements": ways}


def _sequence(*formats: Format) -> Format:
    return {"type": "sequence", "elements": list(formats)}


def _arguments(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a tool's arguments: one that names no properties has none, unless it says otherwise."""
    if parameters.get("properties") or parameters.keys() - {"type", "properties", "title", "description", "$schema"}:
        return {"type": "object", **parameters}
    return {"type": "object", "additionalProperties": False}


def _text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def held(
    params: SamplingParams, tools: Tools | None, text: Callable[[], Text]
) -> tuple[SamplingParams, AnswerCalls | None]:
    """Return sampling parameters that hold an answer to the tools it may call, and the form of its calls.

    text: returns the model's tokenizer, which knows the form. It is None for an answer that may have no calls. Raises
    RequestError if the form is not known, and as check_one_form does.
    """
    if tools is None:
        return params, None
    check_one_form(tools, params)
    calls = AnswerCalls.of(text(), tools.functions)
    if params.structured_outputs is None or tools.choice == "required":
        params = replace(params, structured_outputs=tools.held_to(calls))
    return params, None if tools.choice == "none" else calls


def check_one_form(tools: Tools, params: SamplingParams) -> None:
    """Raise RequestError for an answer that may be a call or a text, if the text is held to a form of its own.

    An answer that must be a call has no text, so its form says nothing.
    """
    given = params.structured_outputs
    if given is not None and tools.choice == "auto":
        raise RequestError(
            f"tools: {given.label} gives the answer a form, too; send one of them, or another tool_choice than auto"
        )


def tools_of(body: Mapping[str, Any]) -> Tools | None:
    """Return the tools that the body of a chat offers; None if it offers none. Raises RequestError for wrong ones."""
    given, choice = body.get("tools"), body.get("tool_choice")
    if not has_tools(given, choice):
        return None
    functions = checked_functions([_nested(f"tools[{index}]", tool) for index, tool in enumerate(given or ())])
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    found, only = choice_of(choice, name, functions)
    return Tools(functions, found, only, body.get("parallel_tool_calls") is not False)


def has_tools(given: Any, choice: Any) -> bool:
    """Return whether a body of OpenAI's offers tools; raise RequestError for one that asks for calls without any."""
    if not given and choice not in (None, "none", "auto"):
        raise RequestError(f"tool_choice is {shown(choice)}, and there are no tools; send tools, or leave it out")
    return bool(given)


def _nested(where: str, tool: Any) -> tuple[str, Mapping[str, Any]]:
    """Return the function of a tool of OpenAI's chats, and its place."""
    if not isinstance(tool, Mapping):
        raise RequestError(f"{where}: expected an object with a function, found {shown(tool)}")
    check_is_function(where, tool)
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise RequestError(f"{where}.function: expected an object with a name, found {shown(function)}")
    return f"{where}.function", function


def check_is_function(where: str, tool: Mapping[str, Any]) -> None:
    """Raise RequestError for a tool of OpenAI's that is another than a function."""
    if tool.get("type", "function") != "function":
        raise RequestError(f"{where}.type is {shown(tool['type'])}; expected function: others are not built")


def checked_functions(
    given: Sequence[tuple[str, Mapping[str, Any]]], schema: str = "parameters"
) -> dict[str, Mapping[str, Any]]:
    """Return functions by name, given each with its place. Raises RequestError for a wrong one, and for too many.

    schema: the name under which each has the JSON Schema of its arguments.
    """
    if len(given) > MAX_TOOLS:
        raise RequestError(f"tools: found {len(given)}, at most {MAX_TOOLS} are allowed; send fewer")
    found: dict[str, Mapping[str, Any]] = {}
    for where, function in given:
        name, parameters = function.get("name"), function.get(schema)
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise RequestError(f"{where}.name: expected 1 to 64 letters, digits and _ . -, found {shown(name)}")
        if name in found:
            raise RequestError(f"{where}.name is {shown(name)}, as another tool's; give each its own")
        if not isinstance(function.get("description", ""), (str, type(None))):
            raise RequestError(f"{where}.description: expected a text, found {shown(function['description'])}")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise RequestError(f"{where}.{schema}: expected a JSON Schema, found {shown(parameters)}")
        if parameters and parameters.get("type", "object") != "object":
            raise RequestError(f"{where}.{schema}.type is {shown(parameters['type'])}; arguments are an object")
        found[name] = function
    return found


def choice_of(choice: Any, name: Any, functions: Mapping[str, Any]) -> tuple[Choice, str | None]:
    """Return what the answer may have by OpenAI's `tool_choice`, and the one tool that it must call if that names one.

    name: that of the tool, if the choice is an object and has one.
    """
    if choice is None:
        return "auto", None
    if isinstance(choice, str):
        if choice not in CHOICES:
            raise RequestError(f"tool_choice is {shown(choice)}; {nearest(choice, CHOICES)}")
        return choice, None  # type: ignore[return-value]
    is_function = isinstance(choice, Mapping) and choice.get("type", "function") == "function"
    if not isinstance(name, str) or not is_function:
        raise RequestError(
            f"tool_choice is {shown(choice)}; expected none, auto, required, or an object of the type function with"
            " the name of one"
        )
    return "required", named(name, functions)


def named(name: str, functions: Mapping[str, Any]) -> str:
    """Return the name of the tool that a request chooses; raise RequestError if it offers none of this name."""
    if name not in functions:
        raise RequestError(f"tool_choice: there is no tool {shown(name)}; {nearest(name, functions)}")
    return name
