"""The cost model of a step: seconds as a sum of prices times the work in it, fitted to the steps that ran.

A step's time is a sum like that of a roofline: the weights are read once per step, every token costs its products,
every sequence its sampling, every key is read, and prompts pay for each pair of a query and a key.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from inferc.runtime.step.plan import F64, I64

WORK = ("steps", "tokens", "sequences", "keys", "pairs")
PRIOR = (1e-2, 1e-4, 1e-5, 1e-8, 1e-9)  # seconds per unit, assumed for a machine on which nothing ran yet
MIN_STEPS = 32  # observed steps before the prices are those of this machine
# An observed step counts as at most this many times its prediction.
MOST_SURPRISE = 4.0
FORGETTING = 0.999  # weight of a step relative to the one after it


@dataclass(frozen=True)
class StepWork:
    """The amounts of work in a step.

    keys: the K and V that are read, summed over the sequences.
    pairs: the pairs of queries and keys of the sequences that compute several tokens.
    """

    tokens: float = 0.0
    sequences: float = 0.0
    keys: float = 0.0
    pairs: float = 0.0

    @staticmethod
    def of(seq_lens: I64, num_new: I64) -> StepWork:
        """Return the work of a step; seq_lens [B] includes the step's tokens, num_new [B] counts them."""
        pairs = np.where(num_new > 1, num_new * (seq_lens - num_new / 2), 0.0)
        return StepWork(float(num_new.sum()), float(len(seq_lens)), float(seq_lens.sum()), float(pairs.sum()))

    @property
    def row(self) -> F64:
        return np.array((1.0, self.tokens, self.sequences, self.keys, self.pairs))


class FadingMean:
    """A mean in which each value weighs `forgetting` times the one after it; 0 before there is a value."""

    def __init__(self, forgetting: float) -> None:
        self._forgetting = forgetting
        self._sum = self._weight = 0.0

    def add(self, value: float) -> None:
        self._sum = self._sum * self._forgetting + value
        self._weight = self._weight * self._forgetting + 1.0

    @property
    def value(self) -> float:
        return self._sum / self._weight if self._weight else 0.0


class StepCost:
    """The prices of a unit of each kind of WORK, in seconds.

    They minimise the squared errors relative to the prediction, with no price below zero. Errors relative to the
    observed time would favour short steps: on a machine whose step times vary, the sum of the predictions would be less
    than the sum of the times.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self._prices: F64 | None = np.array(PRIOR)
        self._products: F64 = np.zeros((len(WORK), len(WORK)))
        self._targets: F64 = np.zeros(len(WORK))
        self._errors = FadingMean(FORGETTING)  # relative errors of the predictions made before each step
        self._is_fixed = False

    @property
    def is_known(self) -> bool:
        return self.num_steps >= MIN_STEPS

    @property
    def error(self) -> float:
        """The mean relative error of the predictions so far, weighted to the latest."""
        return self._errors.value

    @property
    def prices(self) -> F64:
        """The prices in seconds, in the order of WORK."""
        if self._prices is None:
            self._prices = _nonnegative_least_squares(self._products, self._targets)
        return self._prices

    def set_prices(self, prices: dict[str, float]) -> None:
        """Set prices that were fitted before, and stop observing."""
        self._prices = np.array([prices[name] for name in WORK])
        self.num_steps = MIN_STEPS
        self._is_fixed = True

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learn from a step that took `seconds`."""
        if seconds <= 0.0 or self._is_fixed:
            return
        expected = seconds
        if self.is_known:
            predicted = self.seconds(work)
            self._errors.add(abs(predicted - seconds) / seconds)
            expected = min(max(predicted, seconds / MOST_SURPRISE), seconds * MOST_SURPRISE)
        row = work.row / expected
        self._products = self._products * FORGETTING + np.outer(row, row)
        self._targets = self._targets * FORGETTING + row * (seconds / expected)
        self.num_steps += 1
        if self.num_steps >= MIN_STEPS:
            self._prices = None

    def seconds(self, work: StepWork) -> float:
        return float(self.prices @ work.row)

    def most_tokens(self, work: StepWork, seconds: float, start: int) -> int:
        """Return how many prompt tokens a step with `work` can add and still end within `seconds`.

        start: the position of the first of these tokens.
        """
        _, token, sequence, key, pair = self.prices.tolist()
        left = seconds - self.seconds(work) - sequence - key * start
        each = token + key + pair * start
        if left <= 0.0:
            return 0
        if each <= 0.0:
            return 2**31
        # each * n + pair / 2 * n^2 = left
        return int(left / each if pair == 0.0 else (np.sqrt(each * each + 2 * pair * left) - each) / pair)


def _nonnegative_least_squares(products: F64, targets: F64) -> F64:
    """Solve `products @ x = targets` with negative unknowns, the worst first, set to 0."""
    scale = np.sqrt(np.maximum(np.diag(products), 1e-300))
    kept = np.flatnonzero(np.diag(products) > 0)
    solution: F64 = np.zeros(len(targets))
    while len(kept):
        matrix = products[np.ix_(kept, kept)] / np.outer(scale[kept], scale[kept])
        scaled = np.linalg.solve(matrix + 1e-9 * np.eye(len(kept)), targets[kept] / scale[kept])
        if scaled.min() >= 0:
            solution[kept] = scaled / scale[kept]
            break
        kept = np.delete(kept, int(np.argmin(scaled)))
    return solution
