"""A process that answers questions about what clients sent, and that may be killed at any time: the parent's side.

It is started on the first question, and again after it was ended. The system bounds what it does (worker.py): a text
that takes too long, or too much memory, costs its process and nobody else's request.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from dataclasses import dataclass

from inferc.errors import InfercError
from inferc.system.worker import OUT_OF_MEMORY, framed, receive

# How long a process may take to start, and how long one may exceed its time limit before it is killed.
START_SECONDS, LATE_SECONDS = 30.0, 5.0
MAX_ANSWER_BYTES = 256 << 20


class NoProcess(InfercError):
    """The error that the system cannot start a process now. retry_after: seconds until it may."""

    retry_after = 1.0


class WorkerEnded(InfercError):
    """The error that a process ended over a question, or did not answer in time. It says which limit it exceeded."""


@dataclass(frozen=True)
class WorkerLimits:
    """The limits of one answer.

    max_bytes: of the whole address space of the process, of which Python takes a few dozen MB.
    """

    max_seconds: float = 5.0
    max_bytes: int = 1 << 30


class WorkerProcess:
    """The connection to a process that answers questions; concurrent calls take turns.

    module: what it runs. what: what it does, for messages. first: the message that it gets before any question.
    """

    def __init__(self, module: str, what: str, first: bytes, limits: WorkerLimits) -> None:
        self._module, self._what, self._first, self._limits = module, what, first, limits
        self._turn = threading.Lock()
        self._children: list[_Child] = []  # at most one; a list so that the finalizer sees changes
        self._end = weakref.finalize(self, _end_all, self._children)

    def ask(self, question: bytes) -> bytes:
        """Return the answer. Raises WorkerEnded if there is none, NoProcess if the system cannot start a process."""
        with self._turn:
            child, seconds = self._child()
            try:
                return child.ask(question, seconds)
            except (EOFError, OSError):  # the process is gone, or does not answer
                code = child.process.poll()
                self.close()
                raise WorkerEnded(self._fault(code)) from None
            except BaseException:  # interrupted: its answer would be taken for that of the next question
                self.close()
                raise

    @property
    def pid(self) -> int | None:
        """The id of the process, if there is one."""
        return self._children[0].process.pid if self._children else None

    def close(self) -> None:
        """End the process, so a question in progress fails; the next question starts it again."""
        _end_all(self._children)

    def _child(self) -> tuple[_Child, float]:
        """Return the process, started if necessary, and how long to wait for its answer."""
        seconds = self._limits.max_seconds + LATE_SECONDS
        if self._children and self._children[0].process.poll() is None:
            return self._children[0], seconds
        self.close()
        try:
            child = _Child(self._module, self._first, self._limits)
        except OSError as error:
            raise NoProcess(f"the process that {self._what} cannot be started: {error.strerror or error}") from None
        self._children.append(child)
        return child, seconds + START_SECONDS

    def _fault(self, code: int | None) -> str:
        if code == OUT_OF_MEMORY:
            return f"takes more than {self._limits.max_bytes >> 20} MiB of memory"
        if code in (None, -signal.SIGALRM):
            return f"takes more than {self._limits.max_seconds:g} s"
        return f"failed: its process ended with {signal.Signals(-code).name if code < 0 else f'code {code}'}"


class _Child:
    """A process and the parent's end of its socket pair. first: the message sent before any question."""

    def __init__(self, module: str, first: bytes, limits: WorkerLimits) -> None:
        self.connection, theirs = socket.socketpair()
        # The child imports from the same folders as this process, and not from the current folder.
        path = os.pathsep.join(entry for entry in sys.path if entry)
        numbers = (theirs.fileno(), limits.max_seconds, limits.max_bytes)
        try:
            with theirs:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", module, *map(str, numbers)],
                    pass_fds=(theirs.fileno(),),
                    env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,  # otherwise ^C in the terminal would reach it
                )
        except OSError:
            self.connection.close()
            raise
        self._unsent = framed(first)

    def ask(self, question: bytes, seconds: float) -> bytes:
        """Return the answer. Raises EOFError or OSError if none comes in time."""
        self.connection.settimeout(seconds)
        try:
            self.connection.sendall(self._unsent + framed(question))
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
