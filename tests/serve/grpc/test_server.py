"""A real server process, spoken to over a real channel."""

import asyncio
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from http_calls import request
from serving import ENV, INFERC, Server, wait_until

from inferc.client import SERVICE, Client, ServerError
from inferc.errors import ConfigError, RequestError
from inferc.serve.errors import RequestAborted
from inferc.serve.grpc.inference_service import InferenceService
from inferc.serve.models.served_model import ModelSource
from inferc.serve.protos.inferc.v1 import inference_pb2 as pb
from inferc.serve.server import ServeConfig, serve
from inferc.serve.signals import NUMBERS

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
RAW = bytes  # as a serializer: bytes stay as they are
ENDLESS: dict[str, Any] = {
    "n": 64,
    "max_tokens": 200,
    "ignore_eos": True,
}  # seconds of work for a server that runs one at a time


@pytest.fixture
def client(served: str) -> Iterator[Client]:
    with Client(served, timeout=60) as client:
        yield client


def check(channel: grpc.Channel, service: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    return int(stub.Check(health_pb2.HealthCheckRequest(service=service)).status)


def call(channel: grpc.Channel, method: str, data: bytes) -> grpc.RpcError:
    """The error that a streaming call with these bytes ends in."""
    with pytest.raises(grpc.RpcError) as raised:
        list(channel.unary_stream(f"/{SERVICE}/{method}", RAW, RAW)(data, timeout=30))
    return raised.value


# ---------------------------------------------------------------------------------------------- what it answers


def test_a_stream_is_the_whole_answer_in_pieces(client: Client) -> None:
    pieces = list(client.generate("def add(", max_tokens=12, temperature=0.0))
    (whole,) = client.complete("def add(", max_tokens=12, temperature=0.0)
    assert "".join(piece.text for piece in pieces) == whole.text
    assert sum((piece.token_ids for piece in pieces), ()) == whole.token_ids and len(whole.token_ids) <= 12
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert whole.finish_reason in ("length", "stop")


def test_text_and_its_token_ids_are_the_same_prompt(client: Client) -> None:
    ids = client.tokenize("def add(first")
    assert client.detokenize(ids) == "def add(first"
    assert client.complete(ids, max_tokens=5, temperature=0.0) == client.complete(
        "def add(first", max_tokens=5, temperature=0.0
    )


def test_chat_goes_through_the_template(client: Client) -> None:
    (answer,) = client.complete([{"role": "user", "content": "hi"}], max_tokens=4, temperature=0.0, ignore_eos=True)
    assert len(answer.token_ids) == 4


def test_seeds_repeat_and_outputs_differ(client: Client) -> None:
    sampling = {"n": 3, "temperature": 1.5, "max_tokens": 8, "seed": 5, "ignore_eos": True}
    first = client.complete("abc", **sampling)
    assert first == client.complete("abc", **sampling)
    assert len({answer.token_ids for answer in first}) == 3


def test_logprobs_come_with_every_token(client: Client) -> None:
    pieces = list(client.generate("abc", max_tokens=5, temperature=0.0, logprobs=2, ignore_eos=True))
    found = [entry for piece in pieces for entry in piece.logprobs]
    assert [entry.token_id for entry in found] == [token for piece in pieces for token in piece.token_ids]
    assert all(entry.rank == 1 and len(entry.top) == 2 and entry.logprob <= 0 for entry in found)


def test_usage_comes_with_the_last_message(served: str, client: Client) -> None:
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[5, 6, 7]), sampling=pb.SamplingParams(max_tokens=4, n=2, ignore_eos=True)
    )
    with grpc.insecure_channel(served) as channel:
        stream = channel.unary_stream(f"/{SERVICE}/Generate", RAW, pb.GenerateResponse.FromString)
        messages = list(stream(request.SerializeToString()))
    assert not any(message.HasField("usage") for message in messages[:-1])
    assert (messages[-1].usage.prompt_tokens, messages[-1].usage.output_tokens) == (3, 8)


def test_usage_says_what_was_found_in_the_prefix_cache(served: str) -> None:
    def cached(salt: str) -> int:
        sampling = pb.SamplingParams(max_tokens=2, ignore_eos=True, cache_salt=salt)
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(10, 90)), sampling=sampling)
        with grpc.insecure_channel(served) as channel:
            stream = channel.unary_stream(f"/{SERVICE}/Generate", RAW, pb.GenerateResponse.FromString)
            return int(list(stream(request.SerializeToString()))[-1].usage.cached_tokens)

    assert [cached(salt) for salt in ("mine", "mine", "yours")] == [0, 79, 0], "all of 80 but the last"


def test_model_info(client: Client, tiny_artifact: Path) -> None:
    info = client.model_info()
    assert (info.model, info.model_type, info.dtype) == (tiny_artifact.name, "llama", "float32")
    assert (info.max_model_len, list(info.eos_token_ids), info.has_chat_template) == (256, [1], True)


# ------------------------------------------------------------------------------------------------- bad requests


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"max_tokens": -1}, "max_tokens is -1; expected at least 1"),
        ({"temperature": -0.5}, "temperature is -0.5"),
        ({"top_p": 2.0}, "top_p is 2.0"),
        ({"max_tokens": 4, "unlimited": True}, "leave one out"),
        ({"stop_token_ids": [100_000]}, "outside of the vocabulary"),
        ({"tempratur": 1.0}, "unknown sampling parameter tempratur"),
    ],
)
def test_bad_sampling_is_invalid_argument(client: Client, sampling: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        client.complete("abc", **sampling)


def test_a_prompt_longer_than_the_model_allows(client: Client) -> None:
    with pytest.raises(RequestError, match="the prompt has 300 tokens, and the model takes 255 of its 256"):
        client.complete([5] * 300, max_tokens=1)


def test_no_prompt_and_no_such_model(served: str) -> None:
    with grpc.insecure_channel(served) as channel:
        error = call(channel, "Generate", b"")
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and "no prompt" in (error.details() or "")
        error = call(channel, "Generate", pb.GenerateRequest(chat=pb.Chat()).SerializeToString())
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and "no messages" in (error.details() or "")
        error = call(channel, "Generate", pb.GenerateRequest(text="a", model="other").SerializeToString())
        assert error.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    ("data", "where"),
    [
        # Field 77 of the request, and field 99 of its sampling parameters (tag, wire type 0, value 1).
        (
            pb.GenerateRequest(text="a").SerializeToString() + bytes([0xE8, 0x04, 1]),
            "GenerateRequest has field number 77",
        ),
        (b"\x12\x01a\x2a\x03" + bytes([0x98, 0x06, 1]), "GenerateRequest.sampling has field number 99"),
    ],
)
def test_an_unknown_field_is_refused_and_not_dropped(served: str, data: bytes, where: str) -> None:
    with grpc.insecure_channel(served) as channel:
        error = call(channel, "Generate", data)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert where in (error.details() or "")


@pytest.mark.parametrize("data", [b"\xff\xff", b"\x12\x02\xff\xfe"])  # no tag; a text that is not UTF-8
def test_bytes_that_are_no_message(served: str, data: bytes) -> None:
    with grpc.insecure_channel(served) as channel:
        error = call(channel, "Generate", data)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "the bytes are no inferc.v1.GenerateRequest" in (error.details() or "")
        assert check(channel) == SERVING


def test_a_prompt_no_tokens_can_hold_is_refused_before_it_is_tokenized(client: Client) -> None:
    with pytest.raises(RequestError, match="the prompt has 8000000 characters, and the model takes 256 tokens, of at"):
        client.complete("word " * 1_600_000, max_tokens=1)


def test_a_long_text_keeps_nobody_waiting(served: str, client: Client) -> None:
    """Tokenizing it takes seconds, in which health answers within the second that probes give it."""
    with Client(served) as other, grpc.insecure_channel(served) as channel, ThreadPoolExecutor() as pool:
        long = pool.submit(other.tokenize, "word and wood " * 100_000)
        checks = 0
        while not long.done():
            stub = health_pb2_grpc.HealthStub(channel)
            assert stub.Check(health_pb2.HealthCheckRequest(), timeout=1.0).status == SERVING
            checks += 1
        assert checks > 3 and len(long.result()) > 100_000


def test_of_a_prompt_of_one_token_nothing_is_scored(client: Client) -> None:
    deltas = list(client.generate([5], max_tokens=2, ignore_eos=True, prompt_logprobs=1))
    assert deltas[-1].finish_reason == "length" and not any(delta.prompt_logprobs for delta in deltas)


def test_a_request_that_leaves_nothing_to_choose_is_refused(client: Client) -> None:
    with pytest.raises(RequestError, match="nothing is left to choose"):
        client.complete("abc", allowed_token_ids=[1], min_tokens=1)
    with pytest.raises(RequestError, match="repetition_penalty is"):
        client.complete("abc", repetition_penalty=1e-38)


# ------------------------------------------------------------------------------------------ health, reflection


def test_health(served: str) -> None:
    with grpc.insecure_channel(served) as channel:
        assert check(channel) == check(channel, SERVICE) == SERVING
        with pytest.raises(grpc.RpcError) as raised:
            check(channel, "unknown.Service")
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND


def test_reflection_describes_the_service(served: str) -> None:
    with grpc.insecure_channel(served) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert {SERVICE, "grpc.health.v1.Health"} <= set(database.get_services())
        described = database.FindFileContainingSymbol(SERVICE)
    assert {method.name for method in described.service[0].method} >= {"Generate", "Tokenize", "GetModelInfo"}


# --------------------------------------------------------------------------------------- cancelling, deadlines


@pytest.fixture(scope="module")
def slow(tiny_artifact: Path) -> Iterator[Server]:
    """A server that runs one sequence at a time."""
    with Server(tiny_artifact, "--max-num-seqs", "1") as server:
        yield server


def wait_until_idle(client: Client) -> None:
    def idle() -> bool:
        loads = client.loads()
        return (loads.num_running, loads.num_waiting, loads.num_requests, loads.kv_usage) == (0, 0, 0, 0.0)

    wait_until(idle, "the engine is idle and its cache empty")


def test_a_client_that_leaves_frees_its_blocks(slow: Server) -> None:
    with Client(slow.address) as client:
        stream = client.generate("abc", **ENDLESS)
        next(stream)
        assert client.loads().kv_usage > 0 and client.loads().num_requests == 1
        stream.close()
        wait_until_idle(client)


def test_a_deadline_ends_the_request(slow: Server) -> None:
    with Client(slow.address, timeout=0.3) as hasty, Client(slow.address) as client:
        with pytest.raises(ServerError) as raised:
            hasty.complete("abc", **ENDLESS)
        assert raised.value.code == "DEADLINE_EXCEEDED"
        wait_until_idle(client)
    counted = 'inferc_grpc_calls_total{code="DEADLINE_EXCEEDED",method="inferc.v1.InferenceService.Complete"} 1.0'
    wait_until(
        lambda: counted in request(slow.url, "/metrics").body.decode(), "the call is counted as what its client saw"
    )


def test_abort_names_a_request(slow: Server) -> None:
    with Client(slow.address) as client:
        stream = client.generate("abc", request_id="mine", **ENDLESS)
        next(stream)
        with pytest.raises(ServerError) as raised:
            list(client.generate("abc", request_id="mine", max_tokens=1))
        assert raised.value.code == "ALREADY_EXISTS"
        assert client.abort("mine") and not client.abort("mine")
        with pytest.raises(ServerError) as raised:
            list(stream)
        assert raised.value.code == "CANCELLED"
        wait_until_idle(client)


def test_a_request_has_its_name_while_its_prompt_is_scored() -> None:
    """So that Abort finds it."""
    names: list[str] = []

    async def score(prompt: list[int], top: int, request_id: str = "", cache_salt: str = "", first: int = 1) -> None:
        names.append(request_id)
        raise RequestAborted("aborted")

    model = SimpleNamespace(
        engine=SimpleNamespace(facts=SimpleNamespace(defaults={})),
        check_open=lambda params, num_prompts, num_sequences: None,
        check_length=lambda num_tokens, room: None,
        score=score,
    )
    models: Any = SimpleNamespace(get=lambda name: model)
    made = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2]), prompt_logprobs=1, request_id="mine")
    with pytest.raises(RequestAborted):
        asyncio.run(InferenceService(models).complete(made))
    assert names == ["mine"]


def test_a_name_can_be_used_again_at_once(served: str) -> None:
    """Outputs still on their way for the cancelled request are not taken for those of the new one."""
    with Client(served) as client:
        (want,) = client.complete("xyz", max_tokens=6, temperature=0.0, ignore_eos=True)
        for _ in range(10):
            stream = client.generate("abc", request_id="again", max_tokens=200, ignore_eos=True)
            next(stream)
            client.abort("again")
            pieces = list(client.generate("xyz", request_id="again", max_tokens=6, temperature=0.0, ignore_eos=True))
            assert sum((piece.token_ids for piece in pieces), ()) == want.token_ids


def test_a_reader_that_sleeps_stalls_nobody_and_misses_nothing(served: str, client: Client) -> None:
    with Client(served) as sleeper:
        stream = sleeper.generate("abc", n=16, max_tokens=200, ignore_eos=True, logprobs=20, temperature=0.0)
        first = next(stream)
        assert client.complete("abc", max_tokens=20, ignore_eos=True)[0].finish_reason == "length"
        pieces = [first, *stream]
    assert sum(len(piece.token_ids) for piece in pieces) == 16 * 200
    assert sum(piece.finish_reason == "length" for piece in pieces) == 16


# ------------------------------------------------------------------------------------------------ the two ends


def watch(channel: grpc.Channel, seen: list[int]) -> threading.Thread:
    """Collect what health's Watch says until the server goes."""

    def run() -> None:
        try:
            for answer in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()):
                seen.append(answer.status)
        except grpc.RpcError:
            return

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.slow
def test_sigterm_lets_running_requests_end(tiny_artifact: Path) -> None:
    with Server(tiny_artifact, "--max-num-seqs", "1") as server, Client(server.address) as client:
        seen: list[int] = []
        with grpc.insecure_channel(server.address) as channel:
            watching = watch(channel, seen)
            # Long enough that the server still drains when it is asked for more.
            stream = client.generate("abc", n=32, max_tokens=200, ignore_eos=True)
            tokens = len(next(stream).token_ids)
            wait_until(lambda: seen == [SERVING], "Watch has answered")
            server.terminate()
            wait_until(lambda: seen == [SERVING, NOT_SERVING], "Watch says so at once")
            with pytest.raises(ServerError) as raised:
                client.complete("abc", max_tokens=1)
            assert raised.value.code == "UNAVAILABLE"
            tokens += sum(len(piece.token_ids) for piece in stream)
            assert server.process.wait(30) == 0
            watching.join(10)
    assert tokens == 32 * 200


@pytest.mark.slow
def test_sigterm_while_it_loads_ends_it_at_once(tiny_artifact: Path) -> None:
    command = [*INFERC, "serve", str(tiny_artifact), "--grpc-port", "0", "--http-port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENV)
    try:
        wait_until(lambda: bool(psutil.Process(process.pid).children()), "the engine's process has started")
        (engine,) = psutil.Process(process.pid).children()
        process.terminate()
        _, log = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 0 and "Traceback" not in log, log
    wait_until(lambda: not engine.is_running(), "the engine's process has ended")


def test_a_port_in_use_is_known_before_anything_is_loaded(served: str, tmp_path: Path) -> None:
    handlers = [signal.getsignal(number) for number in NUMBERS]
    with pytest.raises(ConfigError, match="the port is in use"):
        config = ServeConfig((ModelSource("none", tmp_path / "none"),), grpc_port=int(served.rpartition(":")[2]))
        serve(config, print)
    assert [signal.getsignal(number) for number in NUMBERS] == handlers


def test_an_objective_that_can_not_be_met_is_told_as_such(tiny_artifact: Path) -> None:
    with Server(tiny_artifact, "--policy", "slo", "--tbt-ms", "200") as server, Client(server.address) as client:
        wishes = {"priority": 3, "client": "me", "ttft_ms": 60_000.0, "tbt_ms": 5000.0}
        (answer,) = client.complete("abc", max_tokens=50, ignore_eos=True, **wishes)  # and steps have been timed
        assert len(answer.token_ids) == 50
        with pytest.raises(ServerError, match="ttft_ms is 0.001, and .* take .* when it is idle") as raised:
            client.complete("abc " * 30, max_tokens=2, ttft_ms=0.001)
        assert raised.value.code == "RESOURCE_EXHAUSTED"
        with pytest.raises(RequestError, match="priority is 2000; expected at most 1000"):
            client.complete("abc", priority=2000)
        (answer,) = client.complete("abc", max_tokens=5, ignore_eos=True)
        assert len(answer.token_ids) == 5
        for _ in range(20):  # answers from which lengths are learned
            client.complete("abc", max_tokens=3, ignore_eos=True)
        loads = client.loads()
        assert loads.num_refused == 1 and loads.step_cost_error > 0
        assert 0 < loads.length_error and 0 < loads.length_error_of_mean


@pytest.mark.slow
def test_sigterm_cuts_off_what_takes_too_long(tiny_artifact: Path) -> None:
    options = ("--max-num-seqs", "1", "--drain-seconds", "0.2")
    with Server(tiny_artifact, *options) as server, Client(server.address) as client:
        stream = client.generate("abc", **{**ENDLESS, "n": 128})
        next(stream)
        server.terminate()
        with pytest.raises(ServerError) as raised:
            list(stream)
        assert raised.value.code == "UNAVAILABLE"
        assert server.process.wait(30) == 0


def test_the_engine_does_not_outlive_its_server(tiny_artifact: Path) -> None:
    with Server(tiny_artifact) as server:
        engine = server.engine
        server.process.kill()
        server.process.wait()
        wait_until(lambda: not psutil.pid_exists(engine.pid), "the engine's process has ended")


@pytest.mark.slow
def test_serving_loads_neither_torch_nor_transformers(served: str, tiny_artifact: Path) -> None:
    with Server(tiny_artifact) as server, Client(server.address) as client:
        client.complete("abc", max_tokens=2)
        for pid in (server.process.pid, server.engine.pid):
            maps = Path(f"/proc/{pid}/maps").read_text()
            assert "numpy" in maps and "/torch/" not in maps and "/transformers/" not in maps


@pytest.mark.parametrize(("num_bytes", "code"), [(60_000, None), (66_000, grpc.StatusCode.RESOURCE_EXHAUSTED)])
def test_metadata_has_a_bound_that_is_the_same_for_every_call(
    served: str, num_bytes: int, code: grpc.StatusCode | None
) -> None:
    found: set[grpc.StatusCode | None] = set()
    with grpc.insecure_channel(served) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        for _ in range(5):
            try:
                check(health_pb2.HealthCheckRequest(), metadata=(("x-a", "b" * num_bytes),), timeout=10)
                found.add(None)
            except grpc.RpcError as error:
                found.add(error.code())
        assert check(health_pb2.HealthCheckRequest(), timeout=10).status == health_pb2.HealthCheckResponse.SERVING
    assert found == {code}
