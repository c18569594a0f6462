"""`--special-tokens-in-text` at every place where a server takes text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from http_calls import request
from serving import Server

from inferc.client import Client
from inferc.errors import RequestError
from inferc.runtime.engine.llm import LLM

CHAT = "/v1/chat/completions"
END = "</s>"
REFUSED = f"has the control token {END!r}, and these are refused in texts here; leave it out"


@pytest.fixture(scope="module")
def refusing(tiny_artifact: Path) -> Iterator[Server]:
    with Server(tiny_artifact, "--special-tokens-in-text", "refuse") as server:
        yield server


def said(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    ("path", "body", "where"),
    [
        (CHAT, {"messages": said(f"a{END}"), "max_tokens": 1}, "messages[0].content"),
        (CHAT, {"messages": said([{"type": "text", "text": END}]), "max_tokens": 1}, "messages[0].content"),
        (CHAT, {"messages": said("a"), "max_tokens": 1, "chat_template_kwargs": {"x": [END]}}, "x"),
        ("/v1/completions", {"prompt": f"a{END}", "max_tokens": 1}, "the prompt"),
        ("/v1/completions", {"prompt": ["a", END], "max_tokens": 1}, "the prompt"),
        ("/v1/responses", {"input": f"a{END}", "max_output_tokens": 16}, "messages[0].content"),
        ("/tokenize", {"prompt": f"a{END}"}, "the prompt"),
        ("/tokenize", {"messages": said(END)}, "messages[0].content"),
    ],
)
def test_a_token_is_refused_over_http(refusing: Server, path: str, body: dict[str, Any], where: str) -> None:
    answer = request(refusing.url, path, body)
    assert (answer.status, answer.error["message"]) == (400, f"{where} {REFUSED}")


def test_a_token_is_refused_over_grpc_and_other_texts_are_not(refusing: Server) -> None:
    with Client(refusing.address) as client:
        for prompt in (f"a{END}", said(END)):
            with pytest.raises(RequestError, match="has the control token '</s>'"):
                client.complete(prompt, max_tokens=1)
        others: list[Any] = ["a</s", said("a</s"), [1]]
        for prompt in others:
            assert client.complete(prompt, max_tokens=1)


def test_a_token_is_text_to_an_engine_of_ones_own(tiny_artifact: Path) -> None:
    with LLM(tiny_artifact, special_tokens_in_text="escape") as llm, LLM(tiny_artifact) as plain:
        (answer,) = llm.chat(said(f"a{END}"), llm.sampling_params(max_tokens=1))
        (other,) = plain.chat(said(f"a{END}"), llm.sampling_params(max_tokens=1))
        assert (answer.prompt_token_ids.count(1), other.prompt_token_ids.count(1)) == (1, 2)
        (answer,) = llm.generate(f"a{END}", llm.sampling_params(max_tokens=1))
        assert 1 not in answer.prompt_token_ids
