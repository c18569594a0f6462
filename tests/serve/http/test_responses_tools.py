"""Tools in the Responses API: items of a real server's answers, whole and streamed, and what they are refused for."""

from __future__ import annotations

import json
from typing import Any

import pytest
from http_calls import request
from serving import Server
from tool_models import TOOLS, check_arguments

from inferc.errors import RequestError
from inferc.runtime.openai.responses import parse_response_request

RESPONSES, CHAT = "/v1/responses", "/v1/chat/completions"
FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]
ONE = {"type": "function", "name": "get_weather"}
SAMPLED: dict[str, Any] = {"input": "hi", "tools": FLAT, "temperature": 1, "seed": 5, "max_output_tokens": 120}


def events(body: bytes) -> list[dict[str, Any]]:
    found = [json.loads(block.split("\ndata: ")[1]) for block in body.decode().split("\n\n")[:-1]]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    assert all(item["id"] for item in items) and len({item["id"] for item in items}) == len(items)
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


@pytest.mark.parametrize("choice", ["required", ONE])
def test_calls_are_items_whole_and_in_parts(tooled: Server, choice: Any) -> None:
    body = {**SAMPLED, "tool_choice": choice, "parallel_tool_calls": False}
    whole = request(tooled.url, RESPONSES, body).json
    (item,) = whole["output"]
    assert (whole["status"], item["type"], item["status"]) == ("completed", "function_call", "completed")
    assert item["id"].startswith("fc_") and item["call_id"].startswith("call_")
    check_arguments(item["name"], json.loads(item["arguments"]))
    assert (whole["tool_choice"], whole["parallel_tool_calls"]) == (choice, False)
    assert [tool["name"] for tool in whole["tools"]] == ["get_weather", "now"]
    assert whole["tools"][1] == {
        "type": "function",
        "name": "now",
        "description": None,
        "parameters": None,
        "strict": True,
    }
    found = events(request(tooled.url, RESPONSES, {**body, "stream": True}).body)
    kinds = [event["type"] for event in found]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-3:] == ["response.function_call_arguments.done", "response.output_item.done", "response.completed"]
    assert set(kinds[3:-3]) == {"response.function_call_arguments.delta"}
    assert found[2]["item"]["arguments"] == "" and found[2]["item"]["status"] == "in_progress"
    assert "".join(event["delta"] for event in found[3:-3]) == item["arguments"] == found[-3]["arguments"]
    assert {event["item_id"] for event in found[3:-2]} == {found[2]["item"]["id"]}
    assert found[-1]["response"]["output"] == [found[-2]["item"]]
    assert without_ids([found[-2]["item"]]) == without_ids([item])


def test_an_answer_is_that_of_a_chat(tooled: Server) -> None:
    """Text that is free, and several calls, by the seeds that give them."""
    kinds = set()
    for seed in range(12):
        for choice in ("auto", "required"):
            body = {**SAMPLED, "seed": seed, "tool_choice": choice}
            response = request(tooled.url, RESPONSES, body).json
            asked = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "tool_choice": choice}
            sampling = {"temperature": 1, "seed": seed, "max_tokens": 120}
            message = request(tooled.url, CHAT, {**asked, **sampling}).json["choices"][0]["message"]
            texts = [each["content"][0]["text"] for each in response["output"] if each["type"] == "message"]
            calls = [each["arguments"] for each in response["output"] if each["type"] == "function_call"]
            assert "".join(texts) == (message["content"] or "")
            assert calls == [each["function"]["arguments"] for each in message.get("tool_calls", [])]
            found = events(request(tooled.url, RESPONSES, {**body, "stream": True}).body)
            assert without_ids(found[-1]["response"]["output"]) == without_ids(response["output"])
            done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
            assert done == found[-1]["response"]["output"]
            kinds.add((bool(texts), len(calls) > 1))
    assert {(True, False), (False, True)} <= kinds


def test_a_call_that_was_cut_is_incomplete(tooled: Server) -> None:
    body = {**SAMPLED, "tool_choice": ONE, "max_output_tokens": 15}
    whole = request(tooled.url, RESPONSES, body).json
    assert whole["status"] == whole["output"][-1]["status"] == "incomplete"
    found = events(request(tooled.url, RESPONSES, {**body, "stream": True}).body)
    assert found[-1]["type"] == "response.incomplete"
    assert without_ids(found[-1]["response"]["output"]) == without_ids(whole["output"])


def test_an_answer_without_a_word_is_a_message(tooled: Server) -> None:
    body = {**SAMPLED, "tool_choice": "auto", "max_output_tokens": 1, "temperature": 0}
    first = request(tooled.url, RESPONSES, body).json["output"][0]["content"][0]["text"]
    body = {**body, "stop": [first[:1]]}
    whole = request(tooled.url, RESPONSES, body).json
    found = events(request(tooled.url, RESPONSES, {**body, "stream": True}).body)
    for response in (whole, found[-1]["response"]):
        assert [(item["type"], item["content"][0]["text"]) for item in response["output"]] == [("message", "")]


def test_histories_have_calls_and_results() -> None:
    call = {
        "type": "function_call",
        "call_id": "call_1",
        "name": "now",
        "arguments": "{}",
        "id": "fc_1",
        "status": None,
    }
    items = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "I ask."},
        call,
        {**call, "call_id": "call_2"},
        {"type": "function_call_output", "call_id": "call_1", "output": "12:00"},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "12:01"}]},
        call,
    ]
    function = {"name": "now", "arguments": "{}"}
    calls = [{"id": f"call_{number}", "type": "function", "function": function} for number in (1, 2)]
    assert parse_response_request({"input": items, "tools": FLAT}).chat.prompts[0] == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "I ask.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "12:00"},
        {"role": "tool", "tool_call_id": "call_2", "content": "12:01"},
        {"role": "assistant", "content": None, "tool_calls": calls[:1]},
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("change", "message", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, 'tools[0].type is "web_search"; expected function', "tools"),
        ({"tools": [{"type": "mcp", "server_label": "a"}]}, 'tools[0].type is "mcp"', "tools"),
        ({"tools": [5]}, "tools[0]: expected an object of type function with a name, found 5", "tools"),
        ({"tools": TOOLS}, "tools[0].function is {", "tools"),
        ({"tools": [*FLAT, FLAT[1]]}, 'tools[2].name is "now", as another tool\'s', "tools"),
        ({"tools": [{**FLAT[1], "parameters": {"type": "array"}}]}, 'tools[0].parameters.type is "array"', "tools"),
        ({"tools": [{**FLAT[1], "description": "\ud800"}]}, "tools: they cannot be repeated in an answer", "tools"),
        ({"tool_choice": "any"}, 'tool_choice is "any"; known', "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, 'tool_choice is {"type": "web_search"}; expected', "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "a"}}, 'tool_choice: there is no tool "a"', "tool_choice"),
        (
            {"tool_choice": {"type": "allowed_tools"}},
            "tool_choice.tools: expected a list of at least one",
            "tool_choice",
        ),
        (
            {"include": ["message.output_text.logprobs"]},
            "include: message.output_text.logprobs is not built",
            "include",
        ),
    ],
)
def test_what_cannot_be_called_is_refused(
    tooled: Server, change: dict[str, Any], message: str, param: str, stream: bool
) -> None:
    reply = request(tooled.url, RESPONSES, {**SAMPLED, **change, "stream": stream})
    assert reply.status == 400 and message in reply.error["message"], reply.error
    assert reply.error["param"] == param


def test_a_call_that_must_be_has_no_text_of_a_form(tooled: Server) -> None:
    """Instructor asks so: a tool's schema is the format of a text, too, and a call of the tool is demanded."""
    body = {**SAMPLED, "tool_choice": ONE, "parallel_tool_calls": False}
    form = {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}}}
    formed, plain = (request(tooled.url, RESPONSES, {**body, **more}).json for more in (form, {}))
    assert without_ids(formed["output"]) == without_ids(plain["output"])


def test_log_probabilities_come_where_nothing_may_be_called(tooled: Server) -> None:
    body = {**SAMPLED, "tool_choice": "none", "include": ["message.output_text.logprobs"], "max_output_tokens": 4}
    (item,) = request(tooled.url, RESPONSES, body).json["output"]
    assert len(item["content"][0]["logprobs"]) == 4


def test_a_model_that_knows_no_tools_refuses_them(url: str) -> None:
    reply = request(url, RESPONSES, SAMPLED)
    assert reply.status == 400 and reply.error["param"] == "tools"
    assert "the model's chat template does not tell how it writes calls" in reply.error["message"]


def test_wishes_about_reasoning_are_refused_by_name() -> None:
    for asked, message in (
        ({"summary": "long"}, 'reasoning.summary is "long"; expected auto, concise or detailed'),
        ({"mode": "pro"}, 'reasoning.mode is "pro", which is not built yet; leave it out'),
    ):
        with pytest.raises(RequestError) as raised:
            parse_response_request({"input": "hi", "reasoning": asked})
        assert str(raised.value) == message


def test_reasoning_of_the_input_belongs_to_what_comes_next() -> None:
    def thought(*texts: str, **more: Any) -> dict[str, Any]:
        return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": each} for each in texts], **more}

    call = {"type": "function_call", "call_id": "c", "name": "now", "arguments": "{}"}
    given = [
        {"role": "user", "content": "hi"},
        thought("a", "b", summary=[{"type": "summary_text", "text": "short"}]),
        call,
        {"type": "function_call_output", "call_id": "c", "output": "12:00"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "c"}]},
        thought("d"),
        {"type": "reasoning", "summary": []},
        {"role": "assistant", "content": "Noon."},
        thought("e"),
    ]
    (messages,) = parse_response_request({"input": given}).chat.prompts
    function = {"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    assert messages == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "reasoning_content": "ab", "tool_calls": [function]},
        {"role": "tool", "tool_call_id": "c", "content": "12:00"},
        {"role": "assistant", "content": "Noon.", "reasoning_content": "c\n\nd"},
        {"role": "assistant", "content": None, "reasoning_content": "e"},
    ]
    with pytest.raises(RequestError) as raised:
        parse_response_request({"input": [thought("a", encrypted_content="x")]})
    assert str(raised.value) == 'input[0].encrypted_content is "x", which is not built yet; leave it out'
