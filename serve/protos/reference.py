"""The generator of docs/grpc.md from the comments of the .proto files.

`make protos` writes the page, and a test compares it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

FOLDER = Path(__file__).parent
FILES = ("inferc/v1/inference.proto", "inference/grpc_service.proto")
FIELD = re.compile(r"((?:repeated |optional )?(?:map<[^>]+>|[\w.]+)) (\w+) = (\d+);")
VALUE = re.compile(r"(\w+) = (\d+);")
METHOD = re.compile(r"rpc (\w+)\((stream )?(\w+)\) returns \((stream )?(\w+)\);")


@dataclass
class Line:
    """A statement of a .proto file, the comment above it, and its depth in braces."""

    text: str
    comment: str
    depth: int


@dataclass
class Block:
    """A service, a message or an enum of a .proto file.

    rows: its statements. within: the message in which it is declared, or "".
    """

    kind: str
    name: str
    comment: str
    within: str = ""
    rows: list[Line] = field(default_factory=list)


def reference() -> str:
    """Return the whole page."""
    parts = [
        "# gRPC reference",
        (
            "Made from the `.proto` files by `make protos`; what is said here is said there. [api.md](api.md) has the"
            " rest."
        ),
    ]
    for name in FILES:
        parts += _file(name)
    return "\n\n".join(parts) + "\n"


def _file(name: str) -> list[str]:
    text = (FOLDER / name).read_text()
    head, _, body = text.partition("syntax =")
    package = re.search(r"^package ([\w.]+);", body, re.MULTILINE)
    assert package is not None, f"{name} has no package"
    blocks = list(_blocks(body))
    parts = [f"## {package[1]}", f"`serve/protos/{name}`", _text([line.strip() for line in head.splitlines()])]
    for block in blocks:
        parts += _service(package[1], block) if block.kind == "service" else _message(block)
    return [part for part in parts if part]


def _blocks(body: str) -> Iterator[Block]:
    current: Block | None = None
    inner: Block | None = None
    for line in _lines(body):
        opened = re.fullmatch(r"(service|message|enum) (\w+) \{(\})?", line.text)
        if line.depth <= 1:
            inner = None
        if line.depth == 0 and opened is not None:
            current = Block(opened[1], opened[2], line.comment)
            yield current
        elif line.depth == 1 and opened is not None and current is not None:
            inner = Block(opened[1], opened[2], line.comment, current.name)
            yield inner
        elif inner is not None:
            inner.rows.append(replace(line, depth=line.depth - 1))
        elif current is not None and line.depth > 0:
            current.rows.append(line)


def _lines(body: str) -> Iterator[Line]:
    comment: list[str] = []
    depth = 0
    for raw in body.splitlines():
        line = raw.strip()
        if line.startswith("//"):
            comment.append(line)
            continue
        if line and line != "}":
            yield Line(line, _text(comment), depth)
        comment = []
        depth += line.count("{") - line.count("}")


def _text(comment: list[str]) -> str:
    """Join a comment's lines into paragraphs; from the first indented line on, they stay as they are."""
    lines = [line.removeprefix("//").removeprefix(" ") for line in comment]
    start = next((index for index, line in enumerate(lines) if line.startswith("  ")), len(lines))
    paragraphs = "\n".join(lines[:start]).split("\n\n")
    text = "\n\n".join(paragraph.replace("\n", " ").strip() for paragraph in paragraphs)
    return text if start == len(lines) else f"{text}\n\n```text\n" + "\n".join(lines[start:]) + "\n```"


def _service(package: str, block: Block) -> list[str]:
    parts = [f"### service {package}.{block.name}", block.comment]
    rows = ["| method | takes | gives | |", "| --- | --- | --- | --- |"]
    for line in block.rows:
        found = METHOD.fullmatch(line.text)
        assert found is not None, f"not a method: {line.text}"
        name, takes_stream, takes, gives_stream, gives = found.groups()
        kinds = [
            f"{'stream of ' if stream else ''}{_link(kind)}"
            for stream, kind in ((takes_stream, takes), (gives_stream, gives))
        ]
        rows.append(f"| `{name}` | {kinds[0]} | {kinds[1]} | {line.comment} |")
    return [*parts, "\n".join(rows)]


def _message(block: Block) -> list[str]:
    parts = [f"### {block.name}", f"Declared in {_link(block.within)}." if block.within else "", block.comment]
    rows: list[str] = []
    inside: dict[int, str] = {}
    for line in block.rows:
        opened = re.fullmatch(r"oneof (\w+) \{", line.text)
        if opened is not None:
            inside[line.depth + 1] = opened[1]
            if line.comment:
                parts.append(f"`{opened[1]}`: {line.comment}")
            continue
        within = f"{inside[line.depth]}." if line.depth in inside and line.depth > 1 else ""
        if (found := FIELD.fullmatch(line.text)) is not None:
            rows.append(f"| {found[3]} | `{within}{found[2]}` | {_type(found[1])} | {line.comment} |")
        elif (found := VALUE.fullmatch(line.text)) is not None:
            rows.append(f"| {found[2]} | `{found[1]}` | | {line.comment} |")
        else:
            raise AssertionError(f"neither field nor value: {line.text}")
    if rows:
        parts.append("\n".join(["| | name | type | |", "| --- | --- | --- | --- |", *rows]))
    return parts


def _type(kind: str) -> str:
    if kind.startswith("map<"):
        return f"`{kind}`"
    prefix, _, name = kind.rpartition(" ")
    shown = _link(name) if re.fullmatch(r"[A-Z]\w+", name) else f"`{name}`"
    return f"{prefix} {shown}".strip()


def _link(name: str) -> str:
    return f"[{name}](#{name.lower()})"


if __name__ == "__main__":
    sys.stdout.write(reference())
