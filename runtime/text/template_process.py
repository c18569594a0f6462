"""A chat template behind a pipe: its process is started when it is first asked, and again after it was killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from inferc.errors import InfercError, RequestError
from inferc.runtime.text.template_worker import OUT_OF_MEMORY, packed, receive

START_SECONDS, LATE_SECONDS = 30.0, 5.0  # for a process to begin; for one that is past its time to end by itself
MAX_ANSWER_BYTES = 256 << 20


class NoProcess(InfercError):
    """The system has no process for a template now. retry_after: seconds until it may have one."""

    retry_after = 1.0


@dataclass(frozen=True)
class TemplateLimits:
    """Of one conversation. max_bytes: of the whole address space of the process, of which Python takes a few dozen MB."""

    max_seconds: float = 5.0
    max_bytes: int = 1 << 30


class TemplateProcess:
    """Asks a process that renders one template. Calls of several threads take their turns.

    tokens: variables that every text has. Raises NoProcess where the system gives none.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], limits: TemplateLimits) -> None:
        self._first = packed({"source": source, "tokens": dict(tokens), **vars(limits)})
        self._limits = limits
        self._turn = threading.Lock()
        self._children: list[_Child] = []  # one at most
        self._end = weakref.finalize(self, _end_all, self._children)

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """The process's answer to a question. Raises RequestError for what the template refuses, fails on or takes too much for."""
        try:
            data = packed(question)
        except (TypeError, ValueError, RecursionError):
            raise RequestError(
                "messages and variables of a chat template are what JSON has: texts, numbers, lists, objects"
            ) from None
        with self._turn:
            child, seconds = self._child()
            try:
                answer = child.ask(data, seconds)
            except (EOFError, OSError, ValueError):  # it is gone, or does not answer
                code = child.process.poll()
                self.close()
                raise RequestError(f"the model's chat template {self._fault(code)}") from None
            except BaseException:  # interrupted: what it answers would be taken for the answer to the next question
                self.close()
                raise
        if "error" in answer:
            raise RequestError(answer["error"])
        return answer

    def _child(self) -> tuple[_Child, float]:
        """The process, and how long to wait for its answer."""
        seconds = self._limits.max_seconds + LATE_SECONDS
        if self._children and self._children[0].process.poll() is None:
            return self._children[0], seconds
        self.close()
        child = _Child(self._first)
        self._children.append(child)
        return child, seconds + START_SECONDS

    def close(self) -> None:
        """End the process; what is being asked fails. It is started again when it is asked again."""
        _end_all(self._children)

    def _fault(self, code: int | None) -> str:
        if code == OUT_OF_MEMORY:
            return f"takes more than {self._limits.max_bytes >> 20} MiB of memory over these messages"
        if code in (None, -signal.SIGALRM):
            return f"takes more than {self._limits.max_seconds:g} s over these messages"
        how = signal.Signals(-code).name if code < 0 else f"code {code}"
        return f"cannot be rendered: its process ended with {how}"


class _Child:
    """A process and our end of its pipe. first: what it is told before it is asked."""

    def __init__(self, first: bytes) -> None:
        try:
            self.connection, theirs = socket.socketpair()
        except OSError as error:
            raise _no_process(error) from None
        # It imports from where this process does, and from nowhere else (not the current folder).
        path = os.pathsep.join(entry for entry in sys.path if entry)
        try:
            with theirs:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "inferc.runtime.text.template_worker", str(theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                    env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,  # ^C in a terminal reaches every process of its session
                )
        except OSError as error:
            self.connection.close()
            raise _no_process(error) from None
        self._unsent = first

    def ask(self, question: bytes, seconds: float) -> dict[str, Any]:
        """Raises EOFError or OSError where no answer comes in time, ValueError for one that is none."""
        self.connection.settimeout(seconds)
        try:
            self.connection.sendall(self._unsent + question)
            self._unsent = b""
            return receive(self.connection, MAX_ANSWER_BYTES)
        except (EOFError, ConnectionError):
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(LATE_SECONDS)  # for its exit code
            raise

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()


def _end_all(children: list[_Child]) -> None:
    with suppress(IndexError):  # another thread ends it too
        while True:
            children.pop().end()


def _no_process(error: OSError) -> NoProcess:
    return NoProcess(f"the process that renders chat templates cannot be started: {error.strerror or error}")
