"""An offline batch on a real server, beside others who want it too."""

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from batches import num_lines, responses, row, texts, write_rows
from certificates import Authority
from command_line import run_inferc
from serving import ENV, INFERC, Server, wait_until

from inferc.client import SERVICE, Client, ServerError, Tls, batch_endpoint
from inferc.client.batch_endpoint import EndpointBackend
from inferc.client.scrape import Endpoint, Page
from inferc.errors import InfercError
from inferc.runtime.openai.answer import Answer
from inferc.runtime.openai.batch_file import BatchInput, BatchOutput, BatchRequest
from inferc.runtime.openai.batch_run import BatchRun, Job, Result, Ticket
from inferc.runtime.openai.request import parse_request
from inferc.serve.protos.inferc.v1 import inference_pb2 as pb
from inferc.serve.security.access import Key, digest_of, write_keys

ENDLESS: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True}
SHORT: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def small(tiny_artifact: Path) -> Iterator[Server]:
    """A server that runs two sequences at a time."""
    with Server(tiny_artifact, "--max-num-seqs", "2", "--threads", "1") as server:
        yield server


@contextmanager
def live(client: Client, n: int) -> Iterator[None]:
    """A request of somebody else, under way for as long as the block lasts."""
    stream = client.generate("abc", n=n, **ENDLESS)
    next(stream)
    try:
        yield
    finally:
        stream.close()
        wait_until(lambda: client.loads().num_requests == 0, "the request is gone")


def ticket(body: dict[str, Any]) -> Ticket:
    asked = BatchRequest(1, "a", "/v1/completions", body)
    return Job(asked, parse_request(asked.url, body), 1, [None]), 0


def test_room_is_what_others_leave(served: str, small: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with EndpointBackend(served) as backend:
        assert [backend.room(num_open) for num_open in (0, 72)] == [72, 0], "64 run, and 8 wait to be next"
        # Forty that run elsewhere would be done before they are counted, on a machine that is busy.
        monkeypatch.setattr(backend._client, "loads", lambda: SimpleNamespace(num_running=40, num_waiting=0))
        assert [backend.room(num_open) for num_open in (0, 10, 40)] == [32, 32, 32]
    with Client(small.address) as client, EndpointBackend(small.address) as backend, live(client, n=64):
        assert client.loads().num_waiting > 50
        assert backend.room(0) == backend.room(2) == 0, "nothing is added to those who wait"
    with EndpointBackend(small.address, concurrency=1) as backend:
        assert backend.room(0) == 1


def test_a_batch_waits_for_others_and_keeps_few_waiting(
    small: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = [{"prompt": f"def f{i}(", **ENDLESS, "temperature": 0} for i in range(12)]
    source = write_rows(tmp_path / "in.jsonl", [row(str(i), body) for i, body in enumerate(bodies)])
    shown: list[str] = []
    is_alone: list[bool] = []
    present: list[int] = []
    with ExitStack() as stack, ExitStack() as others:
        client = stack.enter_context(Client(small.address))
        requests = stack.enter_context(BatchInput(source))
        output = stack.enter_context(BatchOutput(tmp_path / "out.jsonl", requests.fingerprint))
        backend = stack.enter_context(EndpointBackend(small.address, concurrency=8))
        finished = backend.finished

        def watched() -> list[tuple[Ticket, Result]]:
            if is_alone:
                loads = client.loads()
                present.append(loads.num_running + loads.num_waiting)
            elif len(shown) == 2:
                assert client.loads().num_requests == 1, "the batch has added nothing"
                others.close()
                is_alone.append(True)
            return finished()

        monkeypatch.setattr(backend, "finished", watched)
        others.enter_context(live(client, n=64))
        BatchRun(requests, output, backend, lambda what, done, total: shown.append(what)).run(requests.lines)
    assert shown[:2] == ["0 of 12 requests, others go first"] * 2
    assert len(responses(tmp_path / "out.jsonl")) == 12
    assert max(present) <= 3, "beside the two that run, who comes under fcfs finds one of the batch's before him"


@pytest.mark.slow
def test_whoever_else_asks_is_served_first(tiny_artifact: Path, tmp_path: Path) -> None:
    body = {"prompt": "def add(", "n": 24, "seed": 1, **ENDLESS}
    source, out = write_rows(tmp_path / "in.jsonl", [row("a", body)]), tmp_path / "out.jsonl"
    with (
        Server(tiny_artifact, "--max-num-seqs", "1", "--threads", "1", "--policy", "priority") as server,
        Client(server.address, timeout=60) as client,
    ):
        command = [*INFERC, "batch", str(source), "-o", str(out), "--engine", server.address]
        with subprocess.Popen(command, env=ENV, stderr=subprocess.PIPE) as running:
            wait_until(lambda: client.loads().num_waiting >= 18, "the batch has all places and waits for more")
            client.complete("abc", **SHORT)
            assert client.loads().num_waiting >= 6, "it came before those of the batch that waited"
            assert client.loads().num_preemptions >= 1, "and took the place of one that ran"
            assert num_lines(tmp_path / "out.jsonl.partial") == 0
            assert running.wait(60) == 0
        alone = client.complete("def add(", n=24, seed=1, **ENDLESS)
        assert texts(responses(out)["a"]) == [each.text for each in alone], "what was preempted says the same"


def test_a_server_without_room_is_asked_again(small: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    is_full = EndpointBackend._is_full

    def spy(backend: EndpointBackend, sampling: dict[str, Any]) -> bool:
        asked.append(is_full(backend, sampling))
        return asked[-1]

    monkeypatch.setattr(EndpointBackend, "_is_full", spy)
    monkeypatch.setattr("inferc.client.batch_endpoint.LOOK_SECONDS", 0.01)
    sampling = pb.SamplingParams(n=128, **ENDLESS)
    request = pb.GenerateRequest(text="abc", sampling=sampling).SerializeToString()
    job = ticket({"prompt": "abc", **SHORT})
    with (
        Client(small.address) as client,
        grpc.insecure_channel(small.address) as channel,
        EndpointBackend(small.address) as backend,
    ):
        generate = channel.unary_stream(f"/{SERVICE}/Generate", bytes, bytes)
        others = [generate(request) for _ in range(8)]
        wait_until(lambda: client.loads().num_requests == 8, "all places of the queue are taken")
        backend.start(job, "abc")
        wait_until(lambda: len(asked) >= 2, "it was refused more than once")
        for other in others:
            other.cancel()  # type: ignore[no-untyped-call]
        results: list[tuple[Ticket, Result]] = []
        while not results:
            results = backend.finished()
        ((found, answer),) = results
        assert found is job and isinstance(answer, Answer) and all(asked)
        assert len(answer.outputs[0].token_ids) == 4


@pytest.mark.slow
def test_a_server_with_keys_and_tls(tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INFERC_API_KEY", raising=False)
    authority, other = Authority(tmp_path, "ours"), Authority(tmp_path, "other")
    cert, key_file = authority.issue("server")
    keys = tmp_path / "keys.json"
    key = run_inferc("keys", "create", keys, "batch").stdout.strip()
    source = write_rows(tmp_path / "in.jsonl", [row("a", {"prompt": "abc", **SHORT})])
    options = ("--api-keys", str(keys), "--tls-cert", str(cert), "--tls-key", str(key_file))
    with Server(tiny_artifact, *options) as server:
        endpoint = f"https://{server.address}"

        def batch(name: str, *more: str, **env: str) -> Any:
            out = tmp_path / f"{name}.jsonl"
            arguments = ["batch", str(source), "-o", str(out), "--engine", endpoint, "--ca", str(authority.ca), *more]
            return run_inferc(*arguments, env=env)

        refused = batch("none")
        assert refused.returncode == 1 and refused.stderr == (
            f"inferc: {server.address}: the server wants an API key; give --api-key, or set INFERC_API_KEY\n"
        )
        assert "this API key is not known here" in batch("wrong", "--api-key", "wrong").stderr
        assert batch("option", "--api-key", key).returncode == 0
        assert batch("variable", INFERC_API_KEY=key).returncode == 0
        both = [responses(tmp_path / f"{name}.jsonl")["a"] for name in ("option", "variable")]
        assert both[0]["status_code"] == 200 and both[0] == both[1]
        monkeypatch.setattr("inferc.client.batch_endpoint.CONNECT_SECONDS", 1.0)
        with pytest.raises(InfercError, match=rf"with TLS: https://{server.address}"):
            EndpointBackend(server.address, api_key=key)
        with pytest.raises(InfercError, match="its authority in --ca"):
            EndpointBackend(server.address, api_key=key, tls=Tls(ca=other.ca))


def test_a_key_that_has_used_its_rate_waits(tiny_artifact: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    write_keys(keys, [Key("batch", digest_of("a-key"), tokens_per_minute=6000)])
    job = ticket({"prompt": "abc", **SHORT})
    with (
        Server(tiny_artifact, "--api-keys", str(keys)) as server,
        Client(server.address, api_key="a-key") as client,
        EndpointBackend(server.address, api_key="a-key") as backend,
    ):
        client.complete("abc", n=31, **ENDLESS)  # 6200 tokens: two seconds of debt
        backend.start(job, "abc")
        page = Endpoint.parse(server.url, "a-key")
        wait_until(lambda: refusals(Page.fetch(page)) == 1, "it was refused")
        results: list[tuple[Ticket, Result]] = []
        while not results:
            results = backend.finished()
    ((_, answer),) = results
    assert isinstance(answer, Answer) and len(answer.outputs[0].token_ids) == 4


def refusals(page: Page) -> float:
    return page.sum("inferc_requests_refused_total", reason="rate_limit")


@pytest.mark.parametrize(
    ("engine", "options", "message"),
    [
        ("127.0.0.1:1", ("--ca", "ca.pem"), "--ca is for TLS, which 127.0.0.1:1 does without; write --engine https://"),
        ("https://127.0.0.1:1", ("--ca", "none.pem"), "none.pem: cannot read it: No such file or directory"),
        ("out", ("--api-key", "k"), "--api-key is for a server, and out is run in this process; leave it out"),
        ("out", ("--ca", "ca.pem"), "--ca is for a server, and out is run in this process; leave it out"),
    ],
)
def test_options_that_do_not_fit(engine: str, options: tuple[str, ...], message: str, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [row("a", {"prompt": "abc"})])
    command = ["batch", str(source), "-o", str(tmp_path / "out.jsonl"), "--engine", engine, *options]
    done = run_inferc(*command)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize(
    ("tls", "told"), [(None, r"with TLS: https://127.0.0.1:1\)"), (Tls(), "is its authority in --ca")]
)
def test_where_nobody_answers_the_port_is_asked_about(
    tls: Tls | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_endpoint, "CONNECT_SECONDS", 0.01)
    with pytest.raises(ServerError, match=rf"no server answered at 127.0.0.1:1 within 0.01 s; .*{told}"):
        EndpointBackend("127.0.0.1:1", tls=tls)
