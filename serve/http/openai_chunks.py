"""Streamed answers as OpenAI's server-sent events: one for each piece."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from inferc.runtime.engine.llm import CompletionOutput
from inferc.runtime.openai.answer import (
    TokenOf,
    Usage,
    chat_logprobs,
    completion_logprobs,
    usage_body,
)
from inferc.runtime.openai.request import OpenAIRequest
from inferc.runtime.step.plan import Logprobs
from inferc.serve.http.told_json import ToldPrompt
from inferc.serve.models.streams import Piece

DONE = b"data: [DONE]\n\n"


def event(body: Mapping[str, Any]) -> bytes:
    """As ASCII, so that half of a surrogate pair in a message of an error cannot break it."""
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


class Chunks:
    """Makes the events of one request. Most have text and nothing else, and are put together from bytes."""

    def __init__(
        self,
        request: OpenAIRequest,
        head: Mapping[str, Any],
        token: TokenOf,
        include_usage: bool = False,
        continuous_usage: bool = False,
    ) -> None:
        """head: what every chunk begins with: id, created, model."""
        self._request, self._token = request, token
        self._is_chat = request.kind == "chat"
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        start = msgspec.json.encode({"object": kind, **head})[:-1]
        self._start = b"data: " + start + b',"choices":[{"index":'
        self._start_of_usage = b"data: " + start + b',"choices":[],"usage":'
        self._end = b',"usage":null}\n\n' if include_usage and not continuous_usage else b"}\n\n"
        self._begun: set[int] = set()
        self._offsets: dict[int, int] = {}

    def has_begun(self, index: int) -> bool:
        """Whether a choice's first events have been made, which tell of its prompt too."""
        return index in self._begun

    def of(self, index: int, piece: Piece, prompt: ToldPrompt, usage: Usage | None = None) -> bytes:
        """The events of a piece of choice `index`. prompt: what is told of it before the choice's first piece.

        usage: so far, where every chunk has it.
        """
        begins, first = not self.has_begun(index), b""
        if begins:
            self._begun.add(index)
            if self._is_chat:
                body = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
                more = prompt.fields if len(self._begun) == 1 else {}
                first = self._dump(index, body, usage, more)
            elif self._request.echo or prompt.fields:
                first = self._echo(index, prompt, usage)
        if piece.logprobs or self._request.return_token_ids:
            return first + self._dump(index, self._body(index, piece), usage)
        text = msgspec.json.encode(piece.text)
        reason = b"null" if piece.finish_reason is None else b'"%s"' % piece.finish_reason.encode()
        named = b',"delta":{"content":' + text + b"}" if self._is_chat else b',"text":' + text
        return b"".join(
            (
                *(first, self._start, b"%d" % index, named, b',"logprobs":null,"finish_reason":', reason, b"}]"),
                *(self._usage(usage), self._end),
            )
        )

    def usage(self, usages: Sequence[Usage]) -> bytes:
        """The last event, if the client asked for it."""
        return self._start_of_usage + msgspec.json.encode(usage_body(usages)) + b"}\n\n"

    def _usage(self, usage: Usage | None) -> bytes:
        return b',"usage":' + msgspec.json.encode(usage_body([usage])) if usage is not None else b""

    def _dump(
        self, index: int, body: Mapping[str, Any], usage: Usage | None, more: Mapping[str, Any] | None = None
    ) -> bytes:
        """more: fields beside `choices`."""
        encoded = b"," + msgspec.json.encode(body)[1:]
        beside = b"," + msgspec.json.encode(more)[1:-1] if more else b""
        return b"".join((self._start, b"%d" % index, encoded, b"]", beside, self._usage(usage), self._end))

    def _echo(self, index: int, prompt: ToldPrompt, usage: Usage | None) -> bytes:
        """The prompt, before all else."""
        if prompt.lists is not None:
            self._offsets[index] = prompt.text_len
        body = prompt.choice(CompletionOutput(index), self._token)
        return self._dump(index, {**body, "finish_reason": None}, usage)

    def _body(self, index: int, piece: Piece) -> dict[str, Any]:
        rows: Any = None
        if piece.logprobs and self._is_chat:
            rows = chat_logprobs(piece.logprobs, self._token)
        elif piece.logprobs:
            rows = self._completion_logprobs(index, [(row.token_id, row) for row in piece.logprobs])
        named: dict[str, Any] = {"delta": {"content": piece.text}} if self._is_chat else {"text": piece.text}
        body = {**named, "logprobs": rows, "finish_reason": piece.finish_reason}
        return {**body, "token_ids": piece.token_ids} if self._request.return_token_ids else body

    def _completion_logprobs(self, index: int, rows: Sequence[tuple[int, Logprobs | None]]) -> dict[str, Any]:
        start = self._offsets.get(index, 0)
        self._offsets[index] = start + sum(len(self._token(each)[0]) for each, _ in rows)
        return completion_logprobs(rows, self._token, start)


class Growing:
    """An output that comes piece by piece."""

    def __init__(self, index: int) -> None:
        self._output, self._texts = CompletionOutput(index), list[str]()

    def add(self, piece: Piece) -> None:
        output = self._output
        self._texts.append(piece.text)
        output.token_ids += piece.token_ids
        output.finish_reason = piece.finish_reason
        if piece.logprobs:
            output.logprobs = [] if output.logprobs is None else output.logprobs
            output.logprobs += piece.logprobs

    def so_far(self) -> CompletionOutput:
        return replace(self._output, text="".join(self._texts))
