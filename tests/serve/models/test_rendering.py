"""Chat templates under a server: one that takes its time costs its own model's chats time, and nobody else's."""

from __future__ import annotations

import asyncio
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from http_calls import request
from random_models import CHAT_TEMPLATE
from serving import Server

from inferc.compiler.build import compile
from inferc.config import CompileConfig
from inferc.errors import RequestError
from inferc.serve.errors import EngineUnavailable, QueueFull
from inferc.serve.models.rendering import Rendering

CHAT = "/v1/chat/completions"
HOSTILE = (
    "{% if messages[0].content == 'boom' %}{% set n = namespace(x=[1], y=[1]) %}"
    "{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}{{ n.x == n.y }}"
    "{% elif messages[0].content == 'mem' %}{{ 'a'.encode().ljust(4000000000) | length }}{% endif %}"
)


def test_turns_are_bounded() -> None:
    done = threading.Event()

    async def run() -> None:
        rendering = Rendering(max_waiting=2)
        first, second = (asyncio.ensure_future(rendering.run(work)) for work in (done.wait, lambda: "second"))
        await asyncio.sleep(0)  # so that both have begun to wait
        with pytest.raises(QueueFull, match="2 conversations wait for the model's chat template"):
            await rendering.run(lambda: "third")
        done.set()
        assert (await first, await second) == (True, "second")
        rendering.close()

    asyncio.run(run())


def test_a_turn_that_does_not_come() -> None:
    done, begun = threading.Event(), []

    async def run() -> None:
        rendering = Rendering(max_seconds=0.05)
        first, second = (asyncio.ensure_future(rendering.run(work)) for work in (done.wait, lambda: begun.append(2)))
        for each in (first, second):
            with pytest.raises(QueueFull, match="waited 0.05 s for the model's chat template"):
                await each
        done.set()
        assert await Rendering().run(lambda: 3) == 3
        assert await rendering.run(lambda: 4) == 4, "who gave up has no turn any more"
        assert not begun

    asyncio.run(run())


def test_who_waits_or_is_at_it_when_the_model_is_unloaded_is_told_so() -> None:
    begun, ended = threading.Event(), threading.Event()

    def killed() -> str:
        begun.set()
        ended.wait()
        raise RequestError("the model's chat template cannot be rendered: its process ended with SIGKILL")

    async def run() -> None:
        rendering = Rendering()
        both = [asyncio.ensure_future(rendering.run(work)) for work in (killed, lambda: "second")]
        await asyncio.to_thread(begun.wait)
        rendering.close()
        ended.set()
        for each in (*both, rendering.run(lambda: "third")):
            with pytest.raises(EngineUnavailable, match="the model was unloaded before the request was done"):
                await each

    asyncio.run(run())


@pytest.fixture(scope="module")
def hostile(tiny_llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact whose template behaves until a message says boom."""
    folder = tmp_path_factory.mktemp("hostile")
    shutil.copytree(tiny_llama_folder, folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(HOSTILE + CHAT_TEMPLATE)
    compile(folder / "model", folder / "out", CompileConfig(certify="none"))
    return folder / "out"


def chat(url: str, model: str, content: str) -> Any:
    return request(url, CHAT, {"model": model, "max_tokens": 2, "messages": [{"role": "user", "content": content}]})


@pytest.mark.slow
def test_a_hostile_template_is_refused_and_all_else_goes_on(hostile: Path, tiny_artifact: Path) -> None:
    with Server(f"bad={hostile}", f"good={tiny_artifact}") as server, ThreadPoolExecutor(2) as pool:
        assert chat(server.url, "bad", "hi").status == 200
        template = server.template
        boom = pool.submit(chat, server.url, "bad", "boom")
        while not template.cpu_times().user > 0.5 and not boom.done():  # until it is at it
            assert request(server.url, "/health", None).status == 200
        assert chat(server.url, "good", "hi").status == 200
        assert not boom.done(), "the other model's chat did not wait for it"
        answer = boom.result()
        assert answer.status == 400
        assert answer.error["message"] == "the model's chat template takes more than 5 s over these messages"
        answer = chat(server.url, "bad", "mem")
        assert answer.status == 400
        assert "takes more than 1024 MiB of memory" in answer.error["message"]
        assert chat(server.url, "bad", "hi").status == 200
        children = server.children
        server.terminate()
        assert server.process.wait(20) == 0
        assert not [each for each in children if each.is_running()]


@pytest.mark.slow
def test_a_conversation_that_is_being_rendered_is_answered_before_the_server_ends(hostile: Path) -> None:
    with Server(f"bad={hostile}", "--drain-seconds", "60") as server, ThreadPoolExecutor(1) as pool:
        assert chat(server.url, "bad", "hi").status == 200
        template = server.template
        boom = pool.submit(chat, server.url, "bad", "boom")
        while not template.cpu_times().user > 0.5 and not boom.done():  # until it is at it
            assert request(server.url, "/health", None).status == 200
        server.terminate()
        assert boom.result().status == 400
        assert server.process.wait(30) == 0 and "Traceback" not in server.log


@pytest.mark.slow
def test_who_is_cut_off_by_the_end_of_the_server_is_told_so(hostile: Path) -> None:
    with Server(f"bad={hostile}", "--drain-seconds", "0") as server, ThreadPoolExecutor(1) as pool:
        assert chat(server.url, "bad", "hi").status == 200
        template = server.template
        boom = pool.submit(chat, server.url, "bad", "boom")
        while not template.cpu_times().user > 0.5 and not boom.done():
            assert request(server.url, "/health", None).status == 200
        server.terminate()
        answer = boom.result()
        assert answer.status == 503 and answer.error["message"] == "the server shut down before the request was done"
        assert server.process.wait(30) == 0 and "Traceback" not in server.log
