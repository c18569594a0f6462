"""The process that renders a chat template: killed when it has to be, started again, and gone with its parent."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from typing import Any

import psutil
import pytest

from inferc.chat.form import ChatForm
from inferc.errors import RequestError
from inferc.runtime.text.chat_template import ChatTemplate
from inferc.system import worker_process
from inferc.system.worker_process import NoProcess, WorkerLimits

GROW = (
    "{% set n = namespace(x=[1], y=[1]) %}"
    "{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}"
)
SOURCE = (
    "{% if messages[0].content == 'boom' %}" + GROW + "{{ n.x == n.y }}{% elif messages[0].content == 'mem' %}"
    "{{ 'a'.encode().ljust(4000000000) | length }}{% endif %}<{{ messages[0].content }}>"
)


def said(content: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def make(seconds: float = 20.0) -> ChatTemplate:
    return ChatTemplate(SOURCE, {}, ChatForm(), WorkerLimits(seconds))


def process_of(template: ChatTemplate) -> psutil.Process:
    return psutil.Process(template._process.pid)


@pytest.mark.parametrize(("content", "message"), [("boom", "more than 0.3 s"), ("mem", "more than 1024 MiB of memory")])
def test_after_a_process_that_was_ended_comes_another(content: str, message: str) -> None:
    template = make(0.3)
    assert template.render(said("hi")) == "<hi>"
    first = process_of(template).pid
    with pytest.raises(RequestError, match=f"the model's chat template takes {message} over these messages"):
        template.render(said(content))
    assert template.render(said("hi")) == "<hi>"
    assert process_of(template).pid != first and not psutil.pid_exists(first)


def test_one_that_somebody_else_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    template = make()
    assert template.render(said("hi")) == "<hi>"
    process = process_of(template)
    process.kill()
    template._process._process._children[0].process.wait()
    assert template.render(said("hi")) == "<hi>"
    process_of(template).suspend()  # so that its own timer does not end it
    monkeypatch.setattr(worker_process, "LATE_SECONDS", -19.8)
    with pytest.raises(RequestError, match="more than 20 s"):
        template.render(said("hi"))
    assert template.render(said("hi")) == "<hi>"


def test_an_interrupted_question_is_not_answered_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    template = make()
    assert template.render(said("hi")) == "<hi>"

    def interrupted(*_: Any) -> dict[str, Any]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(worker_process, "receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            template.render(said("first"))
    assert template.render(said("second")) == "<second>"


def test_threads_take_turns() -> None:
    template = make()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda number: template.render(said(f"{number}")), range(40)))
    assert found == [f"<{number}>" for number in range(40)]


def test_half_of_a_surrogate_pair_comes_back() -> None:
    assert make().render(said("a\ud83d")) == "<a\ud83d>"


@pytest.mark.parametrize("value", [date(2026, 1, 1), {1, 2}, object()])
def test_variables_are_what_json_has(value: Any) -> None:
    template = make()
    with pytest.raises(RequestError, match="variables of a chat template are what JSON has"):
        template.render(said("hi"), today=value)
    assert template.render(said("hi"), today="x") == "<hi>"


def test_a_damaged_answer_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    template = make()
    monkeypatch.setattr(worker_process, "MAX_ANSWER_BYTES", 1)
    with pytest.raises(RequestError, match="the model's chat template"):
        template.render(said("hi"))
    assert template._process.pid is None


def test_no_process_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(NoProcess, match="chat templates cannot be started: No such file") as caught:
        make().render(said("hi"))
    assert not isinstance(caught.value, RequestError)


@pytest.mark.slow
def test_it_ends_when_it_is_closed_or_nobody_has_it() -> None:
    template = make()
    template.render(said("hi"))
    process = process_of(template)
    template.close()
    assert not process.is_running()
    template.render(said("hi"))
    process = process_of(template)
    del template
    gc.collect()
    assert not process.is_running()


PARENT = """
import sys, threading
from inferc.chat.form import ChatForm
from inferc.runtime.text.chat_template import ChatTemplate
from inferc.system.worker_process import WorkerLimits
template = ChatTemplate(sys.argv[1], {}, ChatForm(), WorkerLimits(1.0))
said = lambda content: [{"role": "user", "content": content}]
template.render(said("hi"))
if sys.argv[2] == "boom":
    threading.Thread(target=template.render, args=(said("boom"),)).start()
print(template._process.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("work", [pytest.param("nothing", marks=pytest.mark.slow), "boom"])
def test_it_ends_with_its_parent(work: str) -> None:
    """However that ended, and whatever it is at: at once where it waits, else by its own timer."""
    command = [sys.executable, "-c", PARENT, SOURCE, work]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        process = psutil.Process(int(parent.stdout.readline()))
        parent.send_signal(signal.SIGKILL)
    process.wait(timeout=30)
