"""The rules of one sequence: which tokens may not follow the tokens so far, or become less likely."""

from __future__ import annotations

import numpy as np

from inferc.runtime.rules.bad_words import BadWords
from inferc.runtime.rules.dry import NONE, Dry, Penalties
from inferc.runtime.rules.repeats import repeated
from inferc.runtime.step.plan import I32
from inferc.runtime.step.sampling_params import SamplingParams


class Rules:
    """The rules that a request's parameters give each of its sequences. They keep nothing of a sequence."""

    def __init__(self, params: SamplingParams) -> None:
        words = [word for word in params.bad_words_ids if len(word) > 1]
        self._bad_words = BadWords(words) if words else None
        self._ngram_size = params.no_repeat_ngram_size
        self._dry: Dry | None = None
        if params.dry_multiplier:
            self._dry = Dry(
                params.dry_multiplier,
                params.dry_base,
                params.dry_allowed_length,
                params.dry_penalty_last_n,
                frozenset(params.dry_breaker_ids),
            )

    @staticmethod
    def of(params: SamplingParams) -> Rules | None:
        """Return the rules of a request, or None if it has none that depends on the tokens so far."""
        return Rules(params) if params.has_rules else None

    def banned(self, token_ids: I32) -> I32:
        """Return the ids that may not follow the tokens of a sequence, its prompt included; some may be there twice."""
        found = [] if self._bad_words is None else [np.array(self._bad_words.banned(token_ids), np.int32)]
        if self._ngram_size:
            found.append(repeated(token_ids, self._ngram_size))
        return np.concatenate(found) if found else np.zeros(0, np.int32)

    def penalties(self, token_ids: I32) -> Penalties:
        """Return what the logits of some ids lose behind the tokens of a sequence, its prompt included."""
        return NONE if self._dry is None else self._dry.penalties(token_ids)
