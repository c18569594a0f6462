"""The answers of earlier requests as a source of drafts: who sees them, how long a match is, and what is forgotten."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferc.runtime.scheduler.batch import Batch
from inferc.runtime.speculation import shared_texts
from inferc.runtime.speculation.ngram import KINDS, OF_OTHERS, NgramDrafter
from inferc.runtime.speculation.pair_index import FIRST_BITS, LONGEST, _hash
from inferc.runtime.speculation.shared_texts import SEPARATOR, SharedTexts, key_of
from inferc.runtime.step.sampling_params import SamplingParams
from inferc.runtime.step.sequence import Sequence, Status


def sequence(prompt: list[int], output: list[int] | None = None, salt: str = "", adapter: str = "") -> Sequence:
    params = SamplingParams(max_tokens=100, cache_salt=salt, adapter=adapter)
    return Sequence("0", 0, 0, len(prompt), [*prompt, *(output or [])], params, 0, 10_000, frozenset())


def found(texts: SharedTexts, seq: Sequence, longer_than: int = 1, most: int = 8) -> tuple[list[int], int] | None:
    match = texts.find(key_of(seq), seq.token_ids[::-1][:LONGEST], longer_than, most)
    return None if match is None else (match[0].tolist(), match[1])


def agreeing(first: list[int], second: list[int]) -> int:
    pairs = zip(first[::-1][:LONGEST], second[::-1][:LONGEST], strict=False)
    return next(
        (count for count, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second), LONGEST)
    )


@settings(max_examples=200, deadline=None)
@given(
    outputs=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=3),
    recent=st.lists(st.integers(0, 2), min_size=2, max_size=10),
)
def test_what_followed_the_longest_match_is_found(outputs: list[list[int]], recent: list[int]) -> None:
    texts, prompt = SharedTexts(), [9] * 40
    for output in outputs:
        texts.add(sequence(prompt, output))
    behind = [[*prompt[-LONGEST:], *output] for output in outputs]
    places = [(agreeing(text[:end], recent), text[end : end + 8]) for text in behind for end in range(1, len(text))]
    match = texts.find(key_of(sequence(prompt)), recent[::-1], 1, 8)
    longest = max(length for length, _ in places)
    if longest < 2:
        assert match is None
    else:
        assert match is not None and match[1] == longest
        assert (match[1], match[0].tolist()) in places


def test_nobody_else_sees_an_answer() -> None:
    texts, prompt = SharedTexts(), list(range(50))
    texts.add(sequence(prompt, [60, 61, 62], salt="a", adapter="b"))
    longer = [*prompt[:32], 80]  # the same first tokens
    assert found(texts, sequence(prompt, salt="a", adapter="b")) == ([60, 61, 62], 16)
    assert found(texts, sequence(longer, [48, 49], salt="a", adapter="b")) == ([60, 61, 62], 2)
    for salt, adapter in (("", ""), ("a", ""), ("", "b"), ("b", "a")):
        assert found(texts, sequence(prompt, salt=salt, adapter=adapter)) is None
    assert found(texts, sequence([1, *prompt[1:]], salt="a", adapter="b")) is None


def test_a_match_as_long_as_one_that_is_known_is_no_use() -> None:
    texts, prompt = SharedTexts(), list(range(50))
    texts.add(sequence(prompt, [60, 61, 62]))
    seq = sequence(prompt, [70, 60])
    assert found(texts, seq) is None, "one token is no match"
    seq = sequence(prompt, [70, 60, 61])
    assert found(texts, seq) == ([62], 2) and found(texts, seq, longer_than=2) is None
    assert found(texts, sequence(prompt, [60, 61, 62])) is None, "nothing followed"


def test_the_oldest_answers_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_texts, "HALF", 120)
    monkeypatch.setattr(shared_texts, "MOST_TOKENS", 600)
    texts, prompts = SharedTexts(), [[first, *range(1, 40)] for first in range(4)]
    source = np.random.default_rng(0)
    answers = source.integers(100, 1 << 30, (9, 30)).tolist()
    for answer in answers:
        texts.add(sequence(prompts[0], answer))
    known = [found(texts, sequence(prompts[0], answer[:4]), most=3) is not None for answer in answers]
    assert known == [False] * 6 + [True] * 3 or known == [False] * 5 + [True] * 4, known
    for prompt in prompts[1:]:
        for answer in answers:
            texts.add(sequence(prompt, answer))
    assert found(texts, sequence(prompts[0], answers[-1][:4])) is None, "its prefix was used least lately"
    assert found(texts, sequence(prompts[-1], answers[-1][:4])) == (answers[-1][4:12], 4 + 12)
    assert texts._num_tokens == sum(each.num_tokens for each in texts._texts.values()) <= 600


def test_short_answers_to_many_prompts_are_forgotten_by_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each prompt takes kilobytes, however short its answer is."""
    monkeypatch.setattr(shared_texts, "MOST_PREFIXES", 3)
    texts, prompts = SharedTexts(), [[first, *range(1, 40)] for first in range(5)]
    for prompt in prompts:
        texts.add(sequence(prompt, [60, 61]))
    assert [found(texts, sequence(prompt)) for prompt in prompts] == [None, None, *[([60, 61], 16)] * 3]
    assert texts._num_tokens == sum(each.num_tokens for each in texts._texts.values())


def test_nothing_follows_the_last_text_of_a_full_array() -> None:
    """Another pair of tokens may have the hash of the last token and the end behind it."""
    texts, prompt, shift = SharedTexts(), list(range(40)), 32 - FIRST_BITS
    texts.add(sequence(prompt, [*range(100, 338), 7]))  # with the end, as many tokens as there is room for at first
    (half,) = next(iter(texts._texts.values())).halves
    assert half.tokens[half.num_tokens - 1] == SEPARATOR and half.num_tokens == 256
    name = _hash(7, SEPARATOR, shift)
    same = next(token for token in range(1000, 1 << 20) if _hash(7, token, shift) == name)
    assert found(texts, sequence(prompt, [7, same])) is None


def test_answers_are_kept_when_they_end_and_not_when_they_are_preempted() -> None:
    batch, drafter, prompt = Batch(2, 1000), NgramDrafter(2, 8, is_shared=True), list(range(50))
    for status, expected in ((Status.WAITING, None), (Status.FINISHED, [60, 61, 62])):
        first = sequence(prompt, [60, 61, 62])
        slot = batch.join(first)
        drafter.watch(batch)
        batch.leave(slot)
        first.status = status
        batch.free(slot)
        slot = batch.join(sequence(prompt))
        drafter.watch(batch)
        (offer,) = drafter.offers(batch, [slot])
        if expected is None:
            assert offer.most == 0
        else:
            assert (offer.most, offer.kind) == (3, OF_OTHERS + len(KINDS) - 1)
            assert drafter.draft(batch, [slot], [2]) == [expected[:2]] and drafter.is_promising(batch, [slot])
        batch.leave(slot)
        batch.free(slot)
        drafter.watch(batch)
