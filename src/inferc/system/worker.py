"""A process that answers questions about what clients sent, and that may be killed at any time: the process itself.

A module that is one calls `run_worker` with its own code: it is run as `python -m MODULE FD SECONDS BYTES`, where FD is
its end of a socket pair. A message is its length followed by its bytes. Memory is bounded by a limit on the address
space, time by a timer that ends the process, whatever it does. It ends with its parent: at once if it is waiting for
it, otherwise by its timer.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable
from typing import TypeAlias

LENGTH = struct.Struct("!Q")
OUT_OF_MEMORY = 77  # the exit code of a process that ran out of memory
Answer: TypeAlias = Callable[[bytes], bytes]


def framed(message: bytes) -> bytes:
    """Return a message as it is sent."""
    return LENGTH.pack(len(message)) + message


def receive(connection: socket.socket, max_bytes: int | None = None) -> bytes:
    """Return the next message. Raises EOFError at the end, OSError if it is late or longer than `max_bytes`."""
    (length,) = LENGTH.unpack(_read(connection, LENGTH.size))
    if max_bytes is not None and length > max_bytes:
        raise OSError(f"a message of {length} bytes")
    return bytes(_read(connection, length))


def _read(connection: socket.socket, count: int) -> bytearray:
    data = bytearray()
    while len(data) < count:
        piece = connection.recv(min(count - len(data), 1 << 20))
        if not piece:
            raise EOFError
        data += piece
    return data


def run_worker(begin: Callable[[bytes], Answer]) -> int:
    """Answer what the parent asks until it is gone, and return the exit code.

    begin: takes the first message, and returns what answers the questions.
    """
    fd, max_seconds, max_bytes = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    for number in (signal.SIGINT, signal.SIGTERM):
        # systemd signals every process of a service, but the parent decides when this one ends.
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    connection = socket.socket(fileno=fd)
    try:
        first = receive(connection)
        _bound_memory(max_bytes)
        answer = begin(first)
        while True:
            question = receive(connection)
            signal.setitimer(signal.ITIMER_REAL, max_seconds)
            message = framed(answer(question))
            signal.setitimer(signal.ITIMER_REAL, 0)
            connection.sendall(message)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)  # the process cannot be used again
    except (EOFError, OSError):
        return 0


def _bound_memory(max_bytes: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = max_bytes if hard == resource.RLIM_INFINITY else min(max_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
