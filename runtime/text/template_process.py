"""The parent's side of a chat template's process, whose questions and answers are JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from inferc.errors import RequestError
from inferc.runtime.text.template_worker import packed
from inferc.system.worker_process import WorkerEnded, WorkerLimits, WorkerProcess

MODULE = "inferc.runtime.text.template_worker"


class TemplateProcess:
    """The connection to a process that renders one template; concurrent calls take turns.

    tokens: variables that every text has. Raises NoProcess if the system cannot start one.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], limits: WorkerLimits) -> None:
        first = packed({"source": source, "tokens": dict(tokens)})
        self._process = WorkerProcess(MODULE, "renders chat templates", first, limits)

    @property
    def pid(self) -> int | None:
        """The id of the process, if there is one."""
        return self._process.pid

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Return the process's answer. Raises RequestError if the template refuses, fails, or exceeds its limits."""
        try:
            data = packed(question)
        except (TypeError, ValueError, RecursionError):
            raise RequestError(
                "messages and variables of a chat template are what JSON has: texts, numbers, lists, objects"
            ) from None
        try:
            answer: dict[str, Any] = json.loads(self._process.ask(data))
        except WorkerEnded as error:
            raise RequestError(f"the model's chat template {error} over these messages") from None
        if "error" in answer:
            raise RequestError(answer["error"])
        return answer

    def close(self) -> None:
        """End the process, so a question in progress fails; the next question starts it again."""
        self._process.close()
