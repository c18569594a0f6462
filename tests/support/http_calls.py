"""HTTP as it goes over the wire: no client between a test and a server."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

TIMEOUT = 60.0


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """OpenAI's object of an error."""
        found = self.json
        assert set(found) == {"error"} and set(found["error"]) == {"message", "type", "param", "code"}, found
        error: dict[str, Any] = found["error"]
        return error

    @property
    def events(self) -> list[Any]:
        """The objects of a stream, without the mark of its end, which must be there."""
        lines = self.body.decode().split("\n\n")
        assert lines[-1] == "" and lines[-2] == "data: [DONE]", lines[-3:]
        assert all(line.startswith("data: ") for line in lines[:-1])
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def request(
    url: str,
    path: str,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
    method: str | None = None,
    timeout: float = TIMEOUT,
) -> Reply:
    """Send a request over HTTP.

    body: bytes as they are, anything else as JSON; timeout: seconds in which the next of the answer must come.
    """
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=timeout)
    try:
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        sent = {"content-type": "application/json", **(headers or {})}
        connection.request(method or ("GET" if body is None else "POST"), path, data, sent)
        answer = connection.getresponse()
        return Reply(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
    finally:
        connection.close()
