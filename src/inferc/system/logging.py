"""The format of log lines: text for people, or one JSON object per line for log collectors.

Both show the id of the request that is being served.
"""

from __future__ import annotations

import json
import logging
import re
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal, TypeAlias

LogFormat: TypeAlias = Literal["text", "json"]
# The id of the request that is being served, as the client or the server named it; "" outside of a request.
REQUEST_ID: ContextVar[str] = ContextVar("REQUEST_ID", default="")
REQUEST_ID_FORM = re.compile(r"[\w.:+/=@-]{1,128}")  # the form of an id that a client may give
# The fields of a log record that were not given as `extra`.
PLAIN = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime"}


class TextFormatter(logging.Formatter):
    """A formatter of text lines that ends each with the request's id and the `extra` fields.

    process: a name that each line shows.
    """

    def __init__(self, process: str = "") -> None:
        super().__init__(f"%(asctime)s {process + ' ' if process else ''}%(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = _fields(record)
        more = " ".join(f"{name}={value}" for name, value in fields.items())
        return super().formatMessage(record) + (f" [{more}]" if more else "")


class JsonFormatter(logging.Formatter):
    """A formatter that writes one JSON object per line.

    The keys are time (UTC), level, logger, process, message, request_id, exception, and those that were given as
    `extra`.
    """

    def __init__(self, process: str = "") -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
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
    """Log to standard error from now on, instead of where earlier configuration sent log lines."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(process) if kind == "json" else TextFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
