"""The check of a gRPC request's bytes before they are parsed into objects.

A message of 32 MiB can hold 16 million empty messages of two bytes, which would take gigabytes as objects. So the
fields are counted first, from the wire format alone. This also finds fields that this server's .proto does not have.

Source: protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeVar

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from inferc.errors import RequestError
from inferc.serve.models.long_texts import Turns

MAX_FIELDS = 1 << 15  # fields at all depths together: a call for 2,048 vectors from token ids has 6,144
MAX_NUMBERS = 1 << 21  # numbers of all lists together: more than in any prompt, and as many as in a body over HTTP
COUNTED_AT_ONCE = 1 << 20  # bytes counted in one call, which fit into a CPU cache
LARGE_BYTES = 16 << 10  # size from which a message is parsed on a thread: it may have 8,192 fields
VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
SIZES = {FIXED64: 8, FIXED32: 4}

# Large messages are parsed one at a time: several busy threads would compete for the GIL, and delay the event loop.
_LARGE = Turns("their messages to be read")
Parsed = TypeVar("Parsed", bound=Message)


@dataclass(frozen=True)
class _Field:
    """A field of a message type as the wire format has it.

    wire: the wire type of one value. packed: many values may come as one length-delimited field.
    """

    name: str
    wire: int
    packed: bool
    inner: Descriptor | None


async def read(kind: type[Parsed], data: bytes) -> Parsed:
    """Parse a message as `parse` does, on a thread if it is large."""
    return parse(kind, data) if len(data) < LARGE_BYTES else await _LARGE.run(partial(parse, kind, data))


def parse(kind: type[Parsed], data: bytes) -> Parsed:
    """Parse a request from bytes that anybody may have sent.

    Raises RequestError for bytes that are no such message, for more fields than any request needs, and for a field,
    at any depth, that this server's .proto does not have. proto3 would silently ignore unknown fields, but a client
    that asks for a feature must not get an answer without it.
    """
    descriptor: Any = kind.DESCRIPTOR
    try:
        _check(descriptor, data)
        return kind.FromString(data)
    except (DecodeError, IndexError) as error:
        raise RequestError(f"the bytes are no {descriptor.full_name}: {error}") from None


def _check(descriptor: Descriptor, data: bytes) -> None:
    """Check the fields of a message; raise IndexError if the bytes end too early, RequestError for what is refused."""
    kind = descriptor.name
    waiting, count = [(descriptor, descriptor.name, 0, len(data))], 0
    lists: list[tuple[int, int, int]] = []  # packed lists of numbers: wire type, start, bytes
    while waiting:
        descriptor, path, at, end = waiting.pop()
        known = _fields(descriptor)
        while at < end:
            count += 1
            if count > MAX_FIELDS:
                raise RequestError(f"{path} has more fields than are taken, {MAX_FIELDS}; send less in one request")
            tag, at = _varint(data, at, end)
            field = known.get(tag >> 3)
            wire = tag & 7
            if field is None or not (wire == field.wire or (wire == LENGTH and field.packed)):
                raise _unknown(path, tag >> 3)
            if wire == VARINT:
                _, at = _varint(data, at, end)
            elif wire == LENGTH:
                size, at = _varint(data, at, end)
                if at + size > end:
                    raise IndexError("they end within a field")
                if field.inner is not None:
                    waiting.append((field.inner, f"{path}.{field.name}", at, at + size))
                elif field.packed:
                    lists.append((field.wire, at, size))
                at += size
            else:
                at += SIZES[wire]
    if sum(size for _, _, size in lists) > MAX_NUMBERS:  # a number has one byte at least
        numbers = sum(_count_numbers(data, *each) for each in lists)
        if numbers > MAX_NUMBERS:
            raise RequestError(
                f"{kind} has {numbers} numbers in lists, and {MAX_NUMBERS} are taken; send less in one request"
            )


def _unknown(path: str, number: int) -> RequestError:
    return RequestError(
        f"{path} has field number {number}, which this server does not know;"
        " leave it out, or use a server of the version that your .proto is from"
    )


def _count_numbers(data: bytes, wire: int, at: int, size: int) -> int:
    if wire != VARINT:
        return size // SIZES[wire]
    view = np.frombuffer(data, np.uint8, size, at)  # a varint ends in a byte whose highest bit is 0
    parts = (view[start : start + COUNTED_AT_ONCE] for start in range(0, size, COUNTED_AT_ONCE))
    return sum(int(np.count_nonzero(part < 0x80)) for part in parts)


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Read a varint, and return it with the position after it."""
    value = shift = 0
    while True:
        if at >= end:
            raise IndexError("they end within a number")
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise IndexError("a number has more than ten bytes")


@cache
def _fields(descriptor: Descriptor) -> Mapping[int, _Field]:
    return {field.number: _field(field) for field in descriptor.fields}


def _field(field: Any) -> _Field:
    kinds = FieldDescriptor
    if field.type in (kinds.TYPE_STRING, kinds.TYPE_BYTES, kinds.TYPE_MESSAGE):
        return _Field(field.name, LENGTH, packed=False, inner=field.message_type)
    wire = VARINT
    if field.type in (kinds.TYPE_DOUBLE, kinds.TYPE_FIXED64, kinds.TYPE_SFIXED64):
        wire = FIXED64
    elif field.type in (kinds.TYPE_FLOAT, kinds.TYPE_FIXED32, kinds.TYPE_SFIXED32):
        wire = FIXED32
    return _Field(field.name, wire, packed=field.is_repeated, inner=None)
