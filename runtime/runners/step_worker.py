"""The thread that runs an engine's steps, in the order in which they are submitted."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from inferc.runtime.step.plan import StepResult

log = logging.getLogger(__name__)


class StepWorker:
    """A thread that runs jobs one after the other.

    cpus: the CPUs to run on; any if empty. on_failure: called in the thread when a job has raised.
    """

    def __init__(self, cpus: Collection[int] = (), on_failure: Callable[[], None] = lambda: None) -> None:
        self._cpus, self._on_failure = cpus, on_failure
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[StepResult] = queue.SimpleQueue()
        self._error: Exception | None = None  # the error of a failed job that was not a step
        self._thread = threading.Thread(target=self._work, name="inferc-step", daemon=True)
        self._thread.start()

    def submit(self, step: Callable[[], StepResult]) -> None:
        """Queue a step, whose result `wait` returns."""

        def job() -> None:
            try:
                self._results.put(self._failed() or step())
            except Exception as error:  # every step must give a result, or `wait` would block forever
                log.exception("step failed")
                self._on_failure()
                self._results.put(_error(error))

        self._jobs.put(job)

    def _failed(self) -> StepResult | None:
        """Return the error result for a step that follows a failed job, or None; forget the failure."""
        error, self._error = self._error, None
        return None if error is None else _error(error)

    def wait(self) -> StepResult:
        """Return the result of the oldest step not yet waited for.

        The result holds the error if the step raised one.
        """
        return self._results.get()

    def put(self, job: Callable[[], None]) -> None:
        """Queue a job that runs after everything queued before.

        If it raises, the next step or call fails with its error.
        """
        self._jobs.put(job)

    def call(self, function: Callable[[], Any]) -> Any:
        """Run a function after everything queued before, and return its result in this thread, or raise its error."""
        done: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

        def job() -> None:
            try:
                if (failed := self._error) is not None:
                    self._error = None
                    raise failed
                done.put((function(), None))
            except Exception as error:  # noqa: BLE001  (raised again in the caller's thread)
                self._on_failure()
                done.put((None, error))

        self.put(job)
        result, error = done.get()
        if error is not None:
            raise error
        return result

    def close(self) -> bool:
        """Finish the queued jobs and end the thread; return False if it had ended before."""
        if not self._thread.is_alive():
            return False
        self._jobs.put(None)
        self._thread.join()
        return True

    def _work(self) -> None:
        if self._cpus:
            os.sched_setaffinity(0, self._cpus)  # 0 means this thread
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:
                log.exception("what a step needs failed")
                self._on_failure()
                self._error = error


def _error(error: Exception) -> StepResult:
    return StepResult(np.zeros(0, np.int32), error=str(error))
