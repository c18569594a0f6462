"""A server watched from outside, and one cause of slowness after another planted and found."""

import contextlib
import json
import math
import os
import pty
import socket
import subprocess
import termios
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from command_line import run_inferc
from loads import load, stuttering
from serving import ENV, INFERC, Server, wait_until

from inferc.client import Client
from inferc.client.diagnosis import Objectives, diagnose
from inferc.client.scrape import Change, Endpoint, Page
from inferc.errors import ConfigError, InfercError


def doctor(url: str, *options: str) -> Any:
    done = run_inferc("doctor", url, "--seconds", "3", "--json", *options)
    found = json.loads(done.stdout)
    assert done.returncode == int(not found["healthy"]), done.stderr
    (model,) = found["models"]
    assert bool(model["symptoms"]) is not found["healthy"]
    return model


# ---------------------------------------------------------------------------------------------------- pages

TEXT = """
inferc_requests_open{model_name="m"} 1
inferc_steps_total{model_name="m"} %d
inferc_model_state{model_name="m",state="serving"} 1
inferc_time_to_first_token_seconds_bucket{model_name="m",le="0.1"} %d
inferc_time_to_first_token_seconds_bucket{model_name="m",le="0.5"} %d
inferc_time_to_first_token_seconds_bucket{model_name="m",le="+Inf"} %d
inferc_time_to_first_token_seconds_count{model_name="m"} %d
inferc_time_to_first_token_seconds_sum{model_name="m"} %g
"""


def test_what_happened_between_two_pages() -> None:
    before = Page.parse(TEXT % (100, 10, 10, 10, 10, 0.5), at=0.0)
    after = Page.parse(TEXT % (150, 10, 20, 20, 20, 3.5), at=10.0)
    change = Change(before, after, "m")
    assert change.rate("inferc_steps_total") == 5.0 and change.state == "serving"
    assert change.mean("inferc_time_to_first_token_seconds") == pytest.approx(0.3)
    assert change.quantile("inferc_time_to_first_token_seconds", 0.5) == pytest.approx(0.3)
    again = Change(after, Page.parse(TEXT % (7, 0, 2, 2, 2, 0.4), at=11.0), "m")
    assert again.gain("inferc_steps_total") == 7, "the engine began anew"


@pytest.mark.parametrize(("late", "advice"), [(4, "the way to it is slow"), (8, "own process comes late")])
def test_one_stall_is_not_the_cause(late: int, advice: str) -> None:
    """`late` of 11 looks saw the server's loop late; a stall of a second is seen by four in a row."""
    texts = [
        TEXT % (100, 10, 10, 10, 10, 0.5) + f"inferc_event_loop_lag_seconds {0.5 * (n < late)}\n" for n in range(11)
    ]
    pages = [Page.parse(text, at=0.3 * n) for n, text in enumerate(texts)]
    cause = diagnose(pages, "m", [0.2] * 30, Objectives()).cause
    assert cause is not None and cause.cause == "network" and advice in cause.advice


@pytest.mark.parametrize("text", ["ftp://a", "http://a/path", "http://a:x", "", "http://", "http://[::1"])
def test_what_is_no_endpoint(text: str) -> None:
    done = run_inferc("doctor", text)
    assert done.returncode == 2 and "expected the HTTP endpoint of a server" in done.stderr


def test_endpoints() -> None:
    assert str(Endpoint.parse("127.0.0.1:81")) == "http://127.0.0.1:81"
    assert str(Endpoint.parse("https://[::1]")) == "https://[::1]:443"


def test_top_ends_at_q(url: str) -> None:
    """The terminal is left as it was."""
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    process = subprocess.Popen(
        [*INFERC, "top", url, "--interval", "0.3"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**ENV, "TERM": "xterm"},
    )
    seen, reading = b"", None
    try:
        while b"tokens out" not in seen:
            seen += os.read(ours, 4096)
        reading = threading.Thread(target=drain, args=(ours,))
        reading.start()
        os.write(ours, b"xq")
        assert process.wait(20) == 0
        assert termios.tcgetattr(theirs) == before
    finally:
        process.kill()
        process.wait()
        os.close(theirs)
        if reading is not None:
            reading.join()
        os.close(ours)


def drain(terminal: int) -> None:
    """Read what is shown on a terminal until its other side is closed."""
    with contextlib.suppress(OSError):
        while os.read(terminal, 4096):
            pass


class _Stranger(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>\nwhat is {this}\n</html>\n")

    def log_message(self, *args: Any) -> None: ...


def test_a_page_of_somebody_else_and_a_key_that_is_none() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Stranger) as stranger:
        thread = threading.Thread(target=stranger.serve_forever)
        thread.start()
        address = f"127.0.0.1:{stranger.server_port}"
        try:
            with pytest.raises(InfercError, match="/metrics is not that of an inferc server"):
                Page.fetch(Endpoint.parse(address))
            with pytest.raises(ConfigError, match="the API key cannot be sent"):
                Page.fetch(Endpoint.parse(address, api_key="two\nlines"))
        finally:
            stranger.shutdown()
            thread.join()


@pytest.mark.parametrize("command", ["top", "doctor"])
def test_nobody_there_and_somebody_else(
    command: str, served: str, url: str, tiny_artifact: Path, tmp_path: Path
) -> None:
    done = run_inferc(command, "127.0.0.1:9")
    assert done.returncode == 1 and done.stderr.startswith("inferc: http://127.0.0.1:9: no server answers")
    done = run_inferc(command, served)  # the gRPC port
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and "no server answers" in done.stderr
    keys = tmp_path / "keys.json"
    key = run_inferc("keys", "create", keys, "me").stdout.strip()
    with Server(tiny_artifact, "--api-keys", str(keys)) as server:
        done = run_inferc(command, server.url)
        assert done.returncode == 1 and "the server wants an API key; give --api-key" in done.stderr
        options = ("--count", "1", "--interval", "0.2") if command == "top" else ("--seconds", "0.5")
        assert run_inferc(command, server.url, "--api-key", key, *options).returncode == 0


# ------------------------------------------------------------------------------------------------------ top


def wait_until_loaded(server: Server, running: int = 0, waiting: int = 0) -> None:
    """Wait until so many sequences run, and so many wait for a place."""

    def is_loaded() -> bool:
        loads = client.loads()
        return loads.num_running >= running and loads.num_waiting >= waiting

    with Client(server.address) as client:
        wait_until(is_loaded, "the load is there")


@pytest.mark.slow
def test_top_shows_what_goes_on(tiny_artifact: Path) -> None:
    with Server(tiny_artifact, "--max-num-seqs", "4") as server, load(server, 6, max_tokens=100):
        wait_until_loaded(server, running=4)
        done = run_inferc("top", server.url, "--json", "--count", "2", "--interval", "1")
        found = json.loads(done.stdout)
        assert len(found["looks"]) == 2 and found["seconds"] == pytest.approx(1.0, abs=0.7)
        (model,) = found["models"]
        assert model["state"] == "serving" and model["output_tokens_per_s"] > 50 and model["requests_per_s"] > 0.5
        assert model["places"] == 4 and model["open"] >= 4 and 0.5 < model["batch_fill"] <= 1
        assert 0 < model["device_busy"] <= 1 and model["ttft_ms"]["p50"] <= model["ttft_ms"]["p99"]
        assert model["tbt_ms"]["p90"] > 0 and model["restarts"] == 0
        screen = run_inferc("top", server.url, "--count", "3", "--interval", "0.3").stdout
    for text in (
        "inferc top",
        tiny_artifact.name,
        "serving",
        "TTFT p90",
        "KV cache",
        "device busy",
        "batch filled",
        "█",
    ):
        assert text in screen, screen


def test_top_options(url: str) -> None:
    done = run_inferc("top", url, "--interval", "0")
    assert done.returncode == 2 and "--interval 0: expected 0.05 to 3600 seconds" in done.stderr


# --------------------------------------------------------------------------------------------------- doctor

GAUGES = """
inferc_requests_open{model_name="m"} 8
inferc_model_state{model_name="m",state="serving"} 1
inferc_sequences_max{model_name="m"} 4
inferc_sequences_running{model_name="m"} %d
inferc_sequences_waiting{model_name="m"} %d
inferc_kv_usage_ratio{model_name="m"} %g
inferc_preemptions_total{model_name="m"} %d
inferc_output_tokens_total{model_name="m"} %d
"""


def looks(running: int, waiting: int, kv_usage: float, preemptions: int = 0) -> list[Page]:
    """Three of ten seconds, in which no request ends and none gets its first token."""
    counts = ((0, 1000), (preemptions // 2, 1500), (preemptions, 2000))
    return [
        Page.parse(GAUGES % (running, waiting, kv_usage, preempted, tokens), at=5.0 * number)
        for number, (preempted, tokens) in enumerate(counts)
    ]


def test_who_waits_for_a_first_token_that_does_not_come_is_a_symptom() -> None:
    """There is no latency to be seen of those who still wait."""
    found = diagnose(looks(running=4, waiting=4, kv_usage=0.3), "m", [0.001], Objectives())
    assert found.symptoms == ("time to first token: sequences wait, and none has had one within 10.0 s",)
    assert found.cause is not None and found.cause.cause == "batch"
    assert not diagnose(looks(running=4, waiting=0, kv_usage=0.3), "m", [0.001], Objectives()).symptoms


def test_preemptions_are_seen_before_a_request_has_ended() -> None:
    found = diagnose(looks(running=4, waiting=4, kv_usage=0.8, preemptions=12), "m", [0.001], Objectives())
    assert found.cause is not None and found.cause.cause == "memory"
    assert "3.00 preemptions a request" in found.cause.evidence


def test_a_server_that_no_try_reached() -> None:
    found = diagnose(looks(running=1, waiting=0, kv_usage=0.1), "m", [math.nan, math.nan], Objectives())
    assert found.symptoms == ("the way to the server and back takes –, 2 tries failed",)
    assert found.cause is not None and "the way to it is slow or loses packets" in found.cause.advice


SLOW = """
inferc_requests_open{model_name="m"} 8
inferc_model_state{model_name="m",state="serving"} 1
inferc_sequences_max{model_name="m"} 4
inferc_sequences_running{model_name="m"} 4
inferc_sequences_waiting{model_name="m"} 4
inferc_kv_usage_ratio{model_name="m"} 0.3
"""


class _Waiting(BaseHTTPRequestHandler):
    """A server all of whose places are taken, and with sequences that wait for one."""

    text = SLOW

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.text.encode())

    def log_message(self, *args: Any) -> None: ...


class _Empty(_Waiting):
    text = "inferc_event_loop_lag_seconds 0\n"


def ask(command: str, handler: type[BaseHTTPRequestHandler], *options: str) -> Any:
    """Run a command against a server that answers all requests alike."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            return run_inferc(command, f"127.0.0.1:{server.server_port}", *options)
        finally:
            server.shutdown()
            thread.join()


HASTY = ("--seconds", "0.1")


def test_top_draws_a_server_and_one_without_a_model() -> None:
    options = ("--interval", "0.05", "--count", "2")
    screen = ask("top", _Waiting, *options).stdout
    for text in ("inferc top", "m  serving", "4 running of 4, 4 waiting", "KV cache            30 %  "):
        assert text in screen, screen
    found = json.loads(ask("top", _Waiting, *options, "--json").stdout)
    assert len(found["looks"]) == 2 and found["models"] == found["looks"][-1]["models"]
    (model,) = found["models"]
    assert (model["running"], model["waiting"], model["kv_usage"]) == (4, 4, 0.3)
    assert "no model is loaded" in ask("top", _Empty, *options).stdout


def test_people_and_programs_are_told_the_same() -> None:
    done = ask("doctor", _Waiting, *HASTY)
    assert done.returncode == 1, done.stderr
    first, *lines = done.stdout.splitlines()
    assert first == "m:" and lines[0].startswith("  symptom  requests are open, and no token came within")
    marks = [line.split()[0] for line in lines[1:] if line[:3] == "  " + line[2:3] and line[2] != " "]
    assert marks.count("CAUSE") == 1 and set(marks) <= {"CAUSE", "also", "ok", "–"}
    done_json = ask("doctor", _Waiting, *HASTY, "--json")
    found = json.loads(done_json.stdout)
    (model,) = found["models"]
    assert done_json.returncode == 1 and not found["healthy"] and model["model"] == "m" and model["cause"] == "batch"
    assert f"           → {model['advice']}" in lines
    assert {"memory", "batch", "cache", "network"} <= {each["cause"] for each in model["checks"]}


def test_a_server_without_a_model_is_told() -> None:
    done = ask("doctor", _Empty, *HASTY)
    assert done.returncode == 1 and "no model is loaded" in done.stderr
    done = run_inferc("doctor", "127.0.0.1:9", "--seconds", "0")
    assert done.returncode == 2 and "--seconds 0: expected a number above 0" in done.stderr


def test_a_healthy_server(tiny_artifact: Path) -> None:
    with Server(tiny_artifact) as server:
        with load(server, 1, 0.1, max_tokens=5):
            found = doctor(server.url, "--ttft-ms", "5000", "--tbt-ms", "2000", "--rtt-ms", "1000")
        assert not found["symptoms"] and found["cause"] is None and found["numbers"]["ttft_p90_ms"] > 0
        done = run_inferc("doctor", server.url, "--seconds", "0.5", "--rtt-ms", "1000")
        assert done.returncode == 0 and done.stdout.startswith(f"{tiny_artifact.name}: nothing is wrong (")


@pytest.mark.slow
def test_memory_pressure(tiny_artifact: Path) -> None:
    options = ("--kv-memory", "144KiB", "--no-prefix-cache")  # one of these prompts has all of it
    with Server(tiny_artifact, *options) as server, load(server, 6, prompt_len=230, max_tokens=25):
        wait_until_loaded(server, running=1, waiting=4)
        found = doctor(server.url, "--ttft-ms", "5")
    assert found["cause"] == "memory" and "--kv-memory" in found["advice"]
    assert "KV cache" in found["checks"][1]["evidence"][0]


@pytest.mark.slow
def test_a_batch_without_places(tiny_artifact: Path) -> None:
    with Server(tiny_artifact, "--max-num-seqs", "2") as server, load(server, 12, max_tokens=100):
        wait_until_loaded(server, running=2, waiting=8)
        found = doctor(server.url, "--ttft-ms", "50")
        shown = run_inferc("doctor", server.url, "--seconds", "2", "--ttft-ms", "50")
    assert found["cause"] == "batch" and "--max-num-seqs" in found["advice"]
    assert [check["cause"] for check in found["checks"]] == ["engine", "memory", "batch", "cache", "network", "device"]
    assert not found["checks"][1]["found"]
    assert shown.returncode == 1
    lines = [line.strip() for line in shown.stdout.splitlines()]
    assert lines[0] == f"{tiny_artifact.name}:" and lines[1].startswith("symptom  time to first token: p90 is")
    assert any(line.startswith("CAUSE    batch configuration") for line in lines)


def test_cache_misses(tiny_artifact: Path) -> None:
    with Server(tiny_artifact) as server:
        with Client(server.address) as client:
            for _ in range(40):  # a prompt that all share
                client.complete([7] * 200, max_tokens=1)
        with load(server, 1, prompt_len=200, fresh=True, max_tokens=2):
            found = doctor(server.url, "--ttft-ms", "0.1")
    assert found["cause"] == "cache" and "cache_priority" in found["advice"]
    (check,) = [check for check in found["checks"] if check["cause"] == "cache"]
    assert check["evidence"][0].startswith("0 % of prompt tokens were found in the prefix cache, ")


@contextlib.contextmanager
def far_away(url: str, seconds: float) -> Iterator[str]:
    """Return the server as seen over a network that delays each direction by `seconds`."""
    target = urlsplit(url)
    listener = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                time.sleep(seconds)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def serve() -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            with near, socket.create_connection((str(target.hostname), int(target.port or 0))) as far:
                there = threading.Thread(target=pump, args=(near, far))
                there.start()
                pump(far, near)
                there.join()

    thread = threading.Thread(target=serve)
    thread.start()
    threads.append(thread)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


@pytest.mark.slow
def test_a_long_way(tiny_artifact: Path) -> None:
    with (
        Server(tiny_artifact) as server,
        far_away(server.url, 0.15) as url,
        load(server, 1, 0.1, max_tokens=5),
    ):
        found = doctor(url, "--ttft-ms", "5000", "--tbt-ms", "2000")
    assert found["cause"] == "network" and "the way to it is slow" in found["advice"]
    assert any("the way to the server and back takes" in symptom for symptom in found["symptoms"])
    assert found["numbers"]["rtt_ms"] >= 300


@pytest.mark.slow
def test_a_server_that_gets_no_core(tiny_artifact: Path) -> None:
    with (
        Server(tiny_artifact) as server,
        load(server, 1, 0.1, max_tokens=5),
        stuttering(server.process.pid, runs=0.3, stands=0.3),
    ):
        page = Endpoint.parse(server.url)
        wait_until(lambda: Page.fetch(page).sum("inferc_event_loop_lag_seconds") > 0.1, "its own loop comes late")
        found = doctor(server.url, "--ttft-ms", "5000", "--tbt-ms", "2000", "--rtt-ms", "20")
    assert found["cause"] == "network" and "The server's own process comes late" in found["advice"]


@pytest.mark.slow
def test_an_engine_that_gets_no_core(tiny_artifact: Path) -> None:
    """None of the four: steps are long by themselves."""
    with (
        Server(tiny_artifact) as server,
        load(server, 2, max_tokens=100),
        stuttering(server.engine.pid, runs=0.05, stands=0.2),
    ):
        wait_until_loaded(server, running=2)
        found = doctor(server.url, "--ttft-ms", "0.01", "--tbt-ms", "1000", "--rtt-ms", "1000")
    assert found["cause"] == "device" and "something else uses the cores" in found["advice"]
