"""Servers of models that reason, and their chats: streamed as they are whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from http_calls import request
from serving import Server
from thinking import Kind, make_thinking

from inferc.compiler.build import compile
from inferc.config import CompileConfig

CHAT = "/v1/chat/completions"
HI = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Rome", "Paris"]}}, "required": ["city"]}
SAMPLED: dict[str, Any] = {"messages": [HI], "temperature": 1, "seed": 5, "max_tokens": 120}


@dataclass(frozen=True)
class Thinking:
    """A server of a model that reasons; tokens: the ids of its markers, or of the pieces that these have.

    address: for gRPC.
    """

    url: str
    out: Path
    kind: Kind
    tokens: dict[str, int]
    address: str = ""

    @property
    def briefly(self) -> dict[str, Any]:
        """Fields that make the reasoning short: a limit, or likely pieces of the marker that ends it."""
        if self.kind != "text":
            return {"max_reasoning_tokens": 12}
        return {"logit_bias": {str(token): 4 for token in self.tokens.values()}}

    @property
    def at_once(self) -> dict[str, Any]:
        """Fields that make the model begin to reason, where it may."""
        return {"logit_bias": {str(self.tokens["<think>"]): 100}}

    def ask(self, **changes: Any) -> Any:
        """Return an answer, after a check that it is streamed as it is whole."""
        body = {**SAMPLED, **changes}
        reply = request(self.url, CHAT, body)
        assert reply.status == 200, reply.body
        events = request(self.url, CHAT, {**body, "stream": True, "stream_options": {"include_usage": True}}).events
        for choice in reply.json["choices"]:
            parts = [each for event in events for each in event["choices"] if each["index"] == choice["index"]]
            assert streamed(parts) == said(choice["message"])
            assert [each["finish_reason"] for each in parts if each["finish_reason"]] == [choice["finish_reason"]]
            rows = [row for each in parts for row in (each["logprobs"] or {}).get("content", [])]
            assert rows == (choice["logprobs"] or {}).get("content", [])
        for name in ("completion_tokens", "completion_tokens_details"):
            assert events[-1]["usage"][name] == reply.json["usage"][name]
        return reply.json


def streamed(parts: list[dict[str, Any]]) -> list[str]:
    """Return what the chunks of a choice have: reasoning before everything else."""
    found = ["", "", "", ""]
    for part in parts:
        delta = part["delta"]
        if delta.get("reasoning"):
            assert found[2:] == ["", ""], "reasoning comes first"
        found[0] += delta.get("reasoning", "")
        found[1] += delta.get("reasoning_content", "")
        found[2] += delta.get("content") or ""
        found[3] += "".join(call["function"]["arguments"] for call in delta.get("tool_calls", ()))
    return found


def said(message: dict[str, Any]) -> list[str]:
    calls = "".join(call["function"]["arguments"] for call in message.get("tool_calls", ()))
    reasoning = [message.get(name, "") for name in ("reasoning", "reasoning_content")]
    return [*reasoning, message["content"] or "", calls]


def serve(source: Path, folder: Path, template: str, kind: Kind) -> Iterator[Thinking]:
    tokens = make_thinking(source, folder / "model", template, kind)
    compile(folder / "model", folder / "out", CompileConfig(certify="none"))
    with Server(folder / "out") as server:
        yield Thinking(server.url, folder / "out", kind, tokens, server.address)
