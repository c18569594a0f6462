"""Sampling one row: every processor and filter against plain numpy, and the draw's distribution."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from arm import ARM_ISAS
from cpp_kernels import EMULATED, ISAS, Kernels
from cpp_sampler import NUM_TOP, VOCAB, Sampler, as_step, many, packed, rows_with, scratch_of, some_logits
from numpy.typing import NDArray

from inferc.runtime.runners.cpu import abi
from inferc.runtime.runners.dense.host_sampler import sample_row, uniform
from inferc.runtime.step.plan import F32, SampleRows, TokenLists


def softmax(logits: F32) -> NDArray[np.float64]:
    wide = np.exp(logits.astype(np.float64) - logits.max())
    shares: NDArray[np.float64] = wide / wide.sum()
    return shares


def test_philox_gives_the_published_words(kernels: Kernels) -> None:
    words = np.zeros(4, np.uint32)
    kernels("test_philox", 0, 0, words)
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


@pytest.mark.parametrize("size", [1, 31, 33, 1024, 1025, 9000])
def test_a_mask_of_bits_allows_what_a_list_does(kernels: Kernels, size: int) -> None:
    source = np.random.default_rng(size)
    masks = source.random((4, size)) < np.array([[0.5], [0.01], [0.99], [0.0]])
    masks[:3, size - 1] = True
    logits = source.standard_normal((4, size)).astype(np.float32) * 3
    for fields in ({"num_logprobs": 3}, {"temperature": 1.5}, {"temperature": 1.0, "top_k": 3, "logit_bias": {0: 2.0}}):
        rows = many(rows_with(seeds=size, **fields), 4)
        lists = [np.flatnonzero(mask).astype(np.int32) for mask in masks]
        listed = Sampler(kernels, logits).rows(replace(rows, allowed=TokenLists.of(lists)))
        assert Sampler(kernels, logits, masks=masks).rows(rows).bits() == listed.bits()


def test_a_mask_that_allows_nothing_fails_its_row_alone(kernels: Kernels) -> None:
    masks = np.zeros((2, VOCAB), np.bool_)
    masks[1, 7] = True
    sampler = Sampler(kernels, some_logits(), masks=masks)
    rows = many(rows_with(), 2)
    bits, sampler.masks = packed(masks), None
    found = sampler.rows(rows, {"mask_rows": np.arange(2, dtype=np.int32), "masks": bits})
    assert found.failed.tolist() == [1, 0] and found.token[1] == 7


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
    out = Sampler(kernels, logits).one(rows_with(num_logprobs=5, banned=[int(order[0]), int(order[1])]))
    expected = np.log(softmax(logits))
    assert out.token[0] == order[2] and out.rank[0] == 3
    assert out.top_ids[0, :5].tolist() == order[:5].tolist()
    np.testing.assert_allclose(out.top[0, :5], expected[order[:5]], atol=2e-6)
    np.testing.assert_allclose(out.logprob[0], expected[out.token[0]], atol=2e-6)


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


# ------------------------------------------------------------------------------------------ against numpy

SIZES = (1, 2, 15, 16, 17, 1023, 1024, 1025, 3000, 40011)
OFTEN = (1, 3000)


def kinds_of_logits(size: int) -> Iterator[F32]:
    """Logits are spread, peaked, with many equal, all equal, masked, huge, denormal, and with both zeros."""
    source = np.random.default_rng(size)
    normal = source.standard_normal(size).astype(np.float32)
    yield normal * np.float32(3)
    yield normal * np.float32(30)
    yield np.round(normal * np.float32(2))
    yield np.zeros(size, np.float32)
    yield np.where(source.random(size) < 0.5, np.float32(-np.inf), normal) if size > 4 else normal
    yield normal * np.float32(1e37)
    yield normal * np.float32(1e-40)
    yield np.where(source.random(size) < 0.5, np.float32(-0.0), np.float32(0.0))


FILTERS: tuple[dict[str, Any], ...] = (
    *[{"temperature": value} for value in (1e-38, 1e-3, 1.0, 1e4, 3e38)],
    *[{"temperature": 1.0, "top_k": k} for k in (1, 2, 40, 999, 5000)],
    *[{"temperature": 1.0, "top_p": p} for p in (0.0, 1e-45, 1e-30, 1e-6, 0.1, 0.9, 0.9999999)],
    *[{"temperature": 1.0, "min_p": p} for p in (1e-45, 0.05, 1.0)],
    {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1.3, "top_k": 7, "top_p": 0.3},
)


def kept_by_sorting(logits: F32, p: NDArray[np.float64], fields: dict[str, Any]) -> NDArray[np.bool_]:
    """Return the tokens that remain after top-k, then top-p of these, and min-p."""
    kept = p > 0
    k, top_p = fields.get("top_k", 0), float(np.float32(fields.get("top_p", 1.0)))
    if 0 < k < len(p):
        kept &= logits >= np.sort(logits)[-k]
    if top_p < 1.0:
        order = [each for each in np.argsort(-p, kind="stable") if kept[each]]
        before = np.cumsum(p[order]) - p[order]
        count = max(1, int((before < top_p * p[order].sum()).sum()))
        kept = np.isin(np.arange(len(p)), order[:count])
    return kept & (p >= np.float32(fields.get("min_p", 0.0)))


@pytest.mark.parametrize(
    "size",
    [size if size in OFTEN else pytest.param(size, marks=pytest.mark.slow) for size in SIZES],
)
def test_every_filter_draws_what_numpy_does(kernels: Kernels, size: int) -> None:
    """The goal lies at the oracle's token, up to rounding, so that all but a few draws are the same."""
    nothing = np.zeros(size, np.bool_), np.zeros(size, np.int32)
    draws = 5 if size > (1000 if kernels.isa in ARM_ISAS else 5000) else 16  # an emulator takes its time
    equal = []
    for logits in kinds_of_logits(size):
        sampler = Sampler(kernels, logits)
        assert sampler(rows_with()) == logits.argmax()
        for fields in FILTERS:
            rows = many(rows_with(seeds=size, **fields), draws)
            found = sampler.rows(rows)
            assert not found.failed.any()
            with np.errstate(over="ignore", under="ignore"):
                p = np.exp((logits - logits.max()) / np.float32(fields["temperature"])).astype(np.float64)
                equal += [sample_row(rows, row, logits, *nothing)[0] == found.token[row] for row in range(len(rows))]
            ends = np.cumsum(np.where(kept := kept_by_sorting(logits, p, fields), p, 0.0))
            slack = 1e-5 * ends[-1]
            for counter, token in enumerate(found.token):
                goal = uniform(size, counter) * ends[-1]
                assert kept[token] and ends[token] - p[token] - slack <= goal <= ends[token] + slack, (fields, counter)
    assert np.mean(equal) > 0.99


def test_the_lowest_temperature_takes_the_most_likely(kernels: Kernels) -> None:
    logits = some_logits()
    assert set(Sampler(kernels, logits).rows(many(rows_with(temperature=1e-45), 20)).token) == {logits.argmax()}


def test_a_draw_is_where_the_running_sum_passes_the_goal(kernels: Kernels) -> None:
    """All tokens weigh the same, exactly: which one a goal falls on is known, also far behind the first part."""
    size = 5000
    out = Sampler(kernels, np.full(size, 2.5, np.float32)).rows(many(rows_with(temperature=0.3, seeds=11), 400))
    assert out.token.tolist() == [int(uniform(11, counter) * size) for counter in range(400)]
    kept = Sampler(kernels, np.full(size, 2.5, np.float32)).rows(
        many(rows_with(temperature=0.3, top_p=0.5, seeds=11), 400)
    )
    assert kept.token.tolist() == [int(uniform(11, counter) * size / 2) for counter in range(400)]


def test_draws_are_distributed_as_the_softmax(kernels: Kernels) -> None:
    """Chi-squared over 60 groups of tokens that lie all over the vocabulary, with a fixed seed."""
    size, draws = 5000, 6000
    logits = some_logits(1.0, size)
    shares = softmax(logits / np.float32(0.9))
    tokens = Sampler(kernels, logits).rows(many(rows_with(temperature=0.9, seeds=5), draws)).token
    group = np.arange(size) * 7919 % 60
    expected = np.bincount(group, shares, 60) * draws
    statistic = float(((np.bincount(group[tokens], minlength=60) - expected) ** 2 / expected).sum())
    assert 25 < statistic < 100  # of 59 degrees of freedom, one in a thousand lies above 98


@pytest.mark.parametrize("size", [1, 17, 1025, 9000])
def test_any_number_of_threads_and_rows_gives_the_same_bits(kernels: Kernels, size: int) -> None:
    source = np.random.default_rng(size)
    logits = np.round(source.standard_normal((9, size)) * 4, 1).astype(np.float32)
    rows = many(rows_with(temperature=0.8, num_logprobs=NUM_TOP), 9)
    rows.top_k[:] = [0, 40, 3, 0, 0, 50, 0, 1, 0]
    rows.top_p[:] = [1, 1, 0.9, 0.5, 0.95, 0.9, 1, 1, 1]
    rows.min_p[4], rows.temperature[6], rows.temperature[8] = 0.02, 0.0, 0.0
    rows.typical_p[[0, 5]], rows.xtc_probability[[3, 5]], rows.xtc_threshold[[3, 5]] = 0.7, 1.0, 0.01
    whole = Sampler(kernels, logits).rows(rows)
    for threads in (1, 3, 5):
        other = Kernels(kernels.isa, threads)
        try:
            assert Sampler(other, logits).rows(rows).bits() == whole.bits()
            for row in (0, 3, 8):
                arrays = {name: getattr(rows, name)[row : row + 1] for name in abi.SAMPLE_ROW_FIELDS}
                one = Sampler(other, logits[row]).rows(replace(rows, **{**arrays, "seq_slots": np.zeros(1, np.int32)}))
                assert one.token[0] == whole.token[row] and one.logprob[0] == whole.logprob[row]
                assert one.rank[0] == whole.rank[row]
                assert one.top.tobytes() == whole.top[row].tobytes() and (one.top_ids == whole.top_ids[row]).all()
        finally:
            other.close()


@pytest.mark.skipif("avx512" not in ISAS, reason="there is one instruction set to run here")
def test_every_instruction_set_gives_the_same_bits() -> None:
    logits = np.concatenate([some_logits(3.0, 4000), np.full(1100, 9.0, np.float32)])
    filters: tuple[dict[str, Any], ...]
    filters = ({}, {"temperature": 0.8}, {"temperature": 0.8, "top_k": 50}, {"temperature": 0.8, "top_p": 0.9})
    filters += ({"temperature": 0.8, "typical_p": 0.8, "xtc_probability": 0.5, "xtc_threshold": 0.001},)
    found = []
    for isa in (*ISAS, EMULATED):
        made = Kernels(isa)
        rows = [many(rows_with(num_logprobs=5, seeds=2, **each), 20) for each in filters]
        found.append([Sampler(made, logits).rows(each).bits() for each in rows])
        made.close()
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize("size", SIZES)
def test_reports_equal_numpys(kernels: Kernels, size: int) -> None:
    for logits in kinds_of_logits(size):
        wanted = min(size, NUM_TOP)
        wide = logits.astype(np.float64) - logits.max()
        expected = wide - np.log(np.exp(wide).sum())
        order = np.argsort(-logits, kind="stable")
        lifted = int(order[np.isfinite(logits[order])][-1])  # by a bias, which reports do not see
        for bias, token in (({}, int(order[0])), ({lifted: 2e38}, lifted)):
            out = Sampler(kernels, logits).one(rows_with(num_logprobs=wanted, **({"logit_bias": bias} if bias else {})))
            assert out.token[0] == token and out.rank[0] == 1 + (logits > logits[token]).sum()
            assert out.top_ids[0, :wanted].tolist() == order[:wanted].tolist()
            np.testing.assert_allclose(out.top[0, :wanted], expected[order[:wanted]], rtol=1e-6, atol=2e-6)
            np.testing.assert_allclose(out.logprob[0], expected[token], rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("by_mass", [False, True], ids=["count", "mass"])
def test_thresholds_equal_those_of_a_sort(kernels: Kernels, by_mass: bool) -> None:
    kernels.library.test_threshold.restype = ctypes.c_double
    source = np.random.default_rng(1)
    for size in (1, 2, 7, 16, 33, 1000):
        for values in (
            source.random(size),
            source.integers(0, 4, size),
            np.full(size, 0.25),
            2.0 ** -source.integers(0, 148, size),
            *(() if by_mass else (source.standard_normal(size) * 1e38, -(2.0 ** -source.integers(0, 148, size)))),
        ):
            numbers = np.asarray(values, np.float32)
            falling = np.sort(numbers)[::-1]
            sums = np.cumsum(falling.astype(np.float64)) if by_mass else np.arange(1.0, size + 1)
            for share in (0.0, 0.1, 0.5, 0.999):
                target = share * sums[-1] + (1e-300 if by_mass else 0.5)
                room = np.append(numbers, np.full(16, np.nan, np.float32))
                above = ctypes.c_double()
                pointer = ctypes.c_void_p(room.ctypes.data)
                found = kernels.library.test_threshold(
                    pointer, ctypes.c_int64(size), ctypes.c_double(target), ctypes.c_int64(by_mass), ctypes.byref(above)
                )
                reached = falling[min(int(np.searchsorted(sums, target)), size - 1)]
                weight = numbers.astype(np.float64) if by_mass else np.ones(size)
                assert above.value == pytest.approx(weight[numbers > found].sum(), rel=1e-12, abs=1e-300)
                assert found == reached or abs(above.value - target) < 1e-12 * sums[-1]


def test_a_report_of_what_was_banned_may_hold_infinity(kernels: Kernels) -> None:
    logits = some_logits(size=50)
    logits[7] = np.inf
    out = Sampler(kernels, logits).one(rows_with(num_logprobs=3, banned=[7]))
    assert out.token[0] == np.argsort(-logits)[1] and out.top_ids[0, :3].tolist() == np.argsort(-logits)[:3].tolist()


def test_not_a_number_is_never_chosen(kernels: Kernels) -> None:
    logits = some_logits(size=2000)
    logits[::3] = np.nan
    for fields in ({"temperature": 1.0}, {"temperature": 1.0, "top_k": 1900}, {"temperature": 1.0, "top_p": 0.99}):
        tokens = Sampler(kernels, logits).rows(many(rows_with(**fields), 200)).token
        assert not np.isnan(logits[tokens]).any() and len(set(tokens.tolist())) > 50


@pytest.mark.parametrize("size", [1, 1025, 5000])
def test_scores_are_log_probabilities(kernels: Kernels, size: int) -> None:
    count = 5
    logits = np.round(np.random.default_rng(3).standard_normal((count, size)) * 3, 2).astype(np.float32)
    targets = np.arange(count, dtype=np.int32) * 31 % size
    logprobs, best = np.zeros(count, np.float32), np.full(count, -1, np.int32)
    step = abi.StepArgs(num_rows=count)
    args = abi.ScoreArgs(as_step(kernels, step), size)
    for name, array in (("target_ids", targets), ("logprobs", logprobs), ("argmax", best)):
        setattr(args, name, kernels.address(array))
    scratch, room = scratch_of(kernels, size)
    kernels("test_score", kernels.threads, args, logits, scratch, room)
    assert best.tolist() == logits.argmax(1).tolist()
    expected = [np.log(softmax(row)[target]) for row, target in zip(logits, targets, strict=True)]
    np.testing.assert_allclose(logprobs, expected, atol=2e-6)


def drafted_rows(rows: SampleRows, slots: Sequence[int]) -> SampleRows:
    """Return the parameters of one row for rows of these slots, at counters that rise within a slot."""
    found = many(rows, len(slots))
    counters = [slots[:place].count(slot) for place, slot in enumerate(slots)]
    return replace(found, seq_slots=np.array(slots, np.int32), counters=np.array(counters, np.uint64))


ROWS = 5  # the last of which two threads sample together


@pytest.mark.parametrize("with_logprobs", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_behind_drafted_tokens_are_those_of_one_step_each(
    kernels: Kernels, temperature: float, with_logprobs: bool
) -> None:
    """Penalties count what was drafted before a row; the slot goes on from the last row that counts."""
    rng = np.random.default_rng(int(temperature) + 2 * with_logprobs)
    logits = rng.normal(size=(ROWS, VOCAB)).astype(np.float32)
    masks = rng.random((ROWS, VOCAB)) < 0.5
    asked = rows_with(
        temperature=temperature,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.7,
        num_logprobs=NUM_TOP if with_logprobs else 0,
        seeds=9,
        logit_bias={3: 1.5},
    )
    start = np.zeros(VOCAB, np.uint32)
    start[[1, 5]] = 1 << 31, 2
    counts, chosen, likely = start.copy(), list[int](), list[bytes]()
    for row in range(ROWS):
        one = Sampler(kernels, logits[row : row + 1], counts, masks[row : row + 1])
        found = one.rows(replace(asked, counters=np.array([row], np.uint64)))
        chosen.append(int(found.token[0]))
        likely.append(found.bits())
    assert counts.sum() - start.sum() == ROWS

    for num_right in range(ROWS):
        inputs = [0, *chosen[:num_right], *((token + 1) % VOCAB for token in chosen[num_right:-1])]
        now = start.copy()
        sampler = Sampler(kernels, logits, now, masks, inputs)
        found = sampler.rows(drafted_rows(asked, [0] * ROWS))
        assert found.token[: num_right + 1].tolist() == chosen[: num_right + 1]
        rows = [found.row(row) for row in range(ROWS)]
        assert [row.bits() for row in rows[: num_right + 1]] == likely[: num_right + 1]
        assert sampler.last_ids[0] == chosen[num_right]
        after = start.copy()
        np.add.at(after, chosen[: num_right + 1], 1)
        assert np.array_equal(now, after)


PARENTS = [-1, 0, 1, 0, 3, 3, 5, 4]  # of the rows of a tree


@pytest.mark.parametrize("with_logprobs", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_of_a_tree_are_those_of_the_chain_on_the_way_to_each(
    kernels: Kernels, temperature: float, with_logprobs: bool
) -> None:
    """Penalties count what was drafted on the way to a row, and nothing of other branches."""
    rng = np.random.default_rng(int(temperature) + 2 * with_logprobs)
    size = len(PARENTS)
    logits, inputs = rng.normal(size=(size, VOCAB)).astype(np.float32), rng.choice(VOCAB, size, replace=False)
    asked = rows_with(
        temperature=temperature,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.7,
        num_logprobs=NUM_TOP if with_logprobs else 0,
        seeds=9,
    )
    ways = [[0]]
    for row in range(1, size):
        ways.append([*ways[PARENTS[row]], row])
    counters = np.array([len(way) - 1 for way in ways], np.uint64)
    rows = replace(many(asked, size), counters=counters, seq_slots=np.zeros(size, np.int32))
    start = np.zeros(VOCAB, np.uint32)
    start[[1, 5, *inputs[3:5]]] = 1 << 31, 2, 1, 1 << 31
    right = [0, 3, 5, 6]
    for row, child in zip(right, [*right[1:], None], strict=True):
        tree = Sampler(kernels, logits, start.copy(), inputs=inputs.tolist())
        found = tree.rows(rows, {"parents": np.array(PARENTS, np.int32)})
        for way in ways:
            alone = Sampler(kernels, logits[way], start.copy(), inputs=inputs[way].tolist())
            expected = alone.rows(drafted_rows(asked, [0] * len(way)))
            assert found.row(way[-1]).bits() == expected.row(len(way) - 1).bits()
        chosen = right[: right.index(row) + 1]
        assert tree.last_ids[0] == found.token[row]
        after = start.copy()
        np.add.at(after, found.token[chosen], 1)
        assert tree.counts is not None and np.array_equal(tree.counts, after)
        if child is not None:
            inputs[child] = found.token[row]  # what was drafted there is right from now on


def test_slots_with_and_without_drafts_share_a_step(kernels: Kernels) -> None:
    logits = np.random.default_rng(4).normal(size=(5, VOCAB)).astype(np.float32)
    alone = [int(row.argmax()) for row in logits]
    sampler = Sampler(kernels, logits, inputs=[0, 0, alone[1], 7, 0])
    assert alone[2] != 7
    found = sampler.rows(drafted_rows(rows_with(), [0, 1, 1, 1, 2]))
    assert found.token.tolist() == alone, "a row of greedy sampling depends on no other"
    assert sampler.last_ids[:3].tolist() == [alone[0], alone[2], alone[4]]


def test_draws_behind_drafts_are_distributed_as_the_softmax(kernels: Kernels) -> None:
    """Chi-squared over 100,000 draws from a chain of 8 tokens, with drafts of which a fourth are right."""
    size, slots, drafted = 8, 50, 3
    rng = np.random.default_rng(12)
    table = (0.8 * rng.standard_normal((size, VOCAB))).astype(np.float32)  # the logits behind each token
    table[:, size:] = -np.inf
    last, counters = np.arange(slots) % size, np.zeros(slots, np.uint64)
    row_slots = np.repeat(np.arange(slots, dtype=np.int32), 1 + drafted)
    rows = replace(
        many(rows_with(temperature=1.0), slots * (1 + drafted)),
        seq_slots=row_slots,
        seeds=1000 + row_slots.astype(np.uint64),
    )
    found, num_right = np.zeros((size, size), np.int64), 0
    while found.sum() < 100_000:
        inputs = np.empty((slots, 1 + drafted), np.int64)
        inputs[:, 0] = last
        for place in range(drafted):
            likely = table[inputs[:, place], :size].argmax(1)
            inputs[:, place + 1] = np.where(rng.random(slots) < 0.7, likely, rng.integers(0, size, slots))
        rows.counters[:] = (counters[:, None] + np.arange(1 + drafted, dtype=np.uint64)).ravel()
        sampler = Sampler(kernels, table[inputs.ravel()], inputs=inputs.ravel().tolist())
        chosen = sampler.rows(rows).token.reshape(slots, 1 + drafted)
        right = np.cumprod(chosen[:, :-1] == inputs[:, 1:], axis=1).sum(1)
        for place in range(1 + drafted):
            counts = right >= place
            np.add.at(found, (inputs[counts, place], chosen[counts, place]), 1)
        last = chosen[np.arange(slots), right]
        assert sampler.last_ids[:slots].tolist() == last.tolist()
        counters += (1 + right).astype(np.uint64)
        num_right += int(right.sum())
    assert 0.2 < num_right / found.sum() < 0.6
    expected = np.stack([softmax(row) for row in table[:, :size]]) * found.sum(1, keepdims=True)
    assert expected.min() > 5
    statistic = float(((found - expected) ** 2 / expected).sum())
    assert 27 < statistic < 96  # of 56 degrees of freedom, one in a thousand lies above 94, and one below 28
