"""The layout of a step's results on the device, as one contiguous run of bytes."""

from __future__ import annotations

from functools import lru_cache

from inferc.arena import LINE_BYTES, round_up
from inferc.runtime.step.limits import MAX_TOP_LOGPROBS


@lru_cache
def output_layout(rows: int) -> dict[str, int]:
    """Return the offset of each result for up to `rows` rows, and the total size as `end`.

    The results are ids and what is reported of their probabilities.
    """
    sizes = {"token_ids": 1, "argmax": 1, "logprobs": 1, "ranks": 1}
    sizes |= {"top_ids": MAX_TOP_LOGPROBS, "top_logprobs": MAX_TOP_LOGPROBS}
    places, at = {}, 0
    for name, width in sizes.items():
        places[name] = at
        at += round_up(4 * width * rows, LINE_BYTES)
    return {**places, "end": at}
