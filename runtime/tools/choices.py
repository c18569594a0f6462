"""The choice of tools that a request makes, in OpenAI's forms: whether the answer has calls, and of which tools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from inferc.errors import RequestError, nearest, shown

Choice: TypeAlias = Literal["none", "auto", "required"]
CHOICES = ("none", "auto", "required")
ALLOWED = "allowed_tools"
MODES = ("auto", "required")


@dataclass(frozen=True)
class Chosen:
    """The calls that an answer may have, or must have.

    only: the one tool that it must call; allowed: the tools that it may call, None: all.
    """

    choice: Choice = "auto"
    only: str | None = None
    allowed: tuple[str, ...] | None = None


def chosen_of(choice: Any, functions: Mapping[str, Any], is_nested: bool) -> Chosen:
    """Return what OpenAI's `tool_choice` says. Raises RequestError for what is none, and for tools not offered.

    is_nested: an object has its tool within `function`, and its list of tools within `allowed_tools`, as in chats.
    """
    if choice is None:
        return Chosen()
    if isinstance(choice, str):
        if choice not in CHOICES:
            raise RequestError(f"tool_choice is {shown(choice)}; {nearest(choice, CHOICES)}")
        return Chosen(choice)  # type: ignore[arg-type]
    kind = choice.get("type", "function") if isinstance(choice, Mapping) else None
    if kind == ALLOWED:
        return _allowed(choice, functions, is_nested)
    name = _name(choice, is_nested) if kind == "function" else None
    if name is None:
        raise RequestError(
            f"tool_choice is {shown(choice)}; expected none, auto, required, or an object of the type function with"
            " the name of one, or of the type allowed_tools"
        )
    return Chosen("required", named(name, functions))


def _allowed(choice: Mapping[str, Any], functions: Mapping[str, Any], is_nested: bool) -> Chosen:
    """Return the choice among some of the tools, all of which the model sees."""
    where, given = "tool_choice", choice
    if is_nested:
        where, given = f"tool_choice.{ALLOWED}", choice.get(ALLOWED)  # type: ignore[assignment]
        if not isinstance(given, Mapping):
            raise RequestError(f"{where}: expected an object with a mode and tools, found {shown(given)}")
    mode, tools = given.get("mode", "auto"), given.get("tools")
    if mode not in MODES:
        raise RequestError(f"{where}.mode is {shown(mode)}; expected auto or required")
    if not isinstance(tools, list) or not tools:
        raise RequestError(f"{where}.tools: expected a list of at least one tool, found {shown(tools)}")
    names = [_name(each, is_nested) for each in tools]
    for index, name in enumerate(names):
        if name is None:
            form = "a function with a name" if is_nested else "a name"
            raise RequestError(
                f"{where}.tools[{index}]: expected an object of the type function with {form}, found"
                f" {shown(tools[index])}"
            )
    found = tuple(dict.fromkeys(named(name, functions) for name in names if name is not None))
    return Chosen(mode, allowed=found)


def _name(value: Any, is_nested: bool) -> str | None:
    """Return the name of the function that an object names; None if it names none."""
    if not isinstance(value, Mapping) or value.get("type", "function") != "function":
        return None
    holder = value.get("function") if is_nested else value
    name = holder.get("name") if isinstance(holder, Mapping) else None
    return name if isinstance(name, str) else None


def named(name: str, functions: Mapping[str, Any]) -> str:
    """Return the name of the tool that a request chooses; raise RequestError if it offers none of this name."""
    if name not in functions:
        raise RequestError(f"tool_choice: there is no tool {shown(name)}; {nearest(name, functions)}")
    return name
