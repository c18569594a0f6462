"""The items of a response in OpenAI's Responses API (reasoning, messages, calls of tools), and their events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from inferc.runtime.tools.answer_calls import AnswerCalls
from inferc.runtime.tools.call_reader import CallPart, CallReader

State: TypeAlias = Literal["in_progress", "completed", "incomplete", "failed"]
Event: TypeAlias = tuple[str, dict[str, Any]]  # (its type, its other fields)

FIRST_THOUGHT: Mapping[str, Any] = {"type": "reasoning_text", "text": ""}
FIRST_PART: Mapping[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


class Items:
    """The items of an answer as it grows.

    name: makes their ids. form: that of the answer's calls, if it may have any; without, the answer is one message,
    which has the log probabilities if they are asked for. may_reason: reasoning may come before it.
    """

    def __init__(self, name: str, form: AnswerCalls | None, may_reason: bool = False) -> None:
        self._name, self._may_reason = name, may_reason
        self._reader = None if form is None else CallReader(form)
        self._done: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # the item that grows, as it began
        self._texts: list[str] = []  # of it: its text or its arguments

    def begin(self) -> list[Event]:
        """Return the events before any text: an answer of text alone is a message, even if it stays empty."""
        return list(self._begin_message()) if self._reader is None and not self._may_reason else []

    def push(self, text: str, is_last: bool = False, logprobs: Sequence[Any] = (), reasoning: str = "") -> list[Event]:
        """Return the events of what became certain with the next text of the answer, or with its end.

        logprobs: those of the text's tokens, without calls; reasoning: what stands before the text.
        """
        reader, events = self._reader, list(self._thought(reasoning)) if reasoning else []
        if reader is None:
            return [*events, *self._said(text, logprobs)] if text or logprobs else events
        parts = [*reader.push(text), *(reader.finish() if is_last else [])]
        return [*events, *(event for part in parts for event in self._of(part))]

    def end(self, status: State, logprobs: Any = ()) -> Iterator[Event]:
        """Yield the last events, made on demand; logprobs: those of all tokens, as JSON.

        status: that of the answer, in which a call that was cut is incomplete.
        """
        if self._open is None and not self._done:
            yield from self._begin_message()
        is_cut = self._reader is not None and self._reader.is_cut
        yield from self._end("incomplete" if is_cut else status, logprobs)

    def so_far(self, status: State, logprobs: Any = ()) -> list[dict[str, Any]]:
        """Return the items, of which the one that has not ended is in this state."""
        return self._done if self._open is None else [*self._done, self._item(status, logprobs)]

    def _of(self, part: str | CallPart) -> Iterator[Event]:
        if isinstance(part, str):
            yield from self._said(part)
            return
        if part.name is not None:
            yield from self._end("completed")
            head = {"type": "function_call", "call_id": part.id, "name": part.name, "arguments": ""}
            yield self._begin({"id": f"fc_{self._suffix}", **head})
        if part.arguments:
            self._texts.append(part.arguments)
            yield "response.function_call_arguments.delta", {**self._place, "delta": part.arguments}

    @property
    def _suffix(self) -> str:
        return f"{self._name}_{len(self._done)}" if self._done else self._name

    @property
    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self._done)}

    def _begin(self, head: dict[str, Any]) -> Event:
        self._open, self._texts = head, []
        return "response.output_item.added", {
            "output_index": len(self._done),
            "item": {**head, "status": "in_progress"},
        }

    def _begin_message(self) -> Iterator[Event]:
        yield self._begin({"id": f"msg_{self._suffix}", "type": "message", "role": "assistant", "content": []})
        yield "response.content_part.added", {**self._place, "content_index": 0, "part": FIRST_PART}

    def _said(self, text: str, logprobs: Sequence[Any] = ()) -> Iterator[Event]:
        if self._open is None or self._open["type"] != "message":
            yield from self._end("completed")
            yield from self._begin_message()
        self._texts.append(text)
        fields = {**self._place, "content_index": 0, "delta": text, "logprobs": logprobs}
        yield "response.output_text.delta", fields

    def _thought(self, text: str) -> Iterator[Event]:
        if self._open is None or self._open["type"] != "reasoning":
            yield from self._end("completed")
            yield self._begin({"id": f"rs_{self._suffix}", "type": "reasoning", "summary": [], "content": []})
            yield "response.content_part.added", {**self._place, "content_index": 0, "part": FIRST_THOUGHT}
        self._texts.append(text)
        yield "response.reasoning_text.delta", {**self._place, "content_index": 0, "delta": text}

    def _item(self, status: State, logprobs: Any) -> dict[str, Any]:
        assert self._open is not None
        text = "".join(self._texts)
        if self._open["type"] == "function_call":
            return {**self._open, "arguments": text, "status": status}
        if self._open["type"] == "reasoning":
            return {**self._open, "content": [{**FIRST_THOUGHT, "text": text}], "status": status}
        return {**self._open, "content": [{**FIRST_PART, "text": text, "logprobs": logprobs}], "status": status}

    def _end(self, status: State, logprobs: Any = ()) -> Iterator[Event]:
        if self._open is None:
            return
        item, place = self._item(status, logprobs), self._place
        if item["type"] != "function_call":
            (part,), of_part = item["content"], {**place, "content_index": 0}
            whole = {name: part[name] for name in ("text", "logprobs") if name in part}
            yield f"response.{part['type']}.done", {**of_part, **whole}
            yield "response.content_part.done", {**of_part, "part": part}
        else:
            said = {"name": item["name"], "arguments": item["arguments"]}
            yield "response.function_call_arguments.done", {**place, **said}
        self._done, self._open = [*self._done, item], None
        yield "response.output_item.done", {"output_index": len(self._done) - 1, "item": item}


def whole_items(
    name: str, form: AnswerCalls | None, text: str, status: State, logprobs: Any = (), reasoning: str = ""
) -> list[dict[str, Any]]:
    """Return the items of a whole answer; the arguments are those of Items."""
    items = Items(name, form, bool(reasoning))
    items.begin()
    items.push(text, is_last=True, reasoning=reasoning)
    list(items.end(status, logprobs))
    return items.so_far(status)
