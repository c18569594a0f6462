"""Tests of what a client is told of an error, and of when to come again."""

import msgspec
import pytest

from inferc.errors import InfercError, ObjectiveError, RequestError
from inferc.serve.errors import EngineUnavailable, QueueFull
from inferc.serve.http.edge import body_of, response_of
from inferc.serve.statuses import GIVEN_UP_SECONDS, MAX_MESSAGE, to_client_error
from inferc.system.worker_process import NoProcess


@pytest.mark.parametrize(
    ("error", "status", "headers"),
    [
        (QueueFull("full", 0.2), 429, {"retry-after": "1"}),
        (EngineUnavailable("it starts", 2.0), 503, {"retry-after": "2"}),
        (EngineUnavailable("it was given up"), 503, {"retry-after": f"{GIVEN_UP_SECONDS:g}"}),
        (NoProcess("the process cannot be started: Resource temporarily unavailable"), 503, {"retry-after": "1"}),
        (ObjectiveError("the first token takes 2 s"), 429, {"x-should-retry": "false"}),
    ],
)
def test_whether_and_when_another_try_is_worth_while(error: InfercError, status: int, headers: dict[str, str]) -> None:
    """An objective that no schedule can meet gets no retry time, and OpenAI's clients do not retry."""
    reply = response_of(to_client_error(error), {"path": "/v1/completions", "headers": []})
    assert reply.status_code == status
    assert {name: reply.headers[name] for name in ("retry-after", "x-should-retry") if name in reply.headers} == headers


def test_a_message_can_be_sent_whatever_it_quotes() -> None:
    assert to_client_error(RequestError("unknown: \ud800é")).message == "unknown: \\ud800é"
    assert len(to_client_error(RequestError("x" * 100_000)).message) == MAX_MESSAGE
    msgspec.json.encode(body_of(RequestError("\udc00")))
