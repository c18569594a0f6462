"""The conversion of generated output into the objects and events of Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import msgspec

from inferc.chat.calls import CallForm
from inferc.runtime.openai.answer import Usage
from inferc.runtime.openai.request import OpenAIRequest
from inferc.runtime.openai.tool_calls import finish_reason
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


class Content:
    """The content of an answer as it grows: its blocks, of text and of calls, and the events that tell of them.

    form: that of the answer's calls, if it may have any.
    """

    def __init__(self, form: CallForm | None) -> None:
        self._reader = None if form is None else CallReader(form, partial(new_id, "toolu_"))
        self._blocks: list[dict[str, Any]] = []
        self._texts: list[str] = []  # of the last block: its text, or its input as JSON
        self._is_open = False

    def push(self, text: str, is_last: bool = False) -> list[Event]:
        """Return the events of what became certain with the next text of the answer, or with its end."""
        reader = self._reader
        parts: list[str | CallPart] = [text] if text else []
        if reader is not None:
            parts = [*reader.push(text), *(reader.finish() if is_last else [])]
        events = [event for part in parts for event in self._of(part)]
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
            if not self._is_open or self._blocks[-1]["type"] != "text":
                yield from self._begin({"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": part}, part)
            return
        if part.name is not None:
            yield from self._begin({"type": "tool_use", "id": part.id, "name": part.name, "input": {}})
        if part.arguments:
            yield self._delta({"type": "input_json_delta", "partial_json": part.arguments}, part.arguments)

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


def usage_body(usage: Usage) -> dict[str, int]:
    """Return a usage as Anthropic's object, whose input tokens are those that were not found in a cache."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.output_tokens,
    }


def error_body(status: int, text: str) -> dict[str, Any]:
    """Return the object of an error, given its HTTP status."""
    kind = KINDS.get(status, KINDS[400 if status < 500 else 500])
    return {"type": "error", "error": {"type": kind, "message": text}}
