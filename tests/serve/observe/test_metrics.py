"""Tests of the counts of requests, and of the metrics page, read by Prometheus' own parsers."""

import http.client
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
from command_line import run_inferc
from http_calls import TIMEOUT, request
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse_plain
from serving import Server, wait_until

from inferc.client import Client, ServerError
from inferc.errors import RequestError
from inferc.serve.models.metrics import OUTCOMES, Ended, ModelMetrics, Objectives, Outcome
from inferc.serve.observe.metrics_page import METRICS, SERVER_METRICS, documentation
from inferc.system.resources import total_memory_bytes

FINISHED_REASONS = ("stop", "length", "abort", "error")  # of vLLM
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


def ended(outcome: Outcome = "stop", first: float = 0.3, last: float = 0.3, count: int = 1, **more: Any) -> Ended:
    """A request that came at 100 on the clock; first, last: seconds from there."""
    return Ended(outcome, 100.0, 5, 0, [100 + first], [100 + last], [count], **more)


@pytest.mark.parametrize(
    ("request_", "objectives", "is_good"),
    [
        (ended(), Objectives(), True),
        (ended(first=0.6, last=0.6), Objectives(), False),
        (ended(first=0.6, last=0.6), Objectives(ttft_ms=None), True),
        (ended(first=0.6, last=0.6, ttft_ms=700.0), Objectives(), True),
        (ended(ttft_ms=200.0), Objectives(), False),
        (ended(last=1.3, count=11), Objectives(), True),
        (ended(last=1.5, count=11), Objectives(), False),
        (ended(last=1.5, count=11), Objectives(tbt_ms=None), True),
        (ended(last=1.5, count=11, tbt_ms=121.0), Objectives(), True),
        (ended(first=math.nan, last=math.nan, count=0), Objectives(), False),
        (ended("error"), Objectives(), False),
    ],
)
def test_a_request_is_good_within_its_objectives(request_: Ended, objectives: Objectives, is_good: bool) -> None:
    metrics = ModelMetrics(objectives)
    metrics.ended(request_)
    assert (metrics.num_counted, metrics.num_good) == (1, int(is_good))


def test_who_leaves_is_neither_good_nor_bad() -> None:
    metrics = ModelMetrics()
    for outcome in ("left", "aborted"):
        metrics.ended(ended(outcome))
    metrics.refused("queue_full")
    assert (metrics.num_counted, metrics.num_good, metrics.refusals["queue_full"]) == (1, 0, 1)


# ------------------------------------------------------------------------------------------------- the page


def page(url: str, timeout: float = TIMEOUT) -> dict[str, float]:
    """Every sample by name and labels, model_name left out."""
    reply = request(url, "/metrics", timeout=timeout)
    assert reply.status == 200 and reply.headers["content-type"].startswith("text/plain; version=")
    found = {}
    for family in parse_plain(reply.body.decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sample.labels.items() if name != "model_name")
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


@pytest.fixture(scope="module")
def own(tiny_artifact: Path) -> Any:
    """A server of one test's own, and what it counted."""
    with Server(tiny_artifact, "--metrics-compat", "vllm", "--max-num-seqs", "2", "--kv-memory", "8MB") as server:
        yield server


def test_requests_are_counted_as_they_went(own: Server) -> None:
    with Client(own.address, retries=0) as client:
        prompt = list(range(5, 69))
        client.complete(prompt, max_tokens=10, n=2, **GREEDY)
        client.complete(prompt, max_tokens=5, stop_token_ids=range(client.model_info().vocab_size), **GREEDY)
        with pytest.raises(RequestError, match="the prompt has 300 tokens"):
            client.complete([5] * 300, max_tokens=1)
        stream = client.generate("abc", n=64, max_tokens=200, ignore_eos=True, request_id="mine")
        next(stream)
        client.abort("mine")
        with pytest.raises(ServerError, match="CANCELLED"):
            list(stream)
        left = client.generate("abc", n=64, max_tokens=200, ignore_eos=True)
        next(left)
        left.close()
    wait_until(lambda: page(own.url)["inferc_requests_open"] == 0, "all are over")
    request(own.url, "/v1/completions", {"prompt": "a", "max_tokens": 0})
    request(own.url, "/no/such/path")
    found = page(own.url)
    outcomes = {
        each: found[f"inferc_requests_total{{outcome={each}}}"] for each in ("length", "stop", "invalid", "refused")
    }
    assert outcomes == {"length": 1, "stop": 1, "invalid": 1, "refused": 0}
    assert (found["inferc_requests_total{outcome=aborted}"], found["inferc_requests_total{outcome=left}"]) == (1, 1)
    assert found["inferc_requests_judged_total"] == 2 and found["inferc_requests_good_total"] == 2
    for name in ("time_to_first_token", "request_queue"):
        assert found[f"inferc_{name}_seconds_count"] == 4 and 0 < found[f"inferc_{name}_seconds_sum"] < 30
    assert found["inferc_request_seconds_count"] == 2 and found["inferc_request_output_tokens_count"] == 3
    assert found["inferc_request_output_tokens_sum"] == 21 and found["inferc_request_prompt_tokens_sum"] == 128
    assert found["inferc_time_between_tokens_seconds_bucket{le=+Inf}"] >= 18
    assert found["inferc_prefix_cache_hit_tokens_total"] >= 32
    assert found["inferc_sequences_max"] == 2 and found["inferc_model_state{state=serving}"] == 1
    assert found["inferc_steps_total"] == found["inferc_step_tokens_count"] > 15
    assert 0 < found["inferc_device_busy_seconds_total"] < 30
    assert found["inferc_step_sequences_total"] <= 2 * found["inferc_steps_total"]
    assert found["inferc_http_responses_total{path=/v1/completions,status=400}"] == 1
    assert found["inferc_http_responses_total{path=other,status=404}"] == 1
    complete = "inferc.v1.InferenceService.Complete"
    assert found[f"inferc_grpc_calls_total{{code=OK,method={complete}}}"] == 2
    assert found[f"inferc_grpc_calls_total{{code=INVALID_ARGUMENT,method={complete}}}"] == 1
    assert 0 <= found["inferc_event_loop_lag_seconds"] < 10


def test_tokens_behind_a_stop_string_are_made_and_in_no_answer(own: Server) -> None:
    def counted() -> tuple[float, float]:
        wait_until(lambda: page(own.url)["inferc_sequences_running"] == 0, "the engine has nothing to do")
        found = page(own.url)
        return found["inferc_request_output_tokens_sum"], found["inferc_output_tokens_total"]

    with Client(own.address) as client:
        answers, made = counted()
        (whole,) = client.complete("def add(", max_tokens=40, **GREEDY)
        assert counted() == (answers + 40, made + 40)
        stop = whole.text[8:10]
        (cut,) = client.complete("def add(", max_tokens=40, stop=stop, **GREEDY)
    assert cut.finish_reason == "stop" and whole.text.startswith(cut.text) and len(cut.token_ids) < 40
    told, done = counted()
    assert told == answers + 40 + len(cut.token_ids)
    assert len(cut.token_ids) <= done - made - 40 <= 40, "how many it made beyond depends on when it heard of the end"


@pytest.mark.slow
def test_time_to_first_token_is_from_the_arrival_of_a_request(own: Server) -> None:
    """The arrival is that of the head over HTTP and of the call over gRPC: what comes before the engine counts."""

    def gain(ask: Callable[[], Any]) -> list[float]:
        before = page(own.url)
        ask()
        after = page(own.url)
        names = ("time_to_first_token", "request", "request_prepare")
        return [after[f"inferc_{name}_seconds_sum"] - before[f"inferc_{name}_seconds_sum"] for name in names]

    @contextmanager
    def suspended() -> Iterator[None]:
        own.engine.suspend()
        try:
            yield
        finally:
            own.engine.resume()

    def half_a_second() -> None:
        """Let a call come to its deadline: the time that it takes is what is measured here."""
        with Client(own.address, timeout=0.5, retries=0) as client, pytest.raises(ServerError, match="DEADLINE"):
            client.complete("a", max_tokens=1)

    def slow_body() -> None:
        body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
        connection = http.client.HTTPConnection(urlsplit(own.url).netloc, timeout=30)
        connection.putrequest("POST", "/v1/completions")
        for name, value in (("content-type", "application/json"), ("content-length", str(len(body)))):
            connection.putheader(name, value)
        connection.endheaders()
        with suspended():
            half_a_second()
        connection.send(body)
        assert connection.getresponse().status == 200
        connection.close()

    def scored() -> None:
        with Client(own.address) as client, ThreadPoolExecutor() as pool:
            with suspended():
                waiting = pool.submit(client.complete, [5, 6, 7], max_tokens=1, prompt_logprobs=1)
                wait_until(lambda: page(own.url)["inferc_requests_open"] == 1, "it waits for its prompt's scores")
                half_a_second()
            waiting.result(30)

    for ask in (slow_body, scored):
        assert all(0.4 < each < 20 for each in gain(ask)), ask


def test_every_metric_is_there_under_its_names(own: Server) -> None:
    names = {re.split(r"[{]|_bucket|_count$|_sum$", name)[0] for name in page(own.url)}
    shown = {each.name for each in METRICS} - {"inferc_requests_refused_total"}  # which has labels once one was refused
    assert shown | {name for name, *_ in SERVER_METRICS} <= names
    # What vLLM's dashboards and the Gateway API inference extension read.
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "cache_config_info",
        "prompt_tokens_total",
        "generation_tokens_total",
        "num_preemptions_total",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "request_success_total",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
        "iteration_tokens_total",
    ):
        assert f"vllm:{name}" in names, name
    reasons = {name for name in page(own.url) if name.startswith("vllm:request_success_total")}
    assert reasons == {f"vllm:request_success_total{{finished_reason={each}}}" for each in FINISHED_REASONS}


def test_the_machine_is_measured_with_the_server(own: Server) -> None:
    before, after = page(own.url), page(own.url)
    assert after["inferc_host_cpus"] == os.cpu_count()
    assert 0 < after["inferc_host_memory_available_bytes"] <= after["inferc_host_memory_bytes"]
    assert after["inferc_host_memory_bytes"] == total_memory_bytes()
    assert 0 < before["inferc_host_cpu_busy_seconds_total"] <= after["inferc_host_cpu_busy_seconds_total"]


def test_ends_of_requests_have_the_names_that_vllm_gives_them() -> None:
    metrics = ModelMetrics()
    for outcome in OUTCOMES:
        metrics.ended(ended(outcome))
    known: Any = SimpleNamespace(model=SimpleNamespace(engine=SimpleNamespace(metrics=metrics)))
    (shown,) = [each for each in METRICS if each.vllm == "request_success_total"]
    assert shown.numbers is not None and shown.vllm_numbers is not None
    assert {labels for labels, _ in shown.numbers(known)} == {(outcome,) for outcome in OUTCOMES}
    # It hears of no request that was not begun.
    assert dict(shown.vllm_numbers(known)) == {("stop",): 1, ("length",): 1, ("error",): 1, ("abort",): 2}


def test_both_of_prometheus_formats(own: Server) -> None:
    accept = "application/openmetrics-text; version=1.0.0"
    reply = request(own.url, "/metrics", headers={"accept": accept})
    assert reply.headers["content-type"].startswith("application/openmetrics-text")
    parsed: Any = parse_open(reply.body.decode())  # type: ignore[no-untyped-call]
    names = {family.name for family in parsed}
    assert "inferc_requests" in names and "inferc_time_to_first_token_seconds" in names


@pytest.mark.parametrize("version", ["abc", "1.x", ""])
def test_a_version_that_is_none_gets_the_plain_format(url: str, version: str) -> None:
    reply = request(url, "/metrics", headers={"accept": f"application/openmetrics-text; version={version}"})
    assert reply.status == 200 and "inferc_requests" in reply.body.decode()


def test_other_names_only_where_they_are_asked_for(url: str) -> None:
    assert not any(name.startswith("vllm:") for name in page(url))


@pytest.mark.slow
def test_a_hung_engine_does_not_hold_up_the_page(tiny_artifact: Path) -> None:
    with Server(tiny_artifact) as server:
        page(server.url)
        server.engine.suspend()
        assert page(server.url, timeout=5)["inferc_model_state{state=serving}"] == 1
        server.engine.resume()


def test_the_documentation_has_every_metric() -> None:
    text = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    assert documentation() in text, "copy the table that inferc.serve.observe.metrics_page.documentation() gives"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--goodput-ttft-ms", "-1"), "--goodput-ttft-ms -1: expected a number of milliseconds, 0 or more"),
        (("--metrics-compat", "tgi"), "--metrics-compat tgi: expected none or vllm"),
    ],
)
def test_bad_options(tiny_artifact: Path, options: tuple[str, ...], message: str) -> None:
    done = run_inferc("serve", tiny_artifact, *options)
    assert done.returncode == 2 and done.stderr == f"inferc: {message}\n"
