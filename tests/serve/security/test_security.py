"""Keys, certificates and limits, on real servers."""

import asyncio
import http.client
import json
import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import pytest
from certificates import Authority
from command_line import run_inferc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from http_calls import request
from serving import FAKETIME, Server, wait_until

from inferc.client import AsyncClient, Client, ServerError, Tls
from inferc.errors import RequestError
from inferc.serve.models.long_texts import MAX_CHARACTERS
from inferc.serve.models.text_calls import MAX_TOKENS
from inferc.serve.security.access import Key, Limits, digest_of, read_keys, write_keys
from inferc.serve.security.tls import Certificates, TlsFiles

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
SHORT: dict[str, Any] = {"max_tokens": 2, "temperature": 0.0}
OF_A_RESPONSE: dict[str, Any] = {"max_output_tokens": 2, "temperature": 0.0}
ENDLESS: dict[str, Any] = {"n": 64, "max_tokens": 200, "ignore_eos": True}


# ------------------------------------------------------------------------------------------------------- keys


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    entries = [
        Key("alice", digest_of("alice-key")),
        Key("root", digest_of("root-key"), admin=True),
        Key("old", digest_of("old-key"), expires="2020-01-01"),
        Key("slow", digest_of("slow-key"), requests_per_minute=2, tokens_per_minute=1000),
        Key("echo", digest_of("echo-key"), requests_per_minute=2),
        Key("salty", digest_of("salty-key"), salted=True),
        Key("one", digest_of("one-key"), max_concurrent=1, limits=Limits(max_output_tokens=100)),
    ]
    write_keys(file, entries)
    return file


@pytest.fixture(scope="module")
def locked(tiny_artifact: Path, keys: Path) -> Iterator[Server]:
    options = ("--max-prompt-tokens", "50", "--max-n", "4", "--max-request-seconds", "20", "--max-num-seqs", "2")
    with Server(tiny_artifact, "--api-keys", str(keys), *options) as server:
        yield server


def ask(server: Server, key: str | None, body: Any = None, **headers: str) -> Any:
    sent = {**headers} if key is None else {"authorization": f"Bearer {key}", **headers}
    return request(server.url, COMPLETIONS, body or {"prompt": "abc", **SHORT}, sent)


def test_nobody_without_a_key(locked: Server) -> None:
    for key in (None, "", "wrong", "old-key", "alice-key2"):
        reply = ask(locked, key)
        assert reply.status == 401 and reply.headers["www-authenticate"] == "Bearer"
        assert (reply.error["type"], reply.error["code"]) == ("authentication_error", "invalid_api_key")
        with Client(locked.address, api_key=key) as client, pytest.raises(ServerError) as raised:
            client.complete("abc", **SHORT)
        assert raised.value.code == "UNAUTHENTICATED"
    for path in ("/v1/models", "/metrics", "/tokenizer_info", "/openapi.json", "/nothing"):
        assert request(locked.url, path).status == 401, path
    assert request(locked.url, "/v1/responses", {"input": "abc"}).status == 401
    assert ask(locked, "alice-key").status == 200
    for name, value in (
        ("x-api-key", "alice-key"),
        ("authorization", "bearer  alice-key"),
        ("authorization", "alice-key"),
    ):
        assert request(locked.url, "/v1/models", headers={name: value}).status == 200
    long = {"input": "abc", "max_output_tokens": 101}
    assert request(locked.url, "/v1/responses", long, {"x-api-key": "one-key"}).status == 400
    assert request(locked.url, "/v1/responses", {**long, **OF_A_RESPONSE}, {"x-api-key": "one-key"}).status == 200
    assert request(locked.url, "/v1/models", headers={"x-api-key": "alice-key"}).status == 200
    with Client(locked.address, api_key="alice-key") as client:
        assert client.complete("abc", **SHORT)


@pytest.mark.slow
def test_tokenizing_is_a_request_of_its_key(tiny_artifact: Path, tmp_path: Path) -> None:
    names = {"alice": 2, "bob": 2, "carol": None}
    write_keys(tmp_path / "k", [Key(name, digest_of(name), requests_per_minute=rate) for name, rate in names.items()])
    with Server(tiny_artifact, "--api-keys", str(tmp_path / "k")) as server:
        bodies: list[tuple[str, Any]] = [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})]
        tried = [request(server.url, *each, {"x-api-key": "alice"}) for each in (*bodies, bodies[0])]
        assert [reply.status for reply in tried] == [200, 200, 429] and tried[2].headers["retry-after"]
        with Client(server.address, retries=0, api_key="bob") as client:
            client.detokenize(client.tokenize("a"))
            for call in (lambda: client.tokenize("a"), lambda: client.detokenize([5])):
                with pytest.raises(ServerError, match="used its 2 requests a minute"):
                    call()
        with Client(server.address, retries=0, api_key="carol") as client:
            with pytest.raises(RequestError, match=f"{MAX_CHARACTERS} are tokenized at once"):
                client.tokenize("a" * (MAX_CHARACTERS + 1))
            with pytest.raises(RequestError, match=f"{MAX_TOKENS} are turned into text at once"):
                client.detokenize([5] * (MAX_TOKENS + 1))
        bodies = [
            ("/tokenize", {"prompt": "a" * (MAX_CHARACTERS + 1)}),
            ("/tokenize", {"messages": [{"role": "user", "content": "a" * (MAX_CHARACTERS + 1)}]}),
            ("/detokenize", {"tokens": [5] * (MAX_TOKENS + 1)}),
            (
                CHAT,
                {
                    "messages": [{"role": "user", "content": "a"}] * 3
                    + [{"role": "a" * (MAX_CHARACTERS + 1), "content": ""}]
                },
            ),
        ]
        for path, body in bodies:
            reply = request(server.url, path, body, {"x-api-key": "carol"})
            assert reply.status == 400 and "at once, send parts" in reply.error["message"]


def test_probes_need_no_key(locked: Server) -> None:
    assert [request(locked.url, path).status for path in ("/health", "/live", "/ready")] == [200] * 3
    with grpc.insecure_channel(locked.address) as channel:
        status = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest()).status
    assert status == health_pb2.HealthCheckResponse.SERVING


def test_only_admins_change_what_is_served(locked: Server) -> None:
    with Client(locked.address, api_key="alice-key", retries=0) as alice:
        calls = (
            lambda: alice.sleep_model(""),
            lambda: alice.load_model("x"),
            lambda: alice.unload_model("x"),
            lambda: alice.wake_model(""),
            lambda: next(alice.kv_events()),
        )
        for call in calls:
            with pytest.raises(ServerError, match="key 'alice' may not do this; it takes a key with admin") as raised:
                call()
            assert raised.value.code == "PERMISSION_DENIED"
    with Client(locked.address, api_key="root-key") as root:
        root.sleep_model("")
        assert root.wake_model("") > 0


def test_requests_are_aborted_by_who_made_them(locked: Server) -> None:
    with (
        Client(locked.address, api_key="alice-key") as alice,
        Client(locked.address, api_key="one-key") as other,
        Client(locked.address, api_key="root-key") as root,
    ):
        for who, may in ((other, False), (alice, True), (root, True)):
            stream = alice.generate("abc", request_id="mine", max_tokens=3000, n=4, ignore_eos=True)
            next(stream)
            assert who.abort("mine") is may
            stream.close()


def test_a_salted_key_shares_what_it_scored_with_nobody(locked: Server) -> None:
    def cached(client: Client) -> int:
        (*_, last) = client.generate([*range(5, 45)], **SHORT)
        assert last.usage is not None
        return last.usage.cached_tokens

    with (
        Client(locked.address, api_key="salty-key") as salty,
        Client(locked.address, api_key="alice-key") as alice,
    ):
        salty.score([*range(5, 45)])
        assert cached(alice) == 0
        assert cached(salty) == 32


def test_a_key_has_its_rate(locked: Server) -> None:
    first, second, third = (ask(locked, "slow-key") for _ in range(3))
    assert (first.status, second.status, third.status) == (200, 200, 429)
    assert (
        first.headers["x-ratelimit-limit-requests"] == "2" and second.headers["x-ratelimit-remaining-requests"] == "0"
    )
    assert third.error["code"] == "rate_limit_exceeded" and 20 <= int(third.headers["retry-after"]) <= 30
    with Client(locked.address, api_key="slow-key", retries=0) as client, pytest.raises(ServerError) as raised:
        client.complete("abc", **SHORT)
    assert raised.value.code == "RESOURCE_EXHAUSTED" and raised.value.retry_after is not None


def test_an_echo_alone_is_a_request_of_its_key(locked: Server) -> None:
    body = {"prompt": "abc", "echo": True, "max_tokens": 0}
    assert [ask(locked, "echo-key", body).status for _ in range(3)] == [200, 200, 429]


def test_a_key_has_its_number_at_once(locked: Server) -> None:
    with Client(locked.address, api_key="one-key", retries=0) as client, ThreadPoolExecutor() as pool:
        locked.engine.suspend()  # or one may be over before the other is sent
        both = [pool.submit(client.complete, "abc", **SHORT) for _ in range(2)]
        (refused,), (taken,) = wait(both, timeout=30, return_when=FIRST_COMPLETED)
        with pytest.raises(ServerError, match="has 1 requests under way, and 1 are allowed at once"):
            refused.result()
        locked.engine.resume()
        assert taken.result(30)
        assert client.complete("abc", **SHORT)


@pytest.mark.slow
def test_who_says_no_length_gets_what_is_allowed(tiny_artifact: Path) -> None:
    with Server(tiny_artifact, "--max-output-tokens", "5") as server:
        body = {"prompt": "abc", "ignore_eos": True}
        assert request(server.url, COMPLETIONS, body).json["usage"]["completion_tokens"] == 5
        reply = request(server.url, COMPLETIONS, {**body, "min_tokens": 6})
        assert reply.status == 400 and reply.error["message"] == "min_tokens is 6; at most 5 is allowed here"
        with Client(server.address) as client:
            assert len(client.complete("abc", ignore_eos=True)[0].token_ids) == 5


def test_limits_of_the_server_and_of_a_key(locked: Server) -> None:
    for body, message in (
        ({"prompt": [5] * 51, **SHORT}, "the prompt has 51 tokens, and 50 are allowed here; shorten it"),
        ({"prompt": "abc", "n": 5}, "n is 5; at most 4 is allowed here"),
        ({"prompt": [5] * 51, "echo": True, "max_tokens": 0, "logprobs": 1}, "the prompt has 51 tokens"),
        ({"prompt": [5] * 51, "echo": True, "max_tokens": 0}, "the prompt has 51 tokens"),
        ({"prompt": "abc", "echo": True, "max_tokens": 0, "n": 5}, "n is 5; at most 4 is allowed here"),
        ({"prompt": "abc", "echo": True, "max_tokens": 0, "logprobs": 1, "n": 5}, "n is 5; at most 4 is allowed here"),
    ):
        reply = ask(locked, "alice-key", body)
        assert reply.status == 400 and message in reply.error["message"]
    reply = ask(locked, "one-key", {"prompt": "abc", "max_tokens": 101})
    assert reply.status == 400 and reply.error["message"] == "max_tokens is 101; at most 100 is allowed here"
    with Client(locked.address, api_key="one-key") as client:
        assert len(client.complete("abc", unlimited=True, ignore_eos=True)[0].token_ids) == 100


def test_keys_are_changed_without_a_restart(tiny_artifact: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    made = run_inferc("keys", "create", file, "alice", "--requests-per-minute", "100")
    alice = made.stdout.strip()
    with Server(tiny_artifact, "--api-keys", str(file)) as server:
        assert ask(server, alice).status == 200
        bob = run_inferc("keys", "create", file, "bob", "--json")
        wait_until(lambda: ask(server, json.loads(bob.stdout)["key"]).status == 200, "the new key is known")
        assert run_inferc("keys", "revoke", file, "alice").stdout == "alice: revoked\n"
        wait_until(lambda: ask(server, alice).status == 401, "the old one is not")
        assert alice not in server.log and alice not in file.read_text()


def test_the_command_that_makes_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    options = ("--admin", "--tokens-per-minute", "1000", "--max-n", "2", "--expires", "2999-01-01", "--salted")
    secret = run_inferc("keys", "create", file, "alice", *options).stdout.strip()
    (key,) = read_keys(file)
    assert (key.name, key.sha256, key.admin, key.salted) == ("alice", digest_of(secret), True, True)
    assert (key.tokens_per_minute, key.limits.max_n, key.expires) == (1000, 2, "2999-01-01")
    listed = run_inferc("keys", "list", file).stdout
    assert listed.startswith(f"alice  {key.sha256[:12]}…  admin") and secret not in listed
    for arguments, message in (
        (("create", file, "alice"), "has a key of 'alice' already"),
        (("create", file, "bob", "--expires", "soon"), "expires is 'soon'; expected a day"),
        (("create", file, "bob", "--max-n", "0"), "max_n is 0; expected a number above 0"),
        (("revoke", file, "carol"), "has no key of 'carol'; it has alice"),
        (("list", tmp_path / "none"), "cannot read the API keys: No such file or directory"),
    ):
        done = run_inferc("keys", *arguments)
        assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1
    assert len(read_keys(file)) == 1


# ------------------------------------------------------------------------------------------------------ limits


@pytest.mark.slow
def test_a_request_ends_after_its_time(tiny_artifact: Path) -> None:
    with Server(tiny_artifact, "--max-num-seqs", "1", "--max-request-seconds", "0.3") as server:
        with Client(server.address) as client, pytest.raises(ServerError, match="within the 0.3 s") as raised:
            client.complete("abc", **ENDLESS)
        assert raised.value.code == "DEADLINE_EXCEEDED"
        reply = request(server.url, COMPLETIONS, {"prompt": "abc", **ENDLESS})
        assert reply.status == 504 and reply.error["code"] == "timeout"
        events = request(server.url, COMPLETIONS, {"prompt": "abc", "stream": True, **ENDLESS}).events
        assert events[-1]["error"]["code"] == "timeout"


@contextmanager
def queueing(server: Server, least: int) -> Iterator[None]:
    """More work on the server than it does within seconds; the server is not good for anything else afterwards."""

    def occupy() -> None:
        with Client(server.address, retries=0) as client, suppress(ServerError):
            client.complete("abc", **{**ENDLESS, "n": 128})

    threads = [threading.Thread(target=occupy) for _ in range(7)]
    with Client(server.address) as client:
        for thread in threads:
            thread.start()
        wait_until(lambda: client.loads().num_waiting > least, "there is a queue")
        tokens = client.loads().output_tokens
        wait_until(lambda: client.loads().output_tokens > tokens + 400, "two sequences have shown how fast it goes on")
    yield
    server.process.kill()
    for thread in threads:
        thread.join()


@pytest.mark.slow
def test_what_would_wait_too_long_is_refused_at_once(tiny_artifact: Path) -> None:
    with (
        ThreadPoolExecutor() as pool,
        Server(tiny_artifact, "--max-num-seqs", "1", "--max-queue-seconds", "0.5") as server,
        Client(server.address, retries=0) as client,
    ):
        assert client.complete("abc", **SHORT)
        with queueing(server, least=90):
            # A limit of the call itself would be one that the server knows.
            asked = pool.submit(client.complete, "abc", **SHORT)
            with pytest.raises(ServerError, match="sequences wait, and the next would wait about") as raised:
                asked.result(10)
            assert raised.value.code == "RESOURCE_EXHAUSTED"
            assert raised.value.retry_after is not None and raised.value.retry_after > 0
            reply = request(server.url, COMPLETIONS, {"prompt": "abc"})
            assert reply.status == 429 and int(reply.headers["retry-after"]) >= 1


@pytest.mark.slow
def test_a_deadline_that_cannot_be_kept_is_told_at_once(tiny_artifact: Path) -> None:
    with (
        Server(tiny_artifact, "--max-num-seqs", "1") as server,
        Client(server.address, timeout=1.5, retries=0) as hasty,
        queueing(server, least=700),
    ):
        with pytest.raises(ServerError, match=r"longer than the [01]\.\d+ s that it may") as raised:
            hasty.complete("abc", **SHORT)
        assert raised.value.code == "RESOURCE_EXHAUSTED"


# --------------------------------------------------------------------------------------------------------- TLS


def https(server: Server, context: ssl.SSLContext, path: str = "/health") -> int:
    port = urlsplit(server.url).port
    connection = http.client.HTTPSConnection("localhost", port, timeout=20, context=context)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


def trusting(ca: Path, pair: tuple[Path, Path] | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(ca))
    if pair is not None:
        context.load_cert_chain(*pair)
    return context


def localhost(server: Server) -> str:
    return server.address.replace("127.0.0.1", "localhost")


def test_both_endpoints_speak_tls_and_take_new_certificates(tiny_artifact: Path, tmp_path: Path) -> None:
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    cert, key = old.issue("server")
    with Server(tiny_artifact, "--tls-cert", str(cert), "--tls-key", str(key)) as server:
        with Client(localhost(server), tls=Tls(ca=old.ca), retries=0) as client:
            assert https(server, trusting(old.ca)) == 200
            assert client.complete("abc", **SHORT)
            stream = client.generate("abc", max_tokens=200, n=16, ignore_eos=True)
            tokens = len(next(stream).token_ids)
            new.issue("server")

            def is_new() -> bool:
                try:
                    return https(server, trusting(new.ca)) == 200
                except ssl.SSLError:
                    return False

            wait_until(is_new, "HTTP has the new certificate")
            tokens += sum(len(piece.token_ids) for piece in stream)
            assert tokens == 3200, "connections that stood go on"
        with Client(localhost(server), tls=Tls(ca=new.ca)) as client:
            assert client.complete("abc", **SHORT)
        with Client(localhost(server), tls=Tls(ca=old.ca), retries=0) as client, pytest.raises(ServerError):
            client.complete("abc", **SHORT)
        with pytest.raises(ssl.SSLError):
            https(server, trusting(old.ca))
        key.write_text("nothing")
        wait_until(lambda: "the certificates stay as they were" in server.log, "what is no key is noticed")
        assert is_new()
        with Client(server.address, retries=0, timeout=10) as plain, pytest.raises(ServerError):
            plain.complete("abc", **SHORT)


def test_only_clients_with_a_certificate(tiny_artifact: Path, tmp_path: Path) -> None:
    ours, others = Authority(tmp_path, "ours"), Authority(tmp_path, "others")
    cert, key = ours.issue("server")
    mine, theirs = ours.issue("client"), others.issue("stranger")
    clients = tmp_path / "clients.pem"
    clients.write_bytes(ours.ca.read_bytes())
    options = ("--tls-cert", str(cert), "--tls-key", str(key), "--tls-client-ca", str(clients))
    with Server(tiny_artifact, *options) as server:

        def lets_in(pair: tuple[Path, Path] | None) -> bool:
            tls = Tls(ours.ca, *(pair or (None, None)))
            try:
                by_http = https(server, trusting(ours.ca, pair)) == 200
            except (ssl.SSLError, ConnectionError):
                by_http = False
            with Client(localhost(server), tls=tls, retries=0, timeout=10) as client:
                try:
                    by_grpc = bool(client.complete("abc", **SHORT))
                except ServerError:
                    by_grpc = False
            assert by_http == by_grpc
            return by_http

        assert lets_in(mine) and not lets_in(theirs) and not lets_in(None)
        clients.write_bytes(others.ca.read_bytes())
        wait_until(lambda: "the certificates were read again" in server.log, "it is noticed")
        assert lets_in(theirs) and not lets_in(mine)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_no_session_outlives_the_authority_of_its_client(version: ssl.TLSVersion, tmp_path: Path) -> None:
    ours, others = Authority(tmp_path, "ours"), Authority(tmp_path, "others")
    cert, key = ours.issue("server")
    clients = tmp_path / "clients.pem"
    clients.write_bytes(ours.ca.read_bytes())
    certificates = Certificates(TlsFiles(cert, key, clients))
    context = trusting(ours.ca, ours.issue("client"))
    context.maximum_version = version

    def shake(session: ssl.SSLSession | None = None) -> ssl.SSLSession | None:
        pipes = [ssl.MemoryBIO() for _ in range(4)]
        client = context.wrap_bio(pipes[0], pipes[1], server_hostname="localhost", session=session)
        server = certificates.ssl_context.wrap_bio(pipes[2], pipes[3], server_side=True)
        for _ in range(4):
            for side, out, into in ((client, pipes[1], pipes[2]), (server, pipes[3], pipes[0])):
                with suppress(ssl.SSLWantReadError):
                    side.do_handshake()
                into.write(out.read())
        server.write(b"hello")
        pipes[0].write(pipes[3].read())
        assert client.read(5) == b"hello"
        return client.session

    session = shake()
    shake(session)
    clients.write_bytes(others.ca.read_bytes() * 2)
    certificates.refresh()
    with pytest.raises(ssl.SSLError):
        shake(session)


@pytest.mark.slow
@pytest.mark.skipif(not FAKETIME, reason="libfaketime is not installed")
def test_an_expired_certificate(tiny_artifact: Path, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.issue("server", timedelta(days=-1))
    done = run_inferc("serve", tiny_artifact, "--tls-cert", cert, "--tls-key", key)
    assert done.returncode == 2 and f"{cert}: the certificate expired on 20" in done.stderr
    authority.issue("server", timedelta(hours=1))
    with Server(tiny_artifact, "--tls-cert", str(cert), "--tls-key", str(key)) as server:
        assert "the certificate expires in 0 days; renew it" in server.log
        assert https(server, trusting(authority.ca)) == 200
        assert "certificate has expired" in https_later(server, authority.ca), "clients refuse it"
        authority.issue("server")
        wait_until(lambda: https_later(server, authority.ca) == "200\n", "and take the next one, without a restart")


def https_later(server: Server, ca: Path) -> str:
    """Return the answer that a client gets whose clock is two hours ahead."""
    script = (
        "import http.client, ssl, sys; from urllib.parse import urlsplit\n"
        "context = ssl.create_default_context(cafile=sys.argv[1])\n"
        "client = http.client.HTTPSConnection('localhost', urlsplit(sys.argv[2]).port, timeout=20, context=context)\n"
        "try: client.request('GET', '/health'); print(client.getresponse().status)\n"
        "except ssl.SSLCertVerificationError as error: print(error)\n"
    )
    env = {**os.environ, "LD_PRELOAD": str(FAKETIME[0]), "FAKETIME": "+2h", "DONT_FAKE_MONOTONIC": "1"}
    command = [sys.executable, "-c", script, str(ca), str(server.url)]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--host", "0.0.0.0"), "--host 0.0.0.0 can be reached from elsewhere, and anybody could ask: give --api-keys"),
        (("--host", "::"), "--host :: can be reached from elsewhere"),
        (("--kv-events", "tcp://*:5557"), "tcp://*:5557 can be reached from elsewhere, and ZeroMQ subscribers see"),
        (("--tls-cert", "x"), "--tls-cert and --tls-key go together; give both"),
        (("--tls-client-ca", "x"), "--tls-client-ca needs --tls-cert and --tls-key"),
        (("--tls-cert", "none.pem", "--tls-key", "none.pem"), "none.pem: cannot read it: No such file or directory"),
        (("--api-keys", "none.json"), "none.json: cannot read the API keys: No such file or directory"),
        (("--max-n", "0"), "max_n is 0; expected a number above 0"),
        (("--max-body-bytes", "0"), "--max-body-bytes 0: expected 1 or more"),
        (("--max-queue-seconds", "-1"), "--max-queue-seconds -1: expected a number of seconds, 0 or more"),
    ],
)
def test_what_is_not_safe_is_refused(tiny_artifact: Path, tmp_path: Path, options: Any, message: str) -> None:
    ports = ("--grpc-port", "0", "--http-port", "0")
    done = run_inferc("serve", tiny_artifact, *ports, *options, cwd=tmp_path)
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_no_page_from_elsewhere_asks_an_open_server(url: str, locked: Server) -> None:
    """The name of another page may stand for 127.0.0.1 by the time its script asks."""
    port = url.rpartition(":")[2]
    for host in (
        "evil.example",
        f"evil.example:{port}",
        "EVIL.EXAMPLE.",
        "localhost.evil.example",
        "1.2.3.4.evil.example",
    ):
        refused = request(url, "/v1/models", headers={"host": host})
        assert refused.status == 403 and "answers to this machine's names only" in refused.error["message"], host
        assert request(url, "/", headers={"host": host}).status == 403
    for host in ("localhost", f"localhost:{port}", "[::1]:80", "10.0.0.7", "gpu-box", "host.docker.internal:80", ""):
        assert request(url, "/v1/models", headers={"host": host}).status == 200, host
    assert ask(locked, "alice-key", host="llm.example").status == 200


@pytest.mark.slow
def test_insecure_says_that_it_is_meant(tiny_artifact: Path) -> None:
    with (
        Server(tiny_artifact, "--host", "0.0.0.0", "--insecure") as server,
        Client(server.address.replace("0.0.0.0", "127.0.0.1")) as client,
    ):
        assert client.complete("abc", **SHORT)
        assert request(server.url, "/v1/models", headers={"host": "llm.example"}).status == 200


def test_the_async_client_has_keys_and_tls_too(tiny_artifact: Path, tmp_path: Path, keys: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.issue("server")
    with Server(tiny_artifact, "--tls-cert", str(cert), "--tls-key", str(key), "--api-keys", str(keys)) as server:

        async def work() -> None:
            async with AsyncClient(localhost(server), tls=Tls(ca=authority.ca), api_key="alice-key") as client:
                assert await client.complete("abc", **SHORT)
            async with AsyncClient(localhost(server), tls=Tls(ca=authority.ca), retries=0) as client:
                with pytest.raises(ServerError, match="UNAUTHENTICATED"):
                    await client.complete("abc", **SHORT)

        asyncio.run(asyncio.wait_for(work(), 60))


def test_errors_name_no_files(locked: Server, tiny_artifact: Path) -> None:
    bodies: list[Any] = [
        {"prompt": [2**62]},
        {"prompt": "a", "model": "../../etc/passwd"},
        {"prompt": "a", "logit_bias": {"x": 1}},
    ]
    for body in bodies:
        reply = ask(locked, "alice-key", body)
        assert 400 <= reply.status < 500
        assert "/tmp" not in reply.body.decode() and ".py" not in reply.body.decode()
    with Client(locked.address, api_key="alice-key") as client, pytest.raises(RequestError) as raised:
        client.complete([2**31 - 1])
    assert ".py" not in str(raised.value)
