"""The checked files of an artifact that concern text: tokenizer, chat template, golden vectors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct

from inferc.errors import ArtifactError
from inferc.manifest_types import read_typed

Type = TypeVar("Type")


class GoldenText(Struct, frozen=True):
    """A text with the ids that the tokenizer gave for it at compile time."""

    text: str
    token_ids: list[int]
    decoded: str | None = None  # the text that the ids decode to


class GoldenChat(Struct, frozen=True):
    """A conversation with what transformers rendered it to."""

    messages: list[dict[str, Any]]
    text: str
    token_ids: list[int]
    add_generation_prompt: bool


class GoldenChats(Struct, frozen=True):
    """The contents of golden_chat.json."""

    vectors: list[GoldenChat] = []
    stop_token_ids: list[int] | None = None
    depends_on_time: bool = False
    form: dict[str, Any] | None = None  # the form in which the chat template reads messages, as ChatForm
    calls: dict[str, Any] | None = None  # the form in which it writes calls of tools, as CallForm
    reasoning: dict[str, Any] | None = None  # the form of its reasoning, as ReasoningForm


@dataclass(frozen=True)
class TextFiles:
    """The files of an artifact that concern text, by name.

    contents: by name within `folder`, which serves only for messages.
    """

    folder: Path
    contents: Mapping[str, bytes] = field(repr=False)

    @staticmethod
    def read(folder: Path) -> TextFiles:
        """Read the files of a folder that has no manifest yet, such as one just compiled. Raises ArtifactError."""
        try:
            return TextFiles(folder, {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()})
        except FileNotFoundError:
            return TextFiles(folder, {})
        except OSError as error:
            raise ArtifactError(f"cannot read {folder}: {error.strerror}") from None

    @property
    def has_tokenizer(self) -> bool:
        return "tokenizer.json" in self.contents

    def text(self, name: str) -> str | None:
        """Return a file's text; None if there is no such file. Raises ArtifactError if it is not UTF-8."""
        if name not in self.contents:
            return None
        try:
            return self.contents[name].decode()
        except UnicodeDecodeError as error:
            raise ArtifactError(f"{self.folder / name} is not UTF-8: {error}; compile the model again") from None

    def json(self, name: str, kind: type[Type]) -> Type | None:
        """Return a JSON file as this type; None if there is no such file. Raises ArtifactError."""
        if name not in self.contents:
            return None
        try:
            return read_typed(self.contents[name], kind)
        except ValueError as error:
            raise ArtifactError(
                f"{self.folder / name} is not JSON of the format: {error}; compile the model again"
            ) from None
