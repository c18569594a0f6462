"""Tools in `inferc batch`: the answers of an artifact are those of a server over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from batches import CHAT, responses, row, write_rows
from command_line import run_inferc
from http_calls import request
from serving import Server
from tool_models import TOOLS

CALL = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}}
HISTORY = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "12:00"},
]
BAD = {"type": "object", "properties": {"a": {"contains": {"const": 1}}}}
BASE: dict[str, Any] = {"messages": HISTORY[:1], "tools": TOOLS, "temperature": 1, "seed": 5, "max_tokens": 120}
BODIES: dict[str, dict[str, Any]] = {
    "required": {**BASE, "tool_choice": "required", "n": 2},
    "one": {
        **BASE,
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "parallel_tool_calls": False,
    },
    "auto": {**BASE, "max_tokens": 20},
    "none": {**BASE, "tool_choice": "none", "max_tokens": 20},
    "history": {**BASE, "messages": HISTORY, "max_tokens": 8},
    "wrong": {**BASE, "tool_choice": "sometimes"},
    "nested": {**BASE, "tools": [{"type": "function", "function": {"name": "f", "parameters": BAD}}]},
    "json": {"messages": HISTORY[:1], "response_format": {"type": "json_object"}, "temperature": 0, "max_tokens": 9},
    "formed": {**BASE, "response_format": {"type": "json_object"}},
    "cut": {**BASE, "tool_choice": {"type": "function", "function": {"name": "get_weather"}}, "stop": '"'},
}


def answer(source: Path, engine: Path | str) -> dict[str, Any]:
    out = source.with_name("out.jsonl")
    done = run_inferc("batch", str(source), "-o", str(out), "--engine", str(engine), "--force")
    assert done.returncode == 0, done.stderr
    return responses(out)


def without_ids(choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for choice in choices:
        for call in choice["message"].get("tool_calls", []):
            assert call.pop("id").startswith("call_")
    return choices


@pytest.mark.parametrize("by", ["artifact", "server"])
def test_a_line_is_answered_as_over_http(tooled: Server, tooled_artifact: Path, tmp_path: Path, by: str) -> None:
    source = write_rows(tmp_path / "in.jsonl", [row(name, body, CHAT) for name, body in BODIES.items()])
    found = answer(source, tooled_artifact if by == "artifact" else tooled.address)
    for name, body in BODIES.items():
        reply, response = request(tooled.url, CHAT, body), found[name]
        assert response["status_code"] == reply.status, name
        if reply.status == 200:
            assert without_ids(response["body"]["choices"]) == without_ids(reply.json["choices"]), name
            assert response["body"]["usage"]["prompt_tokens"] == reply.json["usage"]["prompt_tokens"]
        else:
            assert response["body"] == reply.json
    assert (found["wrong"]["status_code"], found["formed"]["status_code"]) == (400, 200)
    assert found["cut"]["body"]["choices"][0]["finish_reason"] == "stop"
    assert found["one"]["body"]["choices"][0]["finish_reason"] == "tool_calls"


def test_what_grpc_does_not_send_is_refused(tooled: Server, tmp_path: Path) -> None:
    said = [{"role": "assistant", "content": "a", "name": "b"}, *HISTORY[:1]]
    rows = [row("a", {**BASE, "messages": said}, CHAT)]
    response = answer(write_rows(tmp_path / "in.jsonl", rows), tooled.address)["a"]
    assert response["status_code"] == 400
    assert "name is 'b', which is not sent over gRPC" in response["body"]["error"]["message"]


def test_a_model_that_knows_no_tools_refuses_them(tiny_artifact: Path, tmp_path: Path) -> None:
    rows = [row("a", BODIES["required"], CHAT)]
    response = answer(write_rows(tmp_path / "in.jsonl", rows), tiny_artifact)["a"]
    assert response["status_code"] == 400
    assert "the model's chat template does not tell how it writes calls" in response["body"]["error"]["message"]
