"""What an answer tells of tokens as JSON, made in pieces, so that no call holds the interpreter for long while others wait for it.

A prompt's part is made once, for all its choices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from inferc.errors import RequestError
from inferc.runtime.engine.llm import CompletionOutput
from inferc.runtime.openai.answer import (
    EchoedPrompt,
    TokenOf,
    chat_logprobs,
    completion_logprobs,
    prompt_rows,
)
from inferc.runtime.openai.request import OpenAIRequest
from inferc.runtime.step.plan import Logprobs
from inferc.serve.models.streams import Stream

ENTRIES_AT_ONCE = 1 << 13  # some milliseconds
# What one answer tells of its prompts, and of what is generated. 128 Ki tokens with five likely ones each are 768 Ki entries, some 60 MB.
MAX_ENTRIES = 1 << 20  # tokens, and likely ones beside them, for each choice anew
MAX_CHARACTERS = 16 << 20  # of echoed texts, for each choice anew

Value = TypeVar("Value")


def items(values: Sequence[Value], made: Callable[[Sequence[Value]], Sequence[Any]] = list, size: int = 1) -> bytes:
    """What lies between the brackets of a list: what is `made` of the values, a part at a time. size: entries of each."""
    at_once = max(1, ENTRIES_AT_ONCE // size)
    parts = (made(values[at : at + at_once]) for at in range(0, len(values), at_once))
    return b",".join(msgspec.json.encode(part)[1:-1] for part in parts)


def listed(*parts: bytes) -> msgspec.Raw:
    """The list that has these items, one part behind the other."""
    return msgspec.Raw(b"".join((b"[", b",".join(filter(None, parts)), b"]")))


def chat_lists(rows: Sequence[Logprobs], token: TokenOf) -> dict[str, Any]:
    """The same as `chat_logprobs`."""
    content = listed(items(rows, lambda part: chat_logprobs(part, token)["content"], _size(rows)))
    return {**chat_logprobs((), token), "content": content}


@dataclass(frozen=True)
class ToldPrompt:
    """A prompt as its choices tell it, as JSON.

    text: what lies between its quotation marks, of text_len characters. lists: those of `completion_logprobs`, what lies between
    their brackets; None: not asked for. fields: of the choice or, in a chat, of the whole answer.
    """

    num_tokens: int
    text: bytes = b""
    text_len: int = 0
    lists: Mapping[str, bytes] | None = None
    fields: Mapping[str, msgspec.Raw] = field(default_factory=dict)

    def choice(self, output: CompletionOutput, token: TokenOf) -> dict[str, Any]:
        """What a choice of a completion tells: the prompt and what was generated behind it."""
        parts = [] if self.lists is None else [self.lists]
        if output.logprobs is not None:
            rows = [(row.token_id, row) for row in output.logprobs]
            parts.append(_completion_lists(rows, token, self.text_len, size=_size(output.logprobs)))
        logprobs = {name: listed(*(part[name] for part in parts)) for name in parts[0]} if parts else None
        text = msgspec.Raw(b'"' + self.text + msgspec.json.encode(output.text)[1:])
        return {"text": text, "logprobs": logprobs, **self.fields}


def told_prompt(request: OpenAIRequest, prompt: EchoedPrompt, token: TokenOf) -> ToldPrompt:
    """What the request wants to be told of a prompt."""
    fields, rows = dict[str, msgspec.Raw](), prompt.rows or ()
    if request.prompt_logprobs is not None:
        of_rows = items(rows, lambda part: prompt_rows(part, token), _size(rows))
        fields["prompt_logprobs"] = listed(b"null", of_rows)
    if request.return_token_ids:
        fields["prompt_token_ids"] = listed(items(prompt.token_ids))
    if not request.echo:
        return ToldPrompt(len(prompt.token_ids), fields=fields)
    text = msgspec.json.encode(prompt.text)[1:-1]
    lists = None if prompt.rows is None else _completion_lists(prompt.scored, token, 0, prompt.offsets, _size(rows))
    return ToldPrompt(len(prompt.token_ids), text, len(prompt.text), lists, fields)


def check_told(request: OpenAIRequest, top: int | None, num_tokens: int, num_characters: int) -> int:
    """How many entries an answer has of all its prompts. Raises RequestError for more than one answer tells.

    top: likely tokens of each place, None: no log probabilities. num_characters: of echoed texts.
    """
    times = request.params.n if request.kind == "completion" else 1  # a chat tells of its prompt once
    lists = 0 if top is None else (request.echo + (request.prompt_logprobs is not None)) * (1 + top)
    entries = num_tokens * (lists + request.return_token_ids) * times
    check_entries(entries)
    if num_characters * times > MAX_CHARACTERS:
        raise RequestError(
            f"prompt: the answer would echo {num_characters * times} characters, those of each choice counted, and at most"
            f" {MAX_CHARACTERS} are echoed at once; ask for fewer prompts or choices (n)"
        )
    return entries


def check_entries(count: int) -> None:
    """Raise RequestError where an answer would tell so many tokens and likely tokens of its prompts."""
    if count > MAX_ENTRIES:
        raise RequestError(
            f"prompt: the answer would tell {count} tokens and likely tokens of its prompts, those of each choice counted, and at"
            f" most {MAX_ENTRIES} are told at once; ask for fewer prompts, logprobs or choices (n)"
        )


def check_likely(num_entries: int, streams: Iterable[Stream]) -> None:
    """End the streams of an answer, and raise RequestError, where they brought more tokens and likely tokens than one tells."""
    if num_entries > MAX_ENTRIES:
        error = RequestError(
            f"logprobs: the answer has come to tell {num_entries} tokens and likely tokens, and at most {MAX_ENTRIES} are told at"
            " once; ask for fewer choices (n), tokens (max_tokens) or likely ones, or for a stream of a completion"
        )
        for stream in streams:
            stream.end(error)
        raise error


def _size(rows: Sequence[Logprobs]) -> int:
    return 1 + len(rows[0].top) if rows else 1


def _completion_lists(
    rows: Sequence[tuple[int, Logprobs | None]],
    token: TokenOf,
    offset: int,
    known: Sequence[int] = (),
    size: int = 1,
) -> dict[str, bytes]:
    """The lists of `completion_logprobs`, each without its brackets."""
    at_once = max(1, ENTRIES_AT_ONCE // size)
    parts: dict[str, list[bytes]] = {name: [] for name in completion_logprobs((), token)}
    for at in range(0, len(rows), at_once):
        part, known_part = rows[at : at + at_once], known[at : at + at_once]
        for name, values in completion_logprobs(part, token, offset, known_part).items():
            parts[name].append(msgspec.json.encode(values)[1:-1])
        offset += sum(len(token(each)[0]) for each, _ in part[len(known_part) :])
    return {name: b",".join(each) for name, each in parts.items()}
