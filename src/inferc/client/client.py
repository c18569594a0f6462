"""The clients of `inferc serve`: typed, blocking and for asyncio, with streaming and retries.

with Client("127.0.0.1:50051") as client:
    for delta in client.generate("Once upon a time", max_tokens=64):
        sys.stdout.write(delta.text)

async with AsyncClient("127.0.0.1:50051") as client:
    async for delta in client.generate("Once upon a time", max_tokens=64):
        ...
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar, final

import grpc
import grpc.aio
from google.protobuf.message import Message

from inferc.client.messages import (
    SERVICE,
    UNLIMITED,
    Completion,
    Delta,
    Prompt,
    Score,
    ServerError,
    Tls,
    Tries,
    completions,
    delta,
    embed_request,
    error_of,
    generate_request,
    score_request,
    token_ids,
    tokenize_request,
)
from inferc.client.programs import ClientEndpoint
from inferc.errors import RequestError
from inferc.serve.protos.inferc.v1 import inference_pb2 as pb

__all__ = ["SERVICE", "AsyncClient", "Client", "Completion", "Delta", "Prompt", "Score", "ServerError", "Tls"]

RETRIES = 2
Response = TypeVar("Response", bound=Message)


@final
class Client:
    """A blocking connection to one server.

    A prompt is a text, a list of token ids, or a list of chat messages.
    model: which of the server's models every call is for; the first one if it is empty.
    timeout: seconds until a call must have ended, streams and all its tries included; None for no limit.
    retries: how often a call is tried again if the server cannot take it for now, as long as nothing of its answer
    has come. api_key: as `inferc keys create` printed it.

    RequestError is raised for what the server calls the client's fault, ServerError for everything else.
    """

    def __init__(
        self,
        address: str = "127.0.0.1:50051",
        *,
        model: str = "",
        timeout: float | None = None,
        retries: int = RETRIES,
        api_key: str | None = None,
        tls: Tls | None = None,
    ) -> None:
        self.address = address
        self.model = model
        self.timeout = timeout
        self.retries = retries
        self._metadata = _metadata(api_key)
        if tls is None:
            self._channel = grpc.insecure_channel(address, options=UNLIMITED)
        else:
            self._channel = grpc.secure_channel(address, tls.credentials(), options=UNLIMITED)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def wait_until_ready(self, timeout: float = 10.0) -> None:
        """Wait until the server answers; raise ServerError after `timeout` seconds."""
        try:
            grpc.channel_ready_future(self._channel).result(timeout=timeout)
        except grpc.FutureTimeoutError:
            raise ServerError("UNAVAILABLE", f"no server answered at {self.address} within {timeout:g} s") from None

    # ------------------------------------------------------------------------------------------- generating

    def generate(
        self,
        prompt: Prompt,
        *,
        request_id: str = "",
        tap: bool = False,
        prompt_logprobs: int | None = None,
        **sampling: Any,
    ) -> Generator[Delta]:
        """Stream an answer; `sampling` are the fields of inferc.v1.SamplingParams, for example max_tokens=64.

        tap: the server keeps this request's values of the tensors that it was started to tap. prompt_logprobs: the
        first delta has the log probabilities of the prompt's tokens, with so many of the likeliest tokens for each.
        A list of messages may go with tools, tool_choice and parallel_tool_calls, which are OpenAI's, and with
        max_reasoning_tokens, reasoning and chat_template_kwargs, which are those of Chat.

        Closing the iterator, or dropping it, ends the request on the server at once.
        """
        options = {"request_id": request_id, "tap": tap, "prompt_logprobs": prompt_logprobs}
        return self._deltas(generate_request(prompt, self.model, **options, **sampling))

    def _deltas(self, request: pb.GenerateRequest) -> Generator[Delta]:
        tries = Tries(self.retries, self.timeout)
        while True:
            has_begun = False
            call = self._stream("Generate", pb.GenerateResponse)(
                request, timeout=tries.timeout, metadata=self._metadata
            )
            try:
                for message in call:
                    has_begun = True
                    yield delta(message)
                return
            except grpc.RpcError as rpc_error:
                error = error_of(rpc_error)
                pause = None if has_begun else tries.pause(error)
                if pause is None:
                    raise error from None
            finally:
                call.cancel()
            time.sleep(pause)

    def complete(self, prompt: Prompt, **options: Any) -> list[Completion]:
        """Return the whole answer, one Completion for each of the n outputs; the options are those of `generate`."""
        request = generate_request(prompt, self.model, **options)
        return completions(self._call("Complete", request, pb.CompleteResponse))

    def score(self, prompt: Prompt, *, top_logprobs: int = 1, cache_salt: str = "", first: int = 1) -> Score:
        """Return the log probability of each token of a text, with the likeliest tokens at its place.

        first: the first token to score; what the prefix cache has of those before it is not computed again.
        """
        request = score_request(prompt, self.model, top_logprobs, cache_salt, first)
        answer = self._call("Score", request, pb.ScoreResponse)
        return Score(tuple(answer.token_ids), tuple(answer.logprobs))

    def embed(self, inputs: Sequence[str | Sequence[int]], *, dimensions: int | None = None) -> list[list[float]]:
        """Return the embedding of each text or list of token ids.

        The model must make embeddings (model_info().embeds).
        """
        answer = self._call("Embed", embed_request(inputs, self.model, dimensions), pb.EmbedResponse)
        return [list(each.values) for each in answer.embeddings]

    def abort(self, request_id: str) -> bool:
        """End a request that runs elsewhere; return whether it was still running."""
        return bool(self._call("Abort", pb.AbortRequest(request_id=request_id), pb.AbortResponse).aborted)

    def program_endpoint(self) -> ClientEndpoint:
        """Return what `inferc.program` runs on: this connection's model."""
        return ClientEndpoint(self)

    # ----------------------------------------------------------------------------------------- text, models

    def tokenize(
        self, text: str | Sequence[Mapping[str, Any]], *, add_special_tokens: bool = True, **of_chat: Any
    ) -> list[int]:
        """Return the token ids of a text or a conversation, as `generate` would use them.

        of_chat: the fields of TokenizeRequest for a conversation: add_generation_prompt, and num_known and mark for one
        whose first messages have their tokens already.
        """
        request = tokenize_request(text, self.model, add_special_tokens, **of_chat)
        return list(self._call("Tokenize", request, pb.TokenizeResponse).token_ids)

    def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        request = pb.DetokenizeRequest(
            model=self.model, token_ids=token_ids(ids), skip_special_tokens=skip_special_tokens
        )
        return str(self._call("Detokenize", request, pb.DetokenizeResponse).text)

    def token_bytes(self, ids: Sequence[int]) -> bytes:
        """Return the bytes that the tokens stand for, joined; those of a single token may be half a character."""
        request = pb.DetokenizeRequest(model=self.model, token_ids=token_ids(ids))
        return self._call("Detokenize", request, pb.DetokenizeResponse).raw

    def model_info(self) -> pb.GetModelInfoResponse:
        return self._call("GetModelInfo", pb.GetModelInfoRequest(model=self.model), pb.GetModelInfoResponse)

    def loads(self) -> pb.GetLoadsResponse:
        """Return how busy the engine is now."""
        return self._call("GetLoads", pb.GetLoadsRequest(model=self.model), pb.GetLoadsResponse)

    def models(self) -> list[pb.ModelStatus]:
        """Return the server's models: those that are loaded, and those that can be loaded."""
        return list(self._call("ListModels", pb.ListModelsRequest(), pb.ListModelsResponse).models)

    def load_model(self, model: str) -> float:
        """Load a model by its name; return the seconds that it took."""
        return float(self._call("LoadModel", pb.LoadModelRequest(model=model), pb.LoadModelResponse).seconds)

    def unload_model(self, model: str) -> None:
        """Unload a model: let its running requests end, then free its memory."""
        self._call("UnloadModel", pb.UnloadModelRequest(model=model), pb.UnloadModelResponse)

    def load_adapter(self, adapter: str, path: str = "") -> float:
        """Load a LoRA adapter from the server's folder of adapters; return the seconds that it took.

        adapter: the name by which requests name it as their model. path: its folder there, if it has another name.
        """
        request = pb.LoadAdapterRequest(adapter=adapter, path=path, model=self.model)
        return float(self._call("LoadAdapter", request, pb.LoadAdapterResponse).seconds)

    def unload_adapter(self, adapter: str) -> None:
        """Take a LoRA adapter away from new requests; the running ones end with it."""
        request = pb.UnloadAdapterRequest(adapter=adapter, model=self.model)
        self._call("UnloadAdapter", request, pb.UnloadAdapterResponse)

    def sleep_model(self, model: str) -> None:
        """Free a model's memory until its next request."""
        self._call("SleepModel", pb.SleepModelRequest(model=model), pb.SleepModelResponse)

    def wake_model(self, model: str) -> float:
        """Wake a model that sleeps; return the seconds that it took."""
        return float(self._call("WakeModel", pb.WakeModelRequest(model=model), pb.WakeModelResponse).seconds)

    def kv_events(self, start_sequence: int | None = None) -> Iterator[pb.KvEventBatch]:
        """Subscribe to the blocks that the prefix cache stores and evicts.

        The events start with batch `start_sequence`, or now if it is None. The subscription is active when this
        returns; closing the iterator, or dropping it, ends it. ServerError with the code OUT_OF_RANGE means that
        batches were lost: the subscriber must forget what it knows of the server.
        """
        try:
            request = pb.SubscribeKvEventsRequest(model=self.model, start_sequence=start_sequence)
        except (TypeError, ValueError) as error:
            raise RequestError(f"start_sequence: {error}") from None
        call = self._stream("SubscribeKvEvents", pb.KvEventBatch)(
            request, timeout=self.timeout, metadata=self._metadata
        )
        call.initial_metadata()  # waits until the subscription is active
        return _batches(call)

    # ----------------------------------------------------------------------------------------------- inside

    def _stream(self, method: str, response: type[Message]) -> Callable[..., Any]:
        return self._channel.unary_stream(
            f"/{SERVICE}/{method}", request_serializer=_serialize, response_deserializer=response.FromString
        )

    def _call(self, method: str, request: Message, response: type[Response]) -> Response:
        call = self._channel.unary_unary(
            f"/{SERVICE}/{method}", request_serializer=_serialize, response_deserializer=response.FromString
        )
        tries = Tries(self.retries, self.timeout)
        while True:
            try:
                answer: Response = call(request, timeout=tries.timeout, metadata=self._metadata)
                return answer
            except grpc.RpcError as rpc_error:
                error = error_of(rpc_error)
                pause = tries.pause(error)
                if pause is None:
                    raise error from None
            time.sleep(pause)


def _metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    return () if api_key is None else (("authorization", f"Bearer {api_key}"),)


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


def _batches(call: Any) -> Iterator[pb.KvEventBatch]:
    try:
        yield from call
    except grpc.RpcError as error:
        raise error_of(error) from None
    finally:
        call.cancel()


@final
class AsyncClient:
    """A connection to one server for asyncio, with the calls of `Client`; create it where the event loop runs."""

    def __init__(
        self,
        address: str = "127.0.0.1:50051",
        *,
        model: str = "",
        timeout: float | None = None,
        retries: int = RETRIES,
        api_key: str | None = None,
        tls: Tls | None = None,
    ) -> None:
        self.address = address
        self.model = model
        self.timeout = timeout
        self.retries = retries
        self._metadata = _metadata(api_key)
        if tls is None:
            self._channel = grpc.aio.insecure_channel(address, options=UNLIMITED)
        else:
            self._channel = grpc.aio.secure_channel(address, tls.credentials(), options=UNLIMITED)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close(None)

    async def wait_until_ready(self, timeout: float = 10.0) -> None:
        """Wait until the server answers; raise ServerError after `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                await self._channel.channel_ready()
        except TimeoutError:
            raise ServerError("UNAVAILABLE", f"no server answered at {self.address} within {timeout:g} s") from None

    def generate(
        self,
        prompt: Prompt,
        *,
        request_id: str = "",
        tap: bool = False,
        prompt_logprobs: int | None = None,
        **sampling: Any,
    ) -> AsyncIterator[Delta]:
        """Stream an answer, with the options of `Client.generate`.

        Leaving the loop ends the request once the iterator is closed or dropped.
        """
        options = {"request_id": request_id, "tap": tap, "prompt_logprobs": prompt_logprobs}
        return self._deltas(generate_request(prompt, self.model, **options, **sampling))

    async def _deltas(self, request: pb.GenerateRequest) -> AsyncIterator[Delta]:
        tries = Tries(self.retries, self.timeout)
        while True:
            has_begun = False
            call = self._stream("Generate", pb.GenerateResponse)(
                request, timeout=tries.timeout, metadata=self._metadata
            )
            try:
                async for message in call:
                    has_begun = True
                    yield delta(message)
                return
            except grpc.RpcError as rpc_error:
                error = error_of(rpc_error)
                pause = None if has_begun else tries.pause(error)
                if pause is None:
                    raise error from None
            finally:
                call.cancel()
            await asyncio.sleep(pause)

    async def complete(self, prompt: Prompt, **options: Any) -> list[Completion]:
        request = generate_request(prompt, self.model, **options)
        return completions(await self._call("Complete", request, pb.CompleteResponse))

    async def score(self, prompt: Prompt, *, top_logprobs: int = 1, cache_salt: str = "", first: int = 1) -> Score:
        request = score_request(prompt, self.model, top_logprobs, cache_salt, first)
        answer = await self._call("Score", request, pb.ScoreResponse)
        return Score(tuple(answer.token_ids), tuple(answer.logprobs))

    async def embed(self, inputs: Sequence[str | Sequence[int]], *, dimensions: int | None = None) -> list[list[float]]:
        answer = await self._call("Embed", embed_request(inputs, self.model, dimensions), pb.EmbedResponse)
        return [list(each.values) for each in answer.embeddings]

    async def abort(self, request_id: str) -> bool:
        return bool((await self._call("Abort", pb.AbortRequest(request_id=request_id), pb.AbortResponse)).aborted)

    async def tokenize(
        self, text: str | Sequence[Mapping[str, Any]], *, add_special_tokens: bool = True, **of_chat: Any
    ) -> list[int]:
        request = tokenize_request(text, self.model, add_special_tokens, **of_chat)
        return list((await self._call("Tokenize", request, pb.TokenizeResponse)).token_ids)

    async def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        request = pb.DetokenizeRequest(
            model=self.model, token_ids=token_ids(ids), skip_special_tokens=skip_special_tokens
        )
        return str((await self._call("Detokenize", request, pb.DetokenizeResponse)).text)

    async def token_bytes(self, ids: Sequence[int]) -> bytes:
        request = pb.DetokenizeRequest(model=self.model, token_ids=token_ids(ids))
        return (await self._call("Detokenize", request, pb.DetokenizeResponse)).raw

    async def model_info(self) -> pb.GetModelInfoResponse:
        return await self._call("GetModelInfo", pb.GetModelInfoRequest(model=self.model), pb.GetModelInfoResponse)

    async def loads(self) -> pb.GetLoadsResponse:
        return await self._call("GetLoads", pb.GetLoadsRequest(model=self.model), pb.GetLoadsResponse)

    async def models(self) -> list[pb.ModelStatus]:
        return list((await self._call("ListModels", pb.ListModelsRequest(), pb.ListModelsResponse)).models)

    async def load_model(self, model: str) -> float:
        return float((await self._call("LoadModel", pb.LoadModelRequest(model=model), pb.LoadModelResponse)).seconds)

    async def unload_model(self, model: str) -> None:
        await self._call("UnloadModel", pb.UnloadModelRequest(model=model), pb.UnloadModelResponse)

    async def load_adapter(self, adapter: str, path: str = "") -> float:
        request = pb.LoadAdapterRequest(adapter=adapter, path=path, model=self.model)
        return float((await self._call("LoadAdapter", request, pb.LoadAdapterResponse)).seconds)

    async def unload_adapter(self, adapter: str) -> None:
        request = pb.UnloadAdapterRequest(adapter=adapter, model=self.model)
        await self._call("UnloadAdapter", request, pb.UnloadAdapterResponse)

    async def sleep_model(self, model: str) -> None:
        await self._call("SleepModel", pb.SleepModelRequest(model=model), pb.SleepModelResponse)

    async def wake_model(self, model: str) -> float:
        return float((await self._call("WakeModel", pb.WakeModelRequest(model=model), pb.WakeModelResponse)).seconds)

    async def kv_events(self, start_sequence: int | None = None) -> AsyncIterator[pb.KvEventBatch]:
        """Subscribe to the prefix cache's events like `Client.kv_events`.

        Use it as `async for batch in await client.kv_events()`.
        """
        try:
            request = pb.SubscribeKvEventsRequest(model=self.model, start_sequence=start_sequence)
        except (TypeError, ValueError) as error:
            raise RequestError(f"start_sequence: {error}") from None
        call = self._stream("SubscribeKvEvents", pb.KvEventBatch)(
            request, timeout=self.timeout, metadata=self._metadata
        )
        await call.initial_metadata()
        return _async_batches(call)

    def _stream(self, method: str, response: type[Message]) -> Callable[..., Any]:
        return self._channel.unary_stream(
            f"/{SERVICE}/{method}", request_serializer=_serialize, response_deserializer=response.FromString
        )

    async def _call(self, method: str, request: Message, response: type[Response]) -> Response:
        call = self._channel.unary_unary(
            f"/{SERVICE}/{method}", request_serializer=_serialize, response_deserializer=response.FromString
        )
        tries = Tries(self.retries, self.timeout)
        while True:
            try:
                answer: Response = await call(request, timeout=tries.timeout, metadata=self._metadata)
                return answer
            except grpc.RpcError as rpc_error:
                error = error_of(rpc_error)
                pause = tries.pause(error)
                if pause is None:
                    raise error from None
            await asyncio.sleep(pause)


async def _async_batches(call: Any) -> AsyncIterator[pb.KvEventBatch]:
    try:
        async for batch in call:
            yield batch
    except grpc.RpcError as error:
        raise error_of(error) from None
    finally:
        call.cancel()
