"""Typical-p against transformers, and XTC against its definition, alone and behind other filters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cpp_kernels import Kernels
from cpp_sampler import Sampler, many, rows_with, some_logits
from numpy.typing import NDArray
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from inferc.runtime.runners.dense.host_sampler import sample_row, uniform
from inferc.runtime.step.plan import F32

WARPERS = {
    "temperature": TemperatureLogitsWarper,
    "top_k": TopKLogitsWarper,
    "top_p": TopPLogitsWarper,
    "min_p": MinPLogitsWarper,
    "typical_p": TypicalLogitsWarper,
}
XTC = 1  # the stream of random numbers by which XTC is decided
CASES: dict[str, dict[str, Any]] = {
    "nothing left but one": {"typical_p": 1e-6},
    "typical": {"typical_p": 0.2},
    "typical of most": {"typical_p": 0.9},
    "typical behind others": {"typical_p": 0.6, "top_k": 60, "top_p": 0.9, "min_p": 0.01},
    "hot": {"temperature": 3.0, "typical_p": 0.5},
    "cold": {"temperature": 0.2, "typical_p": 0.95},
    "no choice is excluded": {"xtc_probability": 1.0, "xtc_threshold": 0.7},
    "excluded": {"xtc_probability": 1.0, "xtc_threshold": 0.01},
    "all but the least": {"xtc_probability": 1.0, "xtc_threshold": 0.0, "top_k": 20},
    "excluded at times": {"xtc_probability": 0.5, "xtc_threshold": 0.005},
    "excluded behind others": {"xtc_probability": 0.6, "xtc_threshold": 0.05, "top_p": 0.8, "min_p": 0.02},
    "both": {"typical_p": 0.7, "xtc_probability": 0.6, "xtc_threshold": 0.02, "temperature": 1.5},
}


def warped(logits: F32, fields: dict[str, Any]) -> F32:
    """Return the logits after transformers' warpers, in its own order."""
    scores = torch.from_numpy(logits.copy())[None]
    for name, warper in WARPERS.items():
        if name in fields:
            scores = warper(fields[name])(None, scores)
    return scores[0].numpy()


def without_top(shares: list[float], threshold: float) -> set[int]:
    """Return the tokens that XTC leaves of those with a share, when it takes place: by its author's definition."""
    order = sorted(
        (token for token, share in enumerate(shares) if share > 0), key=lambda token: (-shares[token], token)
    )
    num_top = sum(shares[token] >= threshold for token in order)
    return set(order[max(num_top - 1, 0) :])


def shares_of(scores: F32) -> NDArray[np.float64]:
    wide = np.exp(scores.astype(np.float64) - scores.max())
    shares: NDArray[np.float64] = wide / wide.sum()
    return shares


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", [1, 17, 1025, 3000])
def test_draws_from_what_transformers_and_the_definition_leave(kernels: Kernels, size: int, case: str) -> None:
    """The token lies where its goal falls among those that are left, in the order of ids."""
    fields = {"temperature": 1.0, **CASES[case]}
    nothing = np.zeros(size, np.bool_), np.zeros(size, np.int32)
    with_ties = np.round(some_logits(2.0, size) * 2)
    # Of equal tokens at the edge of top-p transformers keeps others.
    for logits in (some_logits(2.0, size), *(() if "top_p" in fields else (with_ties,))):
        rows = many(rows_with(seeds=size, **fields), 30)
        found = Sampler(kernels, logits).rows(rows)
        assert not found.failed.any()
        shares = shares_of(warped(logits, fields))
        for counter, token in enumerate(found.token.tolist()):
            left = shares
            if uniform(size, counter, XTC) < fields.get("xtc_probability", 0.0):
                tokens = without_top(shares.tolist(), fields["xtc_threshold"])
                left = np.where(np.isin(np.arange(size), list(tokens)), shares, 0.0)
            end = np.cumsum(left)
            goal = uniform(size, counter) * end[-1]
            assert left[token] > 0 and end[token] - left[token] - 1e-5 <= goal <= end[token] + 1e-5, counter
        by_host = [sample_row(rows, row, logits, *nothing)[0] for row in range(len(rows))]
        assert np.mean(found.token == by_host) > 0.9


def test_rows_without_either_are_drawn_as_before(kernels: Kernels) -> None:
    logits = some_logits()
    plain = many(rows_with(temperature=1.0, top_p=0.9, seeds=3), 40)
    off = many(rows_with(temperature=1.0, top_p=0.9, seeds=3, typical_p=1.0, xtc_threshold=0.3), 40)
    assert Sampler(kernels, logits).rows(plain).bits() == Sampler(kernels, logits).rows(off).bits()


def test_of_equal_tokens_the_last_stays(kernels: Kernels) -> None:
    seen = Sampler(kernels, np.zeros(40, np.float32)).reach(
        rows_with(temperature=1.0, xtc_probability=1.0, xtc_threshold=0.02), 50
    )
    assert seen.nonzero()[0].tolist() == [39]
    top_half = {"top_p": 0.5, "xtc_probability": 1.0, "xtc_threshold": 0.02}
    assert Sampler(kernels, np.zeros(40, np.float32))(rows_with(temperature=1.0, **top_half)) == 19


def test_excludes_as_often_as_asked_whatever_is_drawn(kernels: Kernels) -> None:
    """The second of two equal tokens is drawn whenever the first is excluded, and half the other times."""
    seen = Sampler(kernels, np.zeros(2, np.float32)).reach(
        rows_with(temperature=1.0, xtc_probability=0.4, xtc_threshold=0.3, seeds=9), 6000
    )
    assert seen[1] / 6000 == pytest.approx(0.4 + 0.6 / 2, abs=0.02)


def test_logprobs_are_of_the_raw_logits_behind_both(kernels: Kernels) -> None:
    logits = some_logits()
    fields = {"typical_p": 0.8, "xtc_probability": 1.0, "xtc_threshold": 0.002, "temperature": 1.0}
    sampler = Sampler(kernels, logits)
    plain, told = sampler.one(rows_with(**fields)), sampler.one(rows_with(num_logprobs=5, **fields))
    order = np.argsort(-logits)
    assert plain.token[0] == told.token[0] and told.top_ids[0, :5].tolist() == order[:5].tolist()
    np.testing.assert_allclose(told.logprob[0], np.log(shares_of(logits))[told.token[0]], atol=2e-6)


def test_not_a_number_is_never_drawn_by_them(kernels: Kernels) -> None:
    logits = some_logits(size=2000)
    logits[::3], logits[1] = np.nan, -np.inf
    fields = {"typical_p": 0.99, "xtc_probability": 0.5, "xtc_threshold": 0.001}
    tokens = Sampler(kernels, logits).rows(many(rows_with(temperature=1.0, **fields), 200)).token
    assert np.isfinite(logits[tokens]).all() and len(set(tokens.tolist())) > 50
