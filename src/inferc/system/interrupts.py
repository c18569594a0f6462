"""Stop long work at a signal, also where Python swallows the exception that the handler raises."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from inferc.system.progress import Progress

Hook: TypeAlias = "Callable[[sys.UnraisableHookArgs], Any]"  # in quotes, as only stubs have the type of its argument


@dataclass
class Interrupts:
    """A record of whether a signal asked the work to stop.

    The exception that the signal handler raises may land in a `__del__` or a weakref's callback, where Python only
    reports it (`unraisable_hook`). Therefore every stage of the work, and the last step before its result appears,
    check this record too.
    """

    seen: bool = False

    def handle(self, _number: int, _frame: Any) -> None:
        self.seen = True
        raise KeyboardInterrupt

    def check(self) -> None:
        if self.seen:
            raise KeyboardInterrupt

    def unraisable_hook(self, usual: Hook) -> Hook:
        """Return a hook that calls the usual one for every unraisable exception but that of the signal handler.

        The signal is answered when the record is checked next.
        """

        def hook(found: sys.UnraisableHookArgs) -> None:
            if not (self.seen and found.exc_type is KeyboardInterrupt):
                usual(found)

        return hook

    def checked(self, progress: Progress) -> Progress:
        """Return `progress` with a check for a signal before each call."""

        def report(stage: str, done: int, total: int) -> None:
            self.check()
            progress(stage, done, total)

        return report


@contextmanager
def interruptible() -> Iterator[Interrupts]:
    """Let SIGTERM and SIGINT unwind the work, so that half-written files are removed.

    Only the main thread may set signal handlers.
    """
    interrupts = Interrupts()
    usual: dict[signal.Signals, Any] = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    ours = [number for number, handler in usual.items() if signal.getsignal(number) is handler]
    if threading.current_thread() is not threading.main_thread():
        ours = []
    for number in ours:
        signal.signal(number, interrupts.handle)
    plain = sys.unraisablehook
    sys.unraisablehook = interrupts.unraisable_hook(plain)
    try:
        yield interrupts
    finally:
        sys.unraisablehook = plain
        for number in ours:
            signal.signal(number, usual[number])
