"""A server that hangs ends by its second signal at the latest, whatever it is at."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import final

import pytest
from serving import ENV, wait_until

SERVE = """
import asyncio, ctypes, sys
from pathlib import Path
from inferc.serve import signals
from inferc.serve.models.models import Models
from inferc.serve.server import ServeConfig, serve

def hang(*_):
    "In C, with the interpreter's lock: no other thread runs, no handler of Python's either."
    pause = ctypes.PyDLL(None).pause
    print("hangs", flush=True)
    while True:
        pause()

async def hang_in_loop(*_):
    hang()

async def wait_for_ever(*_):
    print("hangs", flush=True)
    await asyncio.Event().wait()

where, folder = sys.argv[1:]
signals.HANG_SECONDS = signals.LAST_SECONDS = 1.0
if where == "drain":
    Models.drain = hang_in_loop
elif where == "drain waits":
    Models.drain = wait_for_ever
elif where == "close waits":
    Models.close = wait_for_ever
config = ServeConfig((), model_folder=Path(folder), grpc_port=0, http_port=None)
sys.exit(serve(config, hang if where == "loop" else lambda _: print("ready", flush=True)))
"""


@final
class Serving:
    """The script above at work, until it hangs or is ready."""

    def __init__(self, where: str, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE, where, str(folder)],
            env=ENV,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def next_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    @property
    def catches(self) -> bool:
        """True if the system would call a handler for SIGTERM."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
        return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def test_a_loop_that_hangs_ends_at_the_second_signal(tmp_path: Path) -> None:
    with Serving("loop", tmp_path) as server:
        assert server.next_line() == "hangs"
        assert server.catches
        server.terminate()
        wait_until(lambda: not server.catches, "the first signal has come")
        assert server.process.poll() is None
        server.terminate()
        assert server.process.wait(20) == -signal.SIGTERM


@pytest.mark.slow
def test_a_loop_that_hangs_while_it_drains_ends_by_itself(tmp_path: Path) -> None:
    with Serving("drain", tmp_path) as server:
        assert server.next_line() == "ready"
        server.terminate()
        assert server.next_line() == "hangs"
        assert server.process.wait(20) == 1
        _, said = server.process.communicate()
        assert "Timeout" in said and "in hang_in_loop" in said, "it says where it was"


@pytest.mark.parametrize("where", ["drain waits", "close waits"])
def test_what_never_ends_is_cut_by_the_second_signal(where: str, tmp_path: Path) -> None:
    with Serving(where, tmp_path) as server:
        assert server.next_line() == "ready"
        server.terminate()
        assert server.next_line() == "hangs"
        assert server.process.poll() is None
        server.terminate()
        assert server.process.wait(20) == (0 if where == "drain waits" else 1)


def test_the_third_signal_ends_it_at_once_whichever_it_is(tmp_path: Path) -> None:
    with Serving("close waits", tmp_path) as server:
        assert server.next_line() == "ready"
        server.terminate()
        assert server.next_line() == "hangs"
        server.process.send_signal(signal.SIGINT)
        wait_until(lambda: not server.catches, "the second signal has come")
        server.terminate()
        assert server.process.wait(20) == -signal.SIGTERM


def test_an_orderly_end_leaves_nothing_that_waits(tmp_path: Path) -> None:
    with Serving("nowhere", tmp_path) as server:
        assert server.next_line() == "ready"
        server.terminate()
        assert server.process.wait(20) == 0
        assert "Timeout" not in server.process.communicate()[1]
