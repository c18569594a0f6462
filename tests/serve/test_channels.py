"""A model whose answers are messages in channels, as gpt-oss's, by every API."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from command_line import run_inferc
from harmony import HARMONY, TOKENS
from http_calls import request
from serving import Server
from thinking import add_tokens
from tool_models import TOOLS, WEATHER, check_arguments

from inferc import LLM, SamplingParams, StructuredOutputs
from inferc.client import Client
from inferc.compiler.build import compile
from inferc.config import CompileConfig
from inferc.errors import ConfigError

CHAT = "/v1/chat/completions"
HI = {"role": "user", "content": "hi"}
SAMPLED: dict[str, Any] = {"messages": [HI], "temperature": 1, "seed": 5, "max_tokens": 150, "max_reasoning_tokens": 12}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
FORM = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER}}


@pytest.fixture(scope="module")
def model(tiny_llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("channels") / "model"
    shutil.copytree(tiny_llama_folder, folder)
    (folder / "chat_template.jinja").write_text(HARMONY)
    ids = add_tokens(folder, TOKENS, "control")
    path = folder / "generation_config.json"
    ends = [ids["<|return|>"], ids["<|call|>"]]
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), "eos_token_id": ends}))
    return folder


@pytest.fixture(scope="module")
def artifact(model: Path) -> Path:
    out = model.parent / "out"
    compile(model, out, CompileConfig(certify="none"))
    return out


@pytest.fixture(scope="module")
def server(artifact: Path) -> Iterator[Server]:
    with Server(artifact) as started:
        yield started


def chat(server: Server, **changes: Any) -> dict[str, Any]:
    """Return the choice of a chat, after a check that it is streamed as it is whole and has no control token."""
    body = {**SAMPLED, **changes}
    reply = request(server.url, CHAT, body)
    assert reply.status == 200, reply.body
    (choice,) = reply.json["choices"]
    events = request(server.url, CHAT, {**body, "stream": True, "stream_options": {"include_usage": True}}).events
    found: dict[str, Any] = {"reasoning": "", "content": "", "calls": {}}
    for event in events:
        for part in event["choices"]:
            found["reasoning"] += part["delta"].get("reasoning_content") or ""
            found["content"] += part["delta"].get("content") or ""
            for call in part["delta"].get("tool_calls", ()):
                said = found["calls"].setdefault(call["index"], {"name": call["function"].get("name"), "arguments": ""})
                said["arguments"] += call["function"]["arguments"]
    message = choice["message"]
    assert found["reasoning"] == message.get("reasoning_content", "") and found["content"] == (message["content"] or "")
    assert list(found["calls"].values()) == [call["function"] for call in message.get("tool_calls", ())]
    for name in ("completion_tokens", "completion_tokens_details"):
        assert events[-1]["usage"][name] == reply.json["usage"][name]
    written = json.dumps(message, ensure_ascii=False)
    assert not any(name in written for name in TOKENS) and written == written.encode(errors="ignore").decode()
    return {**choice, "usage": reply.json["usage"]}


@pytest.mark.parametrize(("choice", "is_parallel"), [("required", True), (NAMED, False), ("required", False)])
def test_a_call_is_a_message_behind_reasoning(server: Server, choice: Any, is_parallel: bool) -> None:
    found = chat(server, tools=TOOLS, tool_choice=choice, parallel_tool_calls=is_parallel)
    (call,) = found["message"]["tool_calls"]
    assert found["finish_reason"] == "tool_calls" and found["message"]["content"] is None
    check_arguments(call["function"]["name"], json.loads(call["function"]["arguments"]))
    assert choice == "required" or call["function"]["name"] == "get_weather"


def test_reasoning_is_counted_and_limited(server: Server) -> None:
    limits = [chat(server, seed=seed, max_reasoning_tokens=12) for seed in range(6)]
    counts = [each["usage"]["completion_tokens_details"]["reasoning_tokens"] for each in limits]
    assert max(counts) in range(8, 16) and any(each["message"].get("reasoning_content") for each in limits)


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_an_answer_is_a_text_or_a_call(server: Server, choice: str) -> None:
    seen = set()
    for seed in range(8):
        found = chat(server, tools=TOOLS, tool_choice=choice, seed=seed, max_tokens=60)
        for call in found["message"].get("tool_calls", ()) if found["finish_reason"] == "tool_calls" else ():
            check_arguments(call["function"]["name"], json.loads(call["function"]["arguments"]))
        seen.add("tool_calls" in found["message"])
    assert choice == "auto" or seen == {False}


def test_a_form_holds_the_text_alone(server: Server) -> None:
    for limit in (12, 0):
        found = chat(server, response_format=FORM, max_reasoning_tokens=limit)
        jsonschema.validate(json.loads(found["message"]["content"]), WEATHER)
    assert "reasoning_content" not in found["message"]


def test_where_reasoning_is_shown(server: Server) -> None:
    bias = {"logit_bias": {str(server_token(server, "<|channel|>")): 1}}
    whole = chat(server, response_format=FORM, **bias)
    left_out = chat(server, response_format=FORM, include_reasoning=False, **bias)
    assert left_out["message"]["content"] == whole["message"]["content"]
    assert "reasoning_content" not in left_out["message"]
    within = chat(server, response_format=FORM, separate_reasoning=False, **bias)["message"]["content"]
    thoughts = whole["message"].get("reasoning_content")
    assert within == (f"{thoughts}\n\n" if thoughts else "") + whole["message"]["content"]


def server_token(server: Server, name: str) -> int:
    tokens = request(server.url, "/tokenize", {"prompt": name, "add_special_tokens": False}).json["tokens"]
    (token,) = tokens
    return int(token)


def test_the_next_request_has_the_call_and_its_result(server: Server) -> None:
    message = chat(server, tools=TOOLS, tool_choice=NAMED)["message"]
    (call,) = message["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
    body = {**SAMPLED, "messages": [HI, message, result], "max_tokens": 1, "return_token_ids": True}
    then = request(server.url, CHAT, {**body, "reasoning_effort": "high"}).json
    text = request(server.url, "/detokenize", {"tokens": then["prompt_token_ids"]}).json["prompt"]
    thoughts = message.get("reasoning_content")
    assert text.startswith("<|start|>system<|message|>Reasoning: high<|end|>")
    assert text.partition("hi<|end|>")[2] == (
        (f"<|start|>assistant<|channel|>analysis<|message|>{thoughts}<|end|>" if thoughts else "")
        + "<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>"
        + json.dumps(json.loads(call["function"]["arguments"]))
        + '<|call|><|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>"sunny"<|end|>'
        + "<|start|>assistant"
    )


def test_every_api_has_calls_and_reasoning(server: Server) -> None:
    message = chat(server, tools=TOOLS, tool_choice=NAMED)["message"]
    arguments, thoughts = message["tool_calls"][0]["function"]["arguments"], message.get("reasoning_content", "")
    sampled = {"temperature": 1, "seed": 5, "max_reasoning_tokens": 12}
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
    body: dict[str, Any] = {"input": "hi", "tools": flat, "max_output_tokens": 150, **sampled}
    body["tool_choice"] = {"type": "function", "name": "get_weather"}
    items = request(server.url, "/v1/responses", body).json["output"]
    assert [each["type"] for each in items] == (["reasoning"] if thoughts else []) + ["function_call"]
    assert items[-1]["arguments"] == arguments
    tools = [
        {
            **{name: each[name] for name in ("name", "description") if name in each},
            "input_schema": each.get("parameters", {}),
        }
        for each in flat
    ]
    thinking = {"type": "enabled", "budget_tokens": 12}
    body = {"messages": [HI], "tools": tools, "max_tokens": 150, "temperature": 1, "seed": 5, "thinking": thinking}
    body["tool_choice"] = {"type": "tool", "name": "get_weather"}
    blocks = request(server.url, "/v1/messages", body).json["content"]
    assert [each["type"] for each in blocks] == (["thinking"] if thoughts else []) + ["tool_use"]
    assert blocks[-1]["input"] == json.loads(arguments)
    with Client(server.address, timeout=60) as client:
        options: Any = {**sampled, "max_tokens": 150, "tool_choice": NAMED}
        (answer,) = client.complete([HI], tools=TOOLS, **options)
        assert [call.arguments for call in answer.tool_calls] == [arguments]
        assert (answer.text, answer.reasoning) == ("", thoughts)


def test_answers_in_python_are_read_in_any_case(artifact: Path) -> None:
    with LLM(artifact, num_threads=1) as llm:
        params = SamplingParams(temperature=1.0, seed=5, max_tokens=150)
        (answer,) = llm.chat([HI], params, tools=TOOLS, tool_choice=NAMED, max_reasoning_tokens=12)
        (call,) = answer.outputs[0].tool_calls
        check_arguments(call.name, json.loads(call.arguments))
        text = answer.outputs[0].text
        assert "get_weather" in text and text == text.encode(errors="ignore").decode()
        held = SamplingParams(
            temperature=1.0, seed=5, max_tokens=150, structured_outputs=StructuredOutputs(json=json.dumps(WEATHER))
        )
        (answer,) = llm.chat([HI], held, max_reasoning_tokens=12)
        jsonschema.validate(json.loads(answer.outputs[0].text), WEATHER)


def test_a_batch_has_calls_and_reasoning(server: Server, artifact: Path, tmp_path: Path) -> None:
    message = chat(server, tools=TOOLS, tool_choice=NAMED)["message"]
    line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {**SAMPLED, "tools": TOOLS, "tool_choice": NAMED}}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    done = run_inferc("batch", tmp_path / "in.jsonl", "--engine", artifact, "-o", tmp_path / "out.jsonl")
    assert done.returncode == 0, done.stderr
    answer = json.loads((tmp_path / "out.jsonl").read_text())["response"]["body"]["choices"][0]["message"]
    assert [call["function"] for call in answer["tool_calls"]] == [call["function"] for call in message["tool_calls"]]
    assert answer.get("reasoning_content") == message.get("reasoning_content") and answer["content"] is None


def test_the_forms_are_shown(artifact: Path) -> None:
    shown = run_inferc("inspect", artifact).stdout
    assert "calls     <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}" in shown
    assert "reasoning <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>" in shown


def test_names_that_do_not_go_together_are_refused(model: Path, tiny_llama_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="reasoning is a message in a channel, and calls are not"):
        compile(model, tmp_path / "out", CompileConfig(certify="none", tool_format="hermes"))
    with pytest.raises(ConfigError, match="has no control token <|start|>, of which the headers of channels are made"):
        compile(tiny_llama_folder, tmp_path / "out", CompileConfig(certify="none", reasoning_format="harmony"))
