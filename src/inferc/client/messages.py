"""The parts that both clients share: building requests, reading answers, errors, and retries."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import grpc

from inferc.client.chats import OF_CHATS, OF_TOOLS, chat_of, offered
from inferc.errors import ConfigError, InfercError, RequestError
from inferc.runtime.step.structured_outputs import StructuredOutputs
from inferc.runtime.tools.tools import Tools
from inferc.serve.protos.inferc.v1 import inference_pb2 as pb

SERVICE = "inferc.v1.InferenceService"
FINISH_REASONS = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_TOOL_CALLS: "tool_calls",
}
EARLY_STOPPING = {
    False: pb.EARLY_STOPPING_FALSE,
    True: pb.EARLY_STOPPING_TRUE,
    "never": pb.EARLY_STOPPING_NEVER,
}
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.2, 5.0

Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Tls:
    """The PEM files for reaching a server over TLS.

    ca: the authorities to trust (None: the system's); cert, key: the client's own certificate and key, where the server
    asks for one.
    """

    ca: str | Path | None = None
    cert: str | Path | None = None
    key: str | Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Return gRPC credentials of the files; raise ConfigError for a file that cannot be read."""
        try:
            files = [None if path is None else Path(path).read_bytes() for path in (self.ca, self.key, self.cert)]
        except OSError as error:
            raise ConfigError(f"{error.filename}: cannot read it: {error.strerror}") from None
        return grpc.ssl_channel_credentials(*files)


class ServerError(InfercError):
    """A failure of the server; `code` is the gRPC status code's name, for example UNAVAILABLE.

    retry_after: seconds until another try is worth while, where the server said so.
    """

    def __init__(self, code: str, message: str, retry_after: float | None = None) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.retry_after = retry_after

    @property
    def may_pass(self) -> bool:
        """True if the same request may succeed soon: the server is starting, or has no room now."""
        return self.code == "UNAVAILABLE" or (self.code == "RESOURCE_EXHAUSTED" and self.retry_after is not None)

    def pause(self, attempt: int) -> float:
        """Return the seconds to wait before the next try: what the server said, else doubled each time.

        A random factor keeps all clients from coming back at once.
        """
        wanted = self.retry_after if self.retry_after is not None else FIRST_PAUSE_SECONDS * 2.0**attempt
        return min(wanted, MAX_PAUSE_SECONDS) * random.uniform(0.8, 1.2)


class Tries:
    """A count of the tries of one call, within its number of retries and its timeout.

    `timeout` is the seconds left for the next try.
    """

    def __init__(self, retries: int, timeout: float | None) -> None:
        self._retries, self._count = retries, 0
        self._end = None if timeout is None else time.monotonic() + timeout

    @property
    def timeout(self) -> float | None:
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def pause(self, error: Exception) -> float | None:
        """Return the seconds to wait before another try.

        None means that it is not worth while, or that there is no time for it.
        """
        if self._count >= self._retries or not isinstance(error, ServerError) or not error.may_pass:
            return None
        pause, left = error.pause(self._count), self.timeout
        self._count += 1
        return None if left is not None and pause >= left else pause


@dataclass(frozen=True)
class Delta:
    """The part of output `index` that came since the delta before it.

    The last delta of an output has a finish_reason. The last delta of all has the usage; the first one has
    prompt_logprobs, if they were asked for.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    logprobs: tuple[pb.TokenLogprobs, ...] = ()
    usage: pb.Usage | None = None
    prompt_logprobs: tuple[pb.TokenLogprobs, ...] = ()
    tool_calls: tuple[pb.ToolCallPart, ...] = ()
    reasoning: str = ""


@dataclass(frozen=True)
class Completion:
    """A whole output of a request; its reasoning and its calls of tools are not in `text`."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[pb.TokenLogprobs, ...] = ()
    tool_calls: tuple[pb.ToolCall, ...] = ()
    reasoning: str = ""


@dataclass(frozen=True)
class Score:
    """The tokens of a text, and for each but the first its log probability, its rank and the likeliest tokens there."""

    token_ids: tuple[int, ...]
    logprobs: tuple[pb.TokenLogprobs, ...]


def delta(message: pb.GenerateResponse) -> Delta:
    return Delta(
        message.index,
        message.text,
        tuple(message.token_ids),
        FINISH_REASONS.get(message.finish_reason),
        tuple(message.logprobs),
        message.usage if message.HasField("usage") else None,
        tuple(message.prompt_logprobs),
        tuple(message.tool_calls),
        message.reasoning,
    )


def completions(answer: pb.CompleteResponse) -> list[Completion]:
    return [
        Completion(
            output.text,
            tuple(output.token_ids),
            FINISH_REASONS.get(output.finish_reason, ""),
            tuple(output.logprobs),
            tuple(output.tool_calls),
            output.reasoning,
        )
        for output in answer.outputs
    ]


def generate_request(prompt: Prompt, model: str, **options: Any) -> pb.GenerateRequest:
    """Build a GenerateRequest; raise RequestError for invalid values.

    options: the request's own fields, those of SamplingParams, those of Chat about reasoning and the template, and
    OpenAI's for the tools that a conversation offers.
    """
    fields = {name: options.pop(name) for name in ("request_id", "tap", "prompt_logprobs") if name in options}
    tools = offered({name: options.pop(name) for name in OF_TOOLS if name in options})
    of_chat = {name: options.pop(name) for name in OF_CHATS if name in options}
    try:
        return pb.GenerateRequest(model=model, sampling=_sampling(options), **fields, **_prompt(prompt, tools, of_chat))
    except (TypeError, ValueError) as error:  # a lone surrogate in the text, or a request_id that is not a string
        raise RequestError(f"the request cannot be sent: {error}") from None


def score_request(prompt: Prompt, model: str, top_logprobs: int, cache_salt: str, first: int = 1) -> pb.ScoreRequest:
    """Build a ScoreRequest; raise RequestError for invalid values."""
    options: dict[str, Any] = {"top_logprobs": top_logprobs, "cache_salt": cache_salt}
    if first != 1:  # servers of before this field score all
        options["first"] = first
    try:
        return pb.ScoreRequest(model=model, **options, **_prompt(prompt))
    except (TypeError, ValueError) as error:
        raise RequestError(f"the request cannot be sent: {error}") from None


def embed_request(inputs: Sequence[str | Sequence[int]], model: str, dimensions: int | None) -> pb.EmbedRequest:
    """Build an EmbedRequest; raise RequestError for invalid values."""
    if isinstance(inputs, str) or not isinstance(inputs, Sequence):
        raise RequestError(f"inputs: expected a list of texts or of lists of token ids, found {inputs!r:.80}")
    made = []
    for number, each in enumerate(inputs):
        if isinstance(each, str):
            made.append(pb.EmbedInput(text=each))
        elif isinstance(each, Sequence) and not isinstance(each, bytes):
            made.append(pb.EmbedInput(token_ids=pb.TokenIds(ids=token_ids(each))))
        else:
            raise RequestError(f"inputs[{number}] is {each!r:.80}; expected a text or a list of token ids")
    try:
        return pb.EmbedRequest(model=model, inputs=made, dimensions=dimensions)
    except (TypeError, ValueError) as error:
        raise RequestError(f"the request cannot be sent: {error}") from None


def tokenize_request(
    prompt: str | Sequence[Mapping[str, Any]], model: str, add_special_tokens: bool, **of_chat: Any
) -> Any:
    """Build a TokenizeRequest; raise RequestError for invalid values."""
    fields = _prompt(prompt)
    if "token_ids" in fields:
        raise RequestError("these are token ids already; give a text or chat messages")
    if of_chat and "text" in fields:
        raise RequestError(f"{', '.join(of_chat)}: of a conversation; give the prompt as a list of chat messages")
    try:
        return pb.TokenizeRequest(model=model, add_special_tokens=add_special_tokens, **of_chat, **fields)
    except (TypeError, ValueError) as error:
        raise RequestError(f"the request cannot be sent: {error}") from None


def _sampling(values: Mapping[str, Any]) -> pb.SamplingParams:
    known = [field.name for field in pb.SamplingParams.DESCRIPTOR.fields]
    for name in values:
        if name not in known:
            raise RequestError(f"unknown sampling parameter {name}; known: {', '.join(known)}")
    said = {name: value for name, value in values.items() if value is not None}
    if isinstance(said.get("stop"), str):  # protobuf would take a string for a list of its characters
        said["stop"] = [said["stop"]]
    given = said.get("structured_outputs")
    if not isinstance(given, pb.StructuredOutputs) and (form := StructuredOutputs.of(given)) is not None:
        names = [field.name for field in pb.StructuredOutputs.DESCRIPTOR.fields]
        said["structured_outputs"] = {name: value for name in names if (value := getattr(form, name)) is not None}
    try:
        if (words := said.get("bad_words_ids")) is not None:
            said["bad_words_ids"] = [pb.TokenIds(ids=word) for word in words]
        if (texts := said.get("dry_sequence_breakers")) is not None:
            said["dry_sequence_breakers"] = pb.Texts(texts=texts)
        if isinstance(beams := said.get("beam_search"), Mapping) and "early_stopping" in beams:
            said["beam_search"] = {**beams, "early_stopping": EARLY_STOPPING[beams["early_stopping"]]}
        return pb.SamplingParams(**said)
    except KeyError as error:
        found = error.args[0]
        raise RequestError(f"beam_search: early_stopping is {found!r:.40}; expected True, False or never") from None
    except (TypeError, ValueError) as error:
        raise RequestError(f"sampling: {error}") from None


def _prompt(prompt: Prompt, tools: Tools | None = None, of_chat: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the request field for a prompt; raise RequestError for what is no prompt."""
    is_chat = not isinstance(prompt, str) and isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping)
    if tools is not None and not is_chat:
        raise RequestError("tools: a conversation offers them; give the prompt as a list of chat messages")
    for name, value in (of_chat or {}).items():
        if value is not None and not is_chat:
            raise RequestError(f"{name}: a chat has it; give the prompt as a list of chat messages")
    if isinstance(prompt, str):
        return {"text": prompt}
    if isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
        raise RequestError(f"a prompt is a text, a list of token ids or a list of chat messages, found {prompt!r:.80}")
    if is_chat:
        return {"chat": chat_of(prompt, tools, of_chat)}
    return {"token_ids": pb.TokenIds(ids=token_ids(prompt))}


def token_ids(values: Sequence[Any]) -> list[int]:
    """Return the token ids as a list; raise RequestError for values that are no token ids."""
    for index, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int):
            raise RequestError(f"token_ids[{index}] is {value!r:.80}; a token id is a whole number")
        if not 0 <= value < 2**31:
            raise RequestError(f"token_ids[{index}] is {value}; a token id is 0 to {2**31 - 1}")
    return list(values)


def error_of(error: grpc.RpcError) -> InfercError:
    """Return RequestError for what the server calls the client's fault, else ServerError."""
    code, details = error.code(), error.details() or "no details"
    if code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND):
        return RequestError(details)
    retry_after = None
    metadata: Any = error.trailing_metadata() or ()  # the type stubs do not type its entries
    for name, value in metadata:
        if name == "retry-after":
            retry_after = _seconds(value)
    return ServerError(code.name, details, retry_after)


def _seconds(value: str | bytes) -> float | None:
    """Parse a number of seconds; return None for anything else, as a proxy may write a date."""
    try:
        seconds = float(value)
    except ValueError:
        return None
    return seconds if 0 <= seconds < math.inf else None
