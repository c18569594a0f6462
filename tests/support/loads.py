"""Load on a server, and what makes it slow."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from serving import Server

from inferc.client import Client
from inferc.errors import InfercError


@contextlib.contextmanager
def load(
    server: Server, clients: int, pause: float = 0.0, prompt_len: int = 20, fresh: bool = False, **sampling: Any
) -> Iterator[None]:
    """So many clients, each of which asks again as soon as it has its answer and a pause.

    fresh: no prompt comes twice; else each client has its own.
    """
    stop = threading.Event()

    def run(number: int) -> None:
        rng = random.Random(number)
        with Client(server.address, retries=0, timeout=30) as client:
            while not stop.wait(pause):
                prompt = [rng.randrange(5, 250) for _ in range(prompt_len)] if fresh else [number + 5] * prompt_len
                with contextlib.suppress(InfercError):
                    client.complete(prompt, ignore_eos=True, **sampling)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@contextlib.contextmanager
def stuttering(pid: int, runs: float = 0.6, stands: float = 0.3) -> Iterator[None]:
    """A process that gets no core a part of the time."""
    stop = threading.Event()
    thread = threading.Thread(target=_stutter, args=(pid, stop.wait, runs, stands))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _stutter(pid: int, wait: Callable[[float], bool], runs: float, stands: float) -> None:
    while not wait(runs):
        os.kill(pid, signal.SIGSTOP)
        wait(stands)
        os.kill(pid, signal.SIGCONT)
