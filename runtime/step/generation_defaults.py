"""The sampling parameters that a model's makers ask for in its generation config."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from inferc.errors import RequestError
from inferc.runtime.step.sampling_params import SamplingParams, from_request

log = logging.getLogger(__name__)


def generation_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling defaults that a Hugging Face generation config asks for.

    `do_sample: false` means greedy: then the values that choose among tokens are ignored, while penalties, lengths and
    end tokens are used. A value that no request could give (top_p 0, for example) is left out with a warning, because
    otherwise every request that does not set it would fail.
    """
    found: dict[str, Any] = {}
    for name, value in _theirs(config).items():
        if (
            name in ("top_k", "max_tokens", "min_tokens", "no_repeat_ngram_size")
            and isinstance(value, float)
            and value.is_integer()
        ):
            value = int(value)
        try:
            # Check each value alone: the least and the most number of tokens are reconciled below.
            from_request({name: value, **({"max_tokens": None} if name == "min_tokens" else {})})
        except RequestError as error:
            log.warning("the model's generation config is not followed in %s: %s", THEIR_NAMES[name], error)
        else:
            found[name] = value
    least, most = found.get("min_tokens", 0), found.get("max_tokens", SamplingParams.max_tokens)
    if least > most:
        if "max_tokens" in found:
            log.warning(
                "the model's generation config is not followed in min_new_tokens: %d is more than max_new_tokens %d",
                least,
                most,
            )
            found["min_tokens"] = most
        else:
            # Otherwise no request that sets no lengths could be served.
            found["max_tokens"] = least
    return found


# The names of our parameters in a generation config.
THEIR_NAMES = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty")},
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "stop": "stop_strings",
    "banned_token_ids": "suppress_tokens and bad_words_ids",
    "bad_words_ids": "bad_words_ids",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
}
OF_CHOOSING = ("temperature", "top_p", "top_k", "min_p", "typical_p")


def _theirs(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a generation config sets, by our names."""
    values = {name: config.get(theirs) for name, theirs in THEIR_NAMES.items()}
    if isinstance(values["stop"], str):
        values["stop"] = [values["stop"]]
    ends = _listed(config.get("eos_token_id"))
    words = [word for word in _listed(config.get("bad_words_ids")) if isinstance(word, list) and word]
    values["bad_words_ids"] = [word for word in words if len(word) > 1] or None
    # An end token is no bad word, but it may be suppressed: so it is in transformers.
    banned = [word[0] for word in words if len(word) == 1 and word[0] not in ends]
    banned += _listed(config.get("suppress_tokens"))
    if banned:
        values["banned_token_ids"] = sorted(set(banned)) if all(type(token) is int for token in banned) else banned
    if config.get("do_sample") is False:
        values.update(dict.fromkeys(OF_CHOOSING))
        values["temperature"] = 0.0
    return {name: value for name, value in values.items() if value is not None}


def _listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]


def without_text(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of a model that is served without its tokenizer: stop strings need text."""
    return {name: value for name, value in defaults.items() if name != "stop"}
