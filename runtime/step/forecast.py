"""What is ahead: how long outputs get, and how long prompts and decodes take.

Lengths are learned from what this server has answered, seconds from its steps (cost.py).
"""

from __future__ import annotations

import math
import zlib

import numpy as np

from inferc.runtime.step.cost import FadingMean, StepCost, StepWork
from inferc.runtime.step.plan import F64
from inferc.runtime.step.sequence import Sequence

NUM_BUCKETS = 24  # for the words of each end of a prompt
NUM_WORDS = 8  # that are looked at, at each end
MIN_LENGTHS = 16  # answers before what was learned is used
FORGETTING = 0.998  # weight of an answer against the one after it
PREEMPTIONS = 0.006  # for want of blocks, of each sequence that is let in: what admission aims at
LEAST_CAUTION, MOST_CAUTION, CAUTION_STEP = 0.5, 6.0, 0.5
LEAST_CHUNK = 16  # tokens of prompts that a step computes even where it makes those who decode wait too long
MOST_FOR_PROMPTS = 0.5  # of the time between tokens, where it is said how many sequences may decode
SHARE_SECONDS = 20.0  # over which the share of prompts in the steps' time is a mean
UNKNOWN_LENGTH = 256  # tokens that an answer is thought to have before any was seen


class LengthPredictor:
    """The logarithm of an answer's length as a linear function of its prompt; recursive least squares.

    The prompt's features: its length, the limit, whether it is sampled, and which ids are at its two ends, hashed: at the
    front there is the task, in templates, and at the back the question.
    """

    def __init__(self) -> None:
        size = 4 + 2 * NUM_BUCKETS
        self._weights: F64 = np.zeros(size)
        self._inverse: F64 = np.eye(size) / 0.1  # of the features' second moments; one over what holds the weights at 0
        self._mean = math.log(UNKNOWN_LENGTH)
        self._error, self._error_of_mean = FadingMean(FORGETTING), FadingMean(FORGETTING)
        self.num_lengths = 0

    @property
    def is_known(self) -> bool:
        return self.num_lengths >= MIN_LENGTHS

    @property
    def error(self) -> float:
        """Mean absolute error of the logarithm, of the predictions made before each answer; 0.69 is a factor of 2."""
        return self._error.value

    @property
    def error_of_mean(self) -> float:
        """The same of one who always predicts the mean so far."""
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
        """The logarithm of the number of tokens that it will sample, from its prompt alone."""
        if not self.is_known:
            return self._mean
        return self._mean + float(self._weights @ self.features(seq))

    def learn(self, seq: Sequence) -> None:
        """From a sequence that has ended of itself or at its limit."""
        length = math.log(max(1, seq.num_output))
        row = self.features(seq)
        miss = length - self._mean - float(self._weights @ row)
        if self.is_known:
            self._error.add(abs(miss))
            self._error_of_mean.add(abs(length - self._mean))
        # The first answers move the mean, which is then left to the weights: with a mean that moves they would chase it.
        self.num_lengths += 1
        if self.num_lengths <= MIN_LENGTHS:
            self._mean += (length - self._mean) / self.num_lengths
            return
        gain = self._inverse @ row
        # Nothing is forgotten once it would make directions blow up that were not seen for long.
        forgetting = FORGETTING if np.trace(self._inverse) < 20 * len(row) else 1.0
        gain /= forgetting + row @ gain
        self._weights = self._weights + gain * miss
        self._inverse = (self._inverse - np.outer(gain, row @ self._inverse)) / forgetting


class Caution:
    """How many times the error of predicted lengths is kept in reserve at admission.

    A preemption for want of blocks raises it and every sequence that is let in lowers it a little, so that between its bounds
    PREEMPTIONS of them are preempted: as full a cache as that allows.
    """

    def __init__(self) -> None:
        self.value = 1.0

    def after_preemption(self) -> None:
        self.value = min(MOST_CAUTION, self.value + CAUTION_STEP)

    def after_admission(self) -> None:
        self.value = max(LEAST_CAUTION, self.value - CAUTION_STEP * PREEMPTIONS)


class Forecast:
    """What the scheduler expects of a sequence, in tokens and seconds.

    chunk: tokens of a prompt that one step takes.
    """

    def __init__(self, chunk: int) -> None:
        self.cost = StepCost()
        self.lengths = LengthPredictor()
        self.chunk = chunk
        self._seconds = self._prompt_seconds = 0.0  # of steps, fading

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
        """Of the time of steps, the last ones most, what prompts took of it."""
        return self._prompt_seconds / self._seconds if self._seconds else 0.0

    def total_tokens(self, seq: Sequence) -> int:
        """The length at which a sequence is expected to end.

        One that has outlived its prediction is given as much again as it has sampled.
        """
        if seq.params.ignore_eos and not seq.stop_ids and not seq.params.stop:
            return seq.max_total
        predicted = math.exp(min(30.0, self.lengths.predict(seq)))
        if predicted <= seq.num_output:
            predicted = 2.0 * seq.num_output
        return min(seq.max_total, seq.prompt_len + math.ceil(predicted))

    def has_time(self, beside: StepWork, length: int, seconds: float) -> bool:
        """Whether a sequence of that length can decode beside others, with what prompts take, in steps of so many seconds.

        Also where it could not alone: fewer at once would not help.
        """
        seconds *= 1 - min(MOST_FOR_PROMPTS, self.prompt_share)
        if self.cost.seconds(StepWork(1, 1, length)) > seconds:
            return True
        work = StepWork(beside.tokens + 1, beside.sequences + 1, beside.keys + length)
        return self.cost.seconds(work) <= seconds

    def prompt_seconds(
        self, num_tokens: int, num_found: int = 0, beside: StepWork | None = None, step_seconds: float = math.inf
    ) -> float:
        """Seconds until a prompt's first token, if its chunks come one after the other.

        beside: what else is in each of these steps. step_seconds: that those may take.
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
        """Seconds of as many steps for one sequence alone, the first of which sees `context` keys."""
        step, token, sequence, key, _ = map(float, self.cost.prices)
        return num_tokens * (step + token + sequence + key * (context + num_tokens / 2))

    def service_seconds(self, seq: Sequence, num_found: int = 0) -> float:
        """Seconds that a sequence would take alone, from now to its end."""
        length = len(seq.token_ids)
        left = max(0, self.total_tokens(seq) - length - 1)
        return self.prompt_seconds(length, num_found) + self.decode_seconds(left, length)
