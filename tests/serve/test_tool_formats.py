"""Calls in forms that are no JSON alone: arguments in tags, control tokens, ids that the model writes, by every API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from command_line import run_inferc
from http_calls import request
from serving import Server
from speculated import always_draft
from tool_models import CONTROLLED, CONTROLS, TAGGED, make_tooled

from inferc import LLM, SamplingParams
from inferc.client import Client
from inferc.runtime.engine import load

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", 'Pa"ris']},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "note": {"type": ["string", "null"], "maxLength": 4},
    },
    "required": ["city", "days", "note"],
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
SAMPLED: dict[str, Any] = {"messages": MESSAGES, "tools": TOOLS, "temperature": 1, "seed": 5, "max_tokens": 200}
WEATHER = {"type": "function", "function": {"name": "get_weather"}}
FORMS = {"tagged": (TAGGED, ()), "controlled": (CONTROLLED, CONTROLS)}


@pytest.fixture(scope="module", params=FORMS)
def artifact(request: Any, tiny_llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    make_tooled(tiny_llama_folder, folder, *FORMS[request.param])
    return folder / "tooled"


@pytest.fixture(scope="module")
def server(artifact: Path) -> Iterator[Server]:
    with Server(artifact) as started:
        yield started


@pytest.fixture(scope="module")
def llm(artifact: Path) -> Iterator[LLM]:
    with LLM(artifact, num_threads=1) as opened:
        yield opened


def check(name: str, arguments: str) -> None:
    jsonschema.validate(json.loads(arguments), SCHEMA if name == "get_weather" else {"const": {}})


@pytest.mark.parametrize(("choice", "is_parallel"), [("required", True), (WEATHER, False)])
def test_calls_come_whole_and_in_parts(server: Server, choice: Any, is_parallel: bool) -> None:
    body = {**SAMPLED, "tool_choice": choice, "parallel_tool_calls": is_parallel, "n": 4}
    whole = request(server.url, CHAT, body).json["choices"]
    events = request(server.url, CHAT, {**body, "stream": True}).events
    assert any(each["finish_reason"] == "tool_calls" for each in whole)
    for each in whole:
        parts: dict[int, dict[str, str]] = {}
        for event in events:
            delta = event["choices"][0]
            assert not delta["delta"].get("content")
            for call in delta["delta"].get("tool_calls", []) if delta["index"] == each["index"] else []:
                said = parts.setdefault(call["index"], {"name": call["function"].get("name", ""), "arguments": ""})
                said["arguments"] += call["function"]["arguments"]
        calls = [call["function"] for call in each["message"]["tool_calls"]]
        assert calls == list(parts.values()) and each["message"]["content"] is None
        for call in calls if each["finish_reason"] == "tool_calls" else calls[:-1]:
            check(call["name"], call["arguments"])


def test_an_answer_without_calls_has_none(server: Server) -> None:
    for choice in ("auto", "none"):
        found = request(server.url, CHAT, {**SAMPLED, "tool_choice": choice, "max_tokens": 30}).json["choices"][0]
        events = request(server.url, CHAT, {**SAMPLED, "tool_choice": choice, "max_tokens": 30, "stream": True}).events
        said = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
        assert said == found["message"]["content"] and "tool_calls" not in found["message"]


def test_the_next_request_has_calls_as_the_model_wrote_them(server: Server) -> None:
    body = {**SAMPLED, "tool_choice": WEATHER, "parallel_tool_calls": False, "return_token_ids": True}
    answer = request(server.url, CHAT, body).json
    message, ids = answer["choices"][0]["message"], answer["choices"][0]["token_ids"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "sunny"}
    then = request(server.url, CHAT, {**body, "messages": [*MESSAGES, message, result], "max_tokens": 1}).json
    texts = [
        request(server.url, "/detokenize", {"tokens": tokens}).json["prompt"]
        for tokens in (ids, then["prompt_token_ids"])
    ]
    written = json.loads(message["tool_calls"][0]["function"]["arguments"])
    assert written["city"] in ("Rome", 'Pa"ris')
    head = texts[0].partition("get_weather")[0]
    assert head and texts[1].partition("<|assistant|>")[2].startswith(f"{head}get_weather")


def test_every_api_has_the_calls(server: Server) -> None:
    chat = request(server.url, CHAT, {**SAMPLED, "tool_choice": WEATHER, "parallel_tool_calls": False}).json
    expected = chat["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]
    check("get_weather", expected)
    sampled = {"temperature": 1, "seed": 5}
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
    body: dict[str, Any] = {"input": "hi", "tools": flat, "parallel_tool_calls": False, "max_output_tokens": 200}
    chosen = {"tool_choice": {"type": "function", "name": "get_weather"}}
    (item,) = request(server.url, "/v1/responses", {**body, **sampled, **chosen}).json["output"]
    assert item["type"] == "function_call" and item["arguments"] == expected
    tools = [{"name": each["name"], "input_schema": each.get("parameters", {"type": "object"})} for each in flat]
    body = {"messages": MESSAGES, "tools": tools, "max_tokens": 200, **sampled}
    chosen = {"tool_choice": {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}}  # type: ignore[dict-item]
    (block,) = request(server.url, "/v1/messages", {**body, **chosen}).json["content"]
    assert block["type"] == "tool_use" and block["input"] == json.loads(expected)
    with Client(server.address, timeout=60) as client:
        options: Any = {**sampled, "max_tokens": 200, "tool_choice": WEATHER, "parallel_tool_calls": False}
        (answer,) = client.complete(MESSAGES, tools=TOOLS, **options)
        assert [call.arguments for call in answer.tool_calls] == [expected] and answer.text == ""


def test_calls_in_python(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=200)
    held: Any = {"tools": TOOLS, "tool_choice": WEATHER, "parallel_tool_calls": False}
    for separates in (False, True):
        (answer,) = llm.chat(MESSAGES, params, separate_reasoning=separates, **held)
        (call,) = answer.outputs[0].tool_calls
        check(call.name, call.arguments)
        text = answer.outputs[0].text
        assert "get_weather" in text and not any(name in text for name in CONTROLS)
        assert text == text.encode(errors="ignore").decode(), "no mark is left"


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_drafts_change_no_call(artifact: Path, monkeypatch: pytest.MonkeyPatch, choice: str) -> None:
    """Texts that a form of calls forces are drafted up to a control token, and by n-grams over it; the tokens stay."""
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=120, n=3)
    found, drafted = {}, {}
    for how in ("nothing", "none", "ngram"):
        with monkeypatch.context() as patch:
            if how == "nothing":
                patch.setattr(load, "make_speculation", lambda *_: None)
            options: dict[str, Any] = {} if how == "nothing" else {"speculate": how}
            with LLM(artifact, num_threads=1, max_num_seqs=4, **options) as opened:
                if how != "nothing":
                    always_draft(opened)
                (answer,) = opened.chat(MESSAGES, params, tools=TOOLS, tool_choice=choice)
                found[how] = [(each.token_ids, each.tool_calls[:1]) for each in answer.outputs]
                drafted[how] = opened.stats().num_accepted
    assert (
        [ids for ids, _ in found["none"]] == [ids for ids, _ in found["ngram"]] == [ids for ids, _ in found["nothing"]]
    )
    if choice == "required":
        assert all(calls for _, calls in found["nothing"])
        assert drafted["none"] > 0 and drafted["ngram"] >= drafted["none"] and not drafted["nothing"]


def test_llguidance_holds_to_control_tokens_and_refuses_tags(artifact: Path, server: Server) -> None:
    body = {**SAMPLED, "tool_choice": WEATHER, "parallel_tool_calls": False, "return_token_ids": True}
    with Server(artifact, "--structured-outputs-backend", "llguidance") as other:
        reply = request(other.url, CHAT, body)
        free = request(other.url, CHAT, {**SAMPLED, "tools": [], "max_tokens": 4})
        assert free.status == 200 and free.json["choices"][0]["message"]["content"]
        if artifact.parent.name.startswith("controlled"):
            for each in (body, {**body, "tool_choice": "auto"}):
                one, two = (request(url, CHAT, each).json["choices"][0] for url in (server.url, other.url))
                assert one["token_ids"] == two["token_ids"]
            check("get_weather", reply.json["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"])
            return
        assert reply.status == 400 and reply.error["message"] == (
            "tools: the parameters of get_weather: arguments in tags of their own are not built with llguidance;"
            " use xgrammar for it (--structured-outputs-backend xgrammar)"
        )


def test_the_form_is_shown(artifact: Path) -> None:
    shown = run_inferc("inspect", artifact).stdout
    expected = (
        "calls     <call>NAME<key>KEY</key><is>VALUE</is>…</call>",
        "calls     <|calls|><|call|>functions.NAME:NUMBER<|arguments|>{…}<|/call|><|/calls|>",
    )
    assert any(each in shown for each in expected)
