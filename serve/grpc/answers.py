"""The serialization of gRPC answers, in parts and on a thread if they have many entries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias, TypeVar

from google.protobuf.message import Message

from inferc.serve.models.long_texts import in_text_thread

# Numbers and messages of an answer that are serialized on the event loop, in some milliseconds.
MANY_ENTRIES = 1 << 12
# Numbers and messages that one call into protobuf serializes while it blocks all other threads.
ENTRIES_OF_PART = 1 << 16

Answer: TypeAlias = Message | bytes  # bytes: an answer that is already serialized
Entry = TypeVar("Entry")


def as_bytes(answer: Answer) -> bytes:
    return answer if isinstance(answer, bytes) else answer.SerializeToString()


async def joined(parts: Iterable[Message], num_entries: int) -> bytes:
    """Serialize an answer that is given as parts, which are messages of the same type and are made on demand.

    The concatenated bytes of the parts are a message that has the fields of all of them.
    num_entries: about how many entries all parts have together.

    Source: protobuf.dev/programming-guides/encoding, "Last one wins".
    """

    def made() -> bytes:
        return b"".join(part.SerializeToString() for part in parts)

    return made() if num_entries <= MANY_ENTRIES else await in_text_thread(made)


def slices(entries: Sequence[Entry], size: int = 1) -> Iterator[Sequence[Entry]]:
    """Yield all entries in order, in slices as long as one part may be; size: entries that each of them counts for."""
    at_once = max(1, ENTRIES_OF_PART // size)
    return (entries[at : at + at_once] for at in range(0, len(entries), at_once))
