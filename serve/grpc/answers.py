"""Answers of gRPC calls as bytes: those of many entries are made and serialized beside the event loop, in parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias, TypeVar

from google.protobuf.message import Message

from inferc.serve.models.long_texts import in_text_thread

MANY_ENTRIES = 1 << 12  # numbers and messages of an answer: some milliseconds
ENTRIES_OF_PART = 1 << 16  # what a call into protobuf takes at once, while all other threads wait for it

Answer: TypeAlias = Message | bytes  # bytes: serialized already
Entry = TypeVar("Entry")


def as_bytes(answer: Answer) -> bytes:
    return answer if isinstance(answer, bytes) else answer.SerializeToString()


async def joined(parts: Iterable[Message], num_entries: int) -> bytes:
    """One answer of messages of its kind, each made as it is asked for: their bytes, one behind the other, are the bytes of all
    their fields together.

    num_entries: in all of them, about.

    Source: protobuf.dev/programming-guides/encoding, "Last one wins".
    """

    def made() -> bytes:
        return b"".join(part.SerializeToString() for part in parts)

    return made() if num_entries <= MANY_ENTRIES else await in_text_thread(made)


def pieces(entries: Sequence[Entry], size: int = 1) -> Iterator[Sequence[Entry]]:
    """All entries in their order, as many at a time as a part takes. size: what each of them counts for."""
    at_once = max(1, ENTRIES_OF_PART // size)
    return (entries[at : at + at_once] for at in range(0, len(entries), at_once))
