"""Calls on a stack of a chosen size: a library that recurses ends the whole process where its stack ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")

_SIZE = threading.Lock()  # of new threads, which is one for the process


def on_stack(num_bytes: int, call: Callable[[], Result]) -> Result:
    """Return what a call returns, or raise what it raises, made by a thread with a stack of `num_bytes`.

    The main thread's stack is as large as the system lets it be, and other threads' is what their library chose.
    """
    made: Future[Result] = Future()

    def run() -> None:
        try:
            made.set_result(call())
        except BaseException as error:  # noqa: BLE001 the caller's
            made.set_exception(error)

    with _SIZE:
        before = threading.stack_size(num_bytes)
        try:
            thread = threading.Thread(target=run, name="inferc-stack", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return made.result()
