"""Repetitions: where the last tokens of a text occurred before in it, and the n-grams that may not come again.

The places are found anew for each token by comparing arrays, which takes some microseconds for thousands of tokens.
Nothing is kept between steps, so nothing has to be taken back where a drafted token was not chosen.
"""

from __future__ import annotations

import numpy as np

from inferc.runtime.step.plan import I32, I64


def places_behind(token_ids: I32, count: int) -> I64:
    """Return the ascending places of the tokens that follow an earlier occurrence of the last `count` tokens.

    The occurrences may overlap the last tokens. With a count of 0 these are all places.
    """
    length = len(token_ids)
    if length <= count:
        return np.zeros(0, np.int64)
    if not count:
        return np.arange(length)
    places = np.flatnonzero(token_ids[count - 1 : -1] == token_ids[-1]) + count
    for back in range(2, count + 1):
        if not len(places):
            break
        places = places[token_ids[places - back] == token_ids[-back]]
    return places


def repeated(token_ids: I32, size: int) -> I32:
    """Return the ids, ascending, with which the last tokens would be an n-gram of `size` tokens that occurred before.

    Source: transformers' NoRepeatNGramLogitsProcessor.
    """
    found: I32 = np.unique(token_ids[places_behind(token_ids, size - 1)])
    return found
