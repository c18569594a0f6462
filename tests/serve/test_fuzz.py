"""Requests that no client would send: none ends or hangs the server, and none is its fault."""

import http.client
import json
import random
import socket
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import pytest
from clients import environment
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hostile import a_call, a_flood, a_tensor_call, damaged
from http_calls import request
from serving import Server, wait_until

from inferc.client import Client
from inferc.serve.grpc.server import INFERENCE, KSERVE
from inferc.serve.protos.inferc.v1 import inference_pb2 as pb
from inferc.serve.protos.inference import grpc_service_pb2 as kserve_pb

pytestmark = [pytest.mark.long, pytest.mark.slow]

RAW = bytes
LIMITS = ("--max-request-seconds", "2", "--max-output-tokens", "8", "--max-n", "4")
# What would end the model that the others need.
LEFT_OUT = ("UnloadModel", "RepositoryModelUnload", "SleepModel", "SubscribeKvEvents")
OURS = ("INTERNAL", "UNKNOWN", "UNIMPLEMENTED", "DATA_LOSS")


@pytest.fixture(scope="module")
def target(tiny_artifact: Path) -> Iterator[Server]:
    with Server(tiny_artifact, *LIMITS) as server:
        yield server


def check_alive(server: Server, engine: int) -> None:
    """Assert that the server answers as before, by the same engine, and that its log has no traceback."""
    assert request(server.url, "/health").status == 200
    with Client(server.address, timeout=30) as client:
        assert len(client.complete("abc", max_tokens=3, temperature=0.0, ignore_eos=True)[0].token_ids) == 3
        wait_until(lambda: not (client.loads().num_requests or client.loads().kv_usage), "nothing of it is left")
    assert server.engine.pid == engine
    assert "Traceback" not in server.log and "internal error" not in server.log, server.log[-3000:]


# -------------------------------------------------------------------------------------------------------- HTTP


def schemathesis(server: Server, examples: int, seed: int, folder: Path) -> int:
    """Runs it in a folder for its notes; the number of requests that it made."""
    checks = "not_a_server_error,content_type_conformance,negative_data_rejection,unsupported_method"
    command = [
        str(environment("schemathesis") / "schemathesis"),
        "run",
        f"{server.url}/openapi.json",
        "--checks",
        checks,
        "--max-examples",
        str(examples),
        "--seed",
        str(seed),
        "--suppress-health-check",
        "all",
        "--request-timeout",
        "30",
        "--phases",
        "coverage,fuzzing",
        "--generation-database",
        "none",
        "--warnings",
        "off",
        "--no-color",
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stdout[-6000:]
    return int(done.stdout.partition("Test cases:")[2].split()[0])


@pytest.mark.slow
def test_what_schemathesis_sends(target: Server, tmp_path: Path) -> None:
    engine = target.engine.pid
    assert schemathesis(target, 25, 1, tmp_path) > 500
    check_alive(target, engine)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_requests_of_schemathesis(target: Server, tmp_path: Path) -> None:
    engine = target.engine.pid
    count = 0
    for seed in range(2, 40):
        count += schemathesis(target, 150, seed, tmp_path)
        if count >= 10_000:
            break
    assert count >= 10_000
    check_alive(target, engine)


def fuzz_http(server: Server, count: int, seed: int) -> Counter[int]:
    """Sends so many requests over a connection, or another where the server hangs up; counts of statuses."""
    rng, statuses = random.Random(seed), Counter[int]()
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
    for _ in range(count):
        call = a_call(rng)
        try:
            body: Any = iter([call.body[:7], call.body[7:]]) if call.is_chunked else call.body
            connection.request("POST", call.path, body, call.headers, encode_chunked=call.is_chunked)
            answer = connection.getresponse()
            data = answer.read()
        except (ConnectionError, http.client.HTTPException) as error:
            raise AssertionError(f"{call.path} {call.headers} {call.body[:2000]!r}: {error!r}") from error
        found = f"{call.path} {call.headers} {call.body[:2000]!r}: {answer.status} {data[:1000]!r}"
        assert answer.status not in (500, 501, 502), found
        of_openai = set() if call.path.startswith("/v1/messages") else {"param", "code"}
        assert answer.status == 200 or set(json.loads(data)["error"]) == {"message", "type", *of_openai}, found
        assert answer.status == 200 or len(data) < 2000, found
        assert b"/tmp" not in data and b".py" not in data, found
        statuses[answer.status] += 1
    connection.close()
    return statuses


def test_hundreds_of_bodies_that_nobody_would_send(target: Server) -> None:
    engine = target.engine.pid
    statuses = fuzz_http(target, 800, seed=1)
    assert statuses[200] > 20 and statuses[400] > 400, statuses
    check_alive(target, engine)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_thousand_bodies_that_nobody_would_send(target: Server) -> None:
    engine = target.engine.pid
    fuzz_http(target, 20_000, seed=2)
    check_alive(target, engine)


def test_bytes_that_are_hardly_http(target: Server) -> None:
    engine, rng = target.engine.pid, random.Random(0)
    host, port = urlsplit(target.url).netloc.split(":")
    body = json.dumps({"prompt": "abc", "max_tokens": 2, "stream": True, "logit_bias": {"5": 1.0}}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
    whole = head + b"content-length: %d\r\n\r\n" % len(body) + body
    for _ in range(300):
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            try:
                connection.sendall(damaged(whole, rng))
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):
                    pass
            except ConnectionError:  # it may hang up on what is no HTTP
                pass
    check_alive(target, engine)


# -------------------------------------------------------------------------------------------------------- gRPC

TEXTS = (
    "",
    "abc",
    "tiny-llama",
    "1",
    "\x00",
    "é" * 50,
    "../../etc/passwd",
    "x" * 300,
    "\U0001f469\u200d\U0001f469",
    "{}",
)
NUMBERS = (0, 1, 2, 3, -1, 5, 17, 127, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63), 2**64 - 1)
FLOATS = (0.0, 1.0, -1.0, 0.5, 1e30, -1e30, float("nan"), float("inf"), float("-inf"), 1e-40)


def random_message(message: Message, rng: random.Random, depth: int = 0) -> Message:
    """Fields set at random, to values at the ends of their types."""
    for field in message.DESCRIPTOR.fields:
        if rng.random() < (0.5 if depth < 3 else 0.9):
            continue
        count = rng.choice((1, 1, 2, 5)) if field.is_repeated else 1
        for _ in range(count):
            try:
                _set(message, field, rng, depth)
            except ValueError:  # out of the field's range
                continue
    return message


def _set(message: Message, field: Any, rng: random.Random, depth: int) -> None:
    target: Any = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        at: Any = _value(key, rng)
        if value.message_type is not None:
            random_message(target[at], rng, depth + 1)
        else:
            target[at] = _value(value, rng)
    elif field.message_type is not None:
        random_message(target.add() if field.is_repeated else target, rng, depth + 1)
        if not field.is_repeated:
            target.SetInParent()
    elif field.is_repeated:
        target.append(_value(field, rng))
    else:
        setattr(message, field.name, _value(field, rng))


def _value(field: Any, rng: random.Random) -> Any:
    kinds: dict[int, Callable[[], Any]] = {
        FieldDescriptor.CPPTYPE_STRING: lambda: rng.choice(TEXTS),
        FieldDescriptor.CPPTYPE_BOOL: lambda: rng.random() < 0.5,
        FieldDescriptor.CPPTYPE_FLOAT: lambda: rng.choice(FLOATS),
        FieldDescriptor.CPPTYPE_DOUBLE: lambda: rng.choice(FLOATS),
        FieldDescriptor.CPPTYPE_ENUM: lambda: rng.choice((0, 1)),
    }
    if field.type == FieldDescriptor.TYPE_BYTES:
        return rng.randbytes(rng.randrange(12))
    return kinds.get(field.cpp_type, lambda: rng.choice(NUMBERS))()


SEEDS: dict[str, Message] = {
    "Generate": pb.GenerateRequest(
        text="abc", sampling=pb.SamplingParams(max_tokens=2, stop=["x"], logit_bias={5: 1.0})
    ),
    "Complete": pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])),
    "Score": pb.ScoreRequest(text="abc"),
    "ModelInfer": kserve_pb.ModelInferRequest(
        inputs=[kserve_pb.ModelInferRequest.InferInputTensor(name="text_input", datatype="BYTES", shape=[1])],
        raw_input_contents=[b"\x03\x00\x00\x00abc"],
    ),
}
SEEDS["ModelStreamInfer"] = SEEDS["ModelInfer"]


def fuzz(server: Server, count: int, seed: int) -> dict[str, int]:
    """Send `count` requests and count the status codes.

    The requests are messages of random fields, mutated bytes of messages, and messages with far too many fields.
    """
    rng = random.Random(seed)
    methods = [(service, method) for service in (INFERENCE, KSERVE) for method in service.methods]
    methods = [(service, method) for service, method in methods if method.name not in LEFT_OUT]
    codes: dict[str, int] = {}
    with grpc.insecure_channel(server.address) as channel:
        for number in range(count):
            service, method = methods[number % len(methods)]
            kind = GetMessageClass(method.input_type)
            data = random_message(kind(), rng).SerializeToString()
            kind_of_data = rng.random()
            if kind_of_data < 0.1:
                data = a_flood(rng)
            elif kind_of_data < 0.3 and method.name in ("ModelInfer", "ModelStreamInfer"):
                data = a_tensor_call(rng, kserve_pb.ModelInferRequest)
            elif kind_of_data < 0.5:
                data = damaged(SEEDS.get(method.name, kind()).SerializeToString() or data, rng)
            path = f"/{service.full_name}/{method.name}"
            call: Any
            try:
                if method.client_streaming:
                    call = channel.stream_stream(path, RAW, RAW)(iter([data]), timeout=30)
                    list(call)
                elif method.server_streaming:
                    list(channel.unary_stream(path, RAW, RAW)(data, timeout=30))
                else:
                    channel.unary_unary(path, RAW, RAW)(data, timeout=30)
                code = "OK"
            except grpc.RpcError as error:
                code = error.code().name
                assert code not in OURS, f"{path} {data!r}: {error.details()}"
                assert "/tmp" not in (error.details() or "") and ".py" not in (error.details() or "")
                if code == "DEADLINE_EXCEEDED":
                    assert "the request was not done within" in (error.details() or ""), f"{path} {data!r} hung"
            codes[code] = codes.get(code, 0) + 1
    return codes


def test_a_thousand_messages_that_are_none(target: Server) -> None:
    engine = target.engine.pid
    codes = fuzz(target, 1000, seed=1)
    assert codes["OK"] > 50 and codes["INVALID_ARGUMENT"] > 200, codes
    check_alive(target, engine)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_thousand_messages_that_are_none(target: Server) -> None:
    engine = target.engine.pid
    fuzz(target, 20_000, seed=2)
    check_alive(target, engine)
