"""Steps that are sampled on a GPU: every combination of options, and what is hard for each.

The same steps run under Triton's interpreter, which needs no GPU, and on one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sampled_step import NEAR, SPARE, UNTOUCHED, Launch, SampledStep, Sizes

from inferc.codegen.triton.aot.source import Source
from inferc.codegen.triton.kernels.sampling.fill_late_ids import fill_late_ids
from inferc.codegen.triton.kernels.sampling.keep_chosen import keep_chosen
from inferc.codegen.triton.kernels.sampling.score_rows import score_rows
from inferc.runtime.runners.dense.host_sampler import log_softmax as _log_softmax
from inferc.runtime.step.plan import F32, I32, SampleRows, TokenLists

SMALL = Sizes(64, 128, 64, 16)


def some_rows(slots: I32, seed: int, lists: dict[str, list[I32]] | None = None, **fields: Any) -> SampleRows:
    """Rows with keys and counters of 64 bits; fields: one value, or one per row.

    Lists: ids, and for a bias their values.
    """
    random = np.random.default_rng(seed)
    rows = SampleRows.greedy(slots)
    keys = {name: random.integers(0, 1 << 64, len(slots), np.uint64) for name in ("seeds", "counters")}
    arrays: dict[str, Any] = {**keys}
    for name, value in fields.items():
        arrays[name] = np.broadcast_to(np.asarray(value), len(slots)).astype(getattr(rows, name).dtype)
    for name, ids in (lists or {}).items():
        values = [random.normal(0, 4, len(each)).astype(np.float32) for each in ids] if name == "logit_bias" else ()
        arrays[name] = TokenLists.of(ids, values)
    return replace(rows, **arrays)


def some_logits(rows: int, vocab: int, seed: int, scale: float = 3.0) -> F32:
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * scale).astype(np.float32)


def combined(vocab: int, sizes: Sizes, seed: int, count: int) -> SampledStep:
    """Rows of as many combinations of options; slots in any order, most of which count."""
    random = np.random.default_rng(seed)
    on = random.permutation(list(itertools.product((False, True), repeat=8)))[:count]
    greedy, has_k, has_p, has_min, penalties, bias, banned, allowed = on.T

    def either(where: NDArray[np.bool_], values: list[float], off: float) -> NDArray[np.float64]:
        return np.where(where, random.choice(values, count), off)

    def ids(where: NDArray[np.bool_], most: int) -> list[I32]:
        sizes = np.where(where, random.integers(1, most + 1, count), 0)
        return [np.sort(random.permutation(vocab)[:size]).astype(np.int32) for size in sizes]

    slots = random.permutation(count + 5)[:count].astype(np.int32)
    rows = some_rows(
        slots,
        seed,
        {"logit_bias": ids(bias, vocab), "banned": ids(banned, vocab // 4), "allowed": ids(allowed, vocab)},
        temperature=either(~greedy, [0.3, 0.7, 1.0, 2.5, 40.0], 0.0),
        top_k=either(has_k, [1, 2, 7, vocab // 2, vocab - 1, vocab], 0),
        top_p=either(has_p, [0.0, 1e-6, 0.3, 0.9, 0.999], 1.0),
        min_p=either(has_min, [1e-6, 0.05, 0.4, 1.0, 1.5], 0.0),
        repetition_penalty=either(penalties, [1.0, 1.3, 0.7], 1.0),
        presence_penalty=either(penalties, [0.0, 0.5, -1.0], 0.0),
        frequency_penalty=either(penalties, [0.0, 0.25], 0.0),
        num_logprobs=random.choice([1, 5, 64], count) * (random.random(count) < 0.15),
    )
    step = SampledStep(f"combined {vocab} {sizes.part} {seed}", some_logits(count, vocab, seed), rows, sizes)
    step.chunk = 23
    for slot in slots[random.random(count) < 0.8].tolist():
        step.in_prompt[slot] = random.random(vocab) < 0.2
        step.num_output[slot] = (random.integers(1, 5, vocab) * (random.random(vocab) < 0.2)).astype(np.int32)
    share = random.choice([0.0, 0.02, 0.5, 0.98], (count, 1))
    step.masks = random.random((count, vocab)) < share
    return step


def ties(vocab: int, sizes: Sizes) -> SampledStep:
    """Logits of which many are equal, by all filters; also all equal, and many of -inf."""
    options: list[dict[str, float]] = [
        {},
        {"temperature": 0.0},
        {"top_k": 1},
        {"top_k": vocab // 3},
        {"top_p": 0.0},
        {"top_p": 0.35},
        {"top_p": 0.999999},
        {"top_p": 0.9, "top_k": vocab // 2},
        {"min_p": 0.3},
        {"top_p": 0.7, "min_p": 0.6},
        {"temperature": 1e-45},
        {"temperature": 1e-45, "top_p": 0.4},
        {"temperature": 1e-38, "top_k": vocab // 2},
        {"temperature": 1e30, "top_k": 3},
        {"temperature": 1e30, "top_p": 0.5},
    ]
    coarse = np.round(some_logits(len(options), vocab, 1, 1.0))  # to -0 and 0, too
    flat = np.full_like(coarse, 2.5)
    rare = np.where(some_logits(len(options), vocab, 2) > 2, coarse, -np.inf)
    rare[:, vocab // 2] = 0.5
    logits = np.concatenate((coarse, flat, rare)).astype(np.float32)
    filled = [{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **each} for each in options] * 3
    fields: dict[str, Any] = {
        name: [each[name] for each in filled] for name in ("temperature", "top_k", "top_p", "min_p")
    }
    slots = np.arange(len(filled), dtype=np.int32)[::-1].copy()
    rows = some_rows(slots, 5, num_logprobs=[0, 3, 0, 0, 64] * (len(filled) // 5), **fields)
    return SampledStep(f"ties {vocab} {sizes.part}", logits, rows, sizes, chunk=len(filled))


def filters() -> SampledStep:
    """Many draws from nearly equal tokens after two filters, each of which leaves some to the other."""
    options = [(3, 0.6, 0.0), (12, 0.7, 0.0), (59, 0.5, 0.9), (0, 0.6, 0.8)]
    top_k, top_p, min_p = np.repeat(options, 5, 0).T
    rows = some_rows(np.arange(20, dtype=np.int32), 4, temperature=5.0, top_k=top_k, top_p=top_p, min_p=min_p)
    return SampledStep("filters", some_logits(20, 60, 4, 2.0), rows, SMALL)


def narrowed(vocab: int, sizes: Sizes, seed: int) -> SampledStep:
    """Typical-p and XTC, alone, together and behind other filters; also of many equal logits."""
    options: list[dict[str, float]] = [
        {"typical_p": 0.2},
        {"typical_p": 0.9},
        {"typical_p": 1e-6},
        {"typical_p": 0.5, "temperature": 4.0, "top_k": vocab // 2},
        {"typical_p": 0.6, "top_p": 0.8, "min_p": 0.02},
        {"xtc_threshold": 0.01},
        {"xtc_threshold": 0.0},
        {"xtc_threshold": 0.9},
        {"xtc_threshold": 0.05, "top_p": 0.9},
        {"xtc_threshold": 0.002, "top_k": 9, "temperature": 2.0},
        {"xtc_threshold": 0.01, "typical_p": 0.7, "min_p": 0.001},
    ]
    logits = some_logits(2 * len(options), vocab, seed)
    logits[len(options) :] = np.round(logits[len(options) :])
    names = ("temperature", "top_k", "top_p", "min_p", "typical_p", "xtc_threshold", "xtc_probability")
    off = dict(zip(names, (1.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0), strict=True))
    half = {"xtc_probability": 0.5}
    filled = [{**off, **(half if "xtc_threshold" in each else {}), **each} for each in options * 2]
    fields: dict[str, Any] = {name: [each[name] for each in filled] for name in names}
    rows = some_rows(np.arange(len(filled), dtype=np.int32), seed, num_logprobs=[0, 2] * len(options), **fields)
    return SampledStep(f"narrowed {vocab}", logits, rows, sizes)


def failing() -> SampledStep:
    """Rows without a finite largest number, between rows that have one, of which some hold NaN."""
    vocab = 100
    logits = some_logits(12, vocab, 3)
    logits[1], logits[2, 7], logits[4] = np.nan, np.inf, -np.inf
    logits[6, 5], logits[8:11, 3] = -np.inf, np.nan
    none: I32 = np.zeros(0, np.int32)
    every = np.arange(vocab, dtype=np.int32)
    lists = {"allowed": [none] * 6 + [every[5:6]] + [none] * 5, "banned": [none] * 7 + [every] + [none] * 4}
    temperature = [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0]
    rows = some_rows(np.arange(12, dtype=np.int32), 3, lists, temperature=temperature, num_logprobs=2)
    rows.top_p[[4, 6, 10]] = 0.5
    rows.num_logprobs[8:11] = 0
    step = SampledStep("failing", logits, rows, SMALL)
    assert [row for row in range(12) if step.expected(row) < 0] == [1, 2, 4, 6, 7]
    for slot in range(12):
        step.in_prompt[slot] = every < 0
        step.num_output[slot] = np.zeros(vocab, np.int32)
    return step


def neighbours() -> SampledStep:
    """Several rows of a slot, also where a chunk ends, behind drafted tokens that are wrong."""
    slots = np.array([4, 4, 4, 0, 2, 2, 2, 2, 1], np.int32)
    rows = some_rows(slots, 8, temperature=[0.0, 1.0] * 4 + [0.0], top_k=2)
    logits = some_logits(9, 40, 8)
    logits[1] = logits[0]
    step = SampledStep("neighbours", logits, rows, SMALL, chunk=6)
    for slot in (4, 2):
        step.in_prompt[slot] = np.zeros(40, np.bool_)
        step.num_output[slot] = np.zeros(40, np.int32)
    return step


def drafted(count: int, vocab: int, seed: int, right: float) -> SampledStep:
    """Slots with up to 64 rows behind drafted tokens, of which a share is right, by all options; chunks cut them."""
    random = np.random.default_rng(seed)
    lengths = random.choice([1, 1, 2, 5, 9], count)
    lengths[random.integers(count)] = 64
    slots = np.repeat(random.permutation(count + 3)[:count], lengths).astype(np.int32)
    rows = len(slots)

    def either(values: list[float]) -> NDArray[np.float64]:
        return np.repeat(random.choice(values, count), lengths)

    none, every = np.zeros(0, np.int32), np.arange(vocab, dtype=np.int32)
    some = [np.sort(random.permutation(vocab)[: vocab // 2]).astype(np.int32) for _ in range(rows)]
    has_list = np.repeat(random.random((3, count)) < 0.5, lengths, axis=1)
    lists = {
        name: [ids if on else none for ids, on in zip(some, has, strict=True)]
        for name, has in zip(("allowed", "logit_bias", "banned"), has_list, strict=True)
    }
    failed = random.random(rows) < 0.03
    lists["banned"] = [every if bad else ids for ids, bad in zip(lists["banned"], failed, strict=True)]
    fields: dict[str, Any] = {
        "temperature": either([0.0, 0.7, 1.5]),
        "top_k": either([0, 0, 7]),
        "repetition_penalty": either([1.0, 1.6]),
        "presence_penalty": either([0.0, 1.0]),
        "frequency_penalty": either([0.0, 0.5]),
        "num_logprobs": random.choice([0, 0, 0, 3], rows),
        "typical_p": either([1.0, 1.0, 0.8]),
        "xtc_probability": either([0.0, 0.5]),
        "xtc_threshold": 0.02,
    }
    name, logits = f"drafted {vocab} {right}", some_logits(rows, vocab, seed, 1.5)
    step = SampledStep(name, logits, some_rows(slots, seed, lists, **fields), SMALL, chunk=7)
    step.masks = (random.random((rows, vocab)) < 0.7) & (random.random((rows, 1)) < 0.3)
    for slot in np.unique(slots)[1:].tolist():
        step.in_prompt[slot] = random.random(vocab) < 0.2
        step.num_output[slot] = random.integers(0, 3, vocab).astype(np.int32)
    for row in range(rows - 1):
        if random.random() < right:
            step.inputs[row + 1] = max(0, step.expected(row))
    return step


def large() -> SampledStep:
    """A vocabulary as models have it, cut as it is on a GPU."""
    vocab = 32000
    fields: dict[str, Any] = {
        "temperature": [0.0, 1.0, 0.7, 1.0, 1.0, 1.3],
        "top_k": [0, 0, 50, 0, 0, 9000],
        "top_p": [1.0, 1.0, 0.95, 0.9, 1.0, 0.99],
        "min_p": [0.0, 0.0, 0.0, 0.0, 0.02, 0.0],
        "num_logprobs": [1, 0, 20, 0, 0, 0],
    }
    logits = some_logits(6, vocab, 9)
    rows = some_rows(np.arange(6, dtype=np.int32), 9, {"banned": [np.array([3], np.int32)] * 6}, **fields)
    return SampledStep("large", logits, rows)


def sampled_steps() -> Iterator[SampledStep]:
    yield combined(100, SMALL, 0, 40)
    yield combined(5, Sizes(), 1, 24)
    yield combined(1000, Sizes(128, 256, 256, 64), 2, 24)
    yield combined(4097, Sizes(), 3, 8)
    yield ties(5, SMALL)
    yield ties(200, SMALL)
    yield filters()
    yield narrowed(5, SMALL, 6)
    yield narrowed(300, SMALL, 7)
    yield failing()
    yield neighbours()
    yield drafted(9, 40, 11, 1.0)
    yield drafted(9, 70, 12, 0.8)
    yield large()


STEPS = {step.name: step for step in sampled_steps()}


def kernels_of(vocab: int) -> dict[str, Source]:
    """All that sampling launches, by name."""
    step = SampledStep("", np.zeros((1, vocab), np.float32), SampleRows.greedy(np.zeros(1, np.int32)))
    others = {"keep_chosen": keep_chosen(), "score_rows": score_rows(vocab, vocab), "fill_late_ids": fill_late_ids()}
    return {**step.sources(), **others}


def late_ids_faults(launch: Launch, device: str = "cpu") -> list[str]:
    """Return the faults for more late tokens than one program takes, for one and for none."""
    wrong = []
    random = np.random.default_rng(0)
    for tokens, late in ((300, 261), (4, 1), (2, 0)):
        last = random.integers(0, 1000, 400).astype(np.int32)
        rows = random.permutation(tokens)[:late].astype(np.int32)
        slots = random.permutation(400)[:late].astype(np.int32)
        expected = random.integers(1000, 2000, tokens).astype(np.int32)
        given = {"token_ids_ptr": expected.copy(), "late_rows_ptr": np.append(rows, 0)}
        given |= {"late_slots_ptr": np.append(slots, 0), "last_ids_ptr": last}
        given["num_late_ptr"] = np.array([late], np.int32)
        tensors = {name: torch.tensor(array.astype(np.int32), device=device) for name, array in given.items()}
        source = fill_late_ids()
        launch(source, {"num_tokens": tokens + SPARE}, tensors)
        expected[rows] = last[slots]
        if not np.array_equal(tensors["token_ids_ptr"].cpu().numpy(), expected):
            wrong.append(f"{late} of {tokens}")
    return wrong


def score_faults(launch: Launch, device: str = "cpu") -> list[str]:
    wrong = []
    for vocab, block in ((5, 4096), (1000, 256), (4097, 4096)):
        logits, count = np.round(some_logits(7, vocab, vocab), 1), 7
        logits[2] = 1.5
        target = np.random.default_rng(vocab).integers(0, vocab, count).astype(np.int32)
        tensors = {
            "target_ids_ptr": torch.tensor(target, device=device),
            "logprobs_ptr": torch.full((count + SPARE,), float(UNTOUCHED), device=device),
            "argmax_ptr": torch.full((count + SPARE,), UNTOUCHED, dtype=torch.int32, device=device),
        }
        source = score_rows(vocab, vocab + 2, block)
        for first, rows in ((0, 4), (4, 3)):
            padded = torch.full((rows + SPARE, vocab + 2), float("nan"))
            padded[:rows, :vocab] = torch.from_numpy(logits[first : first + rows])
            tensors["logits_ptr"] = padded.to(device)
            tensors["counts_ptr"] = torch.tensor([0, rows, 0, first, count], dtype=torch.int32, device=device)
            launch(source, {"num_rows": rows + SPARE}, tensors)
        behind = [UNTOUCHED] * SPARE
        best, values = tensors["argmax_ptr"].cpu().numpy(), tensors["logprobs_ptr"].cpu().numpy()
        if not np.array_equal(best, [*logits.argmax(1), *behind]):
            wrong.append(f"{vocab}: argmax {best}")
        if not np.allclose(values, [*_log_softmax(logits)[np.arange(count), target], *behind], rtol=NEAR, atol=NEAR):
            wrong.append(f"{vocab}: log-probabilities {values}")
    return wrong
