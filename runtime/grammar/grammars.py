"""The grammars that an engine's sequences are held to: compiled beside it, followed token by token, made into masks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass

from inferc.errors import InfercError, RequestError
from inferc.runtime.grammar.backend import CompiledGrammar
from inferc.runtime.grammar.compiler import GrammarCompiler
from inferc.runtime.grammar.masks import Constraint, MaskMaker
from inferc.runtime.scheduler.batch import Batch
from inferc.runtime.step.plan import StepPlan
from inferc.runtime.step.sequence import Sequence

log = logging.getLogger(__name__)

# Clients are told this; the actual reason contains our internal names.
UNKNOWN = "it cannot be compiled, by a mistake of the engine's own; its log says which"
LONG_SECONDS = 1.0  # how long an engine with nothing else to do sleeps unless `wake` is called


@dataclass(frozen=True)
class _Parked:
    """A request whose grammar is being compiled; begin: begins it."""

    seqs: list[Sequence]
    grammar: Future[CompiledGrammar]
    begin: Callable[[list[Sequence]], None]

    @property
    def label(self) -> str:
        """The field of the request that gave the form."""
        form = self.seqs[0].params.structured_outputs
        assert form is not None, "its grammar is being compiled"
        return form.label


class Grammars:
    """The requests of one engine whose grammars are being compiled, and the sequences that are held to one.

    compiler: None for an engine whose answers cannot be held to a form.
    wake: called, on any thread, when a grammar is compiled.
    """

    def __init__(self, compiler: GrammarCompiler | None, num_slots: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._compiler, self._masks = compiler, MaskMaker(num_slots, vocab_size)
        self._parked: dict[str, _Parked] = {}  # by request id, in the order in which they came
        self._invalid: list[tuple[str, str]] = []
        self._constraints: dict[Sequence, Constraint] = {}
        self.wake: Callable[[], None] = lambda: None

    # ------------------------------------------------------------------------------------------ compiling

    def check(self, has_end: bool, label: str) -> None:
        """Raise RequestError if an answer cannot be held to a form here.

        has_end: whether the model has an end token. label: the field that gave the form.
        """
        if self._compiler is None:
            raise RequestError(
                f"{label}: this engine does not hold answers to a form, since its target or its artifact"
                " cannot; leave it out, or compile the model with its tokenizer for another target"
            )
        if not has_end:
            raise RequestError(
                f"{label}: the model has no end token, with which an answer of a form ends; leave it out"
            )

    def park(self, seqs: list[Sequence], begin: Callable[[list[Sequence]], None]) -> None:
        """Have the grammar of a request compiled; `begin_ready` begins it with `begin` once that is done."""
        wanted = seqs[0].params.structured_outputs
        assert self._compiler is not None and wanted is not None, "check was called"
        grammar = self._compiler.compile(wanted)
        self._parked[seqs[0].request_id] = _Parked(seqs, grammar, begin)
        grammar.add_done_callback(lambda _: self.wake())

    def begin_ready(self, seconds: float = 0.0) -> None:
        """Begin the requests whose grammars are compiled; wait for one for at most `seconds` if there is none yet."""
        if seconds:
            wait([each.grammar for each in self._parked.values()], seconds, FIRST_COMPLETED)
        for request_id, each in list(self._parked.items()):
            if not each.grammar.done():
                continue
            del self._parked[request_id]
            try:
                compiled = each.grammar.result()
                held = {seq: Constraint(compiled.matcher()) for seq in each.seqs}
            except Exception as error:  # a fault of the library costs this request alone
                if not isinstance(error, InfercError):
                    log.exception("request %s: its grammar cannot be compiled", request_id)
                why = str(error) if isinstance(error, InfercError) else UNKNOWN
                self._invalid.append((request_id, f"{each.label}: {why}"))
                continue
            self._constraints.update(held)
            each.begin(each.seqs)

    def abort(self, request_id: str, index: int | None) -> bool:
        """Abort a request, or one sequence of it, and return whether it was being compiled."""
        if (parked := self._parked.get(request_id)) is None:
            return False
        parked.seqs[:] = [seq for seq in parked.seqs if index is not None and seq.index != index]
        if not parked.seqs:
            del self._parked[request_id]
        return True

    def take_invalid(self) -> list[tuple[str, str]]:
        """Return the requests since the last call whose form cannot be held to, and why."""
        invalid, self._invalid = self._invalid, []
        return invalid

    def is_parked(self, request_id: str) -> bool:
        """Return whether a request's grammar is being compiled."""
        return request_id in self._parked

    @property
    def has_parked(self) -> bool:
        """True if any request's grammar is being compiled."""
        return bool(self._parked)

    @property
    def parked(self) -> list[Sequence]:
        """The sequences of the requests whose grammars are being compiled."""
        return [seq for each in self._parked.values() for seq in each.seqs]

    @property
    def parked_ids(self) -> list[str]:
        """The ids of the requests whose grammars are being compiled."""
        return list(self._parked)

    @property
    def num_parked(self) -> int:
        """The number of their sequences."""
        return sum(len(each.seqs) for each in self._parked.values())

    @property
    def idle_seconds(self) -> float:
        """The time to wait for a grammar that is being compiled."""
        return 0.0 if any(each.grammar.done() for each in self._parked.values()) else LONG_SECONDS

    # ------------------------------------------------------------------------------------------- matching

    def assign(self, seq: Sequence) -> None:
        """Note that a sequence has its slot from the next step on."""
        assert seq.slot is not None
        self._masks.assign(seq.slot, self._constraints.get(seq))

    def mask(self, plan: StepPlan, batch: Batch) -> None:
        """Give a plan the masks of its rows, if any of its sequences is held to a grammar."""
        if self._constraints:
            self._masks.mask(plan, batch.tokens, batch.prompt_len, batch.num_known)

    @property
    def is_any_held(self) -> bool:
        """True if any sequence is held to a grammar."""
        return bool(self._constraints)

    def fit(self, batch: Batch, slot: int, drafted: list[int]) -> int:
        """Return how many of the tokens drafted for a slot its grammar has; no step may be in flight."""
        place = self.place(batch, slot)
        if place is None or self._compiler is None or self._compiler.spelling is None:
            return len(drafted)
        return place.count_fitting(drafted[: self._compiler.spelling.count_with_text(drafted)])

    def forced(self, batch: Batch, slot: int, most: int) -> list[int]:
        """Return the tokens that most likely come next, where a slot's grammar leaves one text; none if it does not.

        most: how many at most. No step may be in flight.
        """
        place = self.place(batch, slot)
        if place is None or self._compiler is None or self._compiler.spelling is None:
            return []
        text = place.matcher.forced_text()
        return self._compiler.spelling.spell(text, most) if text else []

    def place(self, batch: Batch, slot: int) -> Constraint | None:
        """Return where a slot's sequence is in its grammar; None for one that may choose any token.

        No step may be in flight.
        """
        if not self._constraints:
            return None
        return self._masks.at(slot, batch.tokens[slot], int(batch.prompt_len[slot]), int(batch.num_known[slot]))

    def forget(self, seq: Sequence) -> None:
        """Note that a sequence has ended."""
        self._constraints.pop(seq, None)

    def close(self) -> None:
        """End the threads and processes."""
        self._masks.close()
        if self._compiler is not None:
            self._compiler.close()
