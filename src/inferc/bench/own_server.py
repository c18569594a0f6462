"""A temporary `inferc serve` process that a benchmark starts, measures and stops."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inferc.errors import ConfigError, InfercError

STOP_SECONDS = 60.0
DEFAULT_MAX_SEQS, DEFAULT_BUDGET = 64, 512  # the defaults of `inferc serve`


@dataclass(frozen=True)
class Addresses:
    """The addresses of a server's gRPC and HTTP interfaces, as HOST:PORT each."""

    grpc: str
    http: str


@contextmanager
def serving(artifact: Path, options: Sequence[str]) -> Iterator[Addresses]:
    """Start `inferc serve` on free ports of the loopback interface, yield its addresses, and stop it at the end.

    Raises ConfigError if the server refuses the options, InfercError if it ends for another reason before it is ready;
    the message holds the last line that the server printed.
    """
    arguments = [str(artifact), "--host", "127.0.0.1", "--grpc-port", "0", "--http-port", "0", "--json", *options]
    with (
        tempfile.TemporaryFile("w+", errors="replace") as log,
        # The server runs in its own session: Ctrl-C must reach only the load generator, which still reports the
        # requests that have ended.
        subprocess.Popen(
            [sys.executable, "-m", "inferc", "serve", *arguments],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                code = process.wait()
                log.seek(0)
                raise _error(code, log.read())
            ready = json.loads(line)
            yield Addresses(ready["grpc"], ready["http"] or "")
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _error(code: int, said: str) -> InfercError:
    lines = [stripped for each in said.splitlines() if (stripped := each.strip(" │╭╰─╮╯"))]
    last = lines[-1].removeprefix("inferc: ") if lines else "it said nothing"
    message = f"inferc serve ended with exit code {code} before it was ready: {last}"
    return ConfigError(message) if code == 2 else InfercError(message)


def server_options(flags: Mapping[str, Any], concurrency: int | None = None) -> list[str]:
    """Return command-line options of `inferc serve` for these flags.

    The limits are raised so that `concurrency` requests fit into one step, unless a flag or a configuration file sets
    them.
    """
    flags = dict(flags)
    if concurrency is not None and flags.get("--config") is None and flags.get("--max-num-seqs") is None:
        if concurrency > DEFAULT_MAX_SEQS:
            flags["--max-num-seqs"] = concurrency
        if concurrency > DEFAULT_BUDGET and flags.get("--max-num-batched-tokens") is None:
            flags["--max-num-batched-tokens"] = concurrency
    found = []
    for name, value in flags.items():
        if value is False:
            found.append(name.replace("--", "--no-", 1))
        elif value is not None:
            found += [name] if value is True else [name, str(value)]
    return found
