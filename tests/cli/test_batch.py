"""`inferc batch`: files in OpenAI's batch form, answered by an artifact or a server, interrupted and resumed."""

import fcntl
import json
import os
import signal
import subprocess
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from batches import CHAT, EMBEDDINGS, num_lines, responses, row, texts, write_rows
from command_line import run_inferc
from http_calls import request
from serving import ENV, INFERC, Server, wait_until

from inferc import LLM, SamplingParams
from inferc.errors import ConfigError
from inferc.runtime.openai.batch_file import BatchInput

GREEDY = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
SLOW = {"max_tokens": 200, "n": 4, "ignore_eos": True}  # a fifth of a second for an engine that runs one sequence
ONE_AT_A_TIME = ("--max-num-seqs", "1", "--concurrency", "1", "--threads", "1")
BLOCK_BYTES = 32 * 2 * 2 * 2 * 16 * 4  # tokens, layers, K and V, KV heads, head_dim, float32


def command(source: Path, out: Path, engine: Path | str, *options: str) -> list[str]:
    return ["batch", str(source), "-o", str(out), "--engine", str(engine), *options]


def run(source: Path, out: Path, engine: Path | str, *options: str) -> dict[str, Any]:
    """A run to its end, in this process; what --json prints."""
    done = run_inferc(*command(source, out, engine, *options), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def refused(source: Path, out: Path, engine: Path | str, *options: str) -> str:
    """The one line of a run that must not begin."""
    done = run_inferc(*command(source, out, engine, *options))
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith("inferc: ") and done.stderr.count("\n") == 1
    return str(done.stderr)


def start(source: Path, out: Path, engine: Path | str, *options: str) -> "subprocess.Popen[str]":
    arguments = [*INFERC, *command(source, out, engine, *options)]
    return subprocess.Popen(arguments, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def partial(out: Path) -> Path:
    return out.with_name(f"{out.name}.partial")


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """Requests that take seconds one after the other, greedy and seeded."""
    bodies: list[dict[str, Any]] = [{"prompt": f"def f{i}(", **SLOW, "temperature": 0} for i in range(6)]
    bodies += [{"prompt": f"for {i} in", **SLOW, "seed": i} for i in range(6)]
    return write_rows(tmp_path / "many.jsonl", [row(str(i), body) for i, body in enumerate(bodies)])


# ------------------------------------------------------------------------------------------------- answers


def test_log_probabilities_of_prompts_are_those_of_a_server(
    tiny_artifact: Path, served: str, url: str, tmp_path: Path
) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 3}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": ["def add(", [5]], "n": 2, "prompt_logprobs": 2, **GREEDY}),
        ("/v1/completions", {"prompt": "for i in", "prompt_logprobs": 0, **GREEDY}),
        (CHAT, {**chat, "prompt_logprobs": 1}),
    ]
    rows = [row(str(number), body, path) for number, (path, body) in enumerate(bodies)]
    source = write_rows(tmp_path / "in.jsonl", rows)
    engines: tuple[Path | str, ...] = (tiny_artifact, served)
    for number, engine in enumerate(engines):
        out = tmp_path / f"out-{number}.jsonl"
        assert run(source, out, engine)["failed"] == 0, out.read_text()
        answers = responses(out)
        for name, (path, body) in enumerate(bodies):
            found, wanted = answers[str(name)]["body"], request(url, path, body).json
            both = [(found, wanted)] if path == CHAT else list(zip(found["choices"], wanted["choices"], strict=True))
            for ours, theirs in both:
                assert [row and row.keys() for row in ours["prompt_logprobs"]] == [
                    row and row.keys() for row in theirs["prompt_logprobs"]
                ]
                for one, other in zip(ours["prompt_logprobs"], theirs["prompt_logprobs"], strict=True):
                    for token in one or ():
                        assert one[token]["rank"] == other[token]["rank"]
                        assert one[token]["logprob"] == pytest.approx(other[token]["logprob"], abs=1e-5)
    assert answers["0"]["body"]["choices"][3]["prompt_logprobs"] == [None]


def test_every_kind_of_request_by_artifact_and_by_server(tiny_artifact: Path, served: str, tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "temperature": 0}
    rows = [
        row("text", {"prompt": "def add(", **GREEDY, "model": "gpt-4o-mini", "user": "me", "store": True}),
        row("ids", {"prompt": [[5, 6, 7], [8, 9]], **GREEDY, "n": 2, "seed": 3, "temperature": 1}),
        row("stop", {"prompt": "def add(", "max_tokens": 24, "temperature": 0, "stop": ["zzz"], "ignore_eos": True}),
        row("logprobs", {"prompt": "Café 東京 🙂", **GREEDY, "logprobs": 2}),
        row("chat", {**chat, "max_completion_tokens": 5, "logprobs": True, "top_logprobs": 2}, CHAT),
        row("no limit", {**chat, "max_tokens": None}, CHAT),
        row("tools", {**chat, "tools": [{"type": "function"}]}, CHAT),
        row("embeddings", {"input": "hi"}, EMBEDDINGS),
        row("range", {"prompt": "a", "temperature": -1}),
        row("vocabulary", {"prompt": ["a", [99999]]}),
        row("stream", {"prompt": "a", "stream": True}),
        row("too long", {"prompt": [5] * 300}),
    ]
    source = write_rows(tmp_path / "in.jsonl", rows)
    summary = run(source, tmp_path / "out.jsonl", tiny_artifact)
    found = responses(tmp_path / "out.jsonl")
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "out.jsonl"]
    assert set(found) == {each["custom_id"] for each in rows}
    failed = {name: each["body"]["error"] for name, each in found.items() if each["status_code"] == 400}
    assert {name: error["param"] for name, error in failed.items()} == {
        "tools": "tools",
        "embeddings": None,
        "range": "temperature",
        "vocabulary": "prompt",
        "stream": "stream",
        "too long": None,
    }
    assert all(set(error) == {"message", "type", "param", "code"} for error in failed.values())
    assert (summary["requests"], summary["failed"], summary["resumed"]) == (12, 6, 0)
    answered = [each["body"]["usage"] for each in found.values() if each["status_code"] == 200]
    assert summary["output_tokens"] == sum(usage["completion_tokens"] for usage in answered)
    assert summary["prompt_tokens"] == sum(usage["prompt_tokens"] for usage in answered)

    with LLM(tiny_artifact, num_threads=1) as llm:
        params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
        (alone,) = llm.generate("def add(", params)
    assert texts(found["text"]) == [alone.outputs[0].text] and found["text"]["body"]["model"] == tiny_artifact.name
    assert [choice["index"] for choice in found["ids"]["body"]["choices"]] == [0, 1, 2, 3]
    assert len(set(texts(found["ids"]))) == 4
    (choice,) = found["chat"]["body"]["choices"]
    assert choice["message"]["role"] == "assistant" and len(choice["logprobs"]["content"]) == 5
    assert "".join(each["token"] for each in choice["logprobs"]["content"]) == choice["message"]["content"]
    assert found["no limit"]["body"]["usage"]["completion_tokens"] > 16

    by_server = run(source, tmp_path / "served.jsonl", served, "--concurrency", "5")
    assert by_server["output_tokens"] == summary["output_tokens"]
    assert _comparable(responses(tmp_path / "served.jsonl")) == _comparable(found)


def _comparable(found: dict[str, Any]) -> dict[str, Any]:
    """A server has a cache that others filled, and does not tell the bytes of a token that is half a character."""
    for response in found.values():
        response["body"].get("usage", {}).pop("prompt_tokens_details", None)
    for each in found["chat"]["body"]["choices"][0]["logprobs"]["content"]:
        for token in (each, *each["top_logprobs"]):
            token["bytes"] = None if "\ufffd" in token["token"] else token["bytes"]
    return found


def test_requests_that_begin_alike_are_neighbours(tiny_artifact: Path, tmp_path: Path) -> None:
    """The cache holds one of the two beginnings at a time."""
    starts = ([7] * 128, [9] * 128)
    rows = [row(str(i), {"prompt": [*starts[i % 2], i + 20], "max_tokens": 2, "ignore_eos": True}) for i in range(8)]
    source = write_rows(tmp_path / "in.jsonl", rows)
    options = (*ONE_AT_A_TIME, "--kv-memory", str(7 * BLOCK_BYTES))
    neighbours = run(source, tmp_path / "sorted.jsonl", tiny_artifact, *options)
    assert neighbours["cached_tokens"] == 6 * 128
    kept = run(source, tmp_path / "kept.jsonl", tiny_artifact, *options, "--keep-order")
    assert kept["cached_tokens"] < neighbours["cached_tokens"] / 2
    first = json.loads((tmp_path / "kept.jsonl").read_text().splitlines()[0])
    assert first["response"]["body"]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_one_line_on_standard_error_tells_the_rest(tiny_artifact: Path, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [row("a", {"prompt": "a", **GREEDY}), row("b", {"prompt": 5})])
    done = run_inferc(*command(source, tmp_path / "out.jsonl", tiny_artifact))
    assert (done.returncode, done.stdout) == (0, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{tmp_path / 'out.jsonl'}: 2 requests (1 failed), 1 prompt tokens (0 cached), 6 output")


# ------------------------------------------------------------------------------------------ interrupted, resumed


def test_killed_and_resumed_gives_what_one_run_gives(tiny_artifact: Path, many: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with start(many, out, tiny_artifact, *ONE_AT_A_TIME) as running:
        wait_until(lambda: num_lines(partial(out)) >= 2, "two answers are there")
        running.kill()
    assert not out.exists()
    kept = partial(out).read_bytes()
    kept = kept[: kept.rindex(b"\n") + 1]
    with partial(out).open("ab") as file:
        file.write(b'{"id": "batch_req_')  # a line that a full disk or a lost machine tore
    resumed = run(many, out, tiny_artifact)
    assert resumed["resumed"] == kept.count(b"\n") and 2 <= resumed["resumed"] < 12
    assert out.read_bytes().startswith(kept) and not partial(out).exists()
    whole = run(many, tmp_path / "whole.jsonl", tiny_artifact, "--threads", "1")
    assert responses(out) == responses(tmp_path / "whole.jsonl")
    assert {key: whole[key] for key in ("requests", "output_tokens")} == {
        key: resumed[key] for key in ("requests", "output_tokens")
    }


def test_ctrl_c_says_how_to_go_on(tiny_artifact: Path, many: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with start(many, out, tiny_artifact, *ONE_AT_A_TIME) as running:
        wait_until(lambda: num_lines(partial(out)) >= 1, "an answer is there")
        running.send_signal(signal.SIGINT)
        stdout, stderr = running.communicate(timeout=60)
    count = num_lines(partial(out))
    assert (running.returncode, stdout) == (130, "")
    assert stderr == f"inferc: interrupted; {count} of 12 are answered, the same command goes on\n"


@pytest.mark.slow
def test_begun_on_a_server_that_died_and_ended_here(tiny_artifact: Path, many: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with (
        Server(tiny_artifact, "--max-num-seqs", "1", "--threads", "1") as server,
        start(many, out, server.address, "--concurrency", "4") as running,
    ):
        wait_until(lambda: num_lines(partial(out)) >= 1, "an answer is there")
        server.process.kill()
        _, stderr = running.communicate(timeout=60)
    assert running.returncode == 1 and stderr.count("\n") == 1
    assert "UNAVAILABLE" in stderr and stderr.endswith("; what is answered is kept, the same command goes on\n")
    assert run(many, out, tiny_artifact)["resumed"] >= 1
    assert len(responses(out)) == 12


def test_only_the_runtime_is_loaded(tiny_artifact: Path, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [row("a", {"prompt": "a", **GREEDY})])
    arguments = [*INFERC, *command(source, tmp_path / "out.jsonl", tiny_artifact)]
    env = {**ENV, "PYTHONPROFILEIMPORTTIME": "1"}
    done = subprocess.run(arguments, env=env, capture_output=True, text=True, check=True)
    loaded = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert "inferc.runtime.openai.batch_run" in loaded and not loaded & {"torch", "transformers", "grpc", "asyncio"}


# ------------------------------------------------------------------------------------------- what is in the way


def test_an_output_that_exists_is_replaced_only_if_asked(tiny_artifact: Path, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [row("a", {"prompt": "a", **GREEDY})])
    out = tmp_path / "out.jsonl"
    out.write_text("mine\n")
    assert "exists; --force replaces it" in refused(source, out, tiny_artifact)
    assert out.read_text() == "mine\n" and not partial(out).exists()
    run(source, out, tiny_artifact, "--force")
    assert set(responses(out)) == {"a"}
    assert "is the file of requests" in refused(source, source, tiny_artifact, "--force")
    assert "is no file" in refused(source, tmp_path, tiny_artifact, "--force")
    assert "cannot write" in refused(source, tmp_path / "none" / "out.jsonl", tiny_artifact)


def test_answers_to_other_requests_are_not_gone_on_with(tiny_artifact: Path, tmp_path: Path) -> None:
    one = write_rows(tmp_path / "one.jsonl", [row("a", {"prompt": "a", **GREEDY})])
    two = write_rows(tmp_path / "two.jsonl", [row("a", {"prompt": "b", **GREEDY})])
    out = tmp_path / "out.jsonl"
    run(one, out, tiny_artifact)
    kept = out.rename(partial(out)).read_bytes()
    message = refused(two, out, tiny_artifact)
    assert "has answers to other requests than these; delete it, or --force begins anew" in message
    partial(out).write_bytes(kept.replace(tiny_artifact.name.encode(), b"another"))
    assert "has answers of another, and --engine is" in refused(one, out, tiny_artifact)
    partial(out).write_text("a diary\n")
    assert "has answers to other requests" in refused(two, out, tiny_artifact)
    assert run(two, out, tiny_artifact, "--force")["resumed"] == 0


def test_two_runs_do_not_write_one_file(tiny_artifact: Path, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [row("a", {"prompt": "a", **GREEDY})])
    with partial(tmp_path / "out.jsonl").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert "another run is writing" in refused(source, tmp_path / "out.jsonl", tiny_artifact)


def test_an_adapter_answers_a_batch_here_and_on_a_server(adapted: Path, tmp_path: Path) -> None:
    bodies = [{"prompt": [5, 9, 17, 3], **GREEDY}, {"prompt": [8, 4], **GREEDY}]
    source = write_rows(tmp_path / "in.jsonl", [row(f"r{at}", body) for at, body in enumerate(bodies)])
    option = f"everything={adapted / 'adapters' / 'a'}"
    run(source, tmp_path / "base.jsonl", adapted / "cpu")
    run(source, tmp_path / "own.jsonl", adapted / "cpu", "--adapter", option)
    with Server(f"base={adapted / 'cpu'}", "--adapter", option) as server:
        run(source, tmp_path / "served.jsonl", server.address, "--model", "everything")
    base, own, served = (responses(tmp_path / f"{name}.jsonl") for name in ("base", "own", "served"))
    for name in ("r0", "r1"):
        assert texts(served[name]) == texts(own[name]) != texts(base[name])
        assert served[name]["body"]["model"] == own[name]["body"]["model"] == "everything"


def test_a_server_takes_no_options_of_an_engine(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [row("a", {"prompt": "a"})])
    for option in ("--threads", "--max-num-seqs", "--special-tokens-in-text"):
        message = refused(source, tmp_path / "out.jsonl", "127.0.0.1:1", option, "2")
        assert (
            message == f"inferc: {option} is of an engine in this process, and 127.0.0.1:1 has its own; leave it out\n"
        )
    assert "--concurrency 0: expected 1 to" in refused(source, tmp_path / "out.jsonl", tmp_path, "--concurrency", "0")
    assert "no artifact at" in refused(source, tmp_path / "out.jsonl", tmp_path / "none")
    assert os.listdir(tmp_path) == ["in.jsonl"], "nothing is left of what did not begin"


# ------------------------------------------------------------------------------------------------- bad input

GOOD = row("a", {"prompt": "a"})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "no JSON (Expecting property name enclosed in double quotes at column 2); expected one object in each"),
        (b"[" * 100_000, "no JSON ("),
        (b'"caf\xe9"', "byte 4 is 0xe9, which is not UTF-8; convert the file"),
        (b"[]", "found []; expected an object with custom_id, method, url and body"),
        ({**GOOD, "custom_id": "b"}, 'custom_id is "b", as in line 1; give each its own'),
        ({**GOOD, "custom_id": ""}, 'found custom_id ""; expected a text of its own for each request'),
        ({**GOOD, "custom_id": "\ud83d"}, 'found custom_id "\\ud83d"; expected'),
        ({"method": "POST"}, "found custom_id none; expected"),
        ({**GOOD, "method": "GET"}, "method is \"GET\"; expected 'POST'"),
        ({**GOOD, "url": "/v1/images"}, 'url is "/v1/images"; expected one of /v1/completions, /v1/chat/completions'),
        ({**GOOD, "body": None}, "body is null; expected an object, the parameters of the request"),
    ],
)
def test_the_whole_file_is_checked_before_anything_is_done(tmp_path: Path, line: Any, message: str) -> None:
    source = write_rows(tmp_path / "in.jsonl", [row("b", {"prompt": "a"})])
    with source.open("ab") as file:
        file.write(b"\n" + (line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n")
    found = refused(source, tmp_path / "out.jsonl", tmp_path / "no-artifact")
    assert found.startswith(f"inferc: {source}, line 3: {message}")
    assert os.listdir(tmp_path) == ["in.jsonl"]


def test_files_that_hold_no_requests(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    assert "holds no requests" in refused(tmp_path / "empty.jsonl", tmp_path / "out.jsonl", tmp_path)
    assert "is not there" in refused(tmp_path / "none.jsonl", tmp_path / "out.jsonl", tmp_path)
    assert "is no file" in refused(tmp_path, tmp_path / "out.jsonl", tmp_path)


def test_a_file_that_changes_under_way(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [row("a", {"prompt": "a"})])
    with BatchInput(source) as requests:
        assert requests.read(requests.lines[0]).custom_id == "a"
        write_rows(source, [row("b", {"prompt": "b"}), row("c", {})])
        with pytest.raises(ConfigError, match="was changed while it was being answered"):
            requests.read(requests.lines[0])


def test_memory_does_not_grow_with_the_prompts(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", (row(str(i), {"prompt": f"{i}" * 20_000}) for i in range(200)))
    assert source.stat().st_size > 5_000_000
    tracemalloc.start()
    with BatchInput(source) as requests:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(requests.order(keep=False)) == 200
    assert peak < 1_000_000
