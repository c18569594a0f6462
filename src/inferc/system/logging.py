"""How log lines look: as text for people, or as a JSON object each for what collects them. Both tell a request's id."""

from __future__ import annotations

import json
import logging
import re
from contextvars import ContextVar
from datetime import datetime, timezone
from typing import Any, Literal, TypeAlias

LogFormat: TypeAlias = Literal["text", "json"]
# Of the request that is being served, as the client or the server named it; "" outside of one.
REQUEST_ID: ContextVar[str] = ContextVar("REQUEST_ID", default="")
REQUEST_ID_FORM = re.compile(r"[\w.:+/=@-]{1,128}")  # of a client's
# Fields of a record that are not what somebody gave as `extra`.
PLAIN = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime"}


class TextFormatter(logging.Formatter):
    """As logging has it, with the request's id and what else belongs to it at the end. process: named in each line."""

    def __init__(self, process: str = "") -> None:
        super().__init__(f"%(asctime)s {process + ' ' if process else ''}%(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = _fields(record)
        more = " ".join(f"{name}={value}" for name, value in fields.items())
        return super().formatMessage(record) + (f" [{more}]" if more else "")


class JsonFormatter(logging.Formatter):
    """One object a line: time (UTC), level, logger, process, message, request_id, and what was given as `extra`."""

    def __init__(self, process: str = "") -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._process or "main",
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    given = {name: value for name, value in record.__dict__.items() if name not in PLAIN}
    request_id = REQUEST_ID.get()
    return {"request_id": request_id, **given} if request_id and "request_id" not in given else given


def configure(kind: LogFormat, level: int, process: str = "") -> None:
    """Log to standard error from now on, in place of what was configured before."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(process) if kind == "json" else TextFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
