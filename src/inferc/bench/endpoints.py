"""Whom load is put on: inferc over gRPC, or any server with OpenAI's interface over HTTP."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, get_args
from urllib.parse import urlsplit

from inferc.bench.answers import Answer
from inferc.bench.workload import Prompt
from inferc.client.client import AsyncClient, ServerError, Tls
from inferc.errors import ConfigError, InfercError, RequestError

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


async def connect(target: Target, probe: Prompt | None = None) -> Endpoint:
    """Ask the server what it has, and find out by requests of two tokens what it takes. probe: a prompt of the load, where it
    has no token ids. Raises RequestError or InfercError if it answers none."""
    if target.kind == "grpc":
        return await GrpcEndpoint.connect(target)
    from inferc.bench.http_endpoint import HttpEndpoint

    return await HttpEndpoint.connect(target, probe)


class GrpcEndpoint:
    """inferc over gRPC. Nothing is tried again: a refusal is a result."""

    def __init__(self, client: AsyncClient, facts: ServerFacts, target: Target) -> None:
        self.facts = facts
        self._client = client
        self._sampling: dict[str, Any] = {"temperature": target.temperature, "ignore_eos": target.ignore_eos}
        if target.logprobs:
            self._sampling["logprobs"] = 1
        self._sampling["ttft_ms"], self._sampling["tbt_ms"] = target.objectives

    @staticmethod
    async def connect(target: Target) -> GrpcEndpoint:
        tls = None if target.ca is None else Tls(ca=target.ca)
        client = AsyncClient(
            target.address,
            model=target.model or "",
            timeout=target.timeout,
            retries=0,
            api_key=target.api_key,
            tls=tls,
        )
        try:
            info = await client.model_info()
        except InfercError as error:
            await client.close()
            raise type(error)(*_told(error, f"{target.address} does not answer")) from None
        return GrpcEndpoint(client, ServerFacts(info.model, info.vocab_size, info.max_model_len), target)

    def prepare(self, prompt: Prompt, output_len: int) -> object:
        return prompt, output_len

    async def send(self, prepared: object, answer: Answer) -> None:
        assert isinstance(prepared, tuple)
        prompt, output_len = prepared
        start = time.perf_counter()
        pieces = self._client.generate(prompt, max_tokens=output_len, **self._sampling)
        try:
            async for piece in pieces:
                if piece.token_ids:
                    answer.messages.append((time.perf_counter() - start, len(piece.token_ids)))
                if piece.usage is not None:
                    answer.prompt_tokens, answer.cached_tokens = piece.usage.prompt_tokens, piece.usage.cached_tokens
            answer.end(time.perf_counter() - start)
        except RequestError as error:
            answer.fail("INVALID_ARGUMENT", str(error))
        except ServerError as error:
            answer.fail(error.code, str(error))

    async def close(self) -> None:
        await self._client.close()


def _told(error: InfercError, what: str) -> tuple[str, ...]:
    return (error.code, f"{what}: {error}") if isinstance(error, ServerError) else (f"{what}: {error}",)


def check_lengths(facts: ServerFacts, input_len: int, output_len: int) -> None:
    """Raises RequestError if the model does not take the lengths, as far as it is known."""
    limit = facts.max_model_len
    if input_len < 0 or output_len < 1 or (limit is not None and input_len + output_len > limit):
        raise RequestError(
            f"a prompt of {input_len} tokens and an answer of {output_len}: expected at least 1 of each"
            + (f", and together at most {limit}, what the model takes" if limit is not None else "")
        )
