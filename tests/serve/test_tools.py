"""Tools over HTTP: calls of a real server's answers, whole and streamed, histories with calls, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from clients import run_client
from http_calls import request
from serving import Server
from tool_models import TOOLS, check_arguments

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
BAD = {"type": "object", "properties": {"a": {"contains": {"const": 1}, "maxContains": 3}}}
SAMPLED: dict[str, Any] = {"messages": MESSAGES, "tools": TOOLS, "temperature": 1, "seed": 5, "max_tokens": 120}


def now(**given: Any) -> dict[str, Any]:
    """Return a call of a history."""
    return {"id": "call_1", "type": "function", "function": {"name": "now", **given}}


def check(calls: list[dict[str, Any]]) -> None:
    """Check that calls have ids of their own, and arguments under the schemas of their tools."""
    assert len({call["id"] for call in calls}) == len(calls)
    for call in calls:
        assert call["type"] == "function" and call["id"].startswith("call_")
        check_arguments(call["function"]["name"], json.loads(call["function"]["arguments"]))


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"get_weather", "now"}),
        ({"type": "function", "function": {"name": "get_weather"}}, {"get_weather"}),
    ],
)
def test_calls_come_whole_and_in_parts(tooled: Server, choice: Any, names: set[str], n: int) -> None:
    body = {**SAMPLED, "tool_choice": choice, "parallel_tool_calls": False, "n": n}
    whole = request(tooled.url, CHAT, body).json["choices"]
    events = request(tooled.url, CHAT, {**body, "stream": True}).events
    assert len(whole) == n
    for each in whole:
        message = each["message"]
        assert each["finish_reason"] == "tool_calls" and message["content"] is None and len(message["tool_calls"]) == 1
        check(message["tool_calls"])
        assert message["tool_calls"][0]["function"]["name"] in names
        deltas = [event["choices"][0] for event in events if event["choices"][0]["index"] == each["index"]]
        assert [delta["finish_reason"] for delta in deltas if delta["finish_reason"]] == ["tool_calls"]
        parts = [call for delta in deltas for call in delta["delta"].get("tool_calls", [])]
        assert parts[0]["function"]["name"] == message["tool_calls"][0]["function"]["name"] and parts[0]["id"]
        assert all(set(part) == {"index", "function"} and part["index"] == 0 for part in parts[1:])
        assert deltas[0]["delta"] == {"role": "assistant", "content": None}
        assert deltas[-1]["delta"] == {}
        assert all("content" not in delta["delta"] for delta in deltas[1:]), "clients show even an empty text"
        written = "".join(part["function"]["arguments"] for part in parts)
        assert written == message["tool_calls"][0]["function"]["arguments"]


def test_an_answer_has_several_calls(tooled: Server) -> None:
    reply = request(tooled.url, CHAT, {**SAMPLED, "tool_choice": "required", "n": 8, "max_tokens": 160}).json
    ended = [each["message"] for each in reply["choices"] if each["finish_reason"] == "tool_calls"]
    for message in ended:
        check(message["tool_calls"])
    assert any(len(message["tool_calls"]) > 1 for message in ended)


def test_a_call_that_is_cut_says_so(tooled: Server) -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    body = {**SAMPLED, "tool_choice": choice, "max_tokens": 15, "logprobs": True, "stream": True}
    events = request(tooled.url, CHAT, body).events
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    rows = [row for event in events for row in (event["choices"][0]["logprobs"] or {}).get("content", [])]
    assert len(rows) == 15


@pytest.mark.parametrize("stop", ['"', "</call>"])
def test_a_call_within_which_a_stop_string_stands_is_none_to_make(tooled: Server, stop: str) -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    body = {**SAMPLED, "tool_choice": choice, "stop": stop}
    whole = request(tooled.url, CHAT, body).json["choices"][0]
    events = request(tooled.url, CHAT, {**body, "stream": True}).events
    expected = "stop" if stop == '"' else "tool_calls"
    assert whole["message"]["tool_calls"] and whole["finish_reason"] == expected
    assert events[-1]["choices"][0]["finish_reason"] == expected


def test_an_answer_is_calls_or_of_a_form(tooled: Server) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["<call>now={}</call>", 5]}}}
    body = {**SAMPLED, "tool_choice": "auto", "response_format": form, "n": 8, "max_tokens": 160}
    whole = request(tooled.url, CHAT, body).json["choices"]
    events = request(tooled.url, CHAT, {**body, "stream": True}).events
    seen = set()
    for each in whole:
        message = each["message"]
        parts = [event["choices"][0]["delta"] for event in events if event["choices"][0]["index"] == each["index"]]
        assert "".join(part.get("content") or "" for part in parts) == (message["content"] or "")
        seen.add("tool_calls" in message)
        if each["finish_reason"] == "stop":
            assert json.loads(message["content"]) in ("<call>now={}</call>", 5) and "tool_calls" not in message
        elif each["finish_reason"] == "tool_calls":
            check(message["tool_calls"])
    assert seen == {False, True}


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_some_of_the_tools_are_allowed(tooled: Server, mode: str) -> None:
    named = {"type": "function", "function": {"name": "now"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named]}}
    body = {**SAMPLED, "n": 6, "parallel_tool_calls": False, "return_token_ids": True}
    found = request(tooled.url, CHAT, {**body, "tool_choice": allowed}).json
    prompt = request(tooled.url, CHAT, {**body, "tool_choice": "none", "n": 1, "max_tokens": 1}).json
    assert found["prompt_token_ids"] == prompt["prompt_token_ids"], "the model sees all of them"
    calls = [call["function"]["name"] for each in found["choices"] for call in each["message"].get("tool_calls", ())]
    assert set(calls) <= {"now"} and (mode == "auto" or len(calls) == 6)


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_text_is_free(tooled: Server, choice: str) -> None:
    body = {**SAMPLED, "tool_choice": choice, "max_tokens": 20, "ignore_eos": False}
    found = request(tooled.url, CHAT, body).json["choices"][0]
    events = request(tooled.url, CHAT, {**body, "stream": True}).events
    assert found["message"]["content"] and "tool_calls" not in found["message"]
    said = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
    assert said == found["message"]["content"]


def test_histories_have_calls_and_results(tooled: Server) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}}
    history = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12:00"},
    ]
    sent = request(tooled.url, CHAT, {"messages": history, "tools": TOOLS, "max_tokens": 3, "return_token_ids": True})
    text = request(tooled.url, "/detokenize", {"tokens": sent.json["prompt_token_ids"]}).json["prompt"]
    assert '<get_weather><now><|user|>hi<|assistant|><call>now={"a": 1}</call><|tool|>12:00<|assistant|>' in text
    counted = request(tooled.url, "/tokenize", {"messages": history, "tools": TOOLS}).json
    assert counted["tokens"] == sent.json["prompt_token_ids"]
    items = [
        *MESSAGES,
        {"type": "function_call", "call_id": "1", "name": "now", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "1", "output": "12:00"},
    ]
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    reply = request(tooled.url, "/v1/responses/input_tokens", {"input": items, "tools": tools})
    assert reply.json == {"object": "response.input_tokens", "input_tokens": counted["count"]}


def test_a_client_sends_back_what_it_has_read_of_a_call(tooled: Server) -> None:
    """Clients add `parsed` and `parsed_arguments` to answers, which no template is to see."""
    function = {"name": "now", "arguments": "{}"}
    call = {"id": "call_1", "type": "function", "function": function}
    added = {**call, "function": {**function, "parsed_arguments": {}}}
    plain, read = (
        {"messages": [*MESSAGES, message], "tools": TOOLS}
        for message in (
            {"role": "assistant", "content": "a", "tool_calls": [call]},
            {"role": "assistant", "content": "a", "tool_calls": [added], "parsed": {"a": 1}, "refusal": None},
        )
    )
    assert request(tooled.url, "/tokenize", read).json == request(tooled.url, "/tokenize", plain).json
    item = {"type": "function_call", "call_id": "1", **function}
    sent, back = (
        request(tooled.url, "/v1/responses/input_tokens", {"input": [*MESSAGES, each]}).json
        for each in (item, {**item, "parsed_arguments": {}, "id": "fc_1", "status": "completed"})
    )
    assert sent == back and sent["input_tokens"] > 4
    user = [{"role": "user", "content": "hi", "parsed": {"a": 1}}]
    assert "messages[0].parsed is" in request(tooled.url, CHAT, {"messages": user}).error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("change", "message", "param"),
    [
        ({"tools": [*TOOLS, TOOLS[1]]}, 'tools[2].function.name is "now", as another tool', "tools"),
        ({"tool_choice": "sometimes"}, 'tool_choice is "sometimes"', "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, 'tool_choice is "required", and there are no tools', "tool_choice"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": BAD}}]},
            "tools: the parameters of f: #/properties/a/maxContains",
            "tools",
        ),
        (
            {"structured_outputs": {"regex": "a"}},
            "tools: structured_outputs.regex gives the answer a form, too",
            "tools",
        ),
        (
            {"tool_choice": {"type": "allowed_tools"}},
            "tool_choice.allowed_tools: expected an object with",
            "tool_choice",
        ),
        ({"ignore_eos": True}, "ignore_eos", None),
        (
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": 3}}]}]},
            "messages[0].tool_calls[0]: expected an object with a function that has a name",
            "messages",
        ),
        *(
            ({"messages": [*MESSAGES, {"role": "assistant", "tool_calls": calls}]}, f"messages[1].{said}", "messages")
            for calls, said in [
                ("now", 'tool_calls: expected a list, found "now"'),
                ([now(arguments=3)], "tool_calls[0].function.arguments: expected an object, or one as JSON, found 3"),
                ([now(arguments="[1]")], "tool_calls[0].function.arguments: expected an object, or one as JSON"),
                ([now(arguments='{"a')], "tool_calls[0].function.arguments: expected an object, or one as JSON"),
                ([{**now(), "id": 3}], "tool_calls[0].id: expected a text, found 3"),
                ([{**now(), "type": "custom"}], 'tool_calls[0].type is "custom"; expected function'),
            ]
        ),
        (
            {"messages": [*MESSAGES, {"role": "tool", "tool_call_id": 3, "content": "12"}]},
            "messages[1].tool_call_id: expected a text, found 3",
            "messages",
        ),
        (
            {"messages": [{"role": "user", "content": 3}]},
            "messages[0].content: expected text, found 3",
            "messages",
        ),
        (
            {"tool_choice": "required", "min_tokens": 3},
            "min_tokens is 3, and an answer that is held to a form (by tools) ends where the form ends",
            "min_tokens",
        ),
        (
            {"tool_choice": "required", "allowed_token_ids": [5]},
            "allowed_token_ids: it leaves none of the tokens that may come next in the form of tools",
            None,
        ),
    ],
)
def test_what_cannot_be_called_is_refused(
    tooled: Server, change: dict[str, Any], message: str, param: str | None, stream: bool
) -> None:
    reply = request(tooled.url, CHAT, {**SAMPLED, "stream": stream, **change})
    if stream and reply.status == 200:  # what ends a stream that has begun is its last event
        assert reply.events[-1]["error"]["code"] == 400 and message in reply.events[-1]["error"]["message"]
        return
    assert reply.status == 400 and message in reply.error["message"], reply.error
    assert param is None or reply.error["param"] == param


def test_a_model_that_knows_no_tools_refuses_them(url: str) -> None:
    responses = {"input": "hi", "tools": [{"type": "function", "name": "now"}]}
    for path, body in (
        (CHAT, SAMPLED),
        ("/tokenize", {"messages": MESSAGES, "tools": TOOLS}),
        ("/v1/responses/input_tokens", responses),
    ):
        reply = request(url, path, body)
        assert reply.status == 400 and reply.error["param"] == "tools", path
        assert "the model's chat template does not tell how it writes calls" in reply.error["message"]


@pytest.mark.slow
def test_clients_of_others_call_tools(tooled: Server) -> None:
    seen = run_client("openai", "check_tools.py", tooled.url, "tooled")
    openai, langchain = seen["openai"], seen["langchain"]
    assert openai["reason"] == "tool_calls" and openai["content"] is None
    assert openai["streamed"] == [openai["arguments"]] and openai["num_deltas"] > 1
    assert openai["parsed"] == [json.loads(openai["arguments"])]
    assert openai["parsed"][0]["city"] in ("Rome", "Paris") and 1 <= openai["parsed"][0]["days"] <= 9
    assert openai["answered"][0] and openai["answered"][1:] in ([None, "stop"], [None, "length"])
    read = seen["read"]
    assert 1 <= read["call"] <= 9 and 1 <= read["formed"] <= 9 and all(read["answers"]), "what it read goes back"
    assert set(read["lines"][:-1]) == {"data: "} and read["lines"][-1] == "data: [DONE]"
    assert read["counted"][0] == read["counted"][1] > 4
    responses = seen["responses"]
    assert (responses["status"], responses["call"]["type"]) == ("completed", "function_call")
    assert responses["call"]["arguments"] == openai["arguments"], "the same request to the model"
    assert responses["streamed"] == [openai["arguments"]] and responses["parsed"] == openai["parsed"]
    assert responses["num_deltas"] > 1
    assert responses["answered"][0] and responses["answered"][1] == ["message"]
    assert langchain["streamed"] == langchain["calls"] and langchain["then"]
    ((name, arguments),) = langchain["calls"]
    assert name == "GetWeather" and 1 <= arguments["days"] <= 9 and 1 <= langchain["structured"] <= 9


@pytest.mark.slow
def test_litellm_calls_tools_by_every_api(tooled: Server) -> None:
    seen = run_client("litellm", "check_litellm_tools.py", tooled.url, "tooled")
    for api in ("openai", "anthropic"):
        ((name, arguments),), ((streamed_name, streamed),) = seen[api]["calls"], seen[api]["streamed"]
        assert (name, json.loads(arguments)) == (streamed_name, json.loads(streamed)), api
        check_arguments(name, json.loads(arguments))
        assert seen[api]["reasons"] == ["tool_calls", "tool_calls"] and seen[api]["answered"]
    assert seen["responses"] == seen["openai"]["calls"]


@pytest.mark.slow
def test_instructor_makes_objects_of_calls(tooled: Server) -> None:
    seen = run_client("instructor", "check_instructor.py", tooled.url, "tooled")
    assert seen["whole"] == seen["partial"] and seen["num_partials"] > 1
    for name in ("whole", "response", "message", "formed"):
        assert seen[name]["city"] in ("Rome", "Paris") and seen[name]["is_warm"] in (True, False)
