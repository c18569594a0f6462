"""Whom load is put on: inferc over gRPC, or any server with OpenAI's interface over HTTP."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, get_args
from urllib.parse import urlsplit

from inferc.bench.answers import Answer
from inferc.bench.workload import Prompt
from inferc.errors import ConfigError, RequestError

Kind = Literal["grpc", "completions", "chat"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Target:
    """Where a server is, and which of its interfaces is used. address: HOST:PORT of gRPC, else the URL before `/completions`."""

    kind: Kind
    address: str
    model: str | None = None
    api_key: str | None = None
    ca: Path | None = None
    vocab_size: int | None = None  # where the server does not tell
    ignore_eos: bool = True
    temperature: float = 0.0
    logprobs: bool = False  # ask for them: tokens are then sent that are no text
    timeout: float = 600.0
    # TTFT and TBT in milliseconds that requests name; to inferc's gRPC alone.
    objectives: tuple[float | None, float | None] = (None, None)

    @staticmethod
    def address_of(text: str, kind: Kind | None) -> tuple[Kind, str] | None:
        """The interface and address that a URL or HOST:PORT names; None for what is neither. Raises ConfigError."""
        if text.startswith("grpc://") or re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[\w.-]+):\d{1,5}", text):
            if kind in ("completions", "chat"):
                raise ConfigError(f"--endpoint {kind} needs a URL, http://HOST:PORT; {text} is gRPC")
            address = text.removeprefix("grpc://").rstrip("/")
            if not re.fullmatch(r"\S+:\d{1,5}", address):
                raise ConfigError(f"{text}: expected grpc://HOST:PORT")
            return "grpc", address
        if text.startswith(("http://", "https://")):
            if kind == "grpc":
                raise ConfigError(f"--endpoint grpc needs HOST:PORT or grpc://HOST:PORT; {text} is HTTP")
            parts = urlsplit(text)
            if not parts.hostname:
                raise ConfigError(f"{text}: expected http://HOST:PORT")
            path = parts.path.rstrip("/")
            return kind or "completions", f"{parts.scheme}://{parts.netloc}{path or '/v1'}"
        return None


@dataclass
class ServerFacts:
    """What is known of a server. notes: what it did not take, and what was done instead."""

    model: str | None
    vocab_size: int
    max_model_len: int | None = None
    prompts: Literal["token ids", "text"] = "token ids"
    notes: list[str] = field(default_factory=list)


class Endpoint(Protocol):
    facts: ServerFacts

    def prepare(self, prompt: Prompt, output_len: int) -> object:
        """A request as `send` takes it, so that making it takes no time when it is due."""

    async def send(self, prepared: object, answer: Answer) -> None:
        """Send it and note in `answer` what comes. Raises nothing but CancelledError."""

    async def close(self) -> None: ...


def check_lengths(facts: ServerFacts, input_len: int, output_len: int) -> None:
    """Raises RequestError if the model does not take the lengths, as far as it is known."""
    limit = facts.max_model_len
    if input_len < 0 or output_len < 1 or (limit is not None and input_len + output_len > limit):
        raise RequestError(
            f"a prompt of {input_len} tokens and an answer of {output_len}: expected at least 1 of each"
            + (f", and together at most {limit}, what the model takes" if limit is not None else "")
        )
