"""The forecast of the scheduler: how long outputs get, and how long prompts and decodes take.

Lengths are learned from the answers of this server, seconds from its steps (cost.py).
"""

from __future__ import annotations

import math
import zlib

import numpy as np

from inferc.runtime.step.cost import FadingMean, StepCost, StepWork
from inferc.runtime.step.plan import F64
from inferc.runtime.step.sequence import Sequence

NUM_BUCKETS = 24  # hash buckets for the tokens of each end of a prompt
NUM_WORDS = 8  # tokens that are hashed at each end of a prompt
MIN_LENGTHS = 16  # answers before the learned lengths are used
FORGETTING = 0.998  # weight of an answer relative to the one after it
# The share of admitted sequences that are preempted for want of blocks, at which admission aims.
PREEMPTIONS = 0.006
LEAST_CAUTION, MOST_CAUTION, CAUTION_STEP = 0.5, 6.0, 0.5
# The prompt tokens that a step computes even if it makes decoding sequences wait too long.
LEAST_CHUNK = 16
# The largest share of the time between tokens that is reserved for prompts when deciding how many sequences may decode.
MOST_FOR_PROMPTS = 0.5
SHARE_SECONDS = 20.0  # the time over which the share of prompts in the steps' time is averaged
UNKNOWN_LENGTH = 256  # tokens that an answer is assumed to have before any was seen


class LengthPredictor:
    """A linear predictor of the logarithm of an answer's length from its prompt, by recursive least squares.

    The prompt's features are its length, the limit, whether it is sampled, and the hashed token ids at its two ends: in
    templates the task is at the front and the question at the back.
    """

    def __init__(self) -> None:
        size = 4 + 2 * NUM_BUCKETS
        self._weights: F64 = np.zeros(size)
        # The inverse of the features' second moments; it begins as one over the strength that holds the weights at 0.
        self._inverse: F64 = np.eye(size) / 0.1
        self._mean = math.log(UNKNOWN_LENGTH)
        self._error, self._error_of_mean = FadingMean(FORGETTING), FadingMean(FORGETTING)
        self.num_lengths = 0

    @property
    def is_known(self) -> bool:
        return self.num_lengths >= MIN_LENGTHS

    @property
    def error(self) -> float:
        """The mean absolute error of the logarithm, for predictions made before each answer; 0.69 is a factor of 2."""
        return self._error.value

    @property
    def error_of_mean(self) -> float:
        """The mean absolute error of always predicting the mean so far, for comparison with `error`."""
        return self._error_of_mean.value

    def features(self, seq: Sequence) -> F64:
        row: F64 = np.zeros(len(self._weights))
        row[0] = 1.0
        row[1] = math.log1p(seq.prompt_len) / 8
        row[2] = math.log1p(seq.max_total - seq.prompt_len) / 8
        row[3] = not seq.params.greedy
        front, back = seq.token_ids[:NUM_WORDS], seq.token_ids[max(0, seq.prompt_len - NUM_WORDS) : seq.prompt_len]
        for ids, first in ((front, 4), (back, 4 + NUM_BUCKETS)):
            for token in ids:
                row[first + zlib.crc32(token.to_bytes(4, "little")) % NUM_BUCKETS] += 1 / NUM_WORDS
        return row

    def predict(self, seq: Sequence) -> float:
        """Return the logarithm of the number of tokens that a sequence will sample, predicted from its prompt alone."""
        if not self.is_known:
            return self._mean
        return self._mean + float(self._weights @ self.features(seq))

    def learn(self, seq: Sequence) -> None:
        """Learn from a sequence that ended by itself or at its limit."""
        length = math.log(max(1, seq.num_output))
        row = self.features(seq)
        miss = length - self._mean - float(self._weights @ row)
        if self.is_known:
            self._error.add(abs(miss))
            self._error_of_mean.add(abs(length - self._mean))
        # The first answers set the mean, which then stays fixed: the weights would chase a mean that moves.
        self.num_lengths += 1
        if self.num_lengths <= MIN_LENGTHS:
            self._mean += (length - self._mean) / self.num_lengths
            return
        gain = self._inverse @ row
        # Stop forgetting when it would make directions diverge that were not seen for long.
        forgetting = FORGETTING if np.trace(self._inverse) < 20 * len(row) else 1.0
        gain /= forgetting + row @ gain
        self._weights = self._weights + gain * miss
        self._inverse = (self._inverse - np.outer(gain, row @ self._inverse)) / forgetting


class Caution:
    """The factor by which the error of predicted lengths is kept in reserve at admission.

    A preemption for want of blocks raises it, and every admitted sequence lowers it a little. Between its bounds a
    share of PREEMPTIONS of the sequences is therefore preempted, with a cache as full as that allows.
    """

    def __init__(self) -> None:
        self.value = 1.0

    def after_preemption(self) -> None:
        self.value = min(MOST_CAUTION, self.value + CAUTION_STEP)

    def after_admission(self) -> None:
        self.value = max(LEAST_CAUTION, self.value - CAUTION_STEP * PREEMPTIONS)


class Forecast:
    """The scheduler's forecast for sequences, in tokens and seconds.

    chunk: the number of prompt tokens that one step takes.
    """

    def __init__(self, chunk: int) -> None:
        self.cost = StepCost()
        self.lengths = LengthPredictor()
        self.chunk = chunk
        self._seconds = self._prompt_seconds = 0.0  # sums over steps, fading

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learn from a step that took `seconds`."""
        self.cost.observe(work, seconds)
        if not self.cost.is_known:
            return
        keep = math.exp(-seconds / SHARE_SECONDS)
        decodes = self.cost.seconds(StepWork(work.sequences, work.sequences, work.keys))
        self._seconds = self._seconds * keep + seconds
        self._prompt_seconds = self._prompt_seconds * keep + max(0.0, seconds - decodes) * (
            work.tokens > work.sequences
        )

    @property
    def prompt_share(self) -> float:
        """The share of prompts in the time of the steps, weighted to the latest."""
        return self._prompt_seconds / self._seconds if self._seconds else 0.0

    def total_tokens(self, seq: Sequence) -> int:
        """Return the length at which a sequence is expected to end.

        A sequence that is longer than predicted is expected to double its output.
        """
        if seq.params.ignore_eos and not seq.stop_ids and not seq.params.stop:
            return seq.max_total
        predicted = math.exp(min(30.0, self.lengths.predict(seq)))
        if predicted <= seq.num_output:
            predicted = 2.0 * seq.num_output
        return min(seq.max_total, seq.prompt_len + math.ceil(predicted))

    def has_time(self, beside: StepWork, length: int, seconds: float) -> bool:
        """Return whether a sequence of that length can decode beside others in steps of `seconds`, prompts included.

        It is also true if the sequence alone would take longer: fewer sequences at once would not help.
        """
        seconds *= 1 - min(MOST_FOR_PROMPTS, self.prompt_share)
        if self.cost.seconds(StepWork(1, 1, length)) > seconds:
            return True
        work = StepWork(beside.tokens + 1, beside.sequences + 1, beside.keys + length)
        return self.cost.seconds(work) <= seconds

    def prompt_seconds(
        self, num_tokens: int, num_found: int = 0, beside: StepWork | None = None, step_seconds: float = math.inf
    ) -> float:
        """Return the seconds until a prompt's first token if its chunks are computed one after the other.

        beside: the other work in each of these steps.
        step_seconds: the most that a step may take.
        """
        todo = max(1, num_tokens - num_found)
        chunk = self.chunk if beside is None else max(1, self.chunk - int(beside.tokens))
        if beside is not None and step_seconds < math.inf:
            chunk = min(chunk, max(LEAST_CHUNK, self.cost.most_tokens(beside, step_seconds, num_found)))
        steps = -(-todo // chunk)
        keys = steps * (num_found + todo / 2)
        pairs = todo * (num_found + todo / 2) if todo > 1 else 0.0
        step, *prices = map(float, self.cost.prices)
        own = sum(price * amount for price, amount in zip(prices, (todo, steps, keys, pairs), strict=True))
        return own + steps * (step if beside is None else self.cost.seconds(beside))

    def decode_seconds(self, num_tokens: int, context: int) -> float:
        """Return the seconds of `num_tokens` decode steps of one sequence alone, the first with `context` keys."""
        step, token, sequence, key, _ = map(float, self.cost.prices)
        return num_tokens * (step + token + sequence + key * (context + num_tokens / 2))

    def service_seconds(self, seq: Sequence, num_found: int = 0) -> float:
        """Return the seconds that a sequence would take alone, from now to its end."""
        length = len(seq.token_ids)
        left = max(0, self.total_tokens(seq) - length - 1)
        return self.prompt_seconds(length, num_found) + self.decode_seconds(left, length)
