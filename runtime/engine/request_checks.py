"""The checks of a request's sampling parameters against the model and the runner of an engine."""

from __future__ import annotations

from itertools import chain

from inferc.errors import RequestError
from inferc.runtime.step.prompt_limits import check_ids
from inferc.runtime.step.sampling_params import SamplingParams


def check_sampling(params: SamplingParams, vocab_size: int, takes_processors: bool) -> None:
    """Raise RequestError for a token outside of the vocabulary, and for what an engine does not do by itself.

    takes_processors: whether the runner lets functions change logits.
    """
    check_ids("logit_bias", params.logit_bias, vocab_size)
    for name in ("stop_token_ids", "allowed_token_ids", "banned_token_ids", "dry_breaker_ids"):
        check_ids(name, getattr(params, name), vocab_size)
    check_ids("bad_words_ids", list(chain.from_iterable(params.bad_words_ids)), vocab_size)
    if params.best_of is not None:
        raise RequestError(
            f"best_of is {params.best_of}, and the best are known only when all are there, so no answer in parts"
            " has them; leave it out, or ask for a whole answer"
        )
    if params.has_texts:
        raise RequestError(
            "bad_words and dry_sequence_breakers need a tokenizer, which turns them into tokens; leave them empty,"
            " and give bad_words_ids or dry_breaker_ids instead"
        )
    if params.logits_processors and not takes_processors:
        raise RequestError(
            "logits_processors: this target samples where no function of Python is called; leave them out, or"
            " compile the model for --target cpu"
        )


def check_choices(params: SamplingParams, ends: frozenset[int], vocab_size: int) -> None:
    """Raise RequestError if a request, whose ids are in the vocabulary, leaves no token to choose."""
    banned = frozenset(params.never_chosen)
    if not params.allowed_token_ids and not banned:
        return
    if params.allowed_token_ids:
        left = frozenset(params.allowed_token_ids) - banned
        num_left, num_going_on = len(left), len(left - ends)
    else:
        num_left = vocab_size - len(banned)
        num_going_on = num_left - sum(end < vocab_size for end in ends - banned)
    if not num_left:
        what = "allowed_token_ids are all" if params.allowed_token_ids else "all tokens are"
        raise RequestError(f"{what} in banned_token_ids: nothing is left to choose; ban fewer")
    if params.min_tokens and not num_going_on:
        raise RequestError(
            "allowed_token_ids and banned_token_ids leave end tokens only, and min_tokens forbids these at first:"
            " nothing is left to choose; allow more, or set min_tokens to 0"
        )
