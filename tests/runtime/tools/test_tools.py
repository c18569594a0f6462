"""Tools as requests have them, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from inferc import RequestError
from inferc.runtime.tools.tools import Tools, tools_of


def allowed(*names: str, **fields: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"tools": [tool(name) for name in names], **fields}}


def tool(name: Any = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, None),
        ({"tools": [], "tool_choice": "auto"}, None),
        ({"tools": None, "tool_choice": "none"}, None),
        ({"tools": [tool()]}, Tools({"f": {"name": "f"}})),
        ({"tools": [tool()], "tool_choice": "none"}, Tools({"f": {"name": "f"}}, "none")),
        (
            {"tools": [tool(), tool("g")], "tool_choice": "required", "parallel_tool_calls": False},
            Tools({"f": {"name": "f"}, "g": {"name": "g"}}, "required", None, False),
        ),
        (
            {"tools": [tool(strict=True)], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            Tools({"f": {"name": "f", "strict": True}}, "required", "f"),
        ),
        (
            {"tools": [tool(), tool("g")], "tool_choice": allowed("g", "g")},
            Tools({"f": {"name": "f"}, "g": {"name": "g"}}, allowed=("g",)),
        ),
        (
            {"tools": [tool(), tool("g")], "tool_choice": allowed("g", "f", mode="required")},
            Tools({"f": {"name": "f"}, "g": {"name": "g"}}, "required", allowed=("g", "f")),
        ),
    ],
)
def test_tools_of_a_body(body: dict[str, Any], expected: Tools | None) -> None:
    assert tools_of(body) == expected


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"tool_choice": "required"}, 'tool_choice is "required", and there are no tools'),
        ({"tools": [3]}, r"tools\[0\]: expected an object with a function, found 3"),
        ({"tools": [{"type": "web_search"}]}, r'tools\[0\].type is "web_search"; expected function'),
        ({"tools": [{"type": "function"}]}, r"tools\[0\].function: expected an object with a name"),
        ({"tools": [tool("a b")]}, r'tools\[0\].function.name: expected 1 to 64 letters, .*, found "a b"'),
        ({"tools": [tool(), tool()]}, r'tools\[1\].function.name is "f", as another tool\'s'),
        ({"tools": [tool(description=3)]}, r"tools\[0\].function.description: expected a text, found 3"),
        ({"tools": [tool(parameters=3)]}, r"tools\[0\].function.parameters: expected a JSON Schema, found 3"),
        ({"tools": [tool(parameters={"type": "array"})]}, r'parameters.type is "array"; arguments are an object'),
        ({"tools": [tool(f"f{i}") for i in range(129)]}, "tools: found 129, at most 128"),
        ({"tools": [tool()], "tool_choice": "any"}, 'tool_choice is "any"; known: none, auto, required'),
        ({"tools": [tool()], "tool_choice": {"type": "function"}}, "expected none, auto, required, or an object"),
        (
            {"tools": [tool("get_time")], "tool_choice": {"type": "function", "function": {"name": "get_tim"}}},
            'tool_choice: there is no tool "get_tim"; did you mean get_time?',
        ),
        ({"tools": [tool()], "tool_choice": allowed("g")}, 'tool_choice: there is no tool "g"'),
        (
            {"tools": [tool()], "tool_choice": allowed()},
            r"tool_choice.allowed_tools.tools: expected a list of at least",
        ),
        (
            {"tools": [tool()], "tool_choice": allowed("f", mode="none")},
            r'allowed_tools.mode is "none"; expected auto or',
        ),
        ({"tools": [tool()], "tool_choice": {"type": "allowed_tools"}}, "expected an object with a mode and tools"),
        (
            {"tools": [tool()], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": [{"name": "f"}]}}},
            r"allowed_tools.tools\[0\]: expected an object of the type function with a function with a name",
        ),
    ],
)
def test_wrong_tools(body: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        tools_of(body)
