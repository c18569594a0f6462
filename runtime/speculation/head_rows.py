"""The forms of the hidden rows that a head reads: in the host's memory, or on the device that computed them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from inferc.runtime.step.plan import HiddenRows, JoinableRows, Rows, StepResult


class RowSource(Protocol):
    """A source of rows: it takes them out of the results of steps, and makes the input of a head's step of them."""

    def given(self, result: StepResult) -> HiddenRows:
        """Return the rows of a step of the large model that its plan has asked for."""

    def own(self, result: StepResult) -> HiddenRows:
        """Return the row of a step of the head behind which each token was drafted."""

    def join(self, parts: Sequence[HiddenRows]) -> HiddenRows:
        """Return the rows of several parts, one behind the other; all are given, or own, or made by `as_input`."""

    def as_input(self, rows: HiddenRows, is_own: bool) -> HiddenRows:
        """Return rows as a step of the head reads them. is_own: they are the head's."""


@dataclass(frozen=True)
class HostRows:
    """The source of rows that runners copy to the host (`StepResult.tapped`).

    of_model, of_head: the nodes of the model's step, and that of the head's. width: the columns of the head's input.
    """

    of_model: tuple[str, ...]
    of_head: str
    width: int

    def given(self, result: StepResult) -> HiddenRows:
        assert result.tapped is not None, "the runner was asked for values"
        rows: Rows = np.concatenate([result.tapped[name] for name in self.of_model], 1)
        return rows

    def own(self, result: StepResult) -> HiddenRows:
        assert result.tapped is not None, "the head was asked for its rows"
        return result.tapped[self.of_head]

    def join(self, parts: Sequence[HiddenRows]) -> HiddenRows:
        rows: Rows = np.concatenate([np.asarray(part) for part in parts])
        return rows

    def as_input(self, rows: HiddenRows, is_own: bool) -> HiddenRows:
        values = np.asarray(rows)
        whole: Rows = np.zeros((len(values), self.width), values.dtype)
        if is_own:
            whole[:, self.width - values.shape[1] :] = values
        else:
            whole[:, : values.shape[1]] = values
        return whole


class KeptRows:
    """The source of rows that stay on the device (`StepResult.kept`), whose numbers tell whose they are."""

    def given(self, result: StepResult) -> HiddenRows:
        assert result.kept is not None, "the device has room for the rows of a step"
        return result.kept

    def own(self, result: StepResult) -> HiddenRows:
        return self.given(result)

    def join(self, parts: Sequence[HiddenRows]) -> HiddenRows:
        first, *others = parts
        assert isinstance(first, JoinableRows), "it is on a device"
        return first.joined(others)

    def as_input(self, rows: HiddenRows, is_own: bool) -> HiddenRows:
        return rows
