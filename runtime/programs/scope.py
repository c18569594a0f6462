"""The scope of a program's branches: what ends together, and how an error gets from one branch to the others."""

from __future__ import annotations

import threading
from typing import Protocol

from inferc.errors import InfercError
from inferc.runtime.programs.endpoint import Request


class Ended(InfercError):
    """The end of a branch that was not its own fault: the program has ended, or its answer is not needed any more."""


class Branch(Protocol):
    """The part of a State that its scope uses."""

    def settle(self) -> None: ...

    def wake(self) -> None: ...

    def join_thread(self) -> None: ...

    def close(self) -> None: ...


class Scope:
    """The states that fork together, or the first state of a program, and the scopes within.

    An error in one of them ends all: their requests are cancelled, and who waits for them gets the error.
    """

    def __init__(self, parent: Scope | None = None) -> None:
        self.parent = parent
        self.states: list[Branch] = []
        self.children: list[Scope] = []
        self.error: BaseException | None = None
        self.is_told = False  # whether the error was raised to who waited
        self._lock: threading.RLock = threading.RLock() if parent is None else parent._lock
        self._requests: set[Request] = set()
        if parent is not None:
            with self._lock:
                parent.check()
                parent.children.append(self)

    def add(self, state: Branch) -> None:
        """Count a state to this scope; raise the scope's error if it has ended."""
        with self._lock:
            self.check()
            self.states.append(state)

    def check(self) -> None:
        """Raise the error that ended this scope, if it has ended."""
        if self.error is not None:
            self.is_told = True
            raise self.error

    def hold(self, request: Request) -> None:
        """Have a request end with this scope; raise the scope's error if it has ended."""
        with self._lock:
            self.check()
            self._requests.add(request)

    def release(self, request: Request) -> None:
        with self._lock:
            self._requests.discard(request)

    def end(self, error: BaseException) -> None:
        """End this scope and those within; the first error stays."""
        with self._lock:
            if self.error is not None:
                return
            self.error = error
            requests, self._requests = self._requests, set()
            states, children = list(self.states), list(self.children)
        for child in children:
            child.end(error)
            child.is_told = True  # it is this scope's to tell
        for request in requests:
            request.cancel()
        for state in states:
            state.wake()

    def finish(self) -> None:
        """Wait for all states, and raise an error that nobody was told of yet."""
        for state in list(self.states):
            state.settle()
        for child in list(self.children):
            if child.error is None:
                child.finish()
            elif not child.is_told and not isinstance(child.error, Ended):
                child.check()

    def close(self) -> None:
        """Wait until no thread of the scope runs any more, and have its states take nothing more."""
        for state in self.states:
            state.join_thread()
            state.close()
        for child in self.children:
            child.close()
