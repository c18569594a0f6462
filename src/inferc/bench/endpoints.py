"""The servers that load can be sent to: inferc over gRPC, or any server with OpenAI's interface over HTTP."""

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
    """The address of a server, the interface of it that is used, and the options of every request to it.

    address: HOST:PORT for gRPC; for HTTP the URL without the final `/completions`.
    """

    kind: Kind
    address: str
    model: str | None = None
    api_key: str | None = None
    ca: Path | None = None
    vocab_size: int | None = None  # vocabulary size, for servers that do not report it
    ignore_eos: bool = True
    temperature: float = 0.0
    logprobs: bool = False  # ask for logprobs: the server then also sends tokens that do not form text yet
    timeout: float = 600.0
    # Objectives for TTFT and TBT in milliseconds that each request carries. Only inferc's gRPC interface takes them.
    objectives: tuple[float | None, float | None] = (None, None)

    @staticmethod
    def address_of(text: str, kind: Kind | None) -> tuple[Kind, str] | None:
        """Return the interface and address that a URL or HOST:PORT names, None for other texts. Raises ConfigError."""
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
    """The facts that a server reports about itself or that trial requests revealed.

    notes: request fields that the server did not accept, and what was done instead.
    """

    model: str | None
    vocab_size: int
    max_model_len: int | None = None
    prompts: Literal["token ids", "text"] = "token ids"
    notes: list[str] = field(default_factory=list)


class Endpoint(Protocol):
    facts: ServerFacts

    def prepare(self, prompt: Prompt, output_len: int) -> object:
        """Build a request for `send` ahead of time, so that building it takes no time when the request is due."""

    async def send(self, prepared: object, answer: Answer) -> None:
        """Send a prepared request and record in `answer` what arrives. Raises nothing but CancelledError."""

    async def close(self) -> None: ...


def check_lengths(facts: ServerFacts, input_len: int, output_len: int) -> None:
    """Raise RequestError if the model cannot take these lengths, as far as its limit is known."""
    limit = facts.max_model_len
    if input_len < 0 or output_len < 1 or (limit is not None and input_len + output_len > limit):
        raise RequestError(
            f"a prompt of {input_len} tokens and an answer of {output_len}: expected at least 1 of each"
            + (f", and together at most {limit}, what the model takes" if limit is not None else "")
        )
