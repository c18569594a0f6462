"""Bodies of Anthropic's Messages API: the chats that they stand for, and what is refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from inferc.errors import RequestError
from inferc.runtime.anthropic.request import parse_messages
from inferc.runtime.openai.reasoning import Shown, Thinking
from inferc.runtime.openai.request import CHAT, parse_request

HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"name": "f", "description": "A tool.", "input_schema": SCHEMA}
BODY: dict[str, Any] = {"model": "m", "max_tokens": 7, "messages": HI}


def messages(given: list[dict[str, Any]], **more: Any) -> Any:
    return parse_messages({**BODY, "messages": given, **more}).prompts[0]


def test_a_message_is_the_answer_to_a_chat() -> None:
    body = {
        **BODY,
        "system": "Be brief.",
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "stop_sequences": ["a", "b"],
        "seed": 5,
        "tools": [{**TOOL, "type": "custom", "cache_control": {"type": "ephemeral"}, "strict": True}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "metadata": {"user_id": "me"},
        "thinking": {"type": "disabled"},
        "output_config": {"effort": "low"},
        "stream": True,
    }
    function = {"name": "f", "description": "A tool.", "parameters": SCHEMA}
    chat = parse_request(
        CHAT,
        {
            "model": "m",
            "max_tokens": 7,
            "messages": [{"role": "system", "content": "Be brief."}, *HI],
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 3,
            "stop": ["a", "b"],
            "seed": 5,
            "tools": [{"type": "function", "function": function}],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "reasoning_effort": "low",
            "stream": True,
        },
        is_served=True,
    )
    found = parse_messages(body)
    assert found == replace(chat, reasoning="left_out", thinking=Thinking(is_on=False)) and found.params == chat.params


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ("auto", None, True)),
        ({"type": "auto", "disable_parallel_tool_use": True}, ("auto", None, False)),
        ({"type": "any"}, ("required", None, True)),
        ({"type": "tool", "name": "f"}, ("required", "f", True)),
        ({"type": "none"}, ("none", None, True)),
    ],
)
def test_what_may_be_called_is_chosen(choice: Any, expected: tuple[str, str | None, bool]) -> None:
    tools = parse_messages({**BODY, "tools": [TOOL], "tool_choice": choice}).tools
    assert tools is not None and (tools.choice, tools.only, tools.is_parallel) == expected


def test_blocks_become_messages() -> None:
    found = messages(
        [
            {"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "it?"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                    {"type": "text", "text": "I ask."},
                    {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}, "caller": {"type": "direct"}},
                    {"type": "tool_use", "id": "toolu_2", "name": "f", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "one"}]},
                    {"type": "tool_result", "tool_use_id": "toolu_2", "content": "two", "is_error": True},
                    {"type": "tool_result", "tool_use_id": "toolu_3"},
                    {"type": "text", "text": "So?", "cache_control": {"type": "ephemeral"}},
                ],
            },
        ],
        system=[{"type": "text", "text": "A"}, {"type": "text", "text": "B"}],
    )
    assert found == [
        {"role": "system", "content": "A\n\nB"},
        {"role": "user", "content": "What is it?"},
        {
            "role": "assistant",
            "content": "I ask.",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {"id": "toolu_1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}},
                {"id": "toolu_2", "type": "function", "function": {"name": "f", "arguments": {}}},
            ],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "one"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": "Error: two"},
        {"role": "tool", "tool_call_id": "toolu_3", "content": ""},
        {"role": "user", "content": "So?"},
    ]


def test_messages_of_one_role_that_follow_one_another_are_one() -> None:
    call = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}
    found = messages(
        [
            *HI,
            {"role": "user", "content": "there"},
            {"role": "assistant", "content": "a"},
            {"role": "assistant", "content": [call]},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": []},
        ]
    )
    assert [each["role"] for each in found] == ["user", "assistant", "assistant", "user"]
    assert [each["content"] for each in found] == ["hi\n\nthere", "a", "b", ""]
    assert len(found[1]["tool_calls"]) == 1 and "tool_calls" not in found[2]


def test_thoughts_of_messages_that_are_one_are_joined() -> None:
    thoughts = [{"type": "thinking", "thinking": text, "signature": "x"} for text in ("a", "b", "c")]
    said = {"type": "text", "text": "A"}
    turns = [{"role": "assistant", "content": [*thoughts[:2], said]}, {"role": "assistant", "content": [thoughts[2]]}]
    assert messages([*HI, *turns, *HI])[1] == {"role": "assistant", "content": "A", "reasoning_content": "ab\n\nc"}


@pytest.mark.parametrize(
    ("change", "reasoning", "thinking"),
    [
        ({}, "left_out", None),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "apart", Thinking(is_on=True, budget=9)),
        ({"thinking": {"type": "adaptive", "display": "summarized"}}, "apart", Thinking(is_on=True)),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, "left_out", Thinking(is_on=True)),
        ({"thinking": {"type": "disabled"}}, "left_out", Thinking(is_on=False)),
        ({"include_reasoning": True}, "apart", None),
        ({"thinking": {"type": "adaptive"}, "include_reasoning": False}, "left_out", Thinking(is_on=True)),
        ({"separate_reasoning": False}, "in_text", None),
    ],
)
def test_reasoning_is_shown_to_who_asks_for_it(change: Any, reasoning: Shown, thinking: Thinking | None) -> None:
    found = parse_messages({**BODY, **change})
    assert (found.reasoning, found.thinking) == (reasoning, thinking)


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tokens": None}, "max_tokens: expected an integer, found null"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages: expected a list of at least one message"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0]: expected an object with a role (user, assis"),
        ({"messages": [*HI, {"role": "assistant", "content": "I"}]}, "messages[1]: it is the assistant's"),
        ({"messages": [{"role": "user", "content": "a", "name": "b"}]}, 'messages[0].name is "b"'),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content: expected a text or a list of blocks"),
        (
            {"messages": [*HI, {"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE]}]},
            'messages[1].content[1]: expected a block of type text or tool_result, found "image"',
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}]}
                ]
            },
            'messages[0].content[0].content[0]: expected a block of type text, found "image"',
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
            "messages[0].content[0]: expected a bloc",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}, *HI]},
            "messages[0].content[0]: redacted_thinking was encrypted by another server",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f"}]}, *HI]},
            "messages[0].content[0].input: expected an object, found null",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text: expected a text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "citations": [{}]}]}]},
            "messages[0].content[0].citations is [{}]",
        ),
        ({"system": [IMAGE]}, 'system[0]: expected a block of type text, found "image"'),
        ({"system": 3}, "system: expected a text or a list of blocks"),
        ({"stop": ["a"]}, 'stop is ["a"], which this API calls stop_sequences'),
        ({"stop_sequences": "a"}, "stop_sequences: expected a list"),
        ({"n": 2}, "n is 2"),
        ({"mcp_servers": [{}]}, "mcp_servers is [{}], which is not built yet"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens: expected an integer, found null"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens is 0; expected at least 1"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 9}}, "thinking.budget_tokens is 9, and the type is adapt"),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 9}, "max_reasoning_tokens": 8},
            "thinking.budget_tokens is 9 and another limit is 8; leave one out",
        ),
        ({"thinking": {"type": "between_tools"}}, 'thinking.type is "between_tools"; known: enabled, adaptive, disab'),
        ({"thinking": {"type": 3}}, "thinking.type is 3; expected one of enabled, adaptive, disabled"),
        ({"thinking": {"type": "adaptive", "display": "full"}}, 'thinking.display is "full"; expected summarized or o'),
        ({"thinking": {"type": "adaptive", "effort": "low"}}, 'thinking.effort is "low", which is not built yet'),
        ({"metadata": {"user_id": 3}}, "metadata.user_id: expected a text"),
        ({"output_config": {"task_budget": 3}}, "output_config.task_budget is 3"),
        ({"output_config": {"format": {"type": "xml"}}}, 'output_config.format.type is "xml"'),
        ({"tools": [3]}, "tools[0]: expected an object with a name and an input_schema"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema is missing"),
        ({"tools": [TOOL, TOOL]}, 'tools[1].name is "f", as another tool'),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name: expected 1 to 64 letters"),
        ({"tools": [{**TOOL, "input_schema": {"type": "array"}}]}, 'tools[0].input_schema.type is "array"'),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading is true"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            'tools[0].type is "web_search_20250305"; expected custom: Anthropic\'s own tools are not built',
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "required"}}, 'tool_choice.type is "required"'),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name: expected the name of a tool"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, 'tool_choice: there is no tool "g"'),
        (
            {"tools": [TOOL], "tool_choice": {"type": "any", "name": "f"}},
            'tool_choice.name is "f", and its type is "any"',
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": 1}},
            "tool_choice.disable_parallel_tool_use: expected true or false",
        ),
        ({"tool_choice": {"type": "any"}}, "and there are no tools"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as raised:
        parse_messages({**BODY, **change})
    assert message in str(raised.value)


def test_unknown_fields_are_named() -> None:
    assert parse_messages({**BODY, "stop_sequence": ["a"], "service_tier": "auto", "inference_geo": "eu"}).warnings == (
        "stop_sequence is not known and was ignored; did you mean stop_sequences?",
    )
