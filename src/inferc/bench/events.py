"""The parser of server-sent events of OpenAI's interface, which counts how many tokens arrived at which time.

Each read of the connection costs only a few microseconds, because the load generator often runs on the machine that it
measures.
"""

from __future__ import annotations

import msgspec

from inferc.bench.answers import CountedBy, shared_out

DONE = b"[DONE]"


class Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Choice(msgspec.Struct):
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    @property
    def has_text(self) -> bool:
        delta = self.delta
        return bool(self.text or (delta and (delta.content or delta.reasoning_content or delta.reasoning)))


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None


class Chunk(msgspec.Struct):
    choices: list[Choice] = []
    usage: Usage | None = None
    error: msgspec.Raw | None = None


class StreamError(Exception):
    """An error that the server reported within the stream, or data that is not a valid chunk."""


class Events:
    """A splitter of a byte stream into the data of its events; reads may begin and end anywhere within an event."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, part: bytes) -> list[bytes]:
        """Return the data of the events that end in this part of the stream."""
        lines = (self._rest + part).split(b"\n")
        self._rest = lines.pop()
        found = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                found.append(b"\n".join(self._data))
                self._data.clear()
        return found

    def close(self) -> list[bytes]:
        """Return the data of the last event at the end of the stream, even if the empty line after it is missing."""
        return self.feed(b"\n\n") if self._rest or self._data else []


class TokenCounter:
    """A counter of the tokens of one stream, with the time at which each chunk arrived."""

    def __init__(self) -> None:
        self.is_done = False  # set by a finish reason or by the `[DONE]` event
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self._events = Events()
        self._decode = msgspec.json.Decoder(Chunk).decode
        self._reads: list[tuple[float, int, int]] = []  # time, chunks with text, total tokens so far
        self._total: int | None = None
        self._ended_at = 0.0
        self._is_told: bool | None = None  # whether each chunk reports the number of tokens so far

    def feed(self, part: bytes, now: float) -> None:
        """Take the bytes that were read at time `now`. Raises StreamError for an error event or an invalid chunk."""
        self._take(self._events.feed(part), now)

    def close(self, now: float) -> None:
        self._take(self._events.close(), now)
        self._ended_at = now

    def _take(self, events: list[bytes], now: float) -> None:
        chunks = 0
        try:
            for data in events:
                chunks += self._chunk(data)
        finally:  # record the chunks before an error too
            if chunks or self._is_told:
                self._reads.append((now, chunks, self._total or 0))

    def _chunk(self, data: bytes) -> int:
        """Take one event and return how many of its choices have text."""
        if data == DONE:
            self.is_done = True
            return 0
        try:
            chunk = self._decode(data)
        except msgspec.DecodeError:  # raised for a field of the wrong type too
            raise StreamError(f"not a chunk: {data[:120].decode(errors='replace')}") from None
        if chunk.error is not None and bytes(chunk.error) != b"null":
            raise StreamError(bytes(chunk.error)[:300].decode(errors="replace"))
        count = sum(choice.has_text for choice in chunk.choices)
        is_last = any(choice.finish_reason is not None for choice in chunk.choices)
        tokens = None if chunk.usage is None else chunk.usage.completion_tokens
        # The first chunk that holds more than the role shows whether all chunks report token counts. Its token may have
        # no text yet, for example half of a character.
        if self._is_told is None and (count or is_last or (chunk.choices and tokens)):
            self._is_told = tokens is not None
        self.is_done = self.is_done or is_last
        if chunk.usage is not None:
            self._note(chunk.usage)
        return count

    def _note(self, usage: Usage) -> None:
        self._total = self._total if usage.completion_tokens is None else usage.completion_tokens
        if usage.prompt_tokens is not None:
            self.prompt_tokens = usage.prompt_tokens
        if usage.prompt_tokens_details is not None:
            self.cached_tokens = usage.prompt_tokens_details.cached_tokens

    def messages(self) -> tuple[list[tuple[float, int]], CountedBy]:
        """Return when tokens arrived and how many, and how the counts are known."""
        if self._is_told:
            found, before = [], 0
            for when, _, total in self._reads:
                if total > before:
                    found.append((when, total - before))
                    before = total
            return found, "told"
        whens = [when for when, chunks, _ in self._reads for _ in range(chunks)] or self._at_the_end()
        if not whens:
            return [], "chunks"
        counted: CountedBy = "chunks" if not self._total else "told" if self._total == len(whens) else "shared"
        merged: dict[float, int] = {}
        for when, count in zip(whens, shared_out(self._total or len(whens), len(whens)), strict=True):
            merged[when] = merged.get(when, 0) + count
        return [(when, count) for when, count in merged.items() if count], counted

    def _at_the_end(self) -> list[float]:
        """Return the time for tokens that no chunk showed: the end of the stream, if the server counted any tokens."""
        return [self._ended_at] if self._total else []
