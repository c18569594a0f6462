"""The signals that end a server: an orderly end if the event loop still runs, and an end in any case.

Python runs a signal handler only when the interpreter gets to it, so a hanging event loop would never see a signal.
Therefore each handler is installed for one delivery. If the loop does not handle the first signal, the second one has
the system's default action, which ends the process. From the first handled signal on, a watchdog that does not need
the interpreter (faulthandler) ends a process whose event loop hangs; from the second on, it ends a process that is not
done soon. It prints the stack of every thread.
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

HANG_SECONDS = 10.0  # the watchdog ends a process whose event loop does not run for so long while requests end
LAST_SECONDS = 20.0  # time limit to close everything after the second signal; engines have ten seconds of it
BEAT_SECONDS = 0.5
STDERR = 2
NUMBERS = (signal.SIGTERM, signal.SIGINT)
SA_RESETHAND = 0x80000000


class Signals:
    """The queue of SIGTERM and SIGINT signals for the running event loop, in the order in which they come."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[signal.Signals] = asyncio.Queue()
        self._num_heard = 0
        self._beat: asyncio.TimerHandle | None = None
        for number in NUMBERS:
            self._listen(number)

    async def get(self) -> signal.Signals:
        """Wait for the next signal and return it."""
        return await self._queue.get()

    def close(self) -> None:
        """Stop listening: a signal that comes from now on ends the process at once."""
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
    """Restore the handlers of SIGTERM and SIGINT after the body."""
    before = {number: signal.getsignal(number) for number in NUMBERS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: it was not installed by Python, which cannot restore it
                signal.signal(number, handler)


class _SigAction(ctypes.Structure):
    """The `struct sigaction` of Linux on x86-64 and AArch64, as in glibc and musl."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * 16),
        ("flags", ctypes.c_uint),
        ("restorer", ctypes.c_void_p),
    )


def _take_once(number: signal.Signals) -> None:
    """Make the system reset the handler when it calls it (SA_RESETHAND); Python's `signal` has no such flag."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return
    sigaction, action = ctypes.CDLL(None).sigaction, _SigAction()
    if sigaction(number, None, ctypes.byref(action)) == 0:
        action.flags |= SA_RESETHAND
        sigaction(number, ctypes.byref(action), None)
