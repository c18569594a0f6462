"""Logits processors: functions of a request that change a row of logits before its token is chosen.

They run in this process, on the thread that runs the steps, between the model and the sampler.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from inferc.errors import RequestError, shown
from inferc.runtime.step.plan import F32, I32

# (token_ids, logits) -> logits, or (prompt_token_ids, token_ids, logits) -> logits: the ids so far are lists, logits
# are float32 [vocab_size].
LogitsProcessor: TypeAlias = Callable[..., Any]
MAX_PROCESSORS = 64


def check_processors(processors: Sequence[Any]) -> None:
    """Raise RequestError for what cannot be called as a processor is."""
    if len(processors) > MAX_PROCESSORS:
        raise RequestError(
            f"logits_processors: found {len(processors)} functions, at most {MAX_PROCESSORS} are allowed"
        )
    for each in processors:
        if not callable(each):
            raise RequestError(f"logits_processors: expected functions, found {shown(each)} among them")
        _takes_prompt(each)


def _takes_prompt(processor: LogitsProcessor) -> bool:
    """Return whether a processor takes the prompt's ids, too; raise RequestError for another number of arguments."""
    try:
        signature = inspect.signature(processor)
    except (TypeError, ValueError):  # a function of C may not say
        return False
    for values in (2, 3):
        try:
            signature.bind(*range(values))
        except TypeError:
            continue
        return values == 3
    raise RequestError(
        f"logits_processors: {_name(processor)} takes {signature}; expected (token_ids, logits), or (prompt_token_ids,"
        " token_ids, logits)"
    )


def _name(processor: LogitsProcessor) -> str:
    return str(getattr(processor, "__qualname__", type(processor).__qualname__))[:80]


class Processors:
    """The processors of a sequence, and how each is called."""

    def __init__(self, processors: Sequence[LogitsProcessor]) -> None:
        self._calls = [(each, _takes_prompt(each)) for each in processors]

    def __call__(self, prompt: list[int], output: list[int], logits: F32) -> F32:
        """Return the logits that all processors, one behind another, make of a row.

        Raises RequestError, which names the processor, for whatever it raised and for a result that is no row.
        """
        for processor, takes_prompt in self._calls:
            ids = (prompt.copy(), output.copy()) if takes_prompt else (output.copy(),)
            try:
                made = np.asarray(processor(*ids, logits.copy()), np.float32)
            except Exception as error:
                raise RequestError(f"{_name(processor)} failed with {type(error).__name__}: {error}"[:500]) from error
            if made.shape != logits.shape:
                found = f"an array of shape {list(made.shape)}" if made.shape else "no array"
                raise RequestError(
                    f"{_name(processor)} returned {found}; expected the logits, of shape {list(logits.shape)}"
                )
            logits = made
        return logits


@dataclass(frozen=True)
class ProcessedRow:
    """A logits row that processors change: the ids so far, of which the first `prompt_len` are the prompt's."""

    processors: Processors
    token_ids: I32
    prompt_len: int

    def of(self, logits: F32) -> F32:
        ids = self.token_ids.tolist()
        return self.processors(ids[: self.prompt_len], ids[self.prompt_len :], logits)


@dataclass
class ProcessedRows:
    """The logits rows of a step that processors change; errors: of rows whose processors failed, by row."""

    rows: dict[int, ProcessedRow]
    errors: dict[int, str] = field(default_factory=dict)

    def apply(self, logits: F32, first: int = 0) -> None:
        """Change the rows of some logits [count, vocab_size] in place, of which the first is row `first` of the step.

        A row whose processors fail becomes NaN, from which no token is chosen. Nothing is raised.
        """
        for row in range(first, first + len(logits)):
            if (processed := self.rows.get(row)) is None:
                continue
            try:
                logits[row - first] = processed.of(logits[row - first])
            except RequestError as error:
                logits[row - first] = np.nan
                self.errors[row] = f"logits_processors: {error}"
