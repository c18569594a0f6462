"""The engine in a process of its own, behind a pipe.

The child is `python -m inferc.runtime.engine.process FD`; FD is its end of a socket pair. Messages (messages.py) are
framed by `multiprocessing.connection` (its bytes form: nothing is pickled), so neither side can run code on the other.
Each side has a thread that only reads: the parent's notices at once that the child has died, and fails every open
request with the reason; the child's ends the process when the parent is gone. Text stays with the parent.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import logging
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from inferc import errors
from inferc.errors import InfercError
from inferc.runtime.engine.engine import Engine
from inferc.runtime.engine.loop import (
    Add,
    Command,
    EmbedText,
    EngineClient,
    Event,
    Events,
    Failed,
    ScoreText,
    Shutdown,
    run_engine,
)
from inferc.runtime.engine.messages import EventReader, EventWriter, decode_command, encode_command
from inferc.runtime.kv_cache.events import KvBatch
from inferc.runtime.step.sequence import StepOutputs
from inferc.system.logging import LogFormat, configure

log = logging.getLogger(__name__)

LOAD_ENGINE = "inferc.runtime.engine.load:load_engine"
KILL_AFTER_SECONDS = 10.0
# Any client is told this; the actual reason may contain file names.
STOPPED = "the engine has stopped on an error; its log says which"
HINTS: dict[int, str] = {
    signal.SIGKILL: "; the system may have run out of memory",
    signal.SIGBUS: "; a file that it maps was cut short, or cannot be read",
}
# The size of a message that a socket which is ready for writing takes at once.
SMALL_BYTES = 1 << 14


class EngineProcess(EngineClient):
    """An engine in a child process, which is started here; `wait_until_ready` waits for it.

    factory "module:function" makes the Engine in the child from `options` (JSON-able). Raises InfercError if the system
    cannot start a process. No thread that sends a command waits for the child to read it: a child that hangs must not
    stop the thread that has to notice.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        factory: str = LOAD_ENGINE,
        on_stop: Callable[[str], None] | None = None,
        on_kv_events: Callable[[KvBatch], None] | None = None,
        log_format: LogFormat = "text",
    ) -> None:
        super().__init__(on_stop, on_kv_events)
        self._process, self._pipe = _spawn()
        self._can_write = select.poll()
        self._can_write.register(self._pipe.fileno(), select.POLLOUT)
        self._unsent: deque[bytes] = deque()  # in order; the first is being sent
        self._writing = threading.Condition()  # guards `_unsent`, and messages that are sent directly
        self._is_over = False  # whether nothing is sent any more
        self._writer = threading.Thread(target=self._send_late, name="inferc-engine-writer", daemon=True)
        self._writer.start()
        self._closing = False
        self._killed_for: str | None = None
        self._reader: threading.Thread | None = None
        logs = {"log_level": logging.getLogger().level, "log_format": log_format}
        self._write(json.dumps({"factory": factory, "options": dict(options), **logs}).encode())

    def wait_until_ready(self) -> EngineProcess:
        """Wait until the engine takes requests.

        Raises the error with which it failed to start, or InfercError after `close`.
        """
        self._wait_until_ready()
        self._reader = threading.Thread(target=self._read, name="inferc-engine-reader", daemon=True)
        self._reader.start()
        return self

    @property
    def pid(self) -> int:
        return self._process.pid

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end of the process and of the events that it sent."""
        if self._reader is not None:
            self._reader.join(timeout)

    def close(self) -> None:
        """Stop now; open requests fail.

        A child that is still loading, or that does not stop within seconds, is killed.
        """
        self._closing = True
        if self._reader is None:
            self._process.kill()
            self._process.wait()
            return
        if self._stopped is None:
            self._send(Shutdown(drain=False))
        self._reader.join(KILL_AFTER_SECONDS)
        if self._reader.is_alive():
            self._process.kill()
            self._reader.join()

    def kill(self, reason: str) -> None:
        """Kill a process that does not answer; open requests fail with this reason."""
        self._killed_for = reason
        self._process.kill()
        self.join()

    def _send(self, command: Command) -> None:
        try:
            data = encode_command(command)
        except OverflowError:
            assert isinstance(command, Add | ScoreText | EmbedText), "others have no numbers of who asks"
            reason = "the prompt has a number that is no token id: it takes more than 64 bits"
            self._dispatch([Failed(command.request_id, reason, is_request_error=True)])
        else:
            self._write(data)

    def _write(self, data: bytes) -> None:
        with self._writing:
            if not self._unsent and len(data) <= SMALL_BYTES and self._can_write.poll(0):
                self._send_now(data)
            else:
                self._unsent.append(data)
                self._writing.notify()

    def _send_late(self) -> None:
        """Send the messages that the socket had no room for, as the child reads them."""
        while True:
            with self._writing:
                self._writing.wait_for(lambda: self._unsent or self._is_over)
                if self._is_over:
                    return
                data = self._unsent[0]
            self._send_now(data)
            with self._writing:
                self._unsent.popleft()

    def _send_now(self, data: bytes) -> None:
        try:
            self._pipe.send_bytes(data)
        except OSError:  # the child is gone: the reader thread reports why
            log.debug("the engine process does not read any more")

    def _hang_up(self) -> None:
        """Close the pipe to a child that has ended, and end the thread that writes to it."""
        with self._writing:
            self._is_over = True
            self._writing.notify()
        self._writer.join()  # a write to a closed socket ends at once
        with self._writing:
            self._pipe.close()

    def _wait_until_ready(self) -> None:
        try:
            message = json.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            reason = self._describe_end()
            self._hang_up()
            raise InfercError(f"the engine process ended before it was ready: {reason}") from None
        if "error" in message:
            self._process.wait()
            self._hang_up()
            kind = getattr(errors, message["kind"], InfercError)
            raise kind(message["error"])

    def _read(self) -> None:
        reader, is_ending = EventReader(), False
        try:
            while True:
                self._dispatch(reader.decode(self._pipe.recv_bytes()))
                # the engine has stopped by itself; its process must end too
                if self._stopped is not None and not is_ending:
                    is_ending = True
                    self._kill_late()
        except (EOFError, OSError):
            pass
        except Exception:
            log.exception("what the engine process tells cannot be read")
            self._process.kill()
        is_expected = self._process.wait() == 0 or self._closing
        reason = "the engine was closed" if is_expected else self._killed_for or self._describe_end()
        self._hang_up()
        if not is_expected:
            log.error("%s", reason)
        self._fail_all(reason)

    def _kill_late(self) -> None:
        """Kill the child after some seconds.

        An engine that stopped on an error may not reach its end, and the next one needs its memory.
        """
        timer = threading.Timer(KILL_AFTER_SECONDS, self._process.kill)  # `kill` does nothing after `wait`
        timer.daemon = True
        timer.start()

    def _describe_end(self) -> str:
        code = self._process.wait()
        if code >= 0:
            return f"the engine process exited with code {code}; its log says why"
        name = signal.Signals(-code).name
        hint = HINTS.get(-code, "")
        return f"the engine process was killed by {name}{hint}"


def _spawn() -> tuple[subprocess.Popen[bytes], Connection[Any, Any]]:
    """Start a child and return it with our end of its pipe.

    Raises InfercError if there are no processes or files left.
    """
    try:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            command = [sys.executable, "-m", "inferc.runtime.engine.process", str(theirs.fileno())]
            # The child imports from the same places as this process, and from nowhere else (not the current folder).
            path = os.pathsep.join(entry for entry in sys.path if entry)
            environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
            process = subprocess.Popen(
                command,
                pass_fds=(theirs.fileno(),),
                env=environment,
                stdin=subprocess.DEVNULL,
                # Ctrl-C in a terminal reaches every process of the terminal's session.
                start_new_session=True,
            )
            return process, Connection(ours.detach())
    except OSError as error:
        raise InfercError(f"the engine's process cannot be started: {error.strerror or error}") from None


# --------------------------------------------------------------------------------------------------- child


def main(fd: int) -> int:
    """Run the child: make the engine, report it, and obey commands until told to stop or left alone."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # systemd signals every process; the parent decides
    pipe = Connection(fd)
    request = json.loads(pipe.recv_bytes())
    configure(request["log_format"], request["log_level"], "engine")
    try:
        module, function = request["factory"].split(":")
        engine: Engine = getattr(importlib.import_module(module), function)(**request["options"])
    except Exception as error:
        if not isinstance(error, InfercError):
            log.exception("the engine cannot start")
        pipe.send_bytes(json.dumps({"error": str(error), "kind": type(error).__name__}).encode())
        return 1
    try:
        pipe.send_bytes(b'{"ready": true}')
    except OSError:  # the parent ended while we were loading
        return 1
    inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
    failures: list[Event] = []
    writer = EventWriter()

    def emit(events: Events) -> None:
        if not isinstance(events, StepOutputs | KvBatch):
            events = list(events)
            for index, event in enumerate(events):
                if isinstance(event, Failed) and event.request_id is None:
                    failures.append(event)
                    log.error("%s", event.reason)
                    events[index] = dataclasses.replace(event, reason=STOPPED)
        for message in writer.encode(events):
            pipe.send_bytes(message)

    threading.Thread(target=_read_commands, args=(pipe, inbox), daemon=True).start()
    run_engine(engine, inbox, emit)
    return 1 if failures else 0


def _read_commands(pipe: Connection[Any, Any], inbox: queue.SimpleQueue[Command]) -> None:
    try:
        while True:
            inbox.put(decode_command(pipe.recv_bytes()))
    except (EOFError, OSError):
        os._exit(0)  # the parent is gone, and nothing waits for the running step


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
