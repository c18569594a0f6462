"""Sampling one row: every processor and filter against plain numpy, and the draw's distribution."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cpp_kernels import Kernels
from numpy.typing import NDArray

from inferc.runtime import abi
from inferc.runtime.step import F32, SampleRows, TokenLists

VOCAB = 1003


def rows_with(**fields: Any) -> SampleRows:
    """One row, on slot 0."""
    rows = SampleRows.greedy(np.zeros(1, np.int32))
    lists = {
        name: TokenLists.of([np.array(list(value), np.int32)])
        for name, value in fields.items()
        if name in ("logit_bias", "banned", "allowed")
    }
    if "logit_bias" in lists:
        lists["logit_bias"].values = np.array(list(fields["logit_bias"].values()), np.float32)
    arrays = {name: np.array([value], getattr(rows, name).dtype) for name, value in fields.items() if name not in lists}
    changed: dict[str, Any] = {**arrays, **lists}
    return replace(rows, **changed)


class Sampler:
    """Samples a row of logits; `counts` are slot 0's."""

    def __init__(self, kernels: Kernels, logits: F32, counts: NDArray[np.uint32] | None = None) -> None:
        self.kernels, self.logits = kernels, np.ascontiguousarray(logits, np.float32)
        self.counts = counts
        self.token = np.full(1, -1, np.int32)
        self.logprob, self.rank = np.zeros(1, np.float32), np.zeros(1, np.int32)
        self.top_ids, self.top = np.zeros(8, np.int32), np.zeros(8, np.float32)

    def __call__(self, rows: SampleRows) -> int:
        args = abi.SampleArgs(None, len(self.logits))
        keep: list[Any] = []

        def put(name: str, array: NDArray[Any]) -> None:
            keep.append(array)
            setattr(args, name, array.ctypes.data)

        for name in abi.SAMPLE_ROW_FIELDS:
            put(name, getattr(rows, name))
        for name, lists in (("bias", rows.logit_bias), ("banned", rows.banned), ("allowed", rows.allowed)):
            if len(lists.starts):
                put(f"{name}_starts", lists.starts)
                put(f"{name}_ids", lists.token_ids)
        put("bias_values", rows.logit_bias.values)
        if self.counts is not None:
            put("counts", np.array([self.counts.ctypes.data], np.uintp))
        for name, array in (("token_ids", self.token), ("logprobs", self.logprob), ("ranks", self.rank)):
            put(name, array)
        for name, array in (("top_ids", self.top_ids), ("top_logprobs", self.top)):
            put(name, array)
        args.max_top = 8
        work = np.full(len(self.logits), np.nan, np.float32)
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (self.logits, work)]
        if not self.kernels("test_sample", ctypes.byref(args), 0, *pointers):
            raise ValueError("refused")
        return int(self.token[0])

    def reach(self, rows: SampleRows, draws: int = 3000) -> NDArray[np.int64]:
        """How often each token was drawn, over that many counters."""
        found = [self(replace(rows, counters=np.array([counter], np.uint64))) for counter in range(draws)]
        return np.bincount(found, minlength=len(self.logits))


def some_logits(scale: float = 2.0, size: int = VOCAB) -> F32:
    return (np.random.default_rng(0).standard_normal(size) * scale).astype(np.float32)


def softmax(logits: F32) -> NDArray[np.float64]:
    wide = np.exp(logits.astype(np.float64) - logits.max())
    shares: NDArray[np.float64] = wide / wide.sum()
    return shares


def test_philox_gives_the_published_words(kernels: Kernels) -> None:
    words = np.zeros(4, np.uint32)
    kernels("test_philox", 0, 0, ctypes.c_void_p(words.ctypes.data))
    assert [f"{word:08x}" for word in words] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]
    values = [kernels("test_uniform", 5, counter) for counter in range(2000)]
    assert 0.0 <= min(values) < 0.01 and 0.99 < max(values) < 1.0 and abs(np.mean(values) - 0.5) < 0.02


def test_greedy_takes_the_lower_id_of_equals(kernels: Kernels) -> None:
    for size in (1, 15, 16, 17, VOCAB):
        logits = np.minimum(some_logits(size=size), 1.0)
        sampler = Sampler(kernels, logits)
        assert sampler(rows_with()) == int(logits.argmax())


def test_temperature_follows_the_softmax(kernels: Kernels) -> None:
    logits = some_logits(size=9)
    seen = Sampler(kernels, logits).reach(rows_with(temperature=1.7, seeds=3)) / 3000
    np.testing.assert_allclose(seen, softmax(logits / np.float32(1.7)), atol=0.03)


@pytest.mark.parametrize("top_k", [1, 2, 7, VOCAB, VOCAB + 5])
def test_top_k(kernels: Kernels, top_k: int) -> None:
    logits = some_logits(0.1)
    seen = Sampler(kernels, logits).reach(rows_with(temperature=1.0, top_k=top_k), 400)
    allowed = set(np.argsort(-logits)[:top_k].tolist())
    assert set(seen.nonzero()[0].tolist()) <= allowed
    assert len(seen.nonzero()[0]) >= min(top_k, 7)


@pytest.mark.parametrize("top_p", [1e-6, 0.2, 0.5, 0.9])
def test_top_p_keeps_the_smallest_set_that_reaches_it(kernels: Kernels, top_p: float) -> None:
    logits = some_logits(size=12)
    probabilities = softmax(logits)
    order = np.argsort(-probabilities)
    kept = order[: int(np.searchsorted(probabilities[order].cumsum(), top_p)) + 1]
    seen = Sampler(kernels, logits).reach(rows_with(temperature=1.0, top_p=top_p))
    assert set(seen.nonzero()[0].tolist()) == set(kept.tolist())


def test_top_p_of_equal_tokens_keeps_the_first_ones(kernels: Kernels) -> None:
    seen = Sampler(kernels, np.zeros(10, np.float32)).reach(rows_with(temperature=1.0, top_p=0.35))
    assert seen.nonzero()[0].tolist() == [0, 1, 2, 3]


def test_top_p_counts_within_what_top_k_left(kernels: Kernels) -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    seen = Sampler(kernels, logits).reach(rows_with(temperature=1.0, top_k=2, top_p=0.5))
    assert seen.nonzero()[0].tolist() == [0]


def test_min_p(kernels: Kernels) -> None:
    logits = np.log(np.array([0.5, 0.2, 0.06, 0.04, 0.2], np.float32))
    seen = Sampler(kernels, logits).reach(rows_with(temperature=1.0, min_p=0.1))
    assert seen.nonzero()[0].tolist() == [0, 1, 2, 4]


def test_lists_ban_bias_and_allow(kernels: Kernels) -> None:
    logits = some_logits()
    order = np.argsort(-logits)
    sampler = Sampler(kernels, logits)
    assert sampler(rows_with(banned=order[:3].tolist())) == order[3]
    assert sampler(rows_with(logit_bias={int(order[500]): 100.0})) == order[500]
    some = sorted(order[200:260].tolist())
    assert sampler(rows_with(allowed=some)) == order[200]
    assert sampler(rows_with(allowed=some, banned=[int(order[200])])) == order[201]
    assert set(sampler.reach(rows_with(allowed=some, temperature=5.0), 300).nonzero()[0].tolist()) <= set(some)


def test_penalties(kernels: Kernels) -> None:
    logits = np.array([3.0, 2.9, -1.0, 2.0], np.float32)
    counts = np.array([(1 << 31) | 2, 0, 1 << 31, 1], np.uint32)  # 0: prompt and twice in the output, 2: prompt only
    for fields, expected in (
        ({"repetition_penalty": 1.5}, [2.0, 2.9, -1.5, 2.0 / 1.5]),
        ({"presence_penalty": 0.5}, [2.5, 2.9, -1.0, 1.5]),
        ({"frequency_penalty": 0.25}, [2.5, 2.9, -1.0, 1.75]),
    ):
        # Lifting one token at a time shows every processed logit by which bias just makes it win.
        best = max(expected)
        for token, value in enumerate(expected):
            if value == best:
                continue
            for nudge, wins in ((-0.01, False), (0.01, True)):
                sampler = Sampler(kernels, logits, counts.copy())
                chosen = sampler(rows_with(logit_bias={token: best - value + nudge}, **fields))
                assert (chosen == token) is wins, (fields, token)


def test_sampled_tokens_are_counted(kernels: Kernels) -> None:
    counts = np.zeros(4, np.uint32)
    sampler = Sampler(kernels, np.array([1.0, 3.0, 2.5, 0.0], np.float32), counts)
    chosen = [sampler(rows_with(presence_penalty=0.2, frequency_penalty=0.2)) for _ in range(4)]
    assert chosen == [1, 1, 2, 1]
    assert counts.tolist() == [0, 3, 1, 0]


def test_logprobs_are_of_the_raw_logits(kernels: Kernels) -> None:
    logits = some_logits()
    order = np.argsort(-logits)
    sampler = Sampler(kernels, logits)
    token = sampler(rows_with(num_logprobs=5, banned=[int(order[0]), int(order[1])]))
    expected = np.log(softmax(logits))
    assert token == order[2] and sampler.rank[0] == 3
    assert sampler.top_ids[:5].tolist() == order[:5].tolist()
    np.testing.assert_allclose(sampler.top[:5], expected[order[:5]], atol=2e-6)
    np.testing.assert_allclose(sampler.logprob[0], expected[token], atol=2e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_broken_logits_are_refused(kernels: Kernels, bad: float) -> None:
    logits = np.full(20, bad, np.float32)
    with pytest.raises(ValueError, match="refused"):
        Sampler(kernels, logits)(rows_with())


@pytest.mark.parametrize("fields", [{"min_p": -0.0}, {"top_p": 0.0}, {"top_p": 1e-45}, {"top_p": 1e-30}])
def test_limits_at_the_edge_of_float32(kernels: Kernels, fields: dict[str, float]) -> None:
    """Minus zero is off; a nucleus too small for a float is the most likely token."""
    logits = some_logits()
    sampler = Sampler(kernels, logits)
    found = {sampler(rows_with(temperature=1.0, counters=counter, **fields)) for counter in range(50)}
    if "top_p" in fields:
        assert found == {int(logits.argmax())}
    else:
        assert len(found) > 5
