"""The texts within sampling parameters as tokens, which is all that an engine takes: bad words, and breakers of DRY."""

from __future__ import annotations

from inferc.errors import RequestError, shown
from inferc.runtime.step.sampling_params import SamplingParams, changed
from inferc.runtime.text.tokenizer import Text


def spelled(text: Text, params: SamplingParams) -> SamplingParams:
    """Return a request's parameters with token ids instead of texts.

    Raises RequestError for a word that the tokenizer has no tokens for. A thousand words take some ten milliseconds.
    """
    if not params.has_texts:
        return params
    words, breakers = dict.fromkeys(params.bad_words_ids), dict.fromkeys(params.dry_breaker_ids)
    for word in params.bad_words:
        words.update(dict.fromkeys(_spellings(text, word.lstrip(" "))))
    for breaker in params.dry_sequence_breakers:
        breakers[text.ids_of(f"a{breaker}")[-1]] = None
    ids = {"bad_words_ids": tuple(words), "dry_breaker_ids": tuple(breakers)}
    return changed(params, bad_words=(), dry_sequence_breakers=(), **ids)


def _spellings(text: Text, word: str) -> list[tuple[int, ...]]:
    """Return the tokens of a word at the start of a text, behind a space, and within a line.

    A tokenizer that puts a space before each text has those without it only behind a line break.
    """
    plain, spaced = text.ids_of(word), text.ids_of(f" {word}")
    line, behind = text.ids_of("\n"), text.ids_of(f"\n{word}")
    found = [plain, spaced, behind[len(line) :] if behind[: len(line)] == line else []]
    if not plain:
        raise RequestError(f"bad_words: the model's tokenizer has no tokens for {shown(word)}; leave it out")
    return [tuple(ids) for ids in found if ids]
