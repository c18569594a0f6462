"""`inferc.program`: a function that appends texts, generations and choices to a state, run on a model."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from inferc.errors import RequestError, shown
from inferc.runtime.programs.endpoint import Endpoint
from inferc.runtime.programs.facts import Piece
from inferc.runtime.programs.scope import Ended, Scope
from inferc.runtime.programs.state import State

NUM_AT_ONCE = 64


class Program:
    """A function whose first parameter is the state that it appends to.

    A target is an inferc.LLM or an inferc.client.Client. Calling a program within another one appends to that one's
    state.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self.name = getattr(function, "__name__", "program")
        self._signature = inspect.signature(function)

    def __call__(self, state: State, /, *args: Any, **named: Any) -> Any:
        return self._function(state, *args, **named)

    def run(self, target: Any, /, **args: Any) -> Finished:
        """Run the program to its end, and return its state, whose `result` is what the function returned.

        Raises RequestError for arguments that the function does not take, and what the program raises; then nothing of
        it goes on.
        """
        return _Run(self, endpoint_of(target), self._bound(args)).run()

    def batch(
        self, target: Any, args: Sequence[Mapping[str, Any]], /, *, num_at_once: int = NUM_AT_ONCE
    ) -> list[Finished]:
        """Run the program once for each of some arguments, and return the states in their order.

        num_at_once: how many run at the same time; the engine batches what they ask for. An error in one ends all.
        """
        bound = [self._bound(each, f"args[{index}]: ") for index, each in enumerate(args)]
        if isinstance(num_at_once, bool) or not isinstance(num_at_once, int) or num_at_once < 1:
            raise RequestError(f"{self.name}: num_at_once is {shown(num_at_once)}; expected at least 1")
        endpoint = endpoint_of(target)
        whole = Scope()
        runs = [_Run(self, endpoint, each, whole) for each in bound]

        def run(one: _Run) -> Finished:
            try:
                return one.run()
            except BaseException as error:
                whole.end(error)
                raise

        with ThreadPoolExecutor(num_at_once, "inferc-batch") as pool:
            try:
                states = list(pool.map(run, runs))
            except BaseException as error:  # noqa: BLE001 (raised, or the first one that there was)
                whole.end(error)
                raise whole.error or error from None
        return states

    def stream(self, target: Any, /, **args: Any) -> Running:
        """Return a run of the program that starts when it is iterated over, and gives the pieces of its text.

        Those of branches are not among them.
        """
        return Running(_Run(self, endpoint_of(target), self._bound(args)))

    def _bound(self, args: Any, where: str = "") -> dict[str, Any]:
        if not isinstance(args, Mapping):
            raise RequestError(f"{self.name}: {where}expected a mapping of arguments, found {shown(args)}")
        try:
            self._signature.bind(None, **args)
        except TypeError as error:
            raise RequestError(f"{self.name}: {where}{error}") from None
        return dict(args)


class Finished(State):
    """The state of a program; result: what its function returned, once it has."""

    result: Any = None


class Running:
    """A program as it runs: iterating starts it and gives its pieces; leaving the loop ends it.

    state: what it appends to, also after the loop.
    """

    def __init__(self, run: _Run) -> None:
        self._run, self.state = run, run.state
        self._is_started = False

    def __iter__(self) -> Iterator[Piece]:
        if self._is_started:
            raise RequestError("this run was read already; call stream again")
        self._is_started = True
        errors: list[BaseException] = []

        def run() -> None:
            try:
                self._run.run()
            except BaseException as error:  # noqa: BLE001 (raised where the pieces are read)
                errors.append(error)

        thread = threading.Thread(target=run, name="inferc-program", daemon=True)
        thread.start()
        try:
            yield from self.state.pieces(lambda: self.state.is_closed)
        finally:
            self._run.scope.end(Ended("the loop over the program was left"))
            thread.join()
        if errors:
            raise errors[0]


class _Run:
    """One run of a program; parent: the scope of the batch that it is one of."""

    def __init__(
        self, program: Program, endpoint: Endpoint, args: Mapping[str, Any], parent: Scope | None = None
    ) -> None:
        self.program, self.args = program, args
        self.scope = Scope(parent)
        self.state = Finished(endpoint, self.scope)

    def run(self) -> Finished:
        try:
            self.state.result = self.program._function(self.state, **self.args)
            self.scope.finish()
        except BaseException as error:
            self.scope.end(error)
            raise
        finally:
            self.scope.close()
        return self.state


def program(function: Callable[..., Any]) -> Program:
    """Make a program of a function whose first parameter is the state that it appends to."""
    return Program(function)


def endpoint_of(target: Any) -> Endpoint:
    """Return the endpoint of an LLM or of a client; raise RequestError for anything else."""
    from inferc.runtime.engine.llm import LLM
    from inferc.runtime.programs.embedded import EmbeddedEndpoint

    if isinstance(target, Endpoint):
        return target
    if isinstance(target, LLM):
        return EmbeddedEndpoint(target)
    make = getattr(type(target), "program_endpoint", None)
    if make is None:
        raise RequestError(f"a program runs on an inferc.LLM or an inferc.client.Client, found {shown(target)}")
    endpoint: Endpoint = make(target)
    return endpoint
