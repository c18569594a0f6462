"""The limits of what one answer reports: tokens of prompts and of outputs, likely tokens beside them, echoed texts."""

from __future__ import annotations

from collections.abc import Iterable

from inferc.errors import RequestError
from inferc.runtime.openai.request import OpenAIRequest
from inferc.serve.models.streams import Stream

# Entries (tokens, and likely tokens beside them) that one answer may report of its prompts, and as many of its
# generated tokens; each choice counts anew. 128 Ki tokens with five likely ones each are 768 Ki entries, about 60 MB.
MAX_ENTRIES = 1 << 20
MAX_CHARACTERS = 16 << 20  # characters of prompts that one answer may echo; each choice counts anew


def check_prompt_entries(request: OpenAIRequest, top: int | None, num_tokens: int, num_characters: int) -> int:
    """Return how many entries an answer has for all its prompts; raise RequestError for more than MAX_ENTRIES.

    top: likely tokens at each position; None: no log probabilities. num_characters: length of the echoed texts, of
    which at most MAX_CHARACTERS are allowed.
    """
    times = request.params.n if request.kind == "completion" else 1  # a chat reports its prompt once
    lists = 0 if top is None else (request.echo + (request.prompt_logprobs is not None)) * (1 + top)
    entries = num_tokens * (lists + request.return_token_ids) * times
    check_entries(entries)
    if num_characters * times > MAX_CHARACTERS:
        raise RequestError(
            f"prompt: the answer would echo {num_characters * times} characters, those of each choice counted, and at"
            f" most {MAX_CHARACTERS} are echoed at once; ask for fewer prompts or choices (n)"
        )
    return entries


def check_entries(count: int) -> None:
    """Raise RequestError if `count` is more entries about prompts than one answer may have."""
    if count > MAX_ENTRIES:
        raise RequestError(
            f"prompt: the answer would report {count} tokens and likely tokens of its prompts, those of each choice"
            f" counted, and at most {MAX_ENTRIES} are reported at once; ask for fewer prompts, logprobs or choices (n)"
        )


def check_likely(num_entries: int, streams: Iterable[Stream]) -> None:
    """End the streams of an answer and raise RequestError if they brought more entries than one answer may have."""
    if num_entries > MAX_ENTRIES:
        error = RequestError(
            f"logprobs: the answer has come to report {num_entries} tokens and likely tokens, and at most {MAX_ENTRIES}"
            " are reported at once; ask for fewer choices (n), tokens (max_tokens) or likely ones, or for a stream of a"
            " completion"
        )
        for stream in streams:
            stream.end(error)
        raise error
