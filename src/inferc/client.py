"""A client of `inferc serve`: blocking, typed, with streaming.

with Client("127.0.0.1:50051") as client:
    for piece in client.generate("Once upon a time", max_tokens=64):
        sys.stdout.write(piece.text)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, final

import grpc

from inferc.errors import InfercError, RequestError
from inferc.serve.protos.inferc.v1 import inference_pb2 as pb

SERVICE = "inferc.v1.InferenceService"
FINISH_REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


class ServerError(InfercError):
    """The server could not do it; `code` is the gRPC status code's name, for example UNAVAILABLE."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


@dataclass(frozen=True)
class Piece:
    """What came since the piece before it, for output `index`. The last piece of an output has a finish_reason.

    The last one of all has the usage.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    logprobs: tuple[pb.TokenLogprobs, ...] = ()
    usage: pb.Usage | None = None


@dataclass(frozen=True)
class Completion:
    """A whole output."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str


Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


@final
class Client:
    """A connection to one server. A prompt is a text, a list of token ids, or a list of chat messages.

    RequestError is raised for what the server calls the client's fault, ServerError for everything else.
    """

    def __init__(self, address: str = "127.0.0.1:50051", *, timeout: float | None = None) -> None:
        """timeout: seconds until a call must have ended, streams included; None for no limit."""
        self.address = address
        self.timeout = timeout
        unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        self._channel = grpc.insecure_channel(address, options=unlimited)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def wait_until_ready(self, timeout: float = 10.0) -> None:
        """Wait until the server answers; raises ServerError after `timeout` seconds."""
        try:
            grpc.channel_ready_future(self._channel).result(timeout=timeout)
        except grpc.FutureTimeoutError:
            raise ServerError("UNAVAILABLE", f"no server answered at {self.address} within {timeout:g} s") from None

    def generate(self, prompt: Prompt, *, request_id: str = "", tap: bool = False, **sampling: Any) -> Iterator[Piece]:
        """Stream an answer. `sampling` are the fields of inferc.v1.SamplingParams, for example max_tokens=64.

        tap: the server keeps this request's values of what it was started to tap.

        Closing the iterator, or dropping it, ends the request on the server at once.
        """
        try:
            fields = {"request_id": request_id, "tap": tap, "sampling": _sampling(sampling), **_prompt(prompt)}
            request = pb.GenerateRequest(**fields)
        except (TypeError, ValueError) as error:  # half of a surrogate pair, or a request_id that is no text
            raise RequestError(f"the request cannot be sent: {error}") from None
        call = self._stream("Generate", pb.GenerateResponse)(request, timeout=self.timeout)
        try:
            for message in call:
                yield Piece(
                    message.index,
                    message.text,
                    tuple(message.token_ids),
                    FINISH_REASONS.get(message.finish_reason),
                    tuple(message.logprobs),
                    message.usage if message.HasField("usage") else None,
                )
        except grpc.RpcError as error:
            raise _error(error) from None
        finally:
            call.cancel()

    def complete(self, prompt: Prompt, **sampling: Any) -> list[Completion]:
        """As `generate`, but whole: one Completion for each of the n outputs."""
        texts: dict[int, str] = {}
        ids: dict[int, list[int]] = {}
        reasons: dict[int, str] = {}
        for piece in self.generate(prompt, **sampling):
            texts[piece.index] = texts.get(piece.index, "") + piece.text
            ids.setdefault(piece.index, []).extend(piece.token_ids)
            if piece.finish_reason is not None:
                reasons[piece.index] = piece.finish_reason
        return [Completion(texts[index], tuple(ids[index]), reasons[index]) for index in sorted(texts)]

    def abort(self, request_id: str) -> bool:
        """End a request that runs elsewhere; whether it was still running."""
        return bool(self._call("Abort", pb.AbortRequest(request_id=request_id), pb.AbortResponse).aborted)

    def tokenize(self, text: str) -> list[int]:
        return list(self._call("Tokenize", pb.TokenizeRequest(text=text), pb.TokenizeResponse).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        request = pb.DetokenizeRequest(token_ids=_token_ids(token_ids), skip_special_tokens=skip_special_tokens)
        return str(self._call("Detokenize", request, pb.DetokenizeResponse).text)

    def model_info(self) -> pb.GetModelInfoResponse:
        info: pb.GetModelInfoResponse = self._call("GetModelInfo", pb.GetModelInfoRequest(), pb.GetModelInfoResponse)
        return info

    def loads(self) -> pb.GetLoadsResponse:
        """How busy the engine is now."""
        loads: pb.GetLoadsResponse = self._call("GetLoads", pb.GetLoadsRequest(), pb.GetLoadsResponse)
        return loads

    def kv_events(self, start_sequence: int | None = None) -> Iterator[pb.KvEventBatch]:
        """What the prefix cache comes to hold and loses, from batch `start_sequence` on, or from now on.

        The subscription stands when this returns; closing the iterator, or dropping it, ends it. ServerError with the
        code OUT_OF_RANGE means that batches were lost: forget what you know of the server.
        """
        try:
            request = pb.SubscribeKvEventsRequest(start_sequence=start_sequence)
        except (TypeError, ValueError) as error:
            raise RequestError(f"start_sequence: {error}") from None
        call = self._stream("SubscribeKvEvents", pb.KvEventBatch)(request, timeout=self.timeout)
        call.initial_metadata()  # waits
        return _batches(call)

    def _stream(self, method: str, response: Any) -> Callable[..., Any]:
        return self._channel.unary_stream(
            f"/{SERVICE}/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=response.FromString,
        )

    def _call(self, method: str, request: Any, response: Any) -> Any:
        call = self._channel.unary_unary(
            f"/{SERVICE}/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=response.FromString,
        )
        try:
            return call(request, timeout=self.timeout)
        except grpc.RpcError as error:
            raise _error(error) from None


def _batches(call: Any) -> Iterator[pb.KvEventBatch]:
    try:
        yield from call
    except grpc.RpcError as error:
        raise _error(error) from None
    finally:
        call.cancel()


def _sampling(values: Mapping[str, Any]) -> pb.SamplingParams:
    known = [field.name for field in pb.SamplingParams.DESCRIPTOR.fields]
    for name in values:
        if name not in known:
            raise RequestError(f"unknown sampling parameter {name}; known: {', '.join(known)}")
    try:
        return pb.SamplingParams(**{name: value for name, value in values.items() if value is not None})
    except (TypeError, ValueError) as error:
        raise RequestError(f"sampling: {error}") from None


def _prompt(prompt: Prompt) -> dict[str, Any]:
    """The field of GenerateRequest that a prompt is. Raises RequestError for what is none."""
    if isinstance(prompt, str):
        return {"text": prompt}
    if isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
        raise RequestError(f"a prompt is a text, a list of token ids or a list of chat messages, found {prompt!r:.80}")
    if prompt and isinstance(prompt[0], Mapping):
        return {"chat": pb.Chat(messages=[_message(index, part) for index, part in enumerate(prompt)])}
    return {"token_ids": pb.TokenIds(ids=_token_ids(prompt))}


def _token_ids(values: Sequence[Any]) -> list[int]:
    for index, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int):
            raise RequestError(f"token_ids[{index}] is {value!r:.80}; a token id is a whole number")
        if not 0 <= value < 2**31:
            raise RequestError(f"token_ids[{index}] is {value}; a token id is 0 to {2**31 - 1}")
    return list(values)


def _message(index: int, message: Any) -> pb.ChatMessage:
    if not isinstance(message, Mapping):
        raise RequestError(f"message {index} of the chat is {message!r:.80}; it needs a role and a content")
    for name in ("role", "content"):
        if not isinstance(message.get(name), str):
            found = f"{message[name]!r:.80}" if name in message else "none"
            raise RequestError(f"message {index} of the chat needs a {name}, a text; found {found}")
    return pb.ChatMessage(role=message["role"], content=message["content"])


def _error(error: grpc.RpcError) -> InfercError:
    code, details = error.code(), error.details() or "no details"
    if code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND):
        return RequestError(details)
    return ServerError(code.name, details)
