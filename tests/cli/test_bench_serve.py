"""`inferc bench serve` from end to end: on servers of its own and on running ones, over gRPC and HTTP."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import run_inferc
from fake_openai import Behaviour, FakeOpenAI
from serving import ENV, INFERC, Server

from inferc.bench.own_server import server_options
from inferc.cli.bench import _shown

SMALL = ("--input-len", "12", "--output-len", "24", "--warmup", "1")
KEPT = {  # that were there before others came
    "output_tokens_per_s",
    "requests",
    "requests_per_s",
    "ttft_ms",
    "itl_ms",
    "e2e_ms",
    "input_len",
    "output_len",
    "concurrency",
}


def bench(*arguments: str | Path, code: int = 0) -> tuple[str, str]:
    result = run_inferc("bench", "serve", *arguments)
    assert result.returncode == code, result.stderr
    return result.stdout, result.stderr


def bench_json(*arguments: str | Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(bench(*arguments, "--json")[0])
    return found


@pytest.mark.parametrize("endpoint", ["grpc", "completions", "chat"])
def test_a_running_server(endpoint: str, served: str, url: str) -> None:
    where = served if endpoint == "grpc" else url
    found = bench_json(where, *SMALL, "--endpoint", endpoint, "--concurrency", "2", "--requests", "5")
    assert found.keys() >= KEPT and found["model"] == "tiny-llama" and found["concurrency"] == 2
    assert (found["requests"], found["completed"], found["failed"], found["unfinished"]) == (5, 5, {}, 0)
    assert found["output_tokens_per_s"] * found["seconds"] == pytest.approx(5 * 24)
    for name in ("ttft_ms", "e2e_ms"):
        times = found[name]
        assert set(times) == {"mean", "p50", "p90", "p95", "p99", "max"}
        assert 0 < times["p50"] <= times["p90"] <= times["p95"] <= times["p99"] <= times["max"]
    assert found["e2e_ms"]["p50"] >= found["ttft_ms"]["p50"]
    assert found["prompts"] == ("text" if endpoint == "chat" else "token ids")
    assert found["tokens_counted"] == {"told": 5} and found["short_answers"] == 0 and not found["notes"]
    again = bench_json(where, *SMALL, "--endpoint", endpoint, "--requests", "2", "--logprobs", "--temperature", "1")
    assert again["completed"] == 2 and again["output_tokens_per_s"] * again["seconds"] == pytest.approx(2 * 24)
    if endpoint != "chat":
        assert found["prompt_tokens"] == 5 * 12
    assert len(found["loads"]) == 1 and found["loads"][0]["requests"] == 5


@pytest.mark.slow
def test_the_server_counts_the_same(tiny_artifact: Path) -> None:
    """The server's own goodput and tokens are those that the client counts."""
    with Server(tiny_artifact, "--goodput-ttft-ms", "60000", "--goodput-tbt-ms", "60000") as server:
        options = ("--rate", "100", "--requests", "12", "--ttft", "60000", "--tbt", "60000", "--warmup", "0")
        found = bench_json(server.address, "--input-len", "12", "--output-len", "24", *options)
        from inferc.client.scrape import Endpoint, Page

        page = Page.fetch(Endpoint.parse(server.url))
    assert found["goodput"] == 1.0 and found["completed"] == 12
    assert page.sum("inferc_requests_good_total") == 12
    assert page.sum("inferc_output_tokens_total") == 12 * 24


def test_a_sweep_is_saved_and_drawn(url: str, tmp_path: Path) -> None:
    saved, picture = tmp_path / "found.json", tmp_path / "found.png"
    options = ("--rate", "50,200", "--requests", "8", "--arrivals", "gamma", "--burstiness", "0.5", "--ttft", "60000")
    out, _ = bench(url, *SMALL, *options, "--tbt", "0", "-o", saved, "--plot", picture)
    assert "the largest load at which 90% of the requests are within TTFT 60000 ms: 200 requests/s, the highest" in out
    found = json.loads(saved.read_text())
    assert [each["rate"] for each in found["loads"]] == [50, 200] and found["largest_good_rate"] == 200
    assert found["endpoint"] == "completions" and found["where"] == url
    requests = found["loads"][0]["request_times"]
    assert [each["number"] for each in requests] == list(range(8))
    assert all(sum(count for _, count in each["messages"]) == 24 == each["output_tokens"] for each in requests)
    assert all(each["sent_s"] >= each["planned_s"] for each in requests)
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 20_000
    assert {path.name for path in tmp_path.iterdir()} == {"found.json", "found.png"}


def test_a_trace_is_replayed_with_what_its_prompts_share(served: str, tmp_path: Path) -> None:
    trace, picture = tmp_path / "trace.jsonl", tmp_path / "one.svg"
    rows = [
        {"timestamp": 10 * number, "input_length": 600, "output_length": 32, "hash_ids": [0, 100 + number]}
        for number in range(6)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--trace", trace, "--scale", "8", "--speed", "0.02")
    found = bench_json(served, *options, "--plot", picture)
    assert (found["requests"], found["completed"], found["speed"]) == (6, 6, 0.02)
    assert (found["input_len"], found["output_len"]) == (75, 4) and found["rate"] == pytest.approx(
        8 * 100 * 0.02, rel=0.3
    )
    assert (
        found["prompt_tokens"] == 6 * 75 and found["cached_tokens"] >= 3 * 64
    )  # one who comes at once may not find it
    assert "<svg" in picture.read_text()[:500]
    found = bench_json(served, "--trace", trace, "--scale", "8", "--rate", "100", "--requests", "3")
    assert found["requests"] == 3 and found["rate"] == 100 and found["speed"] is None


def test_real_texts(served: str, url: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "def add(a, b):", "max_tokens": 6}\n{"prompt": "class Reader:"}\n')
    options = ("--prompts", prompts, "--output-len", "9", "--concurrency", "1", "--requests", "4")
    for where in (served, url):
        found = bench_json(where, *options)
        assert found["completed"] == 4 and found["prompts"] == ("token ids" if where == served else "text")
        assert found["output_tokens_per_s"] * found["seconds"] == pytest.approx(2 * (6 + 9))
        assert found["prompt_tokens"] > 8
    prompts.write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    assert "--prompts has chats, which need --endpoint chat" in bench(url, *options, code=2)[1]


def test_a_table_for_people_tells_what_failed() -> None:
    with FakeOpenAI(Behaviour(refusals=[200, 429, 429, 200], takes_ids=False)) as fake:
        out, _ = bench(fake.url, *SMALL, "--warmup", "0", "--concurrency", "1", "--requests", "4")
    assert "of the requests: 2 429" in out and "goodput 50.0%" in out and "prompts as text" in out
    assert "note: the server does not take prompts as token ids" in out
    assert "warning: 2 requests failed, the first with 429: come back later" in out
    assert "prompt tokens as the server counts them: 18, 8 of them cached" in out


def test_ctrl_c_shows_what_is_there(tmp_path: Path) -> None:
    saved = tmp_path / "found.json"
    fake = FakeOpenAI(Behaviour(tells_each_chunk=True))
    command = [*INFERC, "bench", "serve"]

    def on_request(count: int) -> None:
        if count == 4:
            fake.behaviour.holds = True
            process.send_signal(signal.SIGINT)

    fake._on_request = on_request
    with fake:
        options = (*SMALL, "--warmup", "0", "--concurrency", "1", "--requests", "99", "--json", "-o", str(saved))
        with subprocess.Popen(
            [*command, fake.url, *options], env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            out, error = process.communicate(timeout=60)
    assert process.returncode == 130 and not error, error
    found = json.loads(out)
    assert found["interrupted"] and (found["completed"], found["unfinished"]) == (2, 1)
    assert json.loads(saved.read_text())["loads"][0]["request_times"][2]["status"] == "unfinished"


def test_its_own_server_gets_the_engine_s_options(tiny_artifact: Path, tmp_path: Path) -> None:
    config = tmp_path / "serve.toml"
    config.write_text('policy = "sjf"\nmax-num-seqs = 3\n')
    options = ("--config", config, "--threads", "1", "--no-prefix-cache", "--requests", "3", "--concurrency", "3")
    found = bench_json(tiny_artifact, *SMALL, *options)
    assert found["completed"] == 3 and found["cached_tokens"] == 0
    config.write_text("max-num-sequences = 3\n")
    _, error = bench(tiny_artifact, *SMALL, *options, code=2)
    assert "before it was ready" in error and error.count("\n") == 1 and "max-num-seq" in error


def test_flags_of_the_own_server() -> None:
    flags = {"--threads": 2, "--pin": True, "--prefix-cache": False, "--policy": None, "--max-num-seqs": None}
    assert server_options(flags) == ["--threads", "2", "--pin", "--no-prefix-cache"]
    assert server_options({}, 64) == [] and server_options({}, 100) == ["--max-num-seqs", "100"]
    assert server_options({}, 600) == ["--max-num-seqs", "600", "--max-num-batched-tokens", "600"]
    assert server_options({"--max-num-seqs": 8}, 600) == ["--max-num-seqs", "8"]
    assert server_options({"--config": "x"}, 600) == ["--config", "x"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rate", "0"), "--rate 0: expected numbers above 0"),
        (("--rate", "1,x"), "found 'x'"),
        (("--rate", "1", "--concurrency", "2"), "leave one out"),
        (("--requests", "0"), "--requests 0: expected more than 0"),
        (("--seconds", "nan"), "--seconds nan: expected more than 0"),
        (("--warmup", "-1"), "--warmup -1: expected 0 or more"),
        (("--arrivals", "often"), "--arrivals often: expected one of poisson, gamma, constant, burst"),
        (("--burstiness", "0"), "--burstiness 0: expected a number above 0"),
        (("--temperature", "-1"), "--temperature -1: expected a number, 0 or more"),
        (("--burst-size", "0"), "--burst-size 0: expected at least 1"),
        (("--input-len", "0"), "expected at least 1 of each"),
        (("--input-len", "300"), "together at most 256"),
        (("--input-spread", "2"), "--input-spread 2: expected 0 to 1"),
        (("--shared-prefix", "128"), "less than the shortest prompt, 128"),
        (("--speed", "2"), "--speed is for --trace FILE"),
        (("--scale", "2"), "--scale is for --trace FILE"),
        (("--trace", "no-file"), "cannot read the trace no-file"),
        (("--prompts", "no-file"), "cannot read the prompts no-file"),
        (("--ttft", "-1"), "--ttft -1: expected a number of milliseconds"),
        (("--share", "0"), "--share 0: expected a number above 0"),
        (("--find",), "--find looks for a request rate"),
        (("--plot", "a.gif"), "expected a file named .png"),
        (("-o", "no-folder/a.json"), "there is no folder no-folder"),
        (("--endpoint", "rest"), "--endpoint rest: expected one of grpc, completions, chat"),
        (("--endpoint", "chat"), "--endpoint chat needs a URL"),
        (("--threads", "2"), "--threads is for the server that an artifact gets"),
        (("--no-prefix-cache",), "--prefix-cache is for the server that an artifact gets"),
        (("--ca", "no-file"), "no-file: cannot read it"),
    ],
)
def test_what_cannot_be_is_one_line(arguments: tuple[str, ...], message: str, served: str) -> None:
    out, error = bench(served, *arguments, code=2)
    assert not out and error.startswith("inferc: ") and error.count("\n") == 1 and message in error, error


def test_neither_an_artifact_nor_a_server(tmp_path: Path) -> None:
    assert "inferc: " in bench(tmp_path / "nothing", code=2)[1]
    assert "--ca is for https" in bench("http://127.0.0.1:9", "--ca", __file__, code=2)[1]
    assert "no connection" in bench("http://127.0.0.1:9", code=1)[1]


def test_without_aiohttp_one_line_names_the_extra(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    monkeypatch.delitem(sys.modules, "inferc.bench.http_endpoint", raising=False)
    _, error = bench(url, code=1)
    assert "needs the package aiohttp" in error and "pip install 'inferc[bench]'" in error and error.count("\n") == 1


def test_over_grpc_aiohttp_is_not_imported(served: str) -> None:
    code = "import sys; sys.modules['aiohttp'] = None; from inferc.cli.main import main; main()"
    command = [sys.executable, "-c", code, "bench", "serve", served, *SMALL, "--requests", "1", "--json"]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert run_inferc("bench", "serve", "--help").stdout.count("aiohttp") == 0


def test_numbers_that_are_not_known_are_shown_as_such() -> None:
    assert [_shown(value) for value in (None, 1234, 0.5, {"p50": 1.0, "p90": 2.0})] == [
        "unknown",
        "1,234",
        "0.500",
        "p50 1.000  p90 2.000",
    ]
