"""Tests of HTTP clients that leave, sleep or meet a full server, and of a server or an engine that ends."""

import http.client
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from command_line import run_inferc
from http_calls import request
from serving import Server, wait_until

from inferc.client import Client

COMPLETIONS = "/v1/completions"
ENDLESS: dict[str, Any] = {"prompt": "abc", "n": 64, "max_tokens": 200, "ignore_eos": True}


@pytest.fixture(scope="module")
def slow(tiny_artifact: Path) -> Iterator[Server]:
    """A server that runs one sequence at a time."""
    with Server(tiny_artifact, "--max-num-seqs", "1") as server:
        yield server


def wait_until_idle(server: Server) -> None:
    with Client(server.address) as client:

        def idle() -> bool:
            loads = client.loads()
            return (loads.num_running, loads.num_waiting, loads.num_requests, loads.kv_usage) == (0, 0, 0, 0.0)

        wait_until(idle, "the engine is idle and its cache empty")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_blocks(slow: Server, stream: bool) -> None:
    connection = http.client.HTTPConnection(urlsplit(slow.url).netloc, timeout=20)
    body = json.dumps({**ENDLESS, "stream": stream}).encode()
    connection.request("POST", COMPLETIONS, body, {"content-type": "application/json"})
    with Client(slow.address) as client, closing(connection):
        if stream:
            with closing(connection.getresponse()) as answer:
                assert answer.readline().startswith(b"data: ")
                wait_until(lambda: client.loads().num_running > 0, "it runs")
        wait_until(lambda: client.loads().num_running > 0, "it runs")
    wait_until_idle(slow)


def test_a_reader_that_sleeps_stalls_nobody_and_misses_nothing(url: str, served: str) -> None:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    body = {"prompt": "abc", "n": 32, "max_tokens": 200, "ignore_eos": True, "logprobs": 32, "stream": True}
    options = {"return_token_ids": True}
    with Client(served, timeout=20) as client:
        before = client.loads().output_tokens
        connection.request("POST", COMPLETIONS, json.dumps({**body, **options}), {"content-type": "application/json"})
        answer = connection.getresponse()
        first = answer.readline()
        assert client.complete("abc", max_tokens=20, ignore_eos=True)[0].finish_reason == "length"
        wait_until(lambda: client.loads().output_tokens >= before + 32 * 200 + 20, "all is made while it sleeps", 60)
    lines = [first, *answer.read().split(b"\n")]
    connection.close()
    events = [json.loads(line.removeprefix(b"data: ")) for line in lines if line.startswith(b"data: {")]
    tokens = [0] * 32
    for event in events:
        for choice in event["choices"]:
            tokens[choice["index"]] += len(choice.get("token_ids", ()))
    assert tokens == [200] * 32
    assert len(events) < 32 * 200 / 2, "what it did not read was merged"


def test_a_full_server_says_when_to_come_back(slow: Server) -> None:
    with ThreadPoolExecutor(10) as pool:
        stop = threading.Event()

        def occupy() -> None:
            connection = http.client.HTTPConnection(urlsplit(slow.url).netloc, timeout=60)
            connection.request(
                "POST",
                COMPLETIONS,
                json.dumps({**ENDLESS, "n": 128, "stream": True}),
                {"content-type": "application/json"},
            )
            stop.wait(30)
            connection.close()

        for _ in range(8):
            pool.submit(occupy)
        with Client(slow.address) as client:
            wait_until(lambda: client.loads().num_waiting > 1000, "all are there")
        reply = request(slow.url, COMPLETIONS, {"prompt": "a", "max_tokens": 1})
        stop.set()
    assert reply.status == 429 and int(reply.headers["retry-after"]) >= 1
    assert (reply.error["type"], reply.error["code"]) == ("rate_limit_error", "queue_full")
    wait_until_idle(slow)


def test_sigterm_lets_streams_end(tiny_artifact: Path) -> None:
    with Server(tiny_artifact, "--max-num-seqs", "1") as server, ThreadPoolExecutor() as pool:
        body = {
            "prompt": "abc",
            "n": 4,
            "max_tokens": 200,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        running = pool.submit(request, server.url, COMPLETIONS, body)
        with Client(server.address) as client:
            wait_until(lambda: client.loads().num_running > 0, "it runs")
        server.terminate()
        wait_until(lambda: request(server.url, "/health").status == 503, "health says so")
        reply = request(server.url, COMPLETIONS, {"prompt": "a"})
        assert reply.status == 503 and reply.headers["retry-after"] == "1"
        assert reply.error["message"] == "the server is shutting down and takes no new requests"
        events = running.result(30).events
        assert sum(len(choice.get("token_ids", ())) for event in events for choice in event["choices"]) == 800
        assert server.process.wait(30) == 0
        assert "Traceback" not in server.log


def test_a_dead_engine_ends_streams_with_an_event(tiny_artifact: Path) -> None:
    with Server(tiny_artifact, "--max-num-seqs", "1") as server, ThreadPoolExecutor() as pool:
        running = pool.submit(request, server.url, COMPLETIONS, {**ENDLESS, "stream": True})
        with Client(server.address) as client:
            wait_until(lambda: client.loads().output_tokens > 10, "it runs")
            server.engine.kill()
            events = running.result(30).events
        assert "choices" in events[0] and set(events[-1]) == {"error"}
        assert "SIGKILL" in events[-1]["error"]["message"] and events[-1]["error"]["code"] == "unavailable"


@pytest.mark.slow
def test_no_http_and_a_port_in_use(server: Server, tiny_artifact: Path) -> None:
    port = str(urlsplit(server.url).port)
    done = run_inferc("serve", tiny_artifact, "--grpc-port", "0", "--http-port", port)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        f"inferc: cannot listen on 127.0.0.1:{port} for HTTP: Address already in use; give another --http-port"
    )
    with Server(tiny_artifact, "--no-http") as without:
        assert "http=off" in without.ready
