"""The JSON of token ids and log probabilities in an answer, encoded in parts so that no call holds the GIL for long.

A prompt's part is encoded once, for all its choices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from inferc.runtime.engine.request_output import CompletionOutput
from inferc.runtime.openai.answer import (
    EchoedPrompt,
    TokenOf,
    chat_logprobs,
    completion_logprobs,
    prompt_rows,
)
from inferc.runtime.openai.request import OpenAIRequest
from inferc.runtime.step.plan import Logprobs

ENTRIES_AT_ONCE = 1 << 13  # entries that are encoded in one call, which takes some milliseconds

Value = TypeVar("Value")


def json_items(
    values: Sequence[Value], made: Callable[[Sequence[Value]], Sequence[Any]] = list, size: int = 1
) -> bytes:
    """Encode the JSON list of `made(values)` in parts, and return it without its brackets.

    size: number of entries that each value counts for.
    """
    at_once = max(1, ENTRIES_AT_ONCE // size)
    parts = (made(values[at : at + at_once]) for at in range(0, len(values), at_once))
    return b",".join(msgspec.json.encode(part)[1:-1] for part in parts)


def json_list(*parts: bytes) -> msgspec.Raw:
    """Return the JSON list that has the items of these parts, which have no brackets."""
    return msgspec.Raw(b"".join((b"[", b",".join(filter(None, parts)), b"]")))


def chat_lists(rows: Sequence[Logprobs], token: TokenOf) -> dict[str, Any]:
    """Return the fields of `chat_logprobs`, with the list encoded in parts."""
    content = json_list(json_items(rows, lambda part: chat_logprobs(part, token)["content"], _size(rows)))
    return {**chat_logprobs((), token), "content": content}


@dataclass(frozen=True)
class PromptJson:
    """The part of an answer that is about a prompt, as JSON that all choices of the prompt share.

    text: the JSON string of the echoed prompt without its quotation marks; it has text_len characters.
    lists: the lists of `completion_logprobs` without their brackets; None if they are not asked for.
    fields: further fields of each choice or, in a chat, of the whole answer.
    """

    num_tokens: int
    text: bytes = b""
    text_len: int = 0
    lists: Mapping[str, bytes] | None = None
    fields: Mapping[str, msgspec.Raw] = field(default_factory=dict)

    def choice(self, output: CompletionOutput, token: TokenOf) -> dict[str, Any]:
        """Return the fields of a completion's choice: the prompt if it is echoed, followed by the generated output."""
        parts = [] if self.lists is None else [self.lists]
        if output.logprobs is not None:
            rows = [(row.token_id, row) for row in output.logprobs]
            parts.append(_completion_lists(rows, token, self.text_len, size=_size(output.logprobs)))
        logprobs = {name: json_list(*(part[name] for part in parts)) for name in parts[0]} if parts else None
        text = msgspec.Raw(b'"' + self.text + msgspec.json.encode(output.text)[1:])
        return {"text": text, "logprobs": logprobs, **self.fields}


def prompt_json(request: OpenAIRequest, prompt: EchoedPrompt, token: TokenOf) -> PromptJson:
    """Encode the part of an answer that a request asks for about a prompt."""
    fields, rows = dict[str, msgspec.Raw](), prompt.rows or ()
    if request.prompt_logprobs is not None:
        of_rows = json_items(rows, lambda part: prompt_rows(part, token), _size(rows))
        fields["prompt_logprobs"] = json_list(b"null", of_rows)
    if request.return_token_ids:
        fields["prompt_token_ids"] = json_list(json_items(prompt.token_ids))
    if not request.echo:
        return PromptJson(len(prompt.token_ids), fields=fields)
    text = msgspec.json.encode(prompt.text)[1:-1]
    lists = None if prompt.rows is None else _completion_lists(prompt.scored, token, 0, prompt.offsets, _size(rows))
    return PromptJson(len(prompt.token_ids), text, len(prompt.text), lists, fields)


def _size(rows: Sequence[Logprobs]) -> int:
    return 1 + len(rows[0].top) if rows else 1


def _completion_lists(
    rows: Sequence[tuple[int, Logprobs | None]],
    token: TokenOf,
    offset: int,
    known: Sequence[int] = (),
    size: int = 1,
) -> dict[str, bytes]:
    """Encode the lists of `completion_logprobs` in parts, each list without its brackets."""
    at_once = max(1, ENTRIES_AT_ONCE // size)
    parts: dict[str, list[bytes]] = {name: [] for name in completion_logprobs((), token)}
    for at in range(0, len(rows), at_once):
        part, known_part = rows[at : at + at_once], known[at : at + at_once]
        for name, values in completion_logprobs(part, token, offset, known_part).items():
            parts[name].append(msgspec.json.encode(values)[1:-1])
        offset += sum(len(token(each)[0]) for each, _ in part[len(known_part) :])
    return {name: b",".join(each) for name, each in parts.items()}
