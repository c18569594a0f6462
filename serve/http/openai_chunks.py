"""Streamed answers as OpenAI's server-sent events: one for each delta."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from inferc.runtime.engine.request_output import CompletionOutput
from inferc.runtime.openai.answer import (
    TokenOf,
    Usage,
    chat_logprobs,
    completion_logprobs,
    usage_body,
)
from inferc.runtime.openai.reasoning import reasoning_delta
from inferc.runtime.openai.request import OpenAIRequest
from inferc.runtime.openai.tool_calls import delta_of, finish_reason
from inferc.runtime.step.plan import Logprobs
from inferc.runtime.tools.answer_calls import AnswerCalls
from inferc.runtime.tools.call_reader import CallPart, CallReader
from inferc.serve.answering.logprobs_json import PromptJson
from inferc.serve.models.streams import Delta

DONE = b"data: [DONE]\n\n"


def event(body: Mapping[str, Any]) -> bytes:
    """Encode a server-sent event in ASCII, so that half of a surrogate pair in an error's message cannot break it."""
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


def with_end(deltas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the last deltas of an answer, of which the very last comes with the reason of its end.

    It is no part of a call: OpenAI's clients say that the call before it is whole, and read its parts after that.
    """
    return [*deltas, {}] if "tool_calls" in deltas[-1] else deltas


class Chunks:
    """The encoder of one request's events; most events have only text, and are put together from bytes."""

    def __init__(
        self,
        request: OpenAIRequest,
        head: Mapping[str, Any],
        token: TokenOf,
        calls: AnswerCalls | None = None,
    ) -> None:
        """Prepare the parts that all chunks share.

        head: the fields with which each begins (id, created, model, …). calls: the form of calls of tools, if answers
        may have any.
        """
        self._request, self._token = request, token
        self._is_chat = request.kind == "chat"
        self._warnings = {"warnings": request.warnings} if request.warnings else {}
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        start = msgspec.json.encode({"object": kind, **head})[:-1]
        self._start = b"data: " + start + b',"choices":[{"index":'
        self._start_of_usage = b"data: " + start + b',"choices":[],"usage":'
        options = request.stream_options
        has_null = options.include_usage and not options.continuous_usage_stats
        self._end = b',"usage":null}\n\n' if has_null else b"}\n\n"
        self._begun: set[int] = set()
        self._offsets: dict[int, int] = {}
        self._calls, self._readers = calls, dict[int, CallReader]()

    def has_begun(self, index: int) -> bool:
        """Return whether a choice's first events have been made, which also report its prompt."""
        return index in self._begun

    def of(self, index: int, delta: Delta, prompt: PromptJson, usage: Usage | None = None) -> bytes:
        """Return the events of a delta of choice `index`.

        prompt: the report about the prompt, which comes before the choice's first delta.
        usage: the usage so far, if every chunk is to have it.
        """
        begins, first = not self.has_begun(index), b""
        if begins:
            self._begun.add(index)
            if self._is_chat:
                said = "" if self._calls is None else None  # a text part, even an empty one, is one that clients show
                body = {"delta": {"role": "assistant", "content": said}, "logprobs": None, "finish_reason": None}
                more = {**prompt.fields, **self._warnings} if len(self._begun) == 1 else {}
                first = self._dump(index, body, usage, more)
            elif self._request.echo or prompt.fields:
                first = self._echo(index, prompt, usage)
            elif self._warnings and len(self._begun) == 1:
                nothing = {"text": "", "logprobs": None, "finish_reason": None}
                first = self._dump(index, nothing, usage, self._warnings)
        if self._calls is not None or delta.reasoning:
            return first + self._in_parts(index, delta, usage)
        if delta.logprobs or self._request.return_token_ids:
            return first + self._dump(index, self._body(index, delta), usage)
        if not delta.text and delta.finish_reason is None:  # what came is awaited to tell reasoning from text
            return first
        text = msgspec.json.encode(delta.text)
        reason = b"null" if delta.finish_reason is None else b'"%s"' % delta.finish_reason.encode()
        named = b',"delta":{"content":' + text + b"}" if self._is_chat else b',"text":' + text
        return b"".join(
            (
                first,
                self._start,
                b"%d" % index,
                named,
                b',"logprobs":null,"finish_reason":',
                reason,
                b"}]",
                self._usage(usage),
                self._end,
            )
        )

    def _in_parts(self, index: int, delta: Delta, usage: Usage | None) -> bytes:
        """Return an event for each part of the answer that a delta completes: reasoning, text, a part of a call."""
        said: list[str | CallPart] = [delta.text] if delta.text else []
        has_calls = False
        if self._calls is not None:
            reader = self._readers.setdefault(index, CallReader(self._calls))
            said = [*reader.push(delta.text), *(reader.finish() if delta.finish_reason is not None else [])]
            has_calls = reader.num_calls > 0 and not reader.is_cut
        parts: list[dict[str, Any]] = [reasoning_delta(delta.reasoning)] if delta.reasoning else []
        parts += map(delta_of, said)
        whole = self._body(index, delta)
        if not parts and (delta.finish_reason is not None or delta.logprobs or self._request.return_token_ids):
            parts = [delta_of("") if self._calls is None else {}]
        if delta.finish_reason is not None:
            parts = with_end(parts)
        events = []
        for number, part in enumerate(parts):
            body: dict[str, Any] = {"logprobs": None} if number else whole
            body = {**body, "delta": part}
            is_last = number == len(parts) - 1
            body["finish_reason"] = finish_reason(delta.finish_reason, has_calls) if is_last else None
            events.append(self._dump(index, body, usage))
        return b"".join(events)

    def usage(self, usages: Sequence[Usage]) -> bytes:
        """Return the last event of the stream, which has the usage if the client asked for it."""
        return self._start_of_usage + msgspec.json.encode(usage_body(usages)) + b"}\n\n"

    def _usage(self, usage: Usage | None) -> bytes:
        return b',"usage":' + msgspec.json.encode(usage_body([usage])) if usage is not None else b""

    def _dump(
        self, index: int, body: Mapping[str, Any], usage: Usage | None, more: Mapping[str, Any] | None = None
    ) -> bytes:
        """Return an event whose choice has the fields of `body`; more: fields of the event beside `choices`."""
        encoded = b"," + msgspec.json.encode(body)[1:]
        beside = b"," + msgspec.json.encode(more)[1:-1] if more else b""
        return b"".join((self._start, b"%d" % index, encoded, b"]", beside, self._usage(usage), self._end))

    def _echo(self, index: int, prompt: PromptJson, usage: Usage | None) -> bytes:
        """Return the event that echoes the prompt, the first of its choice."""
        if prompt.lists is not None:
            self._offsets[index] = prompt.text_len
        body = prompt.choice(CompletionOutput(index), self._token)
        return self._dump(index, {**body, "finish_reason": None}, usage)

    def _body(self, index: int, delta: Delta) -> dict[str, Any]:
        rows: Any = None
        if delta.logprobs and self._is_chat:
            rows = chat_logprobs(delta.logprobs, self._token)
        elif delta.logprobs:
            rows = self._completion_logprobs(index, [(row.token_id, row) for row in delta.logprobs])
        named: dict[str, Any] = {"delta": {"content": delta.text}} if self._is_chat else {"text": delta.text}
        body = {**named, "logprobs": rows, "finish_reason": delta.finish_reason}
        return {**body, "token_ids": delta.token_ids} if self._request.return_token_ids else body

    def _completion_logprobs(self, index: int, rows: Sequence[tuple[int, Logprobs | None]]) -> dict[str, Any]:
        start = self._offsets.get(index, 0)
        self._offsets[index] = start + sum(len(self._token(each)[0]) for each, _ in rows)
        return completion_logprobs(rows, self._token, start)
