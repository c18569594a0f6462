"""Answers of a form over the wire: by HTTP, by gRPC, streamed or not, and what is refused before any of it is out."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from http_calls import request

from inferc.client import Client
from inferc.errors import RequestError

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"verdict": {"enum": ["yes", "no"]}}, "required": ["verdict"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": SCHEMA}}
SAMPLED: dict[str, Any] = {"temperature": 1, "seed": 3, "max_tokens": 100}
BAD_SCHEMA = {"type": "object", "properties": {"a": {"contains": {"const": 1}, "maxContains": 3}}}


def test_a_chat_streams_what_it_answers_whole(url: str) -> None:
    body = {"messages": MESSAGES, "response_format": FORMAT, **SAMPLED}
    choice = request(url, CHAT, body).json["choices"][0]
    assert json.loads(choice["message"]["content"])["verdict"] in ("yes", "no") and choice["finish_reason"] == "stop"
    events = [event["choices"][0] for event in request(url, CHAT, {**body, "stream": True}).events]
    assert "".join(event["delta"].get("content") or "" for event in events) == choice["message"]["content"]


def test_a_response_repeats_its_format(url: str) -> None:
    text_format = {"type": "json_schema", "name": "verdict", "schema": SCHEMA}
    body = {"input": "hi", "text": {"format": text_format}, "temperature": 1, "seed": 3, "max_output_tokens": 100}
    found = request(url, RESPONSES, body).json
    assert found["text"] == {"format": text_format} and found["status"] == "completed"
    assert json.loads(found["output"][0]["content"][0]["text"])["verdict"] in ("yes", "no")


@pytest.mark.parametrize(
    ("body", "pattern"),
    [
        ({"guided_regex": "[a-c]{3}"}, "[a-c]{3}"),
        ({"structured_outputs": {"choice": ["left", "right"]}}, "left|right"),
        ({"grammar": 'root ::= "x" | "y" "z"'}, "x|yz"),
    ],
    ids=str,
)
def test_forms_of_a_completion(url: str, body: dict[str, Any], pattern: str) -> None:
    reply = request(url, COMPLETIONS, {"prompt": ["a", "b"], "n": 2, **SAMPLED, **body}).json
    assert len(reply["choices"]) == 4
    assert all(re.fullmatch(pattern, choice["text"]) for choice in reply["choices"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("url_of", "body", "message", "param"),
    [
        (
            CHAT,
            {"messages": MESSAGES, "response_format": {**FORMAT, "json_schema": {"schema": BAD_SCHEMA}}},
            "response_format.json_schema.schema: #/properties/a/maxContains: ",
            "response_format",
        ),
        (
            RESPONSES,
            {"input": "a", "text": {"format": {"type": "json_schema", "schema": BAD_SCHEMA}}},
            "text.format.schema: #/properties/a/maxContains: ",
            "text",
        ),
        (COMPLETIONS, {"prompt": "a", "guided_regex": "(a"}, "guided_regex: Regex parsing error", "guided_regex"),
        (COMPLETIONS, {"prompt": "a", "guided_json": "{"}, "guided_json: it is no JSON", "guided_json"),
        (COMPLETIONS, {"prompt": "a", "grammar": "root ::= x"}, 'Rule "x" is not defined', "grammar"),
    ],
)
def test_a_form_that_cannot_be_held_to_is_a_bad_request(
    url: str, url_of: str, body: dict[str, Any], message: str, param: str, stream: bool
) -> None:
    reply = request(url, url_of, {**body, "stream": stream})
    assert reply.status == 400 and message in reply.error["message"], reply.body
    assert reply.error["param"] == param


def test_grpc(served: str) -> None:
    with Client(served, timeout=60) as client:
        for form, pattern in (
            ({"regex": "[a-c]{3}"}, "[a-c]{3}"),
            ({"choice": ["left", "right"]}, "left|right"),
            ({"json": json.dumps(SCHEMA), "disable_any_whitespace": True}, '{"verdict": "(yes|no)"}'),
        ):
            (answer,) = client.complete("a", structured_outputs=form, **SAMPLED)
            assert re.fullmatch(pattern, answer.text) and answer.finish_reason == "stop"
        with pytest.raises(RequestError, match=r"structured_outputs.regex: Regex parsing error"):
            client.complete("a", structured_outputs={"regex": "(a"})
        with pytest.raises(RequestError, match="structured_outputs: expected one of json, .*found regex and choice"):
            client.complete("a", structured_outputs={"regex": "a", "choice": ["b"]})
