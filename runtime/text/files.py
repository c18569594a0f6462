"""The files of an artifact that text needs, as they were checked: tokenizer, chat template, golden vectors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from msgspec import UNSET, Struct, UnsetType

from inferc.errors import ArtifactError
from inferc.manifest_types import read_typed

Type = TypeVar("Type")


class GoldenText(Struct, frozen=True):
    """A text, and the ids that the tokenizer gave for it when the model was compiled."""

    text: str
    token_ids: list[int]
    decoded: str | None = None  # what the ids are as a text


class GoldenChat(Struct, frozen=True):
    """A conversation, and what transformers made of it."""

    messages: list[dict[str, Any]]
    text: str
    token_ids: list[int]
    add_generation_prompt: bool


class GoldenChats(Struct, frozen=True):
    """golden_chat.json."""

    vectors: list[GoldenChat] = []
    stop_token_ids: list[int] | UnsetType = UNSET
    depends_on_time: bool = False


@dataclass(frozen=True)
class TextFiles:
    """The files of an artifact that text needs, by name.

    contents: by name within `folder`, which is there for messages alone.
    """

    folder: Path
    contents: Mapping[str, bytes] = field(repr=False)

    @staticmethod
    def read(folder: Path) -> TextFiles:
        """Those of a folder that no manifest knows of yet, as a compile has written it. Raises ArtifactError."""
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
        """A file's text; None where there is no such file. Raises ArtifactError for what is no UTF-8."""
        if name not in self.contents:
            return None
        try:
            return self.contents[name].decode()
        except UnicodeDecodeError as error:
            raise ArtifactError(f"{self.folder / name} is not UTF-8: {error}; compile the model again") from None

    def json(self, name: str, kind: type[Type]) -> tuple[Any, Type] | None:
        """A JSON file as parsed, and as of this type; None where there is no such file. Raises ArtifactError."""
        if name not in self.contents:
            return None
        try:
            return read_typed(self.contents[name], kind)
        except ValueError as error:
            raise ArtifactError(
                f"{self.folder / name} is not JSON of the format: {error}; compile the model again"
            ) from None
