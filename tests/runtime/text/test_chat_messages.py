"""Messages of clients in each form that a template reads."""

from __future__ import annotations

from typing import Any

import pytest

from inferc.chat.form import ChatForm
from inferc.errors import RequestError
from inferc.runtime.text.chat_messages import formed

PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


def one(message: dict[str, Any], form: ChatForm) -> dict[str, Any]:
    (found,) = formed([message], form)
    return found


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "x", "type": "function", "function": {"name": "f", "arguments": arguments}}


def test_content_has_the_form_of_the_template_whatever_was_sent() -> None:
    for sent in (PARTS, "ab"):
        assert one({"role": "user", "content": sent}, ChatForm("text")) == {"role": "user", "content": "ab"}
    assert one({"role": "user", "content": PARTS}, ChatForm("parts"))["content"] == PARTS
    assert one({"role": "user", "content": "ab"}, ChatForm("parts"))["content"] == [{"type": "text", "text": "ab"}]


@pytest.mark.parametrize("sent", [{"role": "user"}, {"role": "user", "content": None}])
def test_no_content(sent: dict[str, Any]) -> None:
    assert one(sent, ChatForm()) == {"role": "user"}
    assert one(sent, ChatForm("text", "none")) == {"role": "user", "content": None}
    assert one(sent, ChatForm("text", "empty")) == {"role": "user", "content": ""}
    assert one(sent, ChatForm("parts", "empty")) == {"role": "user", "content": []}


def test_what_is_null_or_no_call_is_absent() -> None:
    sent: dict[str, Any] = {"role": "assistant", "content": "a", "tool_calls": [], "refusal": None, "name": "b"}
    assert one(sent, ChatForm()) == {"role": "assistant", "content": "a", "name": "b"}


def test_fields_keep_the_order_in_which_they_came() -> None:
    """A template may write a message, or a call, as a whole."""
    given = call({"b": 1, "a": 2})
    sent: dict[str, Any] = {"content": "a", "role": "assistant", "tool_calls": [given], "name": "b"}
    found = one(sent, ChatForm())
    assert list(found) == list(sent) and list(found["tool_calls"][0]) == ["id", "type", "function"]
    assert list(found["tool_calls"][0]["function"]["arguments"]) == ["b", "a"]
    silent = one({"role": "assistant", "tool_calls": [given]}, ChatForm("text", "empty"))
    assert list(silent) == ["role", "content", "tool_calls"]


def test_a_part_is_all_of_a_text_for_templates_that_read_one() -> None:
    assert one({"role": "user", "content": PARTS}, ChatForm("part"))["content"] == [{"type": "text", "text": "ab"}]
    assert one({"role": "assistant"}, ChatForm("part", "empty"))["content"] == [{"type": "text", "text": ""}]


@pytest.mark.parametrize(("writes_it", "role"), [(True, "developer"), (False, "system")])
def test_a_developer_is_the_system_to_templates_that_do_not_know_the_role(writes_it: bool, role: str) -> None:
    assert one({"role": "developer", "content": "a"}, ChatForm(developer=writes_it)) == {"role": role, "content": "a"}


def test_calls_beside_an_empty_text_stand_alone_where_they_would_be_lost() -> None:
    form = ChatForm("text", "none", "json", calls_beside_text=False)
    found = one({"role": "assistant", "content": "", "tool_calls": [call("{}")]}, form)
    assert found["content"] is None and found["tool_calls"] == [call("{}")]
    assert one({"role": "assistant", "content": ""}, form)["content"] == ""


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_has_the_names_that_templates_read(name: str) -> None:
    found = one({"role": "assistant", "content": "a", name: "b"}, ChatForm())
    assert (found["thinking"], found["reasoning_content"]) == ("b", "b")


@pytest.mark.parametrize("given", ['{"city": "Zürich"}', {"city": "Zürich"}])
def test_arguments_of_calls(given: Any) -> None:
    sent: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [call(given)]}
    assert one(sent, ChatForm()) == {"role": "assistant", "tool_calls": [call({"city": "Zürich"})]}
    assert one(sent, ChatForm(tool_calls="json"))["tool_calls"] == [call('{"city": "Zürich"}')]
    assert sent["tool_calls"] == [call(given)], "what the caller has stays as it is"


@pytest.mark.parametrize("given", ["", None])
def test_no_arguments(given: Any) -> None:
    sent = {"role": "assistant", "tool_calls": [call(given)]}
    assert one(sent, ChatForm())["tool_calls"] == [call({})]
    assert one(sent, ChatForm(tool_calls="json"))["tool_calls"] == [call("{}")]


@pytest.mark.parametrize(
    ("message", "form", "error"),
    [
        (
            {"role": "assistant", "tool_calls": [call("[1]")]},
            ChatForm(),
            r'arguments: expected a JSON object, found "\[1\]"',
        ),
        ({"role": "assistant", "tool_calls": [call("{")]}, ChatForm(), 'arguments: expected a JSON object, found "{"'),
        ({"role": "assistant", "tool_calls": [call("[" * 9999)]}, ChatForm(), "arguments: expected a JSON object"),
        ({"role": "assistant", "tool_calls": [call(3)]}, ChatForm(), "arguments: expected an object or JSON, found 3"),
        (
            {"role": "assistant", "tool_calls": [{"name": "f"}]},
            ChatForm(),
            r"tool_calls\[0\]: expected an object with a function",
        ),
        ({"role": "assistant", "tool_calls": "f"}, ChatForm(), r'messages\[0\].tool_calls: expected a list, found "f"'),
        ({"role": "assistant", "tool_calls": [call({})]}, ChatForm(tool_calls=None), "leaves out calls of tools"),
        ({"role": "tool", "content": "a"}, ChatForm(tool_results=False), "leaves out what tools answer"),
        ({"role": "system", "content": "a"}, ChatForm(system=False), "leaves out system messages; say it as the user"),
        ({"role": "developer", "content": "a"}, ChatForm(system=False, developer=False), "leaves out system messages"),
        (
            {"role": "assistant", "content": "a", "tool_calls": [call({})]},
            ChatForm(calls_beside_text=False),
            "leaves out calls of tools in a message with a text",
        ),
    ],
)
def test_what_a_template_cannot_be_given(message: dict[str, Any], form: ChatForm, error: str) -> None:
    with pytest.raises(RequestError, match=error):
        formed([message], form)
