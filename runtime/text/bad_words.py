"""Bad words as tokens: each text in the spellings that it has at the start of a text, behind a space and in a line."""

from __future__ import annotations

from inferc.errors import RequestError, shown
from inferc.runtime.step.sampling_params import SamplingParams, changed
from inferc.runtime.text.tokenizer import Text


def with_words(text: Text, params: SamplingParams) -> SamplingParams:
    """Return a request's parameters with its bad words as token ids, which is all that the engine takes.

    Raises RequestError for a word that the tokenizer has no tokens for. A thousand words take some ten milliseconds.
    """
    if not params.bad_words:
        return params
    words = dict.fromkeys(params.bad_words_ids)
    for word in params.bad_words:
        words.update(dict.fromkeys(_spellings(text, word.lstrip(" "))))
    return changed(params, bad_words=(), bad_words_ids=tuple(words))


def _spellings(text: Text, word: str) -> list[tuple[int, ...]]:
    """Return the tokens of a word with a leading space and without.

    A tokenizer that puts a space before each text has none without it, but behind a line break.
    """
    plain, spaced = text.ids_of(word), text.ids_of(f" {word}")
    line, behind = text.ids_of("\n"), text.ids_of(f"\n{word}")
    found = [plain, spaced, behind[len(line) :] if behind[: len(line)] == line else []]
    if not plain:
        raise RequestError(f"bad_words: the model's tokenizer has no tokens for {shown(word)}; leave it out")
    return [tuple(ids) for ids in found if ids]
