"""The state of a program: the text so far, its token ids, and the variables that generations and choices set."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self, TypeAlias, overload

from inferc.errors import InfercError, RequestError, nearest, shown
from inferc.runtime.programs.endpoint import MARK, Endpoint
from inferc.runtime.programs.expressions import Gen, Select, best, caller, located
from inferc.runtime.programs.facts import Generated, Piece, Selected, Slot
from inferc.runtime.programs.scope import Scope

Appended: TypeAlias = str | Gen | Select
MAX_BRANCHES = 1024
AT_ONCE = 16  # choices of a select that are scored at the same time


class State:
    """A text that grows by what a program appends to it, and the variables that were set on the way.

    Appending returns at once; a variable, the text, a fork and the program's end wait for what they need. The token ids
    only grow: what is generated stays as it was generated, so the prefix cache has all of it for what follows.
    """

    def __init__(self, endpoint: Endpoint, scope: Scope, seed_offset: int = 0) -> None:
        self._endpoint, self._scope, self._seed_offset = endpoint, scope, seed_offset
        self._ids: list[int] = []
        self._unread: list[str] = []  # texts that have no tokens yet: they get them together
        self._pieces: list[Piece] = []
        self._slots: dict[str, Slot] = {}
        self._messages: list[dict[str, str]] = []
        self._todo: deque[tuple[Callable[[], None], str]] = deque()
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._is_closed = False  # nothing is appended any more
        scope.add(self)

    # --------------------------------------------------------------------------------------------- appending

    def __iadd__(self, appended: Appended) -> Self:
        """Append a text, a generation or a choice; raise RequestError for anything else."""
        self._append(appended, caller())
        return self

    def system(self, text: str) -> State:
        """Append a message of the role system, as the model's chat template writes it."""
        return self._message("system", text)

    def user(self, text: str) -> State:
        """Append a message of the role user, as the model's chat template writes it."""
        return self._message("user", text)

    def assistant(self, *parts: Appended) -> State:
        """Append an answer, of texts, generations and choices, between what the chat template writes around it."""
        where = caller()
        if all(isinstance(part, str) for part in parts):
            return self._message("assistant", "".join(map(str, parts)))
        before = list(self._messages)
        self._do(lambda: self._turn(before, len(before), True), f"{where}: assistant")
        for part in parts:
            self._append(part, where)
        self._messages.append({"role": "assistant", "content": MARK})
        after = list(self._messages)
        self._do(lambda: self._turn(after, len(before), False), f"{where}: assistant")
        return self

    def _message(self, role: str, text: str) -> State:
        where = f"{caller()}: {role}"
        if not isinstance(text, str):
            raise located(RequestError(f"expected a text, found {shown(text)}"), where)
        known = len(self._messages)
        self._messages.append({"role": role, "content": text})
        messages = list(self._messages)
        self._do(lambda: self._turn(messages, known, False), where)
        return self

    def _append(self, appended: Appended, where: str) -> None:
        if isinstance(appended, str):
            self._do(lambda: self._say(appended), where)
            return
        if not isinstance(appended, Gen | Select):
            raise located(RequestError(f"expected a text, gen(…) or select(…), found {shown(appended)}"), where)
        slot = Slot()
        if appended.name:
            self._slots[appended.name] = slot
        run = (lambda: self._gen(appended, slot)) if isinstance(appended, Gen) else lambda: self._select(appended, slot)
        self._do(run, f"{where}: {appended}")

    # ---------------------------------------------------------------------------------------------- reading

    def __getitem__(self, name: str) -> Any:
        """Return a variable, once it is set; raise RequestError for one that the program does not have."""
        return self._slot(name).value

    def __setitem__(self, name: str, value: Any) -> None:
        self._slots[name] = Slot(value, True)

    def __contains__(self, name: object) -> bool:
        return name in self._slots

    @property
    def variables(self) -> dict[str, Any]:
        """All variables, once they are set."""
        return {name: self[name] for name in self._slots}

    @property
    def text(self) -> str:
        """The whole text, once all that was appended is there."""
        self.settle()
        return "".join(piece.text for piece in self._pieces)

    @property
    def token_ids(self) -> list[int]:
        """The token ids of the whole text, once all that was appended is there."""
        self.settle()
        self._read()
        return list(self._ids)

    def info(self, name: str) -> Any:
        """Return the facts of a generation (Generated) or a choice (Selected); raise RequestError for neither."""
        found = self._slot(name).info
        if not isinstance(found, Generated | Selected):
            raise located(RequestError(f"{shown(name)} was neither generated nor selected"), caller())
        return found

    def stream(self, name: str) -> Iterator[str]:
        """Iterate over the text of a variable as it is generated."""
        slot = self._slots.get(name) or self._slot(name)
        return (piece.text for piece in self.pieces(lambda: slot.is_set) if piece.name == name)

    def pieces(self, is_done: Callable[[], bool]) -> Iterator[Piece]:
        """Iterate over what is appended, until the condition holds; it is asked again after each change."""
        count = 0
        while True:
            with self._changed:
                while count == len(self._pieces) and not is_done():
                    self._scope.check()
                    self._changed.wait()
                new, ended = self._pieces[count:], is_done()
                count += len(new)
            yield from new
            if ended and count == len(self._pieces):
                return

    def _slot(self, name: str) -> Slot:
        slot = self._slots.get(name)
        if slot is None:
            known = f"; {nearest(name, self._slots)}" if self._slots and isinstance(name, str) else ""
            raise located(RequestError(f"the program has no variable {shown(name)}{known}"), caller())
        self._wait(lambda: slot.is_set)
        return slot

    # --------------------------------------------------------------------------------------------- branches

    def fork(self, n: int) -> Forks:
        """Return n states that go on from here independently, and at the same time.

        They share this state's tokens, which are computed once. A `seed` of a generation is increased by the branch's
        number. An error in one ends the others, and is raised where the program waits for one of them.
        """
        where = f"{caller()}: fork"
        if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MAX_BRANCHES:
            raise located(RequestError(f"n is {shown(n)}; expected 1 to {MAX_BRANCHES}"), where)
        self.settle()
        try:
            self._read()
        except InfercError as error:
            raise located(error, where) from None
        scope = Scope(self._scope)
        return Forks(self, scope, [self._copy(scope, self._seed_offset * MAX_BRANCHES + index) for index in range(n)])

    def _copy(self, scope: Scope, seed_offset: int) -> State:
        other = State(self._endpoint, scope, seed_offset)
        other._ids, other._pieces, other._messages = list(self._ids), list(self._pieces), list(self._messages)
        other._slots = dict(self._slots)
        return other

    # ------------------------------------------------------------------------------------- what is appended

    def _do(self, run: Callable[[], None], where: str) -> None:
        """Run what was appended behind what was appended before, on the state's thread."""
        with self._changed:
            if self._is_closed:
                raise located(InfercError("the program has ended, and its state takes nothing more"), where)
            self._scope.check()
            self._todo.append((run, where))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="inferc-program", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        while True:
            with self._changed:
                if self._scope.error is not None:
                    self._todo.clear()
                if not self._todo:
                    self._thread = None
                    self._changed.notify_all()
                    return
                run, where = self._todo[0]
            try:
                self._scope.check()
                run()
            except InfercError as error:
                self._scope.end(error if error is self._scope.error else located(error, where))
            except BaseException as error:  # noqa: BLE001 (raised where the program waits)
                self._scope.end(error)
            with self._changed:
                if self._todo:
                    self._todo.popleft()

    def _say(self, text: str, name: str = "") -> None:
        """Append a text without tokens."""
        if text:
            self._unread.append(text)
            self._show(text, name)

    def _show(self, text: str, name: str = "") -> None:
        with self._changed:
            self._pieces.append(Piece(text, name))
            self._changed.notify_all()

    def _set(self, slot: Slot, value: str, info: Generated | Selected) -> None:
        with self._changed:
            slot.value, slot.info, slot.is_set = value, info, True
            self._changed.notify_all()

    def _read(self) -> None:
        """Give the texts that have none their tokens."""
        text = "".join(self._unread)
        if text:
            self._ids += self._endpoint.encode(text, begins=not self._ids)
        self._unread.clear()

    def _turn(self, messages: Sequence[dict[str, str]], num_known: int, goes_on: bool) -> None:
        self._read()
        ids = self._endpoint.tokenize_turn(messages, num_known, goes_on)
        self._ids += ids
        self._show(self._endpoint.decode(ids))

    def _gen(self, asked: Gen, slot: Slot) -> None:
        self._read()
        sampling = dict(asked.sampling)
        if "seed" in sampling:
            sampling["seed"] += self._seed_offset
        ids = self._ids or self._endpoint.encode("", begins=True)
        request = self._endpoint.open(ids, sampling)
        self._scope.hold(request)
        text, reason, num_cached = "", "", 0
        new: list[int] = []
        try:
            for part in request:
                text += part.text
                new += part.token_ids
                reason, num_cached = part.finish_reason or reason, part.num_cached
                if part.text:
                    self._show(part.text, asked.name)
        finally:
            self._scope.release(request)
        self._scope.check()
        if not reason:
            raise InfercError("the answer ended before it was finished")
        ends = sampling.get("stop_token_ids", ())
        self._ids = [*ids, *(self._endpoint.kept(new, text, ends) if reason == "stop" else new)]
        self._set(slot, text, Generated(text, tuple(new), reason, len(ids), num_cached))

    def _select(self, asked: Select, slot: Slot) -> None:
        self._read()
        if not self._ids:
            raise RequestError("there is no text to choose by; append some first")
        choices = [self._endpoint.encode(each, begins=False) for each in asked.choices]

        def score(ids: list[int]) -> list[float]:
            self._scope.check()
            return self._endpoint.score([*self._ids, *ids], len(self._ids), asked.cache_salt)

        # The first one computes the text, in which the others then find all but their own tokens.
        scores = [score(choices[0])]
        with ThreadPoolExecutor(AT_ONCE, "inferc-select") as pool:
            scores += pool.map(score, choices[1:])
        index = best(scores, choices, asked.by)
        text = asked.choices[index]
        self._ids += choices[index]
        self._show(text, asked.name)
        token_ids = tuple(map(tuple, choices))
        self._set(slot, text, Selected(text, asked.choices, token_ids, tuple(map(tuple, scores))))

    # ---------------------------------------------------------------------------------------------- waiting

    def _wait(self, is_done: Callable[[], bool]) -> None:
        with self._changed:
            while not is_done():
                self._scope.check()
                self._changed.wait()

    def settle(self) -> None:
        """Wait until all that was appended is there; raise the error that ended this branch."""
        if not self._is_closed:
            self._wait(lambda: self._thread is None and not self._todo and self._scope.error is None)

    def wake(self) -> None:
        """Have all who wait for this state look again."""
        with self._changed:
            self._changed.notify_all()

    @property
    def is_closed(self) -> bool:
        """True once the program has ended."""
        return self._is_closed

    def close(self) -> None:
        """Take nothing more; what is there can still be read."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def join_thread(self) -> None:
        """Wait until nothing runs for this state any more; its scope has ended."""
        thread = self._thread
        if thread is not None:
            thread.join()


class Forks(Sequence[State]):
    """The states that a fork made, by their number; `forks["name"]` has a variable of all."""

    def __init__(self, parent: State, scope: Scope, states: list[State]) -> None:
        self._parent, self.scope, self._states = parent, scope, states

    def __len__(self) -> int:
        return len(self._states)

    @overload
    def __getitem__(self, key: int) -> State: ...

    @overload
    def __getitem__(self, key: slice) -> list[State]: ...

    @overload
    def __getitem__(self, key: str) -> list[Any]: ...

    def __getitem__(self, key: int | slice | str) -> State | list[Any]:
        """Return one state, a list of some, or the values of a variable in all of them."""
        if isinstance(key, str):
            return [state[key] for state in self._states]
        return self._states[key]

    def __iter__(self) -> Iterator[State]:
        return iter(self._states)

    def join(self) -> State:
        """Wait for all branches, and set each variable that one of them set to the list of its values.

        A branch that did not set it has None there. Returns the state that was forked.
        """
        for state in self._states:
            state.settle()
        before = self._parent._slots
        names = [name for state in self._states for name, slot in state._slots.items() if before.get(name) is not slot]
        for name in dict.fromkeys(names):
            found = [state._slots.get(name) for state in self._states]
            self._parent[name] = [None if slot is None else slot.value for slot in found]
        return self._parent

    def each(self, body: Callable[[State], Any]) -> list[Any]:
        """Run a function on each branch at the same time, each in a thread; return what they return.

        An error in one ends the others, and is raised.
        """
        results: list[Any] = [None] * len(self._states)

        def run(index: int) -> None:
            try:
                results[index] = body(self._states[index])
                self._states[index].settle()
            except BaseException as error:  # noqa: BLE001 (raised below)
                self.scope.end(error)

        threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(self._states))]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException as error:  # an interruption of the thread that waits
            self.scope.end(error)
            raise
        self.scope.check()
        return results
