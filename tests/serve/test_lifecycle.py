"""Tests of requests and models when engines die, hang, sleep, or are loaded while a server runs."""

import asyncio
import re
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from command_line import run_inferc
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from http_calls import request
from serving import Server, wait_until

from inferc.client import AsyncClient, Client, Completion, ServerError
from inferc.client.scrape import Page
from inferc.errors import RequestError
from inferc.serve.grpc.server import KSERVE

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
ENDLESS: dict[str, Any] = {"n": 64, "max_tokens": 200, "ignore_eos": True}


def health(address: str) -> int:
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return int(stub.Check(health_pb2.HealthCheckRequest(), timeout=5).status)


SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.mark.slow
def test_the_cache_that_was_asked_for_is_there_before_requests_are(tiny_artifact: Path) -> None:
    with Server(tiny_artifact, "--kv-memory", "400MiB") as server:
        wait_until(lambda: server.engine.memory_info().rss > 400 << 20, "the engine has its memory")


# --------------------------------------------------------------------------------------------- death and hangs


def test_a_killed_engine_comes_back_and_what_had_not_begun_is_answered(tiny_artifact: Path) -> None:
    with (
        Server(tiny_artifact, "--max-num-seqs", "1") as server,
        Client(server.address, retries=0) as client,
        ThreadPoolExecutor() as pool,
    ):
        (want,) = client.complete("xyz", max_tokens=6, **GREEDY)
        stream = client.generate("abc", **ENDLESS)
        next(stream)
        waiting = [pool.submit(client.complete, "xyz", max_tokens=6, **GREEDY) for _ in range(3)]
        scored = pool.submit(client.score, [5, 6, 7])
        wait_until(lambda: client.loads().num_requests == 5, "all are there")
        first = server.engine.pid
        server.engine.send_signal(signal.SIGKILL)
        with pytest.raises(ServerError, match="SIGKILL") as raised:
            list(stream)
        assert raised.value.code == "UNAVAILABLE" and raised.value.retry_after is not None
        assert [future.result(30) for future in waiting] == [[want]] * 3
        assert len(scored.result(30).logprobs) == 2
        assert server.engine.pid != first and client.loads().num_restarts == 1
        wait_until(lambda: health(server.address) == SERVING, "health says SERVING again")
        assert re.search(r"the engine was started again, in [\d.]+ s; requests lost: 1$", server.log, re.MULTILINE)
        assert "Traceback" not in server.log
        server.terminate()
        assert server.process.wait(30) == 0


@pytest.mark.slow
def test_a_hung_engine_is_killed_and_comes_back(tiny_artifact: Path) -> None:
    with Server(tiny_artifact, "--hang-seconds", "1") as server, Client(server.address, retries=0) as client:
        stream = client.generate("abc", **ENDLESS)
        next(stream)
        server.engine.suspend()
        with pytest.raises(ServerError, match="has not ended its step for 1 s and was killed"):
            list(stream)
        assert len(client.complete("xyz", max_tokens=6, **GREEDY)[0].token_ids) == 6


@pytest.mark.slow
def test_an_engine_that_keeps_dying_is_given_up(tiny_artifact: Path) -> None:
    with Server(tiny_artifact) as server, Client(server.address, retries=0) as client:

        def is_given_up() -> bool:
            for child in server.children:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            return health(server.address) != SERVING and "not started again" in server.log

        wait_until(is_given_up, "the engine is given up", seconds=60)
        with pytest.raises(ServerError, match="it is not started again: restart the server") as raised:
            client.complete("abc")
        assert raised.value.code == "UNAVAILABLE"
        server.terminate()
        assert server.process.wait(30) == 1


@pytest.mark.slow
def test_sigterm_while_the_engine_starts_again_loses_nothing(tiny_artifact: Path) -> None:
    with Server(tiny_artifact, "--max-num-seqs", "1") as server, Client(server.address) as client:
        with ThreadPoolExecutor() as pool:
            (want,) = client.complete("xyz", max_tokens=6, **GREEDY)
            server.engine.suspend()
            waiting = [pool.submit(client.complete, "xyz", max_tokens=6, **GREEDY) for _ in range(3)]
            are_open = partial(counted, server, "inferc_requests_open", tiny_artifact.name)
            wait_until(lambda: are_open() == 3, "they are on their way to an engine that does not listen")
            server.engine.kill()
            server.terminate()
            assert [future.result(30) for future in waiting] == [[want]] * 3
        assert server.process.wait(30) == 0


# ----------------------------------------------------------------------------------------------------- models


@pytest.fixture(scope="module")
def folder(tiny_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two artifacts, and what is none."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("one", "two"):
        shutil.copytree(tiny_artifact, folder / name)
    (folder / "notes").mkdir()
    shutil.copytree(tiny_artifact, folder / "damaged")
    with (folder / "damaged" / "engine.json").open("a") as file:
        file.write("x")
    return folder


@pytest.fixture(scope="module")
def several(folder: Path, tiny_artifact: Path) -> Iterator[Server]:
    options = ("--model-folder", str(folder), "--kv-memory", "8MB")
    with Server(f"first={tiny_artifact}", *options) as server:
        yield server


def kserve(client: Client, method: str) -> Any:
    """Return what the Open Inference Protocol answers to an empty request."""
    kind = GetMessageClass(KSERVE.methods_by_name[method].output_type)
    with grpc.insecure_channel(client.address) as channel:
        return channel.unary_unary(f"/{KSERVE.full_name}/{method}", bytes, kind.FromString)(b"")


def states(client: Client) -> dict[str, str]:
    return {model.model: model.state for model in client.models()}


def test_models_are_loaded_and_unloaded_by_name(several: Server) -> None:
    with Client(several.address) as client, Client(several.address, model="two") as two:
        everything = {"first": "serving", "damaged": "unloaded", "one": "unloaded", "two": "unloaded"}
        assert states(client) == everything
        with pytest.raises(RequestError, match='model "two" is not served here; this server has "first"'):
            two.complete("abc")
        assert client.load_model("two") > 0
        assert states(client) == {**everything, "two": "serving"}
        assert two.complete("abc", max_tokens=4, **GREEDY) == client.complete("abc", max_tokens=4, **GREEDY)
        assert (two.model_info().model, client.model_info().model) == ("two", "first")
        assert client.load_model("two") < 0.1, "it is there already"
        two.unload_model("two")
        with pytest.raises(RequestError, match="is not served here"):
            two.complete("abc")
        with pytest.raises(RequestError, match='model "two" is not loaded'):
            client.unload_model("two")
        assert states(client) == everything


@pytest.mark.parametrize("name", ["none", "notes", "../models", "/etc", "one/../two", "", "a" * 1000])
def test_there_is_no_such_model_to_load(several: Server, name: str) -> None:
    with Client(several.address) as client, pytest.raises(RequestError, match='there are "damaged", "one", "two"'):
        client.load_model(name)


def test_a_damaged_artifact_is_told_without_its_path(several: Server, folder: Path) -> None:
    with Client(several.address) as client:
        with pytest.raises(ServerError, match="the model cannot be loaded; the server's log has") as raised:
            client.load_model("damaged")
        assert raised.value.code == "FAILED_PRECONDITION" and str(folder) not in str(raised.value)
        assert str(folder) in several.log
        (damaged,) = [each for each in client.models() if each.model == "damaged"]
        assert damaged.state == "unloaded" and damaged.reason == "it cannot be loaded; the server's log has the details"
        (index,) = [each for each in kserve(client, "RepositoryIndex").models if each.name == "damaged"]
        assert index.state == "UNAVAILABLE" and index.reason == damaged.reason


def test_unloading_lets_running_requests_end(several: Server) -> None:
    with Client(several.address) as client, Client(several.address, model="one", retries=0) as one:
        client.load_model("one")
        stream = one.generate("abc", n=4, max_tokens=200, ignore_eos=True)
        tokens = len(next(stream).token_ids)
        with ThreadPoolExecutor() as pool:
            unloading = pool.submit(client.unload_model, "one")
            wait_until(lambda: states(client)["one"] == "unloading" or unloading.done(), "it is on its way")
            tokens += sum(len(piece.token_ids) for piece in stream)
            unloading.result(30)
        assert tokens == 800


@pytest.mark.slow
def test_a_model_sleeps_and_the_next_request_wakes_it(several: Server) -> None:
    with Client(several.address) as client, Client(several.address, model="one") as one:
        client.load_model("one")
        (want,) = one.complete("xyz", max_tokens=6, **GREEDY)
        count = len(psutil.Process(several.process.pid).children())
        client.sleep_model("one")
        assert states(client)["one"] == "asleep"
        wait_until(lambda: len(psutil.Process(several.process.pid).children()) == count - 1, "its process has ended")
        assert one.loads().num_running == 0 and one.loads().kv_usage == 0, "nothing is asked that would wake it"
        (seen,) = [each for each in kserve(client, "ModelStatistics").model_stats if each.name == "one"]
        assert seen.inference_count > 0 and states(client)["one"] == "asleep"
        assert one.complete("xyz", max_tokens=6, **GREEDY) == [want]
        assert states(client)["one"] == "serving"
        client.sleep_model("one")
        assert client.wake_model("one") > 0 and states(client)["one"] == "serving"
        client.unload_model("one")


# ------------------------------------------------------------------------------------------ more than are awake


@pytest.fixture(scope="module")
def one_awake(tiny_artifact: Path) -> Iterator[Server]:
    """Serve one artifact under three names, of which one may be awake."""
    names = (f"{name}={tiny_artifact}" for name in ("two", "three"))
    with Server(f"one={tiny_artifact}", *names, "--max-awake", "1", "--kv-memory", "8MB") as server:
        yield server


def xyz(server: Server, model: str) -> Completion:
    with Client(server.address, model=model, retries=0) as client:
        (answer,) = client.complete("xyz", max_tokens=6, **GREEDY)
        return answer


def counted(server: Server, metric: str, model: str) -> float:
    return Page.parse(request(server.url, "/metrics").body.decode()).sum(metric, model_name=model)


def is_open(server: Server, model: str) -> bool:
    return counted(server, "inferc_requests_open", model) == 1


def swaps(server: Server) -> list[float]:
    return [counted(server, "inferc_model_swaps_total", name) for name in ("one", "two", "three")]


@pytest.mark.slow
def test_more_models_than_may_be_awake_are_all_there(one_awake: Server) -> None:
    with Client(one_awake.address) as client:
        assert states(client) == {"one": "serving", "two": "asleep", "three": "asleep"}
        assert health(one_awake.address) == SERVING and request(one_awake.url, "/health").status == 200
        found = request(one_awake.url, "/v1/models").json["data"]
        assert {model["id"] for model in found} == {"one", "two", "three"}
        assert len(psutil.Process(one_awake.process.pid).children()) == 1


def test_a_request_wakes_its_model_and_another_sleeps(one_awake: Server) -> None:
    with Client(one_awake.address) as client:
        want = xyz(one_awake, "one")
        before = swaps(one_awake)
        for name in ("two", "three", "one"):
            assert xyz(one_awake, name) == want
            assert states(client) == {**dict.fromkeys(("one", "two", "three"), "asleep"), name: "serving"}
        assert swaps(one_awake) == [count + 1 for count in before]


@pytest.mark.slow
def test_requests_to_all_at_once_are_all_answered(one_awake: Server) -> None:
    with Client(one_awake.address, model="one", retries=0) as client, ThreadPoolExecutor(25) as pool:
        want = xyz(one_awake, "one")
        before = sum(swaps(one_awake))
        stream = client.generate("abc", max_tokens=200, ignore_eos=True)
        tokens = len(next(stream).token_ids)
        asked = [pool.submit(xyz, one_awake, name) for name in ("one", "two", "three") * 8]
        tokens += sum(len(piece.token_ids) for piece in stream)
        assert tokens == 200, "what runs is not cut"
        assert [future.result(60) for future in asked] == [want] * 24
        assert sum(swaps(one_awake)) > before
        assert list(states(client).values()).count("serving") == 1 and len(client.models()) == 3
        assert len(psutil.Process(one_awake.process.pid).children()) == 1
        assert health(one_awake.address) == SERVING and "Traceback" not in one_awake.log


def test_sleep_and_wake_by_hand_keep_to_how_many_may_be_awake(one_awake: Server) -> None:
    with Client(one_awake.address) as client:
        assert client.wake_model("three") >= 0 and states(client)["three"] == "serving"
        assert client.wake_model("two") > 0
        assert states(client) == {"one": "asleep", "two": "serving", "three": "asleep"}
        client.sleep_model("two")
        assert set(states(client).values()) == {"asleep"} and health(one_awake.address) == SERVING
        client.wake_model("one")


@pytest.mark.slow
def test_sigterm_answers_who_waits_for_a_place(tiny_artifact: Path) -> None:
    options = ("--max-awake", "1", "--kv-memory", "8MB")
    with Server(f"one={tiny_artifact}", f"two={tiny_artifact}", *options) as server, ThreadPoolExecutor() as pool:
        want = xyz(server, "one")
        engine = server.engine
        engine.suspend()  # so that the other has to wait
        asked = []
        for name in ("one", "two"):
            asked.append(pool.submit(xyz, server, name))
            wait_until(partial(is_open, server, name), "it is there")
        server.terminate()
        wait_until(lambda: "SIGTERM: no new requests" in server.log, "it ends")
        engine.resume()
        assert [each.result(30) for each in asked] == [want] * 2
        assert server.process.wait(30) == 0 and "Traceback" not in server.log


# ------------------------------------------------------------------------------------------------ what is refused


def test_a_server_of_fixed_models_loads_no_others(served: str, tiny_artifact: Path) -> None:
    with Client(served) as client:
        assert states(client) == {tiny_artifact.name: "serving"}
        with pytest.raises(ServerError, match="start it with --model-folder DIR") as raised:
            client.load_model("other")
        assert raised.value.code == "FAILED_PRECONDITION"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "nothing to serve: give an artifact"),
        (("a=x", "a=y"), "two models are named a"),
        (("a b=x",), "model name 'a b': expected letters"),
        (("a=x", "b=y", "--record", "f"), "--record is for a server of one model"),
        (("--model-folder", "nowhere"), "--model-folder nowhere is not a folder"),
        (("x", "--max-awake", "0"), "--max-awake 0: expected 1 or more; leave it out for no limit"),
        (
            ("x", "--special-tokens-in-text", "drop"),
            "special_tokens_in_text is 'drop'; expected one of allow, refuse, esc",
        ),
        (("x", "--hang-seconds", "-1"), "--hang-seconds -1: expected a number of seconds, 0 or more"),
    ],
)
def test_what_cannot_be_served(options: tuple[str, ...], message: str, tmp_path: Path) -> None:
    result = run_inferc("serve", *options, "--grpc-port", "0", "--http-port", "0", cwd=tmp_path)
    assert result.returncode == 2 and message in result.stderr and len(result.stderr.splitlines()) == 1, result.stderr


# ---------------------------------------------------------------------------------------------- the async client


def test_the_async_client_makes_the_same_calls(several: Server) -> None:
    async def work() -> None:
        async with AsyncClient(several.address) as client:
            await client.wait_until_ready()
            pieces = [piece async for piece in client.generate("abc", max_tokens=8, **GREEDY)]
            (whole,) = await client.complete("abc", max_tokens=8, **GREEDY)
            assert "".join(piece.text for piece in pieces) == whole.text and len(whole.token_ids) == 8
            ids = await client.tokenize("abc")
            assert await client.detokenize(ids) == "abc" and await client.token_bytes(ids) == b"abc"
            with pytest.raises(RequestError, match="inputs: expected a list of texts"):
                await client.embed("abc")
            assert (await client.score("abc")).token_ids == tuple(ids)
            info, loads = await client.model_info(), await client.loads()
            assert info.model == "first" and loads.output_tokens >= 16
            await client.load_model("one")
            await client.sleep_model("one")
            await client.wake_model("one")
            await client.unload_model("one")
            assert {model.model: model.state for model in await client.models()}["one"] == "unloaded"
            with pytest.raises(RequestError, match="max_tokens is -1"):
                await client.complete("abc", max_tokens=-1)
            many = await asyncio.gather(*(client.complete([7, n], max_tokens=3, **GREEDY) for n in range(20)))
            assert all(len(each[0].token_ids) == 3 for each in many)

    asyncio.run(asyncio.wait_for(work(), 60))


def test_the_async_client_aborts(server: Server) -> None:
    async def work() -> None:
        async with AsyncClient(server.address) as client:
            running = asyncio.create_task(client.complete("abc", request_id="mine", **ENDLESS))
            while not await client.abort("mine"):
                pass
            with pytest.raises(ServerError) as raised:
                await running
            assert raised.value.code == "CANCELLED"

    engine = server.engine
    engine.suspend()  # nothing ends before it is aborted
    try:
        asyncio.run(asyncio.wait_for(work(), 60))
    finally:
        engine.resume()
