"""The tools that a request offers to the model, in OpenAI's form, and the grammar that holds an answer to them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

from inferc.chat.calls import SLOTS
from inferc.errors import RequestError, shown
from inferc.runtime.grammar.tags import ARGUMENTS, LABEL
from inferc.runtime.reasoning.channels import ChannelMarks
from inferc.runtime.step.sampling_params import SamplingParams
from inferc.runtime.step.structured_outputs import StructuredOutputs
from inferc.runtime.text.tokenizer import Text
from inferc.runtime.tools.answer_calls import AnswerCalls
from inferc.runtime.tools.beside_form import format_of
from inferc.runtime.tools.choices import Choice, chosen_of
from inferc.runtime.tools.python_calls import python_arguments

MAX_TOOLS = 128  # OpenAI's limit
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")

Format: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Tools:
    """The tools of a request.

    - functions: each tool's function as the request has it, by name.
    - choice: whether the answer may have calls, must have one, or may not; only: the one tool that it must call.
    - is_parallel: the answer may have more than one call.
    - allowed: the tools that it may call, of those that the model sees; None: all.
    """

    functions: Mapping[str, Mapping[str, Any]]
    choice: Choice = "auto"
    only: str | None = None
    is_parallel: bool = True
    allowed: tuple[str, ...] | None = None

    @property
    def for_template(self) -> list[dict[str, Any]]:
        """The tools as a chat template reads them."""
        return [{"type": "function", "function": dict(function)} for function in self.functions.values()]

    def held_to(self, calls: AnswerCalls, beside: StructuredOutputs | None = None) -> StructuredOutputs:
        """Return the form of an answer with these tools, for a model that writes calls in a form of its own.

        Its text is free, if the answer may have one, and its calls are of the tools and under their schemas. beside:
        the form of an answer that has a text; it then has no calls. Raises RequestError for one that cannot be.
        """
        in_channels = calls.channels is not None
        text = None if beside is None else format_of(beside, calls)
        if calls.channels is not None:
            form = self._in_channels(calls, calls.channels, text)
        elif text is not None:
            form = _any([replace(self, choice="required")._format(calls), text])
        else:
            form = self._format(calls)
        tag: Any = {"type": "structural_tag", "format": form}
        return StructuredOutputs(structural_tag=tag, label="tools", has_headers=in_channels)

    def _in_channels(self, calls: AnswerCalls, marks: ChannelMarks, text: Format | None) -> Format:
        """Return the format of an answer behind its reasoning, of which each call and each text is a message."""
        is_held = text is not None
        said = _sequence(*marks.header(marks.channels.said, kinds=is_held), text or {"type": "any_text"})
        if self.choice == "none":
            return said
        written = _Written(calls)
        call = marks.call([(name, self._call(written, name)[-1:]) for name in self._names])
        if self.choice == "required":
            return call
        if is_held:
            return _any([call, said])
        before: Format = {"type": "star", "content": marks.message(marks.channels.calls)}
        return _sequence(before, _any([call, said]))

    @property
    def _names(self) -> list[str]:
        """The names of the tools that an answer may call."""
        if self.only is not None:
            return [self.only]
        return list(self.functions if self.allowed is None else self.allowed)

    def _first(self, written: _Written) -> Format:
        """Return the format of an answer that calls begin, if it has any."""
        form = written.calls.form
        other = _sequence({"type": "regex", "pattern": f"[^{re.escape(form.before[0])}]"}, {"type": "any_text"})
        said: Format = {"type": "optional", "content": other}
        if self.choice == "none":
            return said
        is_one = not self.is_parallel or form.joint is None
        calls: Format = {
            "type": "tags_with_separator",
            "tags": [_tag(name, self._call(written, name)) for name in self._names],
            "separator": form.joint or "",
            "at_least_one": True,
            "stop_after_first": is_one,
        }
        called = _sequence(*written.texts(form.before), calls, *written.texts(form.after))
        return called if self.choice == "required" else _any([called, said])

    def _format(self, calls: AnswerCalls) -> Format:
        written = _Written(calls)
        form, begin = calls.form, calls.form.before[:1]
        if form.is_first:
            return self._first(written)
        if self.choice == "none":
            return written.free() if written.is_token(begin) else {"type": "any_text", "excludes": [written.trigger]}
        is_parallel = self.is_parallel and form.joint is not None
        names = self._names
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
        label = f"the parameters of {name}"
        if written.calls.form.is_python:
            return [*written.texts(written.calls.form.between), python_arguments(label, schema)]
        content: Format = {"type": "json_schema", "json_schema": schema, LABEL: label}
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
    params: SamplingParams, tools: Tools | None, text: Callable[[], Text], thoughts_in_text: bool = False
) -> tuple[SamplingParams, AnswerCalls | None]:
    """Return sampling parameters that hold an answer to the tools it may call, and the form of its calls.

    text: returns the model's tokenizer, which knows the form. It is None for an answer that may have no calls.
    thoughts_in_text: reasoning stays within the text, so calls beside a form come behind it. Raises RequestError if the
    form is not known, or cannot stand beside that of a text.
    """
    if tools is None:
        return params, None
    calls, given = AnswerCalls.of(text(), tools.functions), params.structured_outputs
    if given is None or tools.choice == "required":  # an answer that must be a call has no text to be of a form
        params = replace(params, structured_outputs=tools.held_to(calls))
    elif tools.choice == "auto":
        params = replace(params, structured_outputs=tools.held_to(calls, given))
        calls = replace(calls, is_first=calls.channels is None and not thoughts_in_text)
    return params, None if tools.choice == "none" else calls


def tools_of(body: Mapping[str, Any]) -> Tools | None:
    """Return the tools that the body of a chat offers; None if it offers none. Raises RequestError for wrong ones."""
    given, choice = body.get("tools"), body.get("tool_choice")
    if not has_tools(given, choice):
        return None
    functions = checked_functions([_nested(f"tools[{index}]", tool) for index, tool in enumerate(given or ())])
    chosen = chosen_of(choice, functions, is_nested=True)
    is_parallel = body.get("parallel_tool_calls") is not False
    return Tools(functions, chosen.choice, chosen.only, is_parallel, chosen.allowed)


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
