"""The conversion of generated output into the objects and events of Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import msgspec

from inferc.runtime.openai.answer import Usage
from inferc.runtime.openai.request import OpenAIRequest
from inferc.runtime.openai.tool_calls import finish_reason
from inferc.runtime.tools.answer_calls import AnswerCalls
from inferc.runtime.tools.call_reader import CallPart, CallReader, new_id

Event: TypeAlias = dict[str, Any]
# The `type` of an error by its HTTP status; of others it is that of 400 or of 500.
KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


# Clients send thoughts back with the signature that they came with. Nothing is signed here, and none is checked.
SIGNATURE = "unsigned"
# By the type of a block, the name of its text and the type of the deltas that have a part of it.
DELTAS = {"text": ("text", "text_delta"), "thinking": ("thinking", "thinking_delta")}


class Content:
    """The content of an answer as it grows: its blocks, of thoughts, text and calls, and the events that tell of them.

    form: that of the answer's calls, if it may have any.
    """

    def __init__(self, form: AnswerCalls | None) -> None:
        self._reader = None if form is None else CallReader(form, partial(new_id, "toolu_"))
        self._blocks: list[dict[str, Any]] = []
        self._texts: list[str] = []  # of the last block: its text, or its input as JSON
        self._is_open = False

    def push(self, text: str, is_last: bool = False, reasoning: str = "") -> list[Event]:
        """Return the events of what became certain with the next text of the answer, or with its end.

        reasoning: what stands before the text.
        """
        reader = self._reader
        before = list(self._written("thinking", reasoning)) if reasoning else []
        parts: list[str | CallPart] = [text] if text else []
        if reader is not None:
            parts = [*reader.push(text), *(reader.finish() if is_last else [])]
        events = [*before, *(event for part in parts for event in self._of(part))]
        return [*events, *self._end()] if is_last else events

    @property
    def blocks(self) -> list[dict[str, Any]]:
        """The blocks so far that are whole: a call that was cut is none."""
        is_cut = self._reader is not None and self._reader.is_cut
        return self._blocks[: len(self._blocks) - is_cut]

    @property
    def has_calls(self) -> bool:
        """True if the answer has calls, and all of them are whole."""
        return self._reader is not None and self._reader.num_calls > 0 and not self._reader.is_cut

    def _of(self, part: str | CallPart) -> Iterator[Event]:
        if isinstance(part, str):
            yield from self._written("text", part)
            return
        if part.name is not None:
            yield from self._begin({"type": "tool_use", "id": part.id, "name": part.name, "input": {}})
        if part.arguments:
            yield self._delta({"type": "input_json_delta", "partial_json": part.arguments}, part.arguments)

    def _written(self, kind: str, text: str) -> Iterator[Event]:
        """Yield the events of text for a block of a type that has text."""
        name, delta = DELTAS[kind]
        if not self._is_open or self._blocks[-1]["type"] != kind:
            signature = {"signature": ""} if kind == "thinking" else {}
            yield from self._begin({"type": kind, name: "", **signature})
        yield self._delta({"type": delta, name: text}, text)

    def _begin(self, block: dict[str, Any]) -> Iterator[Event]:
        yield from self._end()
        self._blocks.append(block)
        self._texts, self._is_open = [], True
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block}

    def _delta(self, delta: Mapping[str, Any], text: str) -> Event:
        self._texts.append(text)
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _end(self) -> Iterator[Event]:
        """End the block that is open, and keep it as a whole; the input of a call stays as it was written."""
        if not self._is_open:
            return
        block, text = self._blocks[-1], "".join(self._texts)
        if block["type"] == "thinking":
            yield self._delta({"type": "signature_delta", "signature": SIGNATURE}, "")
            self._blocks[-1] = {**block, "thinking": text, "signature": SIGNATURE}
        else:
            whole = {"text": text} if block["type"] == "text" else {"input": msgspec.Raw(text.encode())}
            self._blocks[-1] = {**block, **whole}
        self._is_open = False
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}


def stop_of(request: OpenAIRequest, reason: str | None, stop: str | int | None, has_calls: bool) -> dict[str, Any]:
    """Return why an answer ended: `stop_reason`, and the `stop_sequence` of the request that ended it if one did.

    has_calls: it has calls, all of them whole.
    """
    found = stop if stop in request.sampling.get("stop", ()) else None
    of_stop = "end_turn" if found is None else "stop_sequence"
    by_reason = {None: None, "length": "max_tokens", "tool_calls": "tool_use"}
    return {"stop_reason": by_reason.get(finish_reason(reason, has_calls), of_stop), "stop_sequence": found}


def message(
    name: str,
    model: str,
    usage: Usage,
    blocks: Sequence[Mapping[str, Any]] = (),
    stop: Mapping[str, Any] | None = None,
    warnings: Sequence[str] = (),
) -> dict[str, Any]:
    """Return a message of the model's. name: makes its id; stop: why it ended, if it did; warnings: as of a chat."""
    return {
        "id": f"msg_{name}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": list(blocks),
        **(stop or {"stop_reason": None, "stop_sequence": None}),
        "usage": usage_body(usage),
        **({"warnings": warnings} if warnings else {}),
    }


def usage_body(usage: Usage) -> dict[str, Any]:
    """Return a usage as Anthropic's object, whose input tokens are those that were not found in a cache."""
    count = usage.reasoning_tokens
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.output_tokens,
        **({} if count is None else {"output_tokens_details": {"thinking_tokens": count}}),
    }


def error_body(status: int, text: str) -> dict[str, Any]:
    """Return the object of an error, given its HTTP status."""
    kind = KINDS.get(status, KINDS[400 if status < 500 else 500])
    return {"type": "error", "error": {"type": kind, "message": text}}
