"""The signals that end a server: orderly as long as it can hear them, and in any case.

Python runs a handler when the interpreter gets to it, so an event loop that hangs would hear of no signal. So each signal
is taken once, and where the loop does not get to the first, the second is the system's, which ends the process. From the first
on a watchdog, which needs no interpreter, ends a process whose loop stands still; from the second on, one that is
not done soon. It writes where every thread was.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import platform
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

HANG_SECONDS = 10.0  # that a loop stands still while requests end
LAST_SECONDS = 20.0  # for everything to be closed after the second signal; engines have ten of them
BEAT_SECONDS = 0.5
STDERR = 2
NUMBERS = (signal.SIGTERM, signal.SIGINT)
SA_RESETHAND = 0x80000000


class Signals:
    """SIGTERM and SIGINT, in the order in which they come, for the running event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[signal.Signals] = asyncio.Queue()
        self._num_heard = 0
        self._beat: asyncio.TimerHandle | None = None
        for number in NUMBERS:
            self._listen(number)

    async def get(self) -> signal.Signals:
        """The next one."""
        return await self._queue.get()

    def close(self) -> None:
        """Listen no more: what comes now ends the process at once."""
        if self._beat is not None:
            self._beat.cancel()
        faulthandler.cancel_dump_traceback_later()
        self._listen_no_more()

    def _listen(self, number: signal.Signals) -> None:
        self._loop.add_signal_handler(number, self._heard, number)
        _take_once(number)

    def _heard(self, number: signal.Signals) -> None:
        self._num_heard += 1
        self._queue.put_nowait(number)
        if self._num_heard == 1:
            for each in NUMBERS:
                self._listen(each)
            self._keep_alive()
        elif self._num_heard == 2:
            if self._beat is not None:
                self._beat.cancel()
            faulthandler.dump_traceback_later(LAST_SECONDS, exit=True, file=STDERR)
            self._listen_no_more()

    def _listen_no_more(self) -> None:
        for number in NUMBERS:
            self._loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    def _keep_alive(self) -> None:
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True, file=STDERR)
        self._beat = self._loop.call_later(BEAT_SECONDS, self._keep_alive)


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Behind it, handlers of SIGTERM and SIGINT are what they were in front."""
    before = {number: signal.getsignal(number) for number in NUMBERS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # else it is not Python's to set
                signal.signal(number, handler)


class _SigAction(ctypes.Structure):
    """`struct sigaction` of Linux on x86-64 and AArch64, by glibc and by musl."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * 16),
        ("flags", ctypes.c_uint),
        ("restorer", ctypes.c_void_p),
    )


def _take_once(number: signal.Signals) -> None:
    """Have the system forget the handler as it calls it; Python's `signal` knows no such flag."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return
    sigaction, action = ctypes.CDLL(None).sigaction, _SigAction()
    if sigaction(number, None, ctypes.byref(action)) == 0:
        action.flags |= SA_RESETHAND
        sigaction(number, ctypes.byref(action), None)
