"""The answers of earlier requests, by the prefix of their prompts, in which later ones find what to draft.

Requests that begin alike are often answered alike: the same question asked again, the steps of an agent, samples of
one prompt. Source of the idea: Oliaro et al. 2024, "SuffixDecoding", arXiv:2411.04975. A text is seen by requests that
have the same first tokens, cache salt and adapter, and by no others.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from inferc.runtime.speculation.pair_index import LONGEST, PairIndex
from inferc.runtime.step.plan import I32
from inferc.runtime.step.sequence import Sequence as Seq

PREFIX = 32  # the first tokens of a prompt that requests have in common
HALF = 1 << 14  # tokens after which a prefix forgets its older half
MOST_TOKENS = 1 << 20  # tokens of all prefixes; they take about 16 bytes each
MOST_PREFIXES = 1 << 12  # each takes about 7 KB, however short its answers are
SEPARATOR = -1  # no token: it stands between two texts

Key = tuple[str, str, tuple[int, ...]]


class _Half:
    """Up to HALF tokens of the answers to one prefix, side by side."""

    def __init__(self) -> None:
        self.tokens: I32 = np.zeros(1 << 8, np.int32)
        self.index = PairIndex()

    @property
    def num_tokens(self) -> int:
        return self.index.num_tokens

    def append(self, ids: list[int]) -> None:
        start, end = self.num_tokens, self.num_tokens + len(ids) + 1
        if end >= len(self.tokens):  # one place stays free, since what follows a token is looked at
            self.tokens = np.concatenate((self.tokens, np.zeros(max(end, len(self.tokens)), np.int32)))
        self.tokens[start : end - 1] = ids
        self.tokens[end - 1] = SEPARATOR
        self.index.extend(self.tokens, end)


class _Texts:
    """The answers to one prefix: the newer ones, and up to as many older ones."""

    def __init__(self) -> None:
        self.halves = [_Half()]

    @property
    def num_tokens(self) -> int:
        return sum(half.num_tokens for half in self.halves)

    def append(self, ids: list[int]) -> None:
        if self.halves[0].num_tokens + len(ids) >= HALF:
            self.halves = [_Half(), self.halves[0]]
        self.halves[0].append(ids)


class SharedTexts:
    """The answers to many prefixes; the prefix that was used least lately is forgotten first."""

    def __init__(self) -> None:
        self._texts: OrderedDict[Key, _Texts] = OrderedDict()
        self._num_tokens = 0

    def add(self, seq: Seq) -> None:
        """Add the output of a sequence that has ended, behind the last tokens of its prompt."""
        ids = seq.token_ids[max(0, seq.prompt_len - LONGEST) :][: HALF // 2]
        if seq.num_output <= 0:
            return
        key = key_of(seq)
        texts = self._texts.setdefault(key, _Texts())
        self._texts.move_to_end(key)
        self._num_tokens -= texts.num_tokens
        texts.append(ids)
        self._num_tokens += texts.num_tokens
        while self._num_tokens > MOST_TOKENS or len(self._texts) > MOST_PREFIXES:
            _, oldest = self._texts.popitem(last=False)
            self._num_tokens -= oldest.num_tokens

    def find(self, key: Key, recent: list[int], longer_than: int, most: int) -> tuple[I32, int] | None:
        """Return what followed the longest match of some tokens in the answers to a prefix, and its length.

        recent: the tokens, the last one first. longer_than: shorter matches, and those of this length, are no use.
        most: tokens to return. None: there is no such match, or nothing followed it.
        """
        if len(recent) < 2 or (texts := self._texts.get(key)) is None:
            return None
        found = None
        for half in texts.halves:
            place, length = half.index.find(half.tokens, recent)
            if length > longer_than:
                ids = half.tokens[place + 1 : min(place + 1 + most, half.num_tokens)]
                ends = np.flatnonzero(ids == SEPARATOR)
                ids = ids[: ends[0]] if len(ends) else ids
                if len(ids):
                    found, longer_than = (ids, length), length
        return found


def key_of(seq: Seq) -> Key:
    """Return the prefix of a sequence, and whose it is."""
    prefix = tuple(seq.token_ids[: min(PREFIX, seq.prompt_len)])
    return seq.params.cache_salt, seq.params.adapter, prefix
