"""The checks of a prompt, made with the same messages where it comes in and in the engine."""

from __future__ import annotations

from collections.abc import Iterable

from inferc.errors import RequestError, shown


def check_length(count: int, max_model_len: int, room: int = 1) -> None:
    """Raise RequestError if a prompt of `count` tokens is too long.

    room: the number of tokens of the model's length that are left for the answer.
    """
    if count + room > max_model_len:
        raise RequestError(
            f"the prompt has {count} tokens, and the model takes {max_model_len - room} of its {max_model_len}"
            + (" (one is left for the answer)" if room else "")
            + "; shorten it, or compile with a larger --max-model-len if the model allows one"
        )


def check_ids(what: str, ids: Iterable[int], vocab_size: int) -> None:
    """Raise RequestError for a token id that the model does not have."""
    low, high = min(ids, default=0), max(ids, default=0)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise RequestError(f"{what}: token id {shown(wrong)} is outside of the vocabulary [0, {vocab_size})")
