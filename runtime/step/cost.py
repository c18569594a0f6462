"""What a step costs: seconds as a sum of prices times the work in it, fitted to the steps that ran.

The step's time has the shape of a roofline's sum: the weights are read once a step, every token costs its products, every
sequence its sampling, every key its reading, and prompts pay for each pair of a query and a key.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import numpy as np

from inferc.runtime.step.plan import F64, I64

WORK = ("steps", "tokens", "sequences", "keys", "pairs")
PRIOR = (1e-2, 1e-4, 1e-5, 1e-8, 1e-9)  # seconds; what is believed of a machine on which nothing ran yet
MIN_STEPS = 32  # observed before the prices are those of this machine
MOST_SURPRISE = 4.0  # times what was predicted, and no step teaches more than one that took that
FORGETTING = 0.999  # weight of a step against the one after it


@dataclass(frozen=True)
class StepWork:
    """What is in a step.

    keys: K and V read, one sequence at a time; pairs: of queries and keys, of the sequences that compute several tokens.
    """

    tokens: float = 0.0
    sequences: float = 0.0
    keys: float = 0.0
    pairs: float = 0.0

    @staticmethod
    def of(seq_lens: I64, num_new: I64) -> StepWork:
        """seq_lens [B] with the step's tokens, num_new [B]."""
        pairs = np.where(num_new > 1, num_new * (seq_lens - num_new / 2), 0.0)
        return StepWork(float(num_new.sum()), float(len(seq_lens)), float(seq_lens.sum()), float(pairs.sum()))

    @property
    def row(self) -> F64:
        return np.array((1.0, *astuple(self)))


class FadingMean:
    """A mean in which each value weighs `forgetting` times the one after it; 0 before there is one."""

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
    """Prices of a unit of each kind of WORK, in seconds. Least squares of errors relative to the prediction, no price below zero.

    Relative to the time itself they would favour what took least: on a machine where steps take now longer, now shorter, the
    sum of the predictions would be less than the sum of the times.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self._prices: F64 | None = np.array(PRIOR)
        self._products: F64 = np.zeros((len(WORK), len(WORK)))
        self._targets: F64 = np.zeros(len(WORK))
        self._errors = FadingMean(FORGETTING)  # of the predictions made before each step, relative
        self._is_fixed = False

    @property
    def is_known(self) -> bool:
        return self.num_steps >= MIN_STEPS

    @property
    def error(self) -> float:
        """Mean relative error of the predictions so far, the last ones most."""
        return self._errors.value

    @property
    def prices(self) -> F64:
        """Seconds, in the order of WORK."""
        if self._prices is None:
            self._prices = _nonnegative_least_squares(self._products, self._targets)
        return self._prices

    def set_prices(self, prices: dict[str, float]) -> None:
        """Take prices that were fitted before, and observe no more."""
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
        """Tokens of a prompt, behind `start` of it, that a step with `work` can take and be done in `seconds`."""
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
    """The solution of `products @ x = targets` where negative unknowns are left out, the worst first, and are 0."""
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
