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


def penalties_behind(ids: Sequence[int], params: SamplingParams) -> dict[int, float]:
    """Return what DRY takes from the logit of each id behind these, place by place as it was first described."""
    found: dict[int, int] = {}
    breakers, last_n = set(params.dry_breaker_ids), params.dry_penalty_last_n
    ids = list(ids) if last_n < 0 else list(ids)[len(ids) - min(last_n, len(ids)) :]
    for place in range(1, len(ids)):
        length = 0
        while length < 50 and length < place and ids[place - 1 - length] == ids[-1 - length]:
            if ids[-1 - length] in breakers:
                break
            length += 1
        if length and ids[place] not in breakers:
            found[ids[place]] = max(length, found.get(ids[place], 0))
    most = {token: length - params.dry_allowed_length for token, length in found.items()}
    return {token: params.dry_multiplier * params.dry_base**over for token, over in most.items() if over >= 0}
