"""The parallel build of kernels in several processes.

Processes are needed since Triton's settings are global to a process, and its compiler holds Python's lock.

Each process is a new Python interpreter, not a fork. So no script needs a guard around its main part, and no thread of
torch is lost in a fork. A process ends when its input is closed, also when the parent process is killed.
"""

from __future__ import annotations

import importlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, fields, replace
from typing import Any

from inferc.codegen.triton.aot import build as build_module
from inferc.codegen.triton.aot.build import Cubin
from inferc.codegen.triton.aot.source import Source
from inferc.errors import InfercError, VerifyError

WORTH_ONE = 16  # the least kernels per process that make up for its start-up time
SERVE = f"from {__name__} import serve; serve()"


@dataclass(frozen=True)
class Job:
    """The arguments of one `build`.

    With `fit`, the kernel gets as many stages as fit into shared memory, see `build_fitting`.
    """

    source: Source
    name: str
    op: str
    arch: str
    assemble: bool = True
    fit: bool = True

    def run(self) -> Cubin:
        build = build_module.build_fitting if self.fit else build_module.build
        return build(self.source, self.name, self.op, self.arch, assemble=self.assemble)

    def packed(self) -> tuple[str, str, dict[str, Any], Job]:
        """Return the job in a form that can be pickled: the kernel by its module and its name."""
        function = self.source.function
        rest = {each.name: getattr(self.source, each.name) for each in fields(self.source) if each.name != "function"}
        return function.fn.__module__, function.__name__, rest, replace(self, source=None)  # type: ignore[arg-type]

    @staticmethod
    def unpacked(packed: tuple[str, str, dict[str, Any], Job]) -> Job:
        module, name, rest, job = packed
        return replace(job, source=Source(function=getattr(importlib.import_module(module), name), **rest))


def worth(total: int) -> int:
    """Return how many processes are worth their start-up time for `total` kernels.

    There are never more than this process may use CPUs.
    """
    return max(1, min(total // WORTH_ONE, len(os.sched_getaffinity(0))))


class Builders(AbstractContextManager["Builders"]):
    """A pool of `count` processes that compile kernels.

    With a count of one, this process compiles. It also compiles kernels that are not part of this package.
    """

    def __init__(self, count: int) -> None:
        self._idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        self._processes = [_Process() for _ in range(count if count > 1 else 0)]
        for process in self._processes:
            self._idle.put(process)
        self._threads = ThreadPoolExecutor(max(1, len(self._processes)), "builders") if self._processes else None

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.close()

    def build(self, jobs: Sequence[Job]) -> Iterator[Cubin]:
        """Yield the cubins of the jobs, in the order of the jobs; raise what `build` raises."""
        for result in self.tried(jobs):
            if isinstance(result, Exception):
                raise result
            yield result

    def tried(self, jobs: Sequence[Job]) -> Iterator[Cubin | Exception]:
        """Yield for each job its cubin, or the error that `build` raised."""
        given = [self._given(job) for job in jobs]
        try:
            for job, future in zip(jobs, given, strict=True):
                yield _tried(job) if future is None else future.result()
        finally:
            for future in given:
                if future is not None:
                    future.cancel()

    def _given(self, job: Job) -> Future[Cubin | Exception] | None:
        if self._threads is None or not job.source.function.fn.__module__.startswith("inferc."):
            return None
        return self._threads.submit(self._elsewhere, job)

    def _elsewhere(self, job: Job) -> Cubin | Exception:
        process = self._idle.get()
        try:
            return process.run(job)
        finally:
            self._idle.put(process)


class _Process:
    """A process that compiles one kernel at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )

    def run(self, job: Job) -> Cubin | Exception:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            pickle.dump(job.packed(), self._process.stdin)
            self._process.stdin.flush()
            result: Cubin | Exception = pickle.load(self._process.stdout)
        except (EOFError, OSError):
            code = self._process.wait()
            return VerifyError(f"{job.name} for {job.arch}: the process that compiled it ended with code {code}")
        return result

    def kill(self) -> None:
        """Kill the process; a thread that waits for its result learns that it ended."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):
                pipe.close()


def serve() -> None:
    """Compile the kernels that arrive on stdin, until it is closed."""
    # A terminal sends SIGINT to its whole process group. The parent handles it, and ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a compiler prints to stdout must not mix with the answers
    while True:
        try:
            packed = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        result = _tried(Job.unpacked(packed))
        if isinstance(result, Exception) and not isinstance(result, InfercError):
            # Other exceptions may not survive pickling.
            result = RuntimeError("".join(traceback.format_exception(result)))
        pickle.dump(result, answers)
        answers.flush()


def _tried(job: Job) -> Cubin | Exception:
    try:
        return job.run()
    except Exception as error:  # noqa: BLE001  (Triton raises many types of its own)
        return error
