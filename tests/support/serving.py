"""`inferc` as users start it: in a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import final

import psutil

ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
CHECKOUT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
"""The environment variables of another interpreter than the tests', which has packages of its own."""
INFERC = (sys.executable, "-m", "inferc")
START_SECONDS = 60.0
PAUSE_SECONDS = 0.02  # between two looks at what another process does
IS_MEASURED = "COVERAGE_PROCESS_CONFIG" in os.environ
"""True if coverage.py measures the processes that tests start."""
FAKETIME = [*Path("/usr/lib").glob("*/faketime/libfaketime.so.1")]
"""The library that gives a process another clock, if it is installed."""


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    """Ask again and again for what another process does, which sends no event.

    seconds: the pauses together, so that a machine that is slow to answer gets longer.
    """
    for _ in range(round(seconds / PAUSE_SECONDS)):
        if condition():
            return
        time.sleep(PAUSE_SECONDS)
    raise AssertionError(f"after pauses of {seconds:g} s still not: {what}")


@final
class Server:
    """A running `inferc serve`; killed at the end of the block if it has not ended by itself."""

    def __init__(
        self, artifact: Path | str, *options: str, under: tuple[str, ...] = (), python: Path | None = None
    ) -> None:
        """Start a server; under: a command that runs it; python: another interpreter than the tests'."""
        command = INFERC if python is None else (str(python), *INFERC[1:])
        self.artifact = artifact
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (open as long as the server is)
        self.process = subprocess.Popen(
            [*under, *command, "serve", str(artifact), "--grpc-port", "0", "--http-port", "0", *options],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=ENV if python is None else CHECKOUT,
        )
        assert self.process.stdout is not None
        self.ready = self.process.stdout.readline().strip()
        assert self.ready.startswith("ready "), self.log
        self.address = self.ready.split("grpc=")[1].split()[0]
        self.url = "http://" + self.ready.split("http=")[1].split()[0]  # "http://off" without HTTP

    @property
    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    @property
    def engine(self) -> psutil.Process:
        (engine,) = (each for each in self.children if "inferc.runtime.engine.process" in each.cmdline())
        return engine

    @property
    def template(self) -> psutil.Process:
        """The process of the chat template, which the first chat starts."""
        (template,) = (each for each in self.children if "inferc.runtime.text.template_worker" in each.cmdline())
        return template

    @property
    def children(self) -> list[psutil.Process]:
        found: list[psutil.Process] = psutil.Process(self.process.pid).children()
        return found

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def __enter__(self) -> Server:
        return self

    def _end(self, children: list[psutil.Process]) -> None:
        """Let the processes come to their ends, where they write what they ran."""
        for process in (self.process, *children):
            with contextlib.suppress(psutil.NoSuchProcess, subprocess.TimeoutExpired, psutil.TimeoutExpired):
                process.terminate()
                process.wait(5)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            children = psutil.Process(self.process.pid).children()
        except psutil.NoSuchProcess:
            children = []
        if IS_MEASURED:
            self._end(children)
        self.process.kill()
        for child in children:  # one that a test suspended would not see that its server is gone
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        self.process.communicate()
        self._log.close()
