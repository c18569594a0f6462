"""Server-sent events and the tokens in them, however the stream is cut."""

import json
from typing import Any

import pytest

from inferc.bench.events import Events, StreamError, TokenCounter


def event(body: Any) -> bytes:
    return b"data: " + (body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode()) + b"\n\n"


def text(value: str, tokens: int | None = None, reason: str | None = None) -> dict[str, Any]:
    usage = {} if tokens is None else {"usage": {"prompt_tokens": 9, "completion_tokens": tokens}}
    return {"id": "x", "choices": [{"index": 0, "text": value, "logprobs": None, "finish_reason": reason}], **usage}


def usage(tokens: int) -> dict[str, Any]:
    details = {"prompt_tokens_details": {"cached_tokens": 4}}
    return {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": tokens, "total_tokens": 0, **details}}


def counted(*parts: bytes) -> TokenCounter:
    """Return the times of parts that come once a second."""
    counter = TokenCounter()
    for now, part in enumerate(parts):
        counter.feed(part, float(now))
    counter.close(float(len(parts)))
    return counter


STREAM = (
    b": a comment\r\n\r\n" + event(text("é")) + b"event: x\r\ndata:{}\r\n\r\n" + event(text("b")) + event(b"[DONE]")
)


def test_a_stream_may_be_cut_anywhere() -> None:
    whole = Events().feed(STREAM)
    assert len(whole) == 4 and whole[1] == b"{}" and whole[-1] == b"[DONE]"
    for at in range(1, len(STREAM)):
        events = Events()
        assert events.feed(STREAM[:at]) + events.feed(STREAM[at:]) == whole
    events = Events()
    assert [data for at in range(len(STREAM)) for data in events.feed(STREAM[at : at + 1])] == whole


def test_an_event_may_have_lines_and_lack_its_end() -> None:
    events = Events()
    assert events.feed(b"data: a\ndata: b\n\ndata: [DO") == [b"a\nb"]
    assert events.feed(b"NE]") == [] and events.close() == [b"[DONE]"] and events.close() == []


def test_chunks_that_tell_their_tokens() -> None:
    # The second has two; the third has one that shows nothing yet, half of a character; the fourth came with the fifth.
    parts = [
        event(text("a", 1)),
        event(text("b", 3)),
        event(text("", 4)),
        event(text("c", 5)) + event(text("d", 7, "stop")),
    ]
    found = counted(*parts, event(usage(7)), event(b"[DONE]"))
    assert found.messages() == ([(0, 1), (1, 2), (2, 1), (3, 3)], "told")
    assert (found.prompt_tokens, found.cached_tokens, found.is_done) == (9, 4, True)


def test_tokens_that_show_nothing_count() -> None:
    first = event(text("", 2)), event(text("é", 3)), event(text("", 4, "length"))
    assert counted(*first).messages() == ([(0, 2), (1, 1), (2, 1)], "told")
    assert counted(event(text("", 5, "length"))).messages() == ([(0, 5)], "told")
    assert counted(event(text("", None, "length")), event(usage(5))).messages() == ([(2, 5)], "shared")


def test_tokens_that_are_told_in_the_end_are_shared_out() -> None:
    parts = [event(text("a")), event(text("b")) + event(text("c")), event(text("d")), event(usage(7))]
    assert counted(*parts).messages() == ([(0, 2), (1, 4), (2, 1)], "shared")
    assert counted(*parts[:3], event(usage(4))).messages() == ([(0, 1), (1, 2), (2, 1)], "told")
    # Usage in the chunk of the finish reason is the sum, not what came in it.
    last = event(text("e", 6, "length"))
    assert counted(*parts[:3], last).messages() == ([(0, 2), (1, 2), (2, 1), (3, 1)], "shared")


def test_without_usage_a_chunk_is_a_token() -> None:
    role = event({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
    thought = event({"choices": [{"delta": {"reasoning_content": "hm"}}]})
    said = event({"choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}], "usage": None})
    found = counted(role, thought, said)
    assert found.messages() == ([(1, 1), (2, 1)], "chunks") and found.is_done and found.prompt_tokens is None
    assert counted(role).messages() == ([], "chunks") and not counted(role).is_done


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"error": {"message": "out of memory"}}, "out of memory"),
        (b"<html>", "not a chunk: <html>"),
        ({"choices": 3}, "not a chunk"),
    ],
)
def test_what_is_no_chunk(data: Any, message: str) -> None:
    with pytest.raises(StreamError, match=message):
        counted(event(data))
    assert counted(event({"error": None, "choices": []})).messages() == ([], "chunks")
