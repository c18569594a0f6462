"""The parent's side of a chat template's process: started on the first question, restarted after it was killed."""

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

# How long a process may take to start, and how long one may exceed its time limit before it is killed.
START_SECONDS, LATE_SECONDS = 30.0, 5.0
MAX_ANSWER_BYTES = 256 << 20


class NoProcess(InfercError):
    """The error that the system cannot start a template's process now. retry_after: seconds until it may."""

    retry_after = 1.0


@dataclass(frozen=True)
class TemplateLimits:
    """The limits of rendering one conversation.

    max_bytes: of the whole address space of the process, of which Python takes a few dozen MB.
    """

    max_seconds: float = 5.0
    max_bytes: int = 1 << 30


class TemplateProcess:
    """The connection to a process that renders one template; concurrent calls take turns.

    tokens: variables that every text has. Raises NoProcess if the system cannot start one.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], limits: TemplateLimits) -> None:
        self._first = packed({"source": source, "tokens": dict(tokens), **vars(limits)})
        self._limits = limits
        self._turn = threading.Lock()
        self._children: list[_Child] = []  # at most one; a list so that the finalizer sees changes
        self._end = weakref.finalize(self, _end_all, self._children)

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Return the process's answer. Raises RequestError if the template refuses, fails, or exceeds its limits."""
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
            except (EOFError, OSError, ValueError):  # the process is gone, or does not answer
                code = child.process.poll()
                self.close()
                raise RequestError(f"the model's chat template {self._fault(code)}") from None
            except BaseException:  # interrupted: its answer would be taken for that of the next question
                self.close()
                raise
        if "error" in answer:
            raise RequestError(answer["error"])
        return answer

    def _child(self) -> tuple[_Child, float]:
        """Return the process, started if necessary, and how long to wait for its answer."""
        seconds = self._limits.max_seconds + LATE_SECONDS
        if self._children and self._children[0].process.poll() is None:
            return self._children[0], seconds
        self.close()
        child = _Child(self._first)
        self._children.append(child)
        return child, seconds + START_SECONDS

    def close(self) -> None:
        """End the process, so a question in progress fails; the next question starts it again."""
        _end_all(self._children)

    def _fault(self, code: int | None) -> str:
        if code == OUT_OF_MEMORY:
            return f"takes more than {self._limits.max_bytes >> 20} MiB of memory over these messages"
        if code in (None, -signal.SIGALRM):
            return f"takes more than {self._limits.max_seconds:g} s over these messages"
        how = signal.Signals(-code).name if code < 0 else f"code {code}"
        return f"cannot be rendered: its process ended with {how}"


class _Child:
    """A process and the parent's end of its socket pair. first: the message sent before any question."""

    def __init__(self, first: bytes) -> None:
        try:
            self.connection, theirs = socket.socketpair()
        except OSError as error:
            raise _no_process(error) from None
        # The child imports from the same folders as this process, and not from the current folder.
        path = os.pathsep.join(entry for entry in sys.path if entry)
        try:
            with theirs:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "inferc.runtime.text.template_worker", str(theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                    env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,  # otherwise ^C in the terminal would reach it
                )
        except OSError as error:
            self.connection.close()
            raise _no_process(error) from None
        self._unsent = first

    def ask(self, question: bytes, seconds: float) -> dict[str, Any]:
        """Return the answer. Raises EOFError or OSError if none comes in time, ValueError if it is malformed."""
        self.connection.settimeout(seconds)
        try:
            self.connection.sendall(self._unsent + question)
            self._unsent = b""
            return receive(self.connection, MAX_ANSWER_BYTES)
        except (EOFError, ConnectionError):
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(LATE_SECONDS)  # wait for the exit code, which tells the cause
            raise

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()


def _end_all(children: list[_Child]) -> None:
    with suppress(IndexError):  # another thread may have taken it out to end it
        while True:
            children.pop().end()


def _no_process(error: OSError) -> NoProcess:
    return NoProcess(f"the process that renders chat templates cannot be started: {error.strerror or error}")
