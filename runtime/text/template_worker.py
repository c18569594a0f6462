"""The process that renders a chat template, and that may be killed at any time.

It is run as `python -m inferc.runtime.text.template_worker FD`, where FD is its end of a socket pair. A message is its
length followed by JSON. The system bounds what a template does: memory by a limit on the address space, time by a timer
that ends the process, whatever it does. It ends with its parent: at once if it is waiting for it, otherwise by its
timer.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from inferc.chat_form import Message, find_form
from inferc.errors import RequestError
from inferc.runtime.text.template_sandbox import Sandbox

LENGTH = struct.Struct("!Q")
OUT_OF_MEMORY = 77  # the exit code of a worker that ran out of memory


def packed(message: Mapping[str, Any]) -> bytes:
    """Return the bytes of a message. Raises TypeError, ValueError or RecursionError for what JSON cannot hold."""
    # Not as ASCII, which would take up to four times the bytes, and of the time in which no other thread runs.
    data = json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return LENGTH.pack(len(data)) + data


def receive(connection: socket.socket, max_bytes: int | None = None) -> dict[str, Any]:
    """Return the next message. Raises EOFError at the end, OSError if it is late or longer than `max_bytes`."""
    (length,) = LENGTH.unpack(_read(connection, LENGTH.size))
    if max_bytes is not None and length > max_bytes:
        raise OSError(f"a message of {length} bytes")
    message: dict[str, Any] = json.loads(_read(connection, length))
    return message


def _read(connection: socket.socket, count: int) -> bytearray:
    data = bytearray()
    while len(data) < count:
        piece = connection.recv(min(count - len(data), 1 << 20))
        if not piece:
            raise EOFError
        data += piece
    return data


class _Worker:
    """A template with its limits, as given in the first message."""

    def __init__(self, source: str, tokens: Mapping[str, str], max_seconds: float, max_bytes: int) -> None:
        self.max_seconds = max_seconds
        self._source, self._tokens = source, tokens
        self._sandbox: Sandbox | None = None
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = max_bytes if hard == resource.RLIM_INFINITY else min(max_bytes, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a question: the text of a conversation, the template's form, or only whether it can be read."""
        try:
            if question.get("find_form"):
                form = find_form(self._find)
                return {"form": None if form is None else asdict(form)}
            if "values" not in question:
                self._template()
                return {}
            return {"text": self._render(question["values"])}
        except RequestError as error:
            return {"error": str(error)}

    def _find(self, messages: Sequence[Message], goes_on: bool, tools: Sequence[Message] | None) -> str:
        return self._render({"messages": messages, "add_generation_prompt": goes_on, "tools": tools})

    def _render(self, values: Mapping[str, Any]) -> str:
        return self._template().render({**self._tokens, **values})

    def _template(self) -> Sandbox:
        if self._sandbox is None:
            self._sandbox = Sandbox(self._source)
        return self._sandbox


def main(fd: int) -> int:
    """Answer what the parent asks until it is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # systemd signals every process of a service, but the parent decides when this one ends.
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    connection = socket.socket(fileno=fd)
    try:
        worker = _Worker(**receive(connection))
        while True:
            question = receive(connection)
            signal.setitimer(signal.ITIMER_REAL, worker.max_seconds)
            answer = worker.answer(question)
            signal.setitimer(signal.ITIMER_REAL, 0)
            connection.sendall(packed(answer))
    except MemoryError:
        os._exit(OUT_OF_MEMORY)  # the process cannot be used again
    except (EOFError, OSError):
        return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
