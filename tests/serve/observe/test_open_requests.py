"""The list of open requests: how far each has come, who may see it, and that no text is in it."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
from http_calls import TIMEOUT, request
from letters import Letters
from serving import Server, wait_until
from virtual_time import run

from inferc.client import Client
from inferc.runtime.engine.loop import Sink, Stats
from inferc.runtime.engine.stats import EngineStats
from inferc.runtime.step.sampling_params import SamplingParams
from inferc.runtime.step.sequence import Output
from inferc.serve.models.async_engine import AsyncEngine
from inferc.serve.models.streams import ModelFacts
from inferc.serve.observe.open_requests import MOST, open_requests
from inferc.serve.security.access import Key, digest_of, write_keys

# ------------------------------------------------------------------------------------------ a scripted engine


class Script:
    """An engine that says what the test makes it say. is_busy: it answers no question for its counters."""

    stopped: str | None = None

    def __init__(self) -> None:
        self.sinks: dict[str, Sink] = {}
        self.waiting: list[str] = []
        self.is_busy = False

    def add(self, prompt_token_ids: Sequence[int], params: SamplingParams, sink: Sink, name: str = "") -> str:
        """Name the requests e1, e2 and so on."""
        engine_id = f"e{len(self.sinks) + 1}"
        self.sinks[engine_id] = sink
        return engine_id

    def score(
        self,
        token_ids: Sequence[int],
        sink: Sink,
        num_top: int = 0,
        cache_salt: str = "",
        first: int = 1,
        adapter: str = "",
    ) -> str:
        return self.add(token_ids, SamplingParams(), sink)

    def load_adapter(self, name: str, path: str, sink: Sink) -> str:
        raise AssertionError("no adapter is loaded here")

    def unload_adapter(self, name: str, sink: Sink) -> str:
        raise AssertionError("no adapter is loaded here")

    def embed(self, token_ids: Sequence[int], sink: Sink) -> str:
        return self.add(token_ids, SamplingParams(), sink)

    def abort(self, request_id: str, index: int | None = None) -> None:
        pass

    def ask_stats(self, sink: Sink) -> str:
        if not self.is_busy:
            sink(Stats("s", EngineStats(waiting_ids=self.waiting)))
        return "s"

    async def say(self, engine_id: str, token_ids: list[int], reason: str | None = None) -> None:
        self.sinks[engine_id](Output(engine_id, 0, token_ids, reason))
        await asyncio.sleep(0)


def engine_of(script: Script | None, max_sequences: int = 100) -> AsyncEngine:
    engine = AsyncEngine(Letters(), ModelFacts(vocab_size=128, max_model_len=64), max_sequences)
    if script is not None:
        engine.attach(script)
    return engine


async def listed(*engines: AsyncEngine, owner: str | None = None) -> dict[str, Any]:
    served = [SimpleNamespace(name=f"model{index}", engine=engine) for index, engine in enumerate(engines)]
    models: Any = SimpleNamespace(served=served)
    return await open_requests(models, owner)


async def states(engine: AsyncEngine) -> dict[str, str | None]:
    return {row["id"]: row["state"] for row in (await listed(engine))["requests"]}


def test_a_request_waits_is_computed_decodes_and_is_gone() -> None:
    async def work() -> None:
        script = Script()
        engine = engine_of(None)
        stream = engine.open([1, 2, 3], SamplingParams(priority=7), "mine", owner="alice", kind="chat")
        row: dict[str, Any] = {
            "id": "mine",
            "kind": "chat",
            "model": "model0",
            "state": "waiting",
            "age_seconds": 2.5,
            "prompt_tokens": 3,
            "output_tokens": 0,
            "priority": 7,
            "key": "alice",
        }
        await asyncio.sleep(2.5)  # of virtual time
        assert await listed(engine) == {"num_open": 1, "requests": [row]}, "there is no engine yet"
        engine.attach(script)
        script.waiting = ["e1"]
        assert await states(engine) == {"mine": "waiting"}
        script.waiting = []
        assert await states(engine) == {"mine": "prefill"}
        await script.say("e1", [65, 66])
        assert await listed(engine) == {"num_open": 1, "requests": [{**row, "state": "decode", "output_tokens": 2}]}
        script.waiting = ["e1"]
        assert await states(engine) == {"mine": "waiting"}, "it was preempted"
        await script.say("e1", [67], "stop")
        assert await states(engine) == {"mine": "unread"}
        stream.close()
        assert await listed(engine) == {"num_open": 0, "requests": []}

    run(work())


def test_an_engine_that_does_not_answer_leaves_open_whether_a_request_waits() -> None:
    async def work() -> None:
        script = Script()
        engine = engine_of(script)
        first, second = (engine.open([1], SamplingParams(), name) for name in ("first", "second"))
        await script.say("e1", [65])
        script.is_busy = True
        assert await states(engine) == {"first": "decode", "second": None}
        first.close()
        second.close()

    run(work())


def test_texts_that_are_scored_or_embedded_are_listed() -> None:
    async def work() -> None:
        script = Script()
        engine = engine_of(script)
        tasks = [
            asyncio.ensure_future(engine.score([1, 2], request_id="scored")),
            asyncio.ensure_future(engine.embed([1, 2, 3], "embedded")),
        ]
        await asyncio.sleep(0)
        script.waiting = ["e2"]
        rows = (await listed(engine))["requests"]
        assert [(row["id"], row["kind"], row["state"], row["prompt_tokens"]) for row in rows] == [
            ("scored", "score", "prefill", 2),
            ("embedded", "embedding", "waiting", 3),
        ]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not engine.tasks

    run(work())


def test_the_oldest_of_all_models_come_first_and_not_more_than_fit() -> None:
    async def work() -> None:
        engines = [engine_of(Script()), engine_of(Script())]
        streams = []
        for number in range(MOST + 6):
            owner = "alice" if number % 2 else "bob"
            streams.append(engines[number % 2].open([1], SamplingParams(), f"r{number}", owner=owner))
            await asyncio.sleep(1)
        found = await listed(*engines)
        assert found["num_open"] == MOST + 6
        assert [row["id"] for row in found["requests"]] == [f"r{number}" for number in range(MOST)]
        own = await listed(*engines, owner="alice")
        assert own["num_open"] == MOST // 2 + 3 and {row["key"] for row in own["requests"]} == {"alice"}
        assert {row["model"] for row in own["requests"]} == {"model1"}
        for stream in streams:
            stream.close()

    run(work())


# ---------------------------------------------------------------------------------------------- a real server


@pytest.fixture(scope="module")
def locked(tiny_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    names = ("alice", "bob")
    keys = [Key(name, digest_of(f"{name}-key")) for name in names]
    write_keys(file, [*keys, Key("root", digest_of("root-key"), admin=True)])
    # With the policy of priority all of alice's outputs come before bob's chat; fairness would let it in between two.
    with Server(tiny_artifact, "--api-keys", str(file), "--max-num-seqs", "1", "--policy", "priority") as server:
        yield server


def asked(server: Server, key: str) -> dict[str, Any]:
    reply = request(server.url, "/requests", headers={"authorization": f"Bearer {key}-key"})
    assert reply.status == 200 and reply.headers["content-type"] == "application/json"
    found: dict[str, Any] = reply.json
    return found


@contextmanager
def chat_of_bob(server: Server) -> Iterator[None]:
    """Hold a chat open whose answer is not read."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=TIMEOUT)
    body = {"messages": [{"role": "user", "content": "a secret"}], "max_tokens": 5, "priority": -3}
    headers = {"content-type": "application/json", "authorization": "Bearer bob-key", "x-request-id": "of-bob"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body).encode(), headers)
    try:
        yield
    finally:
        connection.close()


def test_what_is_open_on_a_server(locked: Server) -> None:
    endless: dict[str, Any] = {"n": 128, "max_tokens": 200, "ignore_eos": True}
    with Client(locked.address, api_key="alice-key") as alice:
        stream = alice.generate("another secret", request_id="of-alice", **endless)
        next(stream)
        with chat_of_bob(locked):
            wait_until(lambda: asked(locked, "root")["num_open"] == 2, "both are listed")
            first, second = asked(locked, "root")["requests"]
            found = [[row[name] for name in ("kind", "state", "key")] for row in (first, second)]
            assert found == [["completion", "decode", "alice"], ["chat", "waiting", "bob"]]
            assert first["output_tokens"] >= 1 and first["age_seconds"] >= second["age_seconds"] > 0
            assert first["id"] == "of-alice" and second["id"].startswith("chatcmpl-of-bob-")
            assert second["prompt_tokens"] > 0 == second["output_tokens"] and second["priority"] == -3
            assert "secret" not in json.dumps([first, second])
            assert [row["key"] for row in asked(locked, "alice")["requests"]] == ["alice"]
            assert [row["id"] for row in asked(locked, "bob")["requests"]] == [second["id"]]
            assert request(locked.url, "/requests").status == 401
            alice.abort("of-alice")
    wait_until(lambda: asked(locked, "root") == {"num_open": 0, "requests": []}, "both are over")


def test_without_keys_all_are_seen(server: Server) -> None:
    reply = request(server.url, "/requests")
    assert reply.status == 200 and set(reply.json) == {"num_open", "requests"}
    assert "/requests" in request(server.url, "/openapi.json").json["paths"]
