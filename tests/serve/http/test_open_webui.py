"""The requests of Open WebUI as it sends them to a server with OpenAI's interface, and those of its own tasks."""

from typing import Any

import pytest
from http_calls import request

CHAT = "/v1/chat/completions"
# It takes most of these out before it asks a server; older versions and its extensions leave some in.
BESIDE: dict[str, Any] = {
    "chat_id": "2f1c",
    "id": "77aa",
    "session_id": "s-1",
    "parent_id": None,
    "parent_message": {"id": "u-1", "role": "user", "content": "hi"},
    "background_tasks": {"title_generation": True, "tags_generation": True, "follow_up_generation": True},
    "model_item": {"id": "m", "object": "model", "owned_by": "openai", "urlIdx": 0},
    "metadata": {"chat_id": "2f1c", "task": "title_generation"},
}
ASKING: dict[str, Any] = {
    "features": {"web_search": True},
    "files": [{"type": "file", "id": "f-1"}],
    "params": {"temperature": 0.5},
    "tool_ids": ["calculator"],
    "variables": {"{{USER_NAME}}": "Ada", "{{CURRENT_DATE}}": "2026-01-01"},
}
HEADERS = {
    "content-type": "application/json",
    "authorization": "Bearer none",
    "http-referer": "https://example.com/",
    "x-openwebui-user-name": "Ada",
}


def body(**more: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    return {"messages": messages, "temperature": 0, "max_tokens": 8, **more}


@pytest.fixture(scope="module")
def model(url: str) -> str:
    """Return the model that it shows first, found as it finds them."""
    reply = request(url, "/v1/models", headers=HEADERS)
    assert reply.status == 200 and reply.json["object"] == "list"
    return str(reply.json["data"][0]["id"])


@pytest.fixture(scope="module")
def want(url: str) -> str:
    return str(request(url, CHAT, body()).json["choices"][0]["message"]["content"])


def test_a_turn_of_a_conversation(url: str, model: str, want: str) -> None:
    asked = body(model=model, stream=True, stream_options={"include_usage": True}, **BESIDE)
    events = request(url, CHAT, asked, HEADERS).events
    *chunks, usage = events
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == want
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant" and chunks[-1]["choices"][0]["finish_reason"]
    assert usage["choices"] == [] and usage["usage"]["total_tokens"] > usage["usage"]["completion_tokens"] > 0
    assert not any("warnings" in event for event in events)


def test_the_parameters_that_a_user_sets(url: str, model: str) -> None:
    params = {
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "seed": 0,
        "stop": ["END"],
        "logit_bias": {"5": -10},
        "reasoning_effort": "medium",
    }
    reply = request(url, CHAT, body(model=model, stream=False, **params), HEADERS)
    assert reply.status == 200 and reply.json["choices"] and "warnings" not in reply.json


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_titles_tags_and_questions(url: str, model: str, limit: str) -> None:
    asked = {"model": model, "messages": [{"role": "user", "content": "### Task:\nA title."}], "stream": False}
    reply = request(url, CHAT, {**asked, limit: 8, "metadata": {"task": "title_generation"}}, HEADERS)
    assert reply.status == 200 and isinstance(reply.json["choices"][0]["message"]["content"], str)


def test_what_would_change_an_answer_is_named(url: str, model: str, want: str) -> None:
    reply = request(url, CHAT, body(model=model, **ASKING), HEADERS)
    assert reply.json["choices"][0]["message"]["content"] == want
    named = [line.partition(" ")[0] for line in reply.json["warnings"]]
    assert sorted(named) == sorted(ASKING) and all(
        "is not known and was ignored" in line for line in reply.json["warnings"]
    )
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    refused = request(url, CHAT, body(model=model, tools=[tool]), HEADERS)
    assert refused.status == 400 and refused.error["param"] == "tools"


def test_turns_are_of_text(url: str, model: str) -> None:
    parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    turns = [
        {"role": "user", "content": [parts[0]]},
        {"role": "assistant", "content": "It is text."},
        {"role": "user", "content": "And now?"},
    ]
    assert request(url, CHAT, {**body(model=model), "messages": turns}, HEADERS).status == 200
    refused = request(url, CHAT, {**body(model=model), "messages": [{"role": "user", "content": parts}]}, HEADERS)
    assert refused.status == 400 and "takes text parts only" in refused.error["message"]
