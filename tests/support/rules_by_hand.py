"""The rules of sampling in their plainest form: loops over lists, without any knowledge of how the engine has them."""

from __future__ import annotations

from collections.abc import Sequence

from inferc.runtime.step.sampling_params import SamplingParams


def banned_behind(ids: Sequence[int], params: SamplingParams) -> set[int]:
    """Return the ids that may not follow these, by the parameters whose say depends on them."""
    ids, size = list(ids), params.no_repeat_ngram_size
    found = {word[-1] for word in params.bad_words_ids if ids[len(ids) - len(word) + 1 :] == list(word[:-1])}
    if size:
        grams = {tuple(ids[at : at + size]) for at in range(len(ids) - size + 1)}
        found |= {gram[-1] for gram in grams if ids[len(ids) - size + 1 :] == list(gram[:-1])}
    return found
