"""Reasoning in `inferc batch`: the answers of an artifact, and of a server over gRPC, are those over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from batches import CHAT, responses, row, write_rows
from command_line import run_inferc
from http_calls import request
from thinking import MAY_BEGIN
from thinking_server import HI, SAMPLED, SCHEMA, Thinking, serve

FORM = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
THOUGHT = {"role": "assistant", "content": None, "reasoning_content": "Hm"}


@pytest.fixture(scope="module")
def free(tiny_llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Thinking]:
    """A server of a model that may begin to reason, and to which the template may say that it does not."""
    yield from serve(tiny_llama_folder, tmp_path_factory.mktemp("free"), MAY_BEGIN, "token")


@pytest.mark.parametrize("by", ["artifact", "server"])
def test_a_line_is_answered_as_over_http(free: Thinking, tmp_path: Path, by: str) -> None:
    base = {**SAMPLED, "max_reasoning_tokens": 6, **free.at_once}
    bodies: dict[str, dict[str, Any]] = {
        "form": {**base, **FORM, "n": 2},
        "logprobs": {**base, "logprobs": True, "max_tokens": 20},
        "calls": {**base, "tools": TOOLS, "tool_choice": "required"},
        "left_out": {**base, "include_reasoning": False, "max_tokens": 20},
        "in_text": {**base, "separate_reasoning": False, "max_tokens": 20},
        "cut": {**base, "max_tokens": 5},
        "off": {**base, **FORM, "chat_template_kwargs": {"enable_thinking": False}},
        "none": {**base, **FORM, "reasoning_effort": "none"},
        "history": {**SAMPLED, "messages": [HI, THOUGHT, HI], "max_tokens": 4},
        "wrong": {**base, "max_reasoning_tokens": -1},
    }
    source = write_rows(tmp_path / "in.jsonl", [row(name, body, CHAT) for name, body in bodies.items()])
    out = tmp_path / "out.jsonl"
    done = run_inferc("batch", source, "-o", out, "--engine", free.out if by == "artifact" else free.address)
    assert done.returncode == 0, done.stderr
    found = responses(out)
    for name, body in bodies.items():
        reply, response = request(free.url, CHAT, body), found[name]
        assert response["status_code"] == reply.status, name
        if reply.status != 200:
            assert response["body"] == reply.json
            continue
        ours, theirs = response["body"], reply.json
        for choice in (*ours["choices"], *theirs["choices"]):
            for call in choice["message"].get("tool_calls", []):
                call.pop("id")
        assert ours["choices"] == theirs["choices"], name
        theirs["usage"].pop("prompt_tokens_details")
        assert ours["usage"] == theirs["usage"], name
    assert [found[name]["status_code"] for name in ("wrong", "none")] == [400, 200]
    shown = {name for name in bodies if name != "wrong" and "reasoning" in found[name]["body"]["choices"][0]["message"]}
    assert shown == {"form", "logprobs", "calls", "cut"}


def test_an_effort_that_is_not_read_is_named(free: Thinking, tmp_path: Path) -> None:
    source = write_rows(
        tmp_path / "in.jsonl", [row("a", {**SAMPLED, "reasoning_effort": "low", "max_tokens": 3}, CHAT)]
    )
    assert run_inferc("batch", source, "-o", tmp_path / "out.jsonl", "--engine", free.out).returncode == 0
    (warning,) = responses(tmp_path / "out.jsonl")["a"]["body"]["warnings"]
    assert warning.startswith("reasoning_effort is not read by the model's chat template")
