"""The process that renders a chat template, and that may be killed at any time: its questions and answers are JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from inferc.chat.form import Message, find_form
from inferc.errors import RequestError
from inferc.runtime.text.template_sandbox import Sandbox
from inferc.system.worker import Answer, run_worker


def packed(message: Mapping[str, Any]) -> bytes:
    """Return the bytes of a message. Raises TypeError, ValueError or RecursionError for what JSON cannot hold."""
    # Not as ASCII, which would take up to four times the bytes, and of the time in which no other thread runs.
    return json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass")


class _Worker:
    """A template as given in the first message."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        self._source, self._tokens = source, tokens
        self._sandbox: Sandbox | None = None

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a question: the text of a conversation, the template's form, or only whether it can be read."""
        try:
            if question.get("find_form"):
                form = find_form(self._find)
                return {"form": None if form is None else form.to_json()}
            if "values" not in question:
                self._template()
                return {}
            return {"text": self._render(question["values"])}
        except RequestError as error:
            return {"error": str(error)}

    def _find(self, messages: Sequence[Message], goes_on: bool, tools: Sequence[Message] | None) -> str:
        return self._render({"messages": messages, "add_generation_prompt": goes_on, "tools": tools})

    def _render(self, values: Mapping[str, Any]) -> str:
        return self._template().render({**self._tokens, **values})

    def _template(self) -> Sandbox:
        if self._sandbox is None:
            self._sandbox = Sandbox(self._source)
        return self._sandbox


def begin(first: bytes) -> Answer:
    """Take the template, and return what answers questions about it."""
    worker = _Worker(**json.loads(first))
    return lambda question: packed(worker.answer(json.loads(question)))


if __name__ == "__main__":
    sys.exit(run_worker(begin))
