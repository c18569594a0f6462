"""Log lines that programs read, and traces that an OpenTelemetry collector gets."""

import json
import logging
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from command_line import run_inferc
from http_calls import request
from otlp_collector import Collector
from serving import Server, wait_until

from inferc.client import Client
from inferc.errors import RequestError
from inferc.serve.models.metrics import Ended
from inferc.serve.observe import tracing
from inferc.serve.observe.tracing import Tracing
from inferc.serve.protos.inferc.v1 import inference_pb2 as pb
from inferc.system.logging import REQUEST_ID, JsonFormatter, TextFormatter

COMPLETIONS = "/v1/completions"


# -------------------------------------------------------------------------------------------------------- logs


def record(message: str, *args: Any, **extra: Any) -> logging.LogRecord:
    made = logging.LogRecord("inferc.serve", logging.INFO, "file.py", 5, message, args, None)
    made.__dict__.update(extra)
    return made


def test_lines_for_people_and_for_programs() -> None:
    token = REQUEST_ID.set("mine")
    try:
        line = TextFormatter("engine").format(record("took %d s", 5, model="m"))
        assert re.fullmatch(r"\S+ \S+ engine INFO inferc\.serve: took 5 s \[request_id=mine model=m\]", line)
        entry = json.loads(JsonFormatter("engine").format(record("took %d s\n", 5, model="m")))
    finally:
        REQUEST_ID.reset(token)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", entry.pop("time"))
    assert entry == {
        "level": "info",
        "logger": "inferc.serve",
        "process": "engine",
        "message": "took 5 s\n",
        "request_id": "mine",
        "model": "m",
    }
    assert "request_id" not in json.loads(JsonFormatter().format(record("idle")))


@pytest.mark.slow
def test_a_server_logs_requests_as_objects(tiny_artifact: Path) -> None:
    with Server(tiny_artifact, "--log-format", "json", "--log-requests") as server:
        body = {"prompt": [5] * 40, "max_tokens": 4, "ignore_eos": True}
        request(server.url, COMPLETIONS, body, {"x-request-id": "by-http"})
        with Client(server.address) as client:
            client.complete([5] * 40, max_tokens=3, ignore_eos=True, request_id="by-grpc")
            with pytest.raises(RequestError):
                client.complete([5] * 10, max_tokens=1, logit_bias={1 << 20: 1.0})
        lines = [json.loads(line) for line in server.log.splitlines()]
    assert {line["process"] for line in lines} == {"main", "engine"}
    over = [line for line in lines if line["message"].startswith("request over")]
    assert [(line["request_id"], line["message"]) for line in over[:2]] == [
        ("by-http", "request over: length"),
        ("by-grpc", "request over: length"),
    ]
    assert over[2]["message"] == "request over: invalid" and over[2]["ttft_ms"] is None
    first, second = over[:2]
    assert (first["prompt_tokens"], first["cached_tokens"], first["output_tokens"]) == (40, 0, 4)
    assert second["cached_tokens"] == 39 and second["output_tokens"] == 3 and second["model"] == tiny_artifact.name
    assert 0 <= first["queue_ms"] <= first["ttft_ms"] <= first["total_ms"]


def test_requests_are_not_logged_unasked(server: Server) -> None:
    request(server.url, COMPLETIONS, {"prompt": "secret words", "max_tokens": 1})
    assert "request over" not in server.log and "secret words" not in server.log


# ------------------------------------------------------------------------------------------------------ traces


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


def attributes(span: Any) -> dict[str, Any]:
    return {entry.key: getattr(entry.value, entry.value.WhichOneof("value")) for entry in span.attributes}


def test_a_trace_goes_from_the_request_to_its_steps(tiny_artifact: Path, collector: Collector) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    body = {"prompt": [5] * 40, "max_tokens": 10, "ignore_eos": True}
    with Server(
        tiny_artifact, "--otlp-endpoint", collector.url, "--max-num-batched-tokens", "16", "--max-num-seqs", "8"
    ) as server:
        request(
            server.url, COMPLETIONS, body, {"traceparent": parent, "tracestate": "a=1,b=x y", "x-request-id": "mine"}
        )
        call = grpc.insecure_channel(server.address).unary_unary(
            "/inferc.v1.InferenceService/Complete", pb.GenerateRequest.SerializeToString, pb.CompleteResponse.FromString
        )
        other = "00-1af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        metadata = (("traceparent", other), ("tracestate", "a=2"), ("tracestate", "c=3"))
        call(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5])), metadata=metadata)
        request(server.url, COMPLETIONS, {"prompt": [5] * 10, "max_tokens": 1, "logit_bias": {str(1 << 20): 1.0}})
        server.terminate()
        assert server.process.wait(30) == 0, "what is left is sent at the end"
    spans = {span.name: span for span in collector.spans if span.trace_id.hex() == parent.split("-")[1]}
    assert {span.trace_state for span in spans.values()} == {"a=1,b=x y"}
    assert {span.trace_state for span in collector.spans if span.trace_id.hex() == other.split("-")[1]} == {"a=2,c=3"}
    root = spans.pop(f"generate {tiny_artifact.name}")
    assert root.parent_span_id.hex() == parent.split("-")[2] and set(spans) == {"prepare", "queue", "prefill", "decode"}
    assert all(span.parent_span_id == root.span_id for span in spans.values())
    found = attributes(root)
    assert found["gen_ai.usage.input_tokens"] == 40 and found["gen_ai.usage.output_tokens"] == 10
    assert found["gen_ai.response.id"] == "mine" and 0 < found["gen_ai.server.time_to_first_token"] < 20
    times = [spans[name].start_time_unix_nano for name in ("prepare", "queue", "prefill", "decode")]
    assert root.start_time_unix_nano <= times[0] and times == sorted(times) and times[-1] <= root.end_time_unix_nano
    steps = [attributes(event) for name in ("prefill", "decode") for event in spans[name].events]
    assert len(steps) == 10 and [step["inferc.tokens"] for step in steps] == [1] * 10
    numbers = [step["inferc.step"] for step in steps]
    assert numbers == list(range(numbers[0], numbers[0] + 10)) and numbers[0] == 3, "after two chunks of the prompt"
    assert all(0 < step["inferc.step_ms"] < 20_000 for step in steps)
    (failed,) = [span for span in collector.spans if span.status.code == 2]
    assert failed.status.message == "invalid"


@pytest.mark.slow
def test_only_a_share_of_requests_is_traced(tiny_artifact: Path, collector: Collector) -> None:
    with Server(tiny_artifact, "--otlp-endpoint", collector.url, "--trace-ratio", "0") as server:
        for header in ({}, {"traceparent": "nonsense"}, {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}):
            request(server.url, COMPLETIONS, {"prompt": "a", "max_tokens": 2, "ignore_eos": True}, header)
        server.terminate()
        server.process.wait(30)
    assert {span.trace_id.hex() for span in collector.spans} == {"a" * 32}, "whose client wants it"


@pytest.mark.slow
def test_a_collector_that_is_not_there_is_nobodys_problem(tiny_artifact: Path) -> None:
    with Server(tiny_artifact, "--otlp-endpoint", "http://127.0.0.1:9") as server:
        assert request(server.url, COMPLETIONS, {"prompt": "a", "max_tokens": 2}).status == 200
        server.terminate()
        wait_until(lambda: server.process.poll() is not None, "it ends", seconds=30)
        assert server.process.returncode == 0


def test_a_collector_that_does_not_answer_holds_up_no_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracing, "CLOSE_SECONDS", 0.3)
    monkeypatch.setattr(tracing, "EXPORT_SECONDS", 0.6)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        traces = Tracing(f"http://127.0.0.1:{silent.getsockname()[1]}")
        at = 100.0
        stream: Any = SimpleNamespace(arrived_at=at, steps=None, traced=None, num_starts=1)
        traces.begin(stream, "m")
        traces.end(stream, Ended("stop", at, 1, 0, [at], [at], [1]), "m", "r")
        traces.close()
        assert "the collector of traces does not answer" in caplog.text, "it left before those who send had given up"
        for thread in threading.enumerate():
            if thread.name == "inferc-tracing-end":
                thread.join()  # what it says when it gives up would be in another test's log


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--log-format", "xml"), "--log-format xml: expected text or json"),
        (("--otlp-endpoint", "127.0.0.1:4318"), "--otlp-endpoint 127.0.0.1:4318: expected http://HOST:PORT"),
        (("--trace-ratio", "2"), "--trace-ratio 2: expected 0 to 1"),
    ],
)
def test_bad_options(tiny_artifact: Path, options: tuple[str, ...], message: str) -> None:
    done = run_inferc("serve", tiny_artifact, *options)
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1
