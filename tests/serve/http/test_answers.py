"""Answers as HTTP's protocol is handed them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from inferc.serve.http.answers import WRITTEN_AT_ONCE, Events, Json
from inferc.serve.http.openai_chunks import with_end


@pytest.mark.parametrize("num_letters", [1, WRITTEN_AT_ONCE - 8, 3 * WRITTEN_AT_ONCE])
def test_a_long_answer_is_handed_over_in_parts(num_letters: int) -> None:
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("an answer asks for nothing")

    asyncio.run(Json({"a": "x" * num_letters})({"type": "http"}, receive, send))
    head, *parts = sent
    data = b"".join(part["body"] for part in parts)
    assert json.loads(data) == {"a": "x" * num_letters}
    assert dict(head["headers"])[b"content-length"] == str(len(data)).encode()
    assert (
        len(parts) == -(-len(data) // WRITTEN_AT_ONCE) and max(map(len, (p["body"] for p in parts))) <= WRITTEN_AT_ONCE
    )
    assert [part["more_body"] for part in parts] == [True] * (len(parts) - 1) + [False]


def test_so_is_a_long_event_of_a_stream() -> None:
    sent: list[dict[str, Any]] = []
    long = b"data: " + b"x" * (2 * WRITTEN_AT_ONCE) + b"\n\n"

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def rest() -> AsyncGenerator[bytes, None]:
        yield b"data: a\n\n"
        yield long

    asyncio.run(Events(long, rest())({"type": "http"}, receive, send))
    parts = [part["body"] for part in sent[1:]]
    assert b"".join(parts) == long + b"data: a\n\n" + long
    assert len(parts) == 3 + 1 + 3 + 1 and max(map(len, parts)) == WRITTEN_AT_ONCE
    assert [part["more_body"] for part in sent[1:]] == [True] * 7 + [False]


def test_the_end_of_calls_stands_in_a_chunk_of_its_own() -> None:
    """A busy machine may merge the last part of a call with the end of the answer."""
    text, call = {"content": "a"}, {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]}
    assert with_end([text, call]) == [text, call, {}]
    assert with_end([call, text]) == [call, text] and with_end([{}]) == [{}]
