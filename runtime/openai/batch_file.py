"""The two files of an offline batch in OpenAI's format: requests, and answers in order of completion, one per line.

Neither is ever held in memory: of the requests an index is kept, and of the answers the set of answered requests.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

from inferc.errors import ConfigError, InfercError, shown
from inferc.runtime.openai.request import URLS
from inferc.system.json_text import parse_json
from inferc.system.private_files import open_private
from inferc.system.progress import Progress, silent

REPORT_EVERY = 256  # lines
SURROGATE = re.compile("[\ud800-\udfff]")  # half of a surrogate pair is not a character
# The prefixes that are hashed to sort similar prompts together: the length of the first, the growth factor of the
# length, and the bytes of a digest.
FIRST_LENGTH, GROWTH, DIGEST_BYTES = 32, 1.25, 3


@dataclass(frozen=True, slots=True)
class Line:
    """The place of a request in the file; sorting by `key` puts requests with a common prefix next to each other."""

    number: int
    offset: int
    key: bytes


@dataclass(frozen=True)
class BatchRequest:
    """One line of the input file."""

    number: int
    custom_id: str
    url: str
    body: Mapping[str, Any]


@final
class BatchInput:
    """The file of requests, all of which is checked. Close it when done, or use it as a context manager.

    Raises ConfigError naming the faulty line.
    """

    def __init__(self, path: Path, progress: Progress = silent) -> None:
        self.path = path
        self.lines: list[Line] = []
        if not path.is_file():
            raise ConfigError(f"{path} is {'no file' if path.exists() else 'not there'}; give a file of requests")
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from None
        self._stamp = self._now()
        try:
            self.fingerprint = self._check(progress)
        except BaseException:
            self.close()
            raise
        if not self.lines:
            self.close()
            raise ConfigError(f"{path} holds no requests; expected a JSON object in each line")

    def order(self, keep: bool) -> list[Line]:
        """Return all lines: in file order if `keep`, else with equal prompt prefixes next to each other."""
        return self.lines if keep else sorted(self.lines, key=lambda line: line.key)

    def read(self, line: Line) -> BatchRequest:
        """Return the request of a line. Raises ConfigError if the file has changed since it was checked."""
        if self._now() != self._stamp:
            raise ConfigError(
                f"{self.path} was changed while it was being answered; leave it as it is, and begin again"
            )
        self._file.seek(line.offset)
        return self._parse(line.number, self._file.readline())

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _now(self) -> tuple[int, int]:
        found = os.fstat(self._file.fileno())
        return found.st_size, found.st_mtime_ns

    def _check(self, progress: Progress) -> str:
        """Fill the index, and return the fingerprint of the content."""
        content = hashlib.sha256()
        seen: dict[str, int] = {}
        offset, total = 0, self._stamp[0]
        for number, data in enumerate(self._file, start=1):
            content.update(data)
            if data.strip():
                request = self._parse(number, data)
                before = seen.setdefault(request.custom_id, number)
                if before != number:
                    raise self._wrong(
                        number, f"custom_id is {shown(request.custom_id)}, as in line {before}; give each its own"
                    )
                self.lines.append(Line(number, offset, _key(_beginning(request.body))))
            offset += len(data)
            if number % REPORT_EVERY == 0:
                progress("check", offset, total)
        return content.hexdigest()[:16]

    def _parse(self, number: int, data: bytes) -> BatchRequest:
        try:
            value = parse_json(data.decode("utf-8-sig").rstrip())
        except UnicodeDecodeError as error:
            raise self._wrong(
                number, f"byte {error.start} is 0x{data[error.start]:02x}, which is not UTF-8; convert the file"
            ) from None
        except ValueError as error:
            reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
            raise self._wrong(number, f"no JSON ({reason}); expected one object in each line") from None
        if not isinstance(value, dict):
            raise self._wrong(number, f"found {shown(value)}; expected an object with custom_id, method, url and body")
        custom_id, method, url, body = (value.get(name) for name in ("custom_id", "method", "url", "body"))
        if not isinstance(custom_id, str) or not custom_id or SURROGATE.search(custom_id):
            found = f"{shown(custom_id)}" if "custom_id" in value else "none"
            raise self._wrong(number, f"found custom_id {found}; expected a text of its own for each request")
        if method != "POST":
            raise self._wrong(number, f"method is {shown(method)}; expected 'POST'")
        if url not in URLS:
            raise self._wrong(number, f"url is {shown(url)}; expected one of {', '.join(URLS)}")
        if not isinstance(body, dict):
            raise self._wrong(number, f"body is {shown(body)}; expected an object, the parameters of the request")
        return BatchRequest(number, custom_id, url, body)

    def _wrong(self, number: int, what: str) -> ConfigError:
        return ConfigError(f"{self.path}, line {number}: {what}")


def _beginning(body: Mapping[str, Any]) -> bytes:
    """Return what decides which cached prefixes a request can use, as bytes.

    Two results share a prefix as far as the prompts do.
    """
    prompt = body.get("messages", body.get("prompt"))
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]  # of several prompts, the first one counts
    return json.dumps([body.get("cache_salt"), prompt]).encode()


def _key(text: bytes) -> bytes:
    """Return the hashes of ever longer prefixes of a text: two keys share a prefix as far as their texts do.

    A key is a few hundred bytes at most, however long the text is.
    """
    running, key, start, length = hashlib.blake2b(digest_size=DIGEST_BYTES), b"", 0, float(FIRST_LENGTH)
    while (end := int(length)) <= len(text):
        running.update(text[start:end])
        key += running.digest()
        start, length = end, length * GROWTH
    return key


# ----------------------------------------------------------------------------------------------- answers


@dataclass
class Totals:
    """The totals over all answers so far, including those of earlier runs."""

    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0

    def add(self, response: Mapping[str, Any]) -> None:
        """Count what the `response` of an answer contains."""
        self.requests += 1
        self.failed += response["status_code"] != 200
        usage = response["body"].get("usage") or {}
        self.prompt_tokens += usage.get("prompt_tokens", 0)
        self.output_tokens += usage.get("completion_tokens", 0)
        self.cached_tokens += (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


@final
class BatchOutput:
    """The file of answers, named `OUT.partial` until all are there.

    Each answer has an id made of the input's fingerprint and its line, by which a run finds out what an interrupted run
    has answered. A torn line at the end is dropped. Raises ConfigError, with nothing changed, for an output that
    exists, for the partial output of another input (unless `force`), and while another run writes it.
    """

    def __init__(self, path: Path, fingerprint: str, force: bool = False) -> None:
        self.path = path
        self.partial = path.with_name(f"{path.name}.partial")
        self.answered: set[int] = set()  # the answered lines of the input
        self.models: set[str] = set()  # the names of the models that answered
        self.totals = Totals()
        self._prefix = f"batch_req_{fingerprint}_"
        if path.exists() and not (force and path.is_file()):
            what = "exists; --force replaces it" if path.is_file() else "is no file; give the name of one"
            raise ConfigError(f"{path} {what}")
        try:
            self._file = open(self.partial, "a+b", buffering=0, opener=open_private)  # noqa: SIM115 (closed at the end)
        except OSError as error:
            raise ConfigError(f"cannot write {self.partial}: {error.strerror}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._resume(force)
        except BlockingIOError:
            self._file.close()
            raise ConfigError(f"another run is writing {self.partial}; wait for it, or choose another output") from None
        except BaseException:
            self._file.close()
            raise

    def append(self, request: BatchRequest, request_id: str, status: int, body: Mapping[str, Any]) -> None:
        """Write an answer. Raises InfercError if it cannot be written, for example on a full disk."""
        response = {"status_code": status, "request_id": request_id, "body": body}
        name = f"{self._prefix}{request.number}"
        value = {"id": name, "custom_id": request.custom_id, "response": response, "error": None}
        data = memoryview(json.dumps(value, ensure_ascii=False).encode() + b"\n")
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            raise InfercError(f"cannot write {self.partial}: {error.strerror}") from None
        self.totals.add(response)
        self.answered.add(request.number)

    def finish(self) -> None:
        """Give the file its final name, once all answers are there."""
        try:
            os.fsync(self._file.fileno())
            self.partial.replace(self.path)
        except OSError as error:
            raise InfercError(f"cannot write {self.path}: {error.strerror}; it is all in {self.partial}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.answered:
            self.partial.unlink(missing_ok=True)  # while it is locked; it holds no answer
        self._file.close()

    def _resume(self, force: bool) -> None:
        """Take over what an earlier run has answered."""
        end = 0
        self._file.seek(0)
        for value, size in self._whole_lines():
            found = re.fullmatch(re.escape(self._prefix) + r"(\d+)", str(value.get("id")))
            if found is None or int(found[1]) in self.answered:
                if force:
                    self.answered.clear()
                    self.models.clear()
                    self.totals, end = Totals(), 0
                    break
                raise ConfigError(
                    f"{self.partial} has answers to other requests than these; delete it, or --force begins anew"
                )
            self.answered.add(int(found[1]))
            self.totals.add(value["response"])
            self.models.add(value["response"]["body"].get("model", ""))
            end += size
        self._file.truncate(end)

    def _whole_lines(self) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield each complete line as JSON ({} if it is not JSON) with its number of bytes."""
        with open(os.dup(self._file.fileno()), "rb") as file:
            for data in file:
                if not data.endswith(b"\n"):
                    return
                try:
                    value = parse_json(data)
                except ValueError:
                    value = {}
                yield value if isinstance(value, dict) else {}, len(data)
