"""Tests of faults that a server survives: a full disk, a clock that jumps, a log that nobody reads, endless answers."""

import json
import resource
import subprocess
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import psutil
import pytest
from command_line import run_inferc
from http_calls import request
from serving import ENV, FAKETIME, INFERC, Server, wait_until

from inferc.client import Client
from inferc.errors import RequestError

COMPLETIONS = "/v1/completions"
SHORT = {"prompt": "abc", "max_tokens": 5, "ignore_eos": True}


def answers(url: str) -> bool:
    reply = request(url, COMPLETIONS, SHORT)
    return reply.status == 200 and reply.json["usage"]["completion_tokens"] == 5


def time_of(url: str) -> float:
    """The server's own time of day."""
    return parsedate_to_datetime(request(url, "/health").headers["date"]).timestamp()


@pytest.mark.slow
def test_a_recording_that_the_disk_takes_no_more_of(tiny_artifact: Path, tmp_path: Path) -> None:
    file = tmp_path / "calls.jsonl"
    with Server(tiny_artifact, "--record", str(file)) as server:
        assert answers(server.url)
        wait_until(lambda: file.read_bytes().count(b"\n") == 2, "it is recorded")
        size = file.stat().st_size
        psutil.Process(server.engine.pid).rlimit(resource.RLIMIT_FSIZE, (size + 100, size + 100))
        assert all(answers(server.url) for _ in range(5)), "requests are answered all the same"
        wait_until(lambda: "File too large" in server.log, "the log says so")
        assert server.log.count("File too large") == 1 and "Traceback" not in server.log
        lines = file.read_bytes().splitlines()
        assert request(server.url, "/health").status == 200
    assert len(lines) == 2 and all(json.loads(line) for line in lines), "what was written is whole"


@pytest.mark.slow
def test_a_disk_that_is_full_from_the_start(tiny_artifact: Path, tmp_path: Path) -> None:
    def small() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))

    ports = ("--grpc-port", "0", "--http-port", "0")
    command = [*INFERC, "serve", str(tiny_artifact), *ports, "--record", str(tmp_path / "calls.jsonl")]
    done = subprocess.run(command, env=ENV, preexec_fn=small, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "cannot write the recording" in done.stderr.splitlines()[-1], done.stderr
    assert "File too large" in done.stderr and "Traceback" not in done.stderr
    done = run_inferc("serve", tiny_artifact, *ports, "--record", "/dev/full")
    assert done.returncode == 2 and "cannot write the recording /dev/full: it is no file" in done.stderr


def test_keys_are_not_lost_to_a_full_disk(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    run_inferc("keys", "create", file, "alice")
    before = file.read_bytes()

    def small() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))

    # Under coverage, the process could not write what it has measured either.
    env = {name: value for name, value in ENV.items() if not name.startswith("COVERAGE_")}
    command = [*INFERC, "keys", "create", str(file), "bob"]
    done = subprocess.run(command, env=env, preexec_fn=small, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "cannot write" in done.stderr and len(done.stderr.splitlines()) == 1
    assert file.read_bytes() == before and list(tmp_path.iterdir()) == [file]


@pytest.mark.slow
def test_a_log_that_nobody_takes(tiny_artifact: Path) -> None:
    command = [*INFERC, "serve", str(tiny_artifact), "--grpc-port", "0", "--http-port", "0", "--log-requests"]
    with open("/dev/full", "w") as full:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=full, text=True, env=ENV)
    try:
        assert process.stdout is not None
        url = "http://" + process.stdout.readline().split("http=")[1].split()[0]
        assert all(answers(url) for _ in range(3))
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.skipif(not FAKETIME, reason="libfaketime is not installed")
@pytest.mark.parametrize("jump", [pytest.param("+40d", marks=pytest.mark.slow), "-40d"])
def test_a_clock_that_jumps(tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: str) -> None:
    """NTP or a resumed machine lets only the time of day jump."""
    clock = tmp_path / "clock"
    clock.write_text("+0")
    for name, value in {
        "LD_PRELOAD": str(FAKETIME[0]),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_NO_CACHE": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }.items():
        monkeypatch.setitem(ENV, name, value)
    with Server(tiny_artifact, "--hang-seconds", "5", "--max-request-seconds", "60", "--log-format", "json") as server:
        for name in ("LD_PRELOAD", "FAKETIME_TIMESTAMP_FILE", "FAKETIME_NO_CACHE", "DONT_FAKE_MONOTONIC"):
            monkeypatch.delitem(ENV, name)
        engine = server.engine.pid
        with Client(server.address, retries=0) as client:
            before = request(server.url, COMPLETIONS, SHORT).json["created"]
            stream = client.generate("abc", n=64, max_tokens=200, ignore_eos=True)
            tokens = len(next(stream).token_ids)
            clock.write_text(jump)
            tokens += sum(len(piece.token_ids) for piece in stream)
            assert tokens == 64 * 200
            created = request(server.url, COMPLETIONS, SHORT).json["created"]
            assert abs(created - before - 86400 * int(jump[:-1])) < 3600, "it did jump"
            # Asked of the server alone: under libfaketime an engine that is kept busy hangs at times, jump or not.
            wait_until(lambda: time_of(server.url) >= created + 3, "its engine was asked for its counters meanwhile")
            assert answers(server.url) and request(server.url, "/health").status == 200
            assert server.engine.pid == engine and client.loads().num_restarts == 0
        page = request(server.url, "/metrics").body.decode()
        sums = [float(line.split()[-1]) for line in page.splitlines() if "_seconds_sum{" in line]
        assert sums and all(0 <= value < 86400 for value in sums), "no time was counted that was none"


@pytest.mark.slow
def test_an_answer_with_more_likely_tokens_than_one_tells_ends_as_soon_as_it_has_them(tiny_artifact: Path) -> None:
    """33 of each token: a million after 248 of each choice."""
    wants: dict[str, Any] = {"n": 128, "max_tokens": 252, "logprobs": 32, "ignore_eos": True}
    with Server(tiny_artifact, "--max-num-seqs", "256") as server, Client(server.address) as client:
        reply = request(server.url, COMPLETIONS, {"prompt": "abc", **wants})
        assert reply.status == 400
        assert "and at most 1048576 are reported at once; ask for fewer choices" in reply.json["error"]["message"]
        with pytest.raises(RequestError, match="and at most 1048576 are reported at once; ask for fewer choices"):
            client.complete("abc", **wants)
        pieces = client.generate("abc", **wants)
        assert sum(len(piece.token_ids) for piece in pieces) == 128 * 252, "a stream has all of them"
        wait_until(lambda: client.loads().num_running == 0, "nothing runs")
        reply = request(server.url, COMPLETIONS, {"prompt": "abc", **wants, "max_tokens": 200})
        assert [len(choice["logprobs"]["tokens"]) for choice in reply.json["choices"]] == [200] * 128
