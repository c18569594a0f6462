"""The items of a response in OpenAI's Responses API, messages and calls of tools, and the events that tell of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from inferc.chat.calls import CallForm
from inferc.runtime.tools.call_reader import CallPart, CallReader

State: TypeAlias = Literal["in_progress", "completed", "incomplete", "failed"]
Event: TypeAlias = tuple[str, dict[str, Any]]  # (its type, its other fields)

FIRST_PART: Mapping[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


class Items:
    """The items of an answer as it grows.

    name: makes their ids. form: that of the answer's calls, if it may have any; without, the answer is one message,
    which has the log probabilities if they are asked for.
    """

    def __init__(self, name: str, form: CallForm | None) -> None:
        self._name = name
        self._reader = None if form is None else CallReader(form)
        self._done: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # the item that grows, as it began
        self._texts: list[str] = []  # of it: its text or its arguments

    def begin(self) -> list[Event]:
        """Return the events before any text: an answer without calls is a message, even if it stays empty."""
        return list(self._begin_message()) if self._reader is None else []

    def push(self, text: str, is_last: bool = False, logprobs: Sequence[Any] = ()) -> list[Event]:
        """Return the events of what became certain with the next text of the answer, or with its end."""
        reader = self._reader
        if reader is None:
            return [self._text_delta(text, logprobs)] if text or logprobs else []
        parts = [*reader.push(text), *(reader.finish() if is_last else [])]
        return [event for part in parts for event in self._of(part)]

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
            if self._open is None or self._open["type"] != "message":
                yield from self._end("completed")
                yield from self._begin_message()
            yield self._text_delta(part)
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

    def _text_delta(self, text: str, logprobs: Sequence[Any] = ()) -> Event:
        self._texts.append(text)
        fields = {**self._place, "content_index": 0, "delta": text, "logprobs": logprobs}
        return "response.output_text.delta", fields

    def _item(self, status: State, logprobs: Any) -> dict[str, Any]:
        assert self._open is not None
        text = "".join(self._texts)
        if self._open["type"] == "function_call":
            return {**self._open, "arguments": text, "status": status}
        return {**self._open, "content": [{**FIRST_PART, "text": text, "logprobs": logprobs}], "status": status}

    def _end(self, status: State, logprobs: Any = ()) -> Iterator[Event]:
        if self._open is None:
            return
        item, place = self._item(status, logprobs), self._place
        if item["type"] == "message":
            (part,), of_part = item["content"], {**place, "content_index": 0}
            yield "response.output_text.done", {**of_part, "text": part["text"], "logprobs": part["logprobs"]}
            yield "response.content_part.done", {**of_part, "part": part}
        else:
            said = {"name": item["name"], "arguments": item["arguments"]}
            yield "response.function_call_arguments.done", {**place, **said}
        self._done, self._open = [*self._done, item], None
        yield "response.output_item.done", {"output_index": len(self._done) - 1, "item": item}


def whole_items(name: str, form: CallForm | None, text: str, status: State, logprobs: Any = ()) -> list[dict[str, Any]]:
    """Return the items of a whole answer; the arguments are those of Items."""
    items = Items(name, form)
    items.begin()
    items.push(text, is_last=True)
    list(items.end(status, logprobs))
    return items.so_far(status)
