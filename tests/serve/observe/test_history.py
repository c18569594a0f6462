"""The last hour of the metrics, which a dashboard shows of the time before it was opened."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from http_calls import request
from serving import Server, wait_until
from virtual_time import run

from inferc.client.scrape import Page
from inferc.serve.observe.history import EVERY_SECONDS, MOST, MetricsHistory
from inferc.serve.security.access import Key, digest_of, write_keys


class Counting:
    """A page of metrics that counts how often it is rendered."""

    def __init__(self) -> None:
        self.count = 0

    async def render(self, accept: str = "") -> tuple[bytes, str]:
        self.count += 1
        return b"# HELP n What is counted.\n# TYPE n counter\nn %d\n" % self.count, "text/plain"


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Return the wall clock's time, which is the list's only entry."""
    time = [1000.0]
    monkeypatch.setattr("inferc.serve.observe.history.time.time", lambda: time[0])
    yield time


def history_of(page: Any) -> MetricsHistory:
    return MetricsHistory(page)  # whatever can be rendered


def pages_of(text: str) -> list[tuple[float, Page]]:
    """Return the pages of a history with their times."""
    head, *parts = text.split("# at ")
    assert head.startswith("# now ") and float(head.removeprefix("# now ")) > 0
    pages = [part.split("\n", 1) for part in parts]
    return [(float(at), Page.parse(samples, float(at))) for at, samples in pages]


def test_pages_are_kept_with_their_times_and_without_comments(now: list[float]) -> None:
    async def work() -> str:
        history = history_of(Counting())
        assert history.text() == "# now 1000.0\n"
        await history.take()
        now[0] = 1010.25
        await history.take()
        now[0] = 1012.0
        return history.text()

    assert run(work()) == "# now 1012.0\n# at 1000.0\nn 1\n# at 1010.2\nn 2\n"


def test_an_hour_is_kept_and_no_more() -> None:
    async def work() -> str:
        history = history_of(Counting())
        running = asyncio.ensure_future(history.run())
        await asyncio.sleep((MOST + 5) * EVERY_SECONDS - 1)
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        return history.text()

    values = [line for line in run(work()).splitlines() if not line.startswith("#")]
    assert values == [f"n {number}" for number in range(6, MOST + 6)] and MOST * EVERY_SECONDS == 3600


@pytest.mark.slow
def test_what_was_before_is_told_to_who_comes_later_and_has_a_key(tiny_artifact: Path, tmp_path: Path) -> None:
    write_keys(tmp_path / "keys.json", [Key("alice", digest_of("alice-key"))])
    key = {"authorization": "Bearer alice-key"}
    with Server(tiny_artifact, "--api-keys", str(tmp_path / "keys.json")) as server:
        assert request(server.url, "/metrics/history").status == 401
        body = {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
        assert request(server.url, "/v1/completions", body, key).status == 200

        def told() -> list[tuple[float, Page]]:
            reply = request(server.url, "/metrics/history", headers=key)
            assert reply.status == 200 and reply.headers["content-type"].startswith("text/plain")
            return pages_of(reply.body.decode())

        wait_until(lambda: told()[-1][1].sum("inferc_output_tokens_total") == 4, "it is in the history", 60)
        (first, before), *_, (last, after) = told()
        assert (before.sum("inferc_output_tokens_total"), after.sum("inferc_requests_total")) == (0, 1)
        assert last - first >= EVERY_SECONDS - 1
        assert after.sum("inferc_host_memory_bytes") > 0
