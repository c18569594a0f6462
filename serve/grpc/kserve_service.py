"""The Open Inference Protocol with Triton's extensions (inference/grpc_service.proto) for models that generate text."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from inferc.errors import InfercError, RequestError, shown
from inferc.runtime.openai.request import MAX_PROMPTS, OpenAIRequest, logit_bias_of
from inferc.runtime.step.sampling_params import SamplingParams, from_request
from inferc.serve.answering.answering import Answering
from inferc.serve.errors import NotServed
from inferc.serve.grpc import protocol
from inferc.serve.grpc.answers import Answer, joined
from inferc.serve.grpc.inference_service import engine_stats, reason_of
from inferc.serve.models.models import ModelEntry, Models
from inferc.serve.models.queue_forecast import ARRIVED_AT
from inferc.serve.models.served_model import ServedModel
from inferc.serve.models.tasks import deadline
from inferc.serve.protos.inference import grpc_service_pb2 as pb
from inferc.serve.security.access import CALLER
from inferc.serve.statuses import to_client_error
from inferc.system.json_text import parse_json
from inferc.version import __version__

VERSION = "1"
PLATFORM = "inferc"
EXTENSIONS = ("model_repository", "statistics", "model_configuration", "schedule_policy")
# Each input tensor: its name, the protocol's datatype, the type in a model's config, its shape, and whether it is
# optional.
INPUTS = (
    ("text_input", "BYTES", pb.TYPE_STRING, (-1,), True),
    ("input_ids", "INT32", pb.TYPE_INT32, (-1,), True),
    ("stream", "BOOL", pb.TYPE_BOOL, (1,), True),
    ("sampling_parameters", "BYTES", pb.TYPE_STRING, (1,), True),
    ("exclude_input_in_output", "BOOL", pb.TYPE_BOOL, (1,), True),
)
OUTPUTS = (
    ("text_output", "BYTES", pb.TYPE_STRING, (-1,)),
    ("output_ids", "INT32", pb.TYPE_INT32, (-1,)),
    ("finish_reason", "BYTES", pb.TYPE_STRING, (-1,)),
    ("num_input_tokens", "INT32", pb.TYPE_INT32, (-1,)),
    ("num_output_tokens", "INT32", pb.TYPE_INT32, (-1,)),
)
DTYPES = {"BOOL": "?", "INT32": "<i4", "INT64": "<i8", "UINT32": "<u4", "UINT64": "<u8"}
CONTENTS = {"BOOL": "bool", "INT32": "int", "INT64": "int64", "UINT32": "uint", "UINT64": "uint64", "BYTES": "bytes"}
# Request parameters that are no sampling parameters: Triton's clients send them for Triton's own queue.
TRITONS = ("sequence_id", "sequence_start", "sequence_end", "binary_data_output", "triton_enable_empty_final_response")
MAX_AT_ONCE = 1024  # requests of one stream that run at the same time
MAX_AXES = 8
MAX_SAMPLING_BYTES = 256 << 10  # size of the JSON, which is parsed while all other tasks wait
STATES = {"serving": "READY", "asleep": "READY", "loading": "LOADING", "starting": "LOADING", "unloading": "UNLOADING"}


@dataclass(frozen=True)
class _CheckedRequest:
    """The content of a ModelInferRequest, checked."""

    id: str
    model: ServedModel
    prompts: Sequence[str | list[int]]
    params: SamplingParams
    streams: bool
    echoes: bool  # the answer's text begins with the prompt
    outputs: tuple[str, ...]
    timeout: float | None  # seconds
    marks_end: bool  # the stream ends with an empty response that is marked as the last


@dataclass(frozen=True)
class _Answer:
    """The complete answer to one prompt, or its next part; num_output_tokens: number of its tokens so far."""

    num_input_tokens: int
    text: str
    token_ids: Sequence[int]
    finish_reason: str
    num_output_tokens: int


class KServeService:
    """The implementation of the service: one method for each RPC; errors become the statuses of statuses.py."""

    def __init__(self, models: Models) -> None:
        self.models = models

    # ------------------------------------------------------------------------------------ server and models

    async def server_live(self, request: pb.ServerLiveRequest) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def server_ready(self, request: pb.ServerReadyRequest) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self.models.is_serving)

    async def model_ready(self, request: pb.ModelReadyRequest) -> pb.ModelReadyResponse:
        try:
            model = self._model(request.name, request.version)
        except InfercError:
            return pb.ModelReadyResponse(ready=False)
        return pb.ModelReadyResponse(ready=model.is_ready)

    async def server_metadata(self, request: pb.ServerMetadataRequest) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(name="inferc", version=__version__, extensions=EXTENSIONS)

    async def model_metadata(self, request: pb.ModelMetadataRequest) -> pb.ModelMetadataResponse:
        model = self._model(request.name, request.version)
        tensor = pb.ModelMetadataResponse.TensorMetadata
        return pb.ModelMetadataResponse(
            name=model.name,
            versions=[VERSION],
            platform=PLATFORM,
            inputs=[tensor(name=name, datatype=kind, shape=shape) for name, kind, _, shape, _ in INPUTS],
            outputs=[tensor(name=name, datatype=kind, shape=shape) for name, kind, _, shape in OUTPUTS],
        )

    async def model_config(self, request: pb.ModelConfigRequest) -> pb.ModelConfigResponse:
        model = self._model(request.name, request.version)
        return pb.ModelConfigResponse(
            config=pb.ModelConfig(
                name=model.name,
                platform=PLATFORM,
                backend=PLATFORM,
                max_batch_size=0,  # 0: the shapes are complete, without a batch axis before them
                input=[
                    pb.ModelInput(name=name, data_type=kind, dims=shape, optional=optional)
                    for name, _, kind, shape, optional in INPUTS
                ],
                output=[pb.ModelOutput(name=name, data_type=kind, dims=shape) for name, _, kind, shape in OUTPUTS],
                model_transaction_policy=pb.ModelTransactionPolicy(decoupled=True),
            )
        )

    async def model_statistics(self, request: pb.ModelStatisticsRequest) -> pb.ModelStatisticsResponse:
        models = [self._model(request.name, request.version)] if request.name else self.models.served
        return pb.ModelStatisticsResponse(model_stats=[await self._statistics(model) for model in models])

    async def repository_index(self, request: pb.RepositoryIndexRequest) -> pb.RepositoryIndexResponse:
        self._check_repository(request.repository_name)
        entries = [
            pb.RepositoryIndexResponse.ModelIndex(
                name=name, version=VERSION, state=STATES.get(entry.state, "UNAVAILABLE"), reason=_reason(entry)
            )
            for entry in self.models.entries()
            for name in (entry.name, *entry.adapters)  # an adapter answers under its own name
        ]
        return pb.RepositoryIndexResponse(
            models=[entry for entry in entries if entry.state == "READY" or not request.ready]
        )

    async def repository_model_load(self, request: pb.RepositoryModelLoadRequest) -> pb.RepositoryModelLoadResponse:
        self._check_repository(request.repository_name)
        if request.parameters:
            listed = ", ".join(sorted(request.parameters))[:150]
            raise RequestError(f"parameters {listed}: a model is loaded as it was compiled; leave them out")
        await self.models.load(request.model_name)
        return pb.RepositoryModelLoadResponse()

    async def repository_model_unload(
        self, request: pb.RepositoryModelUnloadRequest
    ) -> pb.RepositoryModelUnloadResponse:
        self._check_repository(request.repository_name)
        if others := sorted(
            set(request.parameters) - {"unload_dependents"}
        ):  # accepted without effect: no model has dependents
            raise RequestError(f"parameters {', '.join(others):.150} are unknown; leave them out")
        await self.models.unload(request.model_name)
        return pb.RepositoryModelUnloadResponse()

    def _check_repository(self, name: str) -> None:
        if name:
            raise RequestError(f"repository_name is {shown(name)}: models are known by their own names; leave it out")

    def _model(self, name: str, version: str) -> ServedModel:
        if version not in ("", VERSION):
            raise NotServed(
                f"model {shown(name, 150)} has no version {shown(version, 50)}; its only one is {VERSION!r}"
            )
        return self.models.get(name)

    async def _statistics(self, model: ServedModel) -> pb.ModelStatistics:
        metrics, stats = model.engine.metrics, await engine_stats(model)
        whole, first = metrics.e2e, metrics.ttft
        of_first = (
            first.sum / first.count * whole.count if first.count else 0.0
        )  # estimated time to first token of the requests that ended

        def duration(count: int, seconds: float) -> pb.StatisticDuration:
            return pb.StatisticDuration(count=count, ns=int(seconds * 1e9))

        return pb.ModelStatistics(
            name=model.name,
            version=VERSION,
            last_inference=int(1e3 * metrics.last_at),
            inference_count=whole.count,
            execution_count=stats.num_steps,
            inference_stats=pb.InferStatistics(
                success=duration(whole.count, whole.sum),
                fail=duration(metrics.failed.count, metrics.failed.sum),
                queue=duration(whole.count, of_first),
                compute_infer=duration(whole.count, max(0.0, whole.sum - of_first)),
            ),
        )

    # -------------------------------------------------------------------------------------------- inference

    async def model_infer(self, request: pb.ModelInferRequest) -> Answer:
        work = self._work(request)
        async with deadline(work.timeout):
            answers = await _whole(work)
        num_entries = sum(len(answer.token_ids) for answer in answers) + len(work.outputs) * len(answers)
        return await joined((_response(work, each) for each in [answers]), num_entries)

    async def model_stream_infer(
        self, requests: AsyncIterator[pb.ModelInferRequest]
    ) -> AsyncGenerator[pb.ModelStreamInferResponse, None]:
        """Answer all requests of a stream at the same time; end when the client sends no more and all are answered."""
        # At most one response waits in the queue, so that a client that reads slowly stalls only its own requests.
        ready: asyncio.Queue[pb.ModelStreamInferResponse | None] = asyncio.Queue(1)
        tasks: set[asyncio.Task[None]] = set()

        async def answer(request: pb.ModelInferRequest) -> None:
            ARRIVED_AT.set(time.monotonic())  # a request arrives later than its stream began
            try:
                work = self._work(request)
                # The time limit includes the wait for a client that reads slowly.
                async with deadline(work.timeout), aclosing(_responses(work)) as responses:
                    async for response in responses:
                        await ready.put(pb.ModelStreamInferResponse(infer_response=response))
            except Exception as error:  # noqa: BLE001 (any error ends this request only)
                name, model = request.id[: protocol.MAX_REQUEST_ID], request.model_name[: protocol.MAX_REQUEST_ID]
                response = pb.ModelInferResponse(id=name, model_name=model)
                response.parameters["triton_final_response"].bool_param = True
                await ready.put(
                    pb.ModelStreamInferResponse(error_message=to_client_error(error).message, infer_response=response)
                )

        async def read() -> None:
            async for request in requests:
                task = asyncio.create_task(answer(request))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                while len(tasks) >= MAX_AT_ONCE:  # meanwhile nothing is read from the client
                    await asyncio.wait(set(tasks), return_when=asyncio.FIRST_COMPLETED)
            while tasks:
                await asyncio.wait(set(tasks))
            await ready.put(None)

        reading = asyncio.create_task(read())
        try:
            while (response := await _next(ready, reading)) is not None:
                yield response
        finally:
            for task in (reading, *tasks):
                task.cancel()
            await asyncio.gather(reading, *tasks, return_exceptions=True)

    def _work(self, request: pb.ModelInferRequest) -> _CheckedRequest:
        """Check a request and return its content; raises RequestError."""
        model = self._model(request.model_name, request.model_version)
        inputs = _tensors(request, model.engine.facts.max_model_len)
        values, timeout = _sampling(request.parameters, inputs.get("sampling_parameters"))
        params = from_request(values, CALLER.get().limits.defaults(model.engine.facts.defaults))
        if params.n != 1:
            raise RequestError(f"n is {params.n}; this protocol gives one output for each prompt: send it more often")
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(params, name)) is not None:
                raise RequestError(f"{name} is {count}, and no output of this protocol has them; leave it out")
        return _CheckedRequest(
            id=protocol.checked_id("id", request.id),
            model=model,
            prompts=_prompts(inputs),
            params=params,
            streams=_flag(inputs, "stream", False),
            echoes=not _flag(inputs, "exclude_input_in_output", True),
            outputs=_outputs(request),
            timeout=timeout,
            marks_end=request.parameters["triton_enable_empty_final_response"].bool_param
            if "triton_enable_empty_final_response" in request.parameters
            else False,
        )


async def _next(
    ready: asyncio.Queue[pb.ModelStreamInferResponse | None], reading: asyncio.Task[None]
) -> pb.ModelStreamInferResponse | None:
    """Return the next response, None after the last; raise the error that ended the reading of requests."""
    if not ready.empty():
        return ready.get_nowait()
    getting = asyncio.ensure_future(ready.get())
    try:
        await asyncio.wait((getting, reading), return_when=asyncio.FIRST_COMPLETED)
        if not getting.done() and reading.exception() is None:
            await getting  # the reader has ended normally, so a last item is on its way
        if not getting.done():
            reading.result()
        return getting.result()
    finally:
        getting.cancel()


async def _responses(work: _CheckedRequest) -> AsyncGenerator[pb.ModelInferResponse, None]:
    """Yield the responses to one request of a stream."""
    if not work.streams:
        response = _response(work, await _whole(work))
        response.parameters["triton_final_response"].bool_param = not work.marks_end
        yield response
    else:
        if len(work.prompts) > 1:
            raise RequestError(f"text_input has {len(work.prompts)} texts; stream takes one, so send each alone")
        async with aclosing(_deltas(work, work.prompts[0])) as deltas:
            async for delta in deltas:
                response = _response(work, [delta])
                is_last = bool(delta.finish_reason) and not work.marks_end
                response.parameters["triton_final_response"].bool_param = is_last
                yield response
    if work.marks_end:
        response = pb.ModelInferResponse(id=work.id, model_name=work.model.name, model_version=VERSION)
        response.parameters["triton_final_response"].bool_param = True
        yield response


async def _deltas(work: _CheckedRequest, prompt: str | list[int]) -> AsyncGenerator[_Answer, None]:
    model = work.model
    model.check_open(work.params)
    if not isinstance(prompt, str):
        model.check_length(len(prompt))
    ids = await model.encode(prompt) if isinstance(prompt, str) else prompt
    count, text = 0, _echoed(work, prompt)
    params = await model.spelled(work.params) if work.params.has_texts else work.params
    with closing(model.open(ids, params)) as stream:
        async for delta in stream:
            count += len(delta.token_ids)
            yield _Answer(len(ids), text + delta.text, delta.token_ids, delta.finish_reason or "", count)
            text = ""


async def _whole(work: _CheckedRequest) -> list[_Answer]:
    """Return the complete answers to all prompts of a request, in order."""
    request = OpenAIRequest("completion", tuple(work.prompts), {}, params=work.params)
    with closing(Answering(work.model, request)) as answering:
        await answering.start()
        answers = await answering.answers()
    return [
        _Answer(
            answer.prompt_tokens,
            _echoed(work, prompt) + output.text,
            output.token_ids,
            output.finish_reason or "",
            len(output.token_ids),
        )
        for prompt, answer in zip(work.prompts, answers, strict=True)
        for output in answer.outputs
    ]


def _echoed(work: _CheckedRequest, prompt: str | list[int]) -> str:
    """Return the text of a prompt if the answer is to begin with it, else ""."""
    if not work.echoes:
        return ""
    return prompt if isinstance(prompt, str) else work.model.decode(prompt)


# ------------------------------------------------------------------------------------------------- tensors


def _tensors(request: pb.ModelInferRequest, max_model_len: int) -> dict[str, Any]:
    """Return the input tensors by name, as lists of bytes or of numbers.

    Raises RequestError, for a tensor that is too long before it is decoded.
    """
    most = {"text_input": MAX_PROMPTS, "input_ids": max_model_len}
    known = {name: kind for name, kind, *_ in INPUTS}
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise RequestError(f"found {len(raw)} raw_input_contents for {len(request.inputs)} inputs; give one for each")
    found: dict[str, Any] = {}
    for index, tensor in enumerate(request.inputs):
        name, kind = tensor.name, tensor.datatype
        if name not in known:
            raise RequestError(f"input {shown(name)} is unknown; known: {', '.join(known)}")
        if name in found:
            raise RequestError(f"input {name} is there twice")
        _check_no_parameters(f"input {name}", tensor.parameters)
        allowed = ("INT32", "INT64", "UINT32", "UINT64") if known[name] == "INT32" else (known[name],)
        if kind not in allowed:
            raise RequestError(f"input {name}: found datatype {shown(kind, 40)}, expected {' or '.join(allowed)}")
        count = _count(name, tensor.shape)
        if count > most.get(name, 1):
            raise RequestError(f"input {name} has {count} values; at most {most.get(name, 1)} are taken")
        given = raw[index] if raw else getattr(tensor.contents, f"{CONTENTS[kind]}_contents")
        if not raw and len(given) != count:
            raise RequestError(f"input {name}: found {len(given)} values for the shape {list(tensor.shape)}")
        found[name] = _from_raw(name, kind, given, count) if raw else list(given)
    return found


def _count(name: str, shape: Sequence[int]) -> int:
    """Return how many values a tensor of this shape has."""
    if len(shape) > MAX_AXES:
        raise RequestError(f"input {name}: its shape has {len(shape)} axes; at most {MAX_AXES} are taken")
    count = 1
    for size in shape:
        if size < 0 or count * size > 1 << 26:
            raise RequestError(f"input {name}: shape {list(shape)} is out of range")
        count *= size
    return count


def _check_no_parameters(what: str, parameters: Mapping[str, pb.InferParameter]) -> None:
    """Refuse parameters that ask for tensors in shared memory or for classification, which are not supported.

    A client that sends them would misread the answer.
    """
    if parameters:
        listed = ", ".join(sorted(parameters))
        raise RequestError(f"{what}: parameters {listed:.150} are not known here (no shared memory, no classification)")


def _from_raw(name: str, kind: str, data: bytes, count: int) -> list[Any]:
    """Decode `count` values; raise RequestError if the bytes hold more or fewer."""
    if kind != "BYTES":
        dtype = np.dtype(DTYPES[kind])
        if len(data) != count * dtype.itemsize:
            raise RequestError(
                f"input {name}: found {len(data)} bytes, expected {count * dtype.itemsize} for its shape"
            )
        values: list[Any] = np.frombuffer(data, dtype).tolist()
        return values
    texts: list[bytes] = []
    at = 0
    while at < len(data):
        (length,) = struct.unpack_from("<I", data, at) if at + 4 <= len(data) else (len(data),)
        if at + 4 + length > len(data):
            raise RequestError(
                f"input {name}: a text is longer than the bytes that are there; expected 4 bytes of length"
            )
        if len(texts) == count:
            raise RequestError(f"input {name}: found more texts than the {count} of its shape")
        texts.append(data[at + 4 : at + 4 + length])
        at += 4 + length
    if len(texts) != count:
        raise RequestError(f"input {name}: found {len(texts)} texts for the {count} of its shape")
    return texts


def _prompts(inputs: Mapping[str, Any]) -> list[str | list[int]]:
    if ("text_input" in inputs) == ("input_ids" in inputs):
        raise RequestError("expected one of the inputs text_input and input_ids")
    if "input_ids" in inputs:
        return [[int(token) for token in inputs["input_ids"]]]
    if not inputs["text_input"]:
        raise RequestError("input text_input has no text; give at least one")
    return [_text("text_input", data) for data in inputs["text_input"]]


def _text(name: str, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"input {name} is not UTF-8: {error.reason} at byte {error.start}") from None


def _flag(inputs: Mapping[str, Any], name: str, default: bool) -> bool:
    if name not in inputs:
        return default
    if len(inputs[name]) != 1:
        raise RequestError(f"input {name}: found {len(inputs[name])} values, expected one")
    return bool(inputs[name][0])


def _sampling(
    parameters: Mapping[str, pb.InferParameter], listed: Sequence[bytes] | None
) -> tuple[dict[str, Any], float | None]:
    """Return the sampling parameters, and the request's time limit in seconds.

    A parameter given by its own name takes precedence over one in the list of sampling parameters.
    """
    values: dict[str, Any] = {}
    if listed is not None:
        if len(listed) != 1:
            raise RequestError(f"input sampling_parameters: found {len(listed)} values, expected one JSON object")
        if len(listed[0]) > MAX_SAMPLING_BYTES:
            raise RequestError(
                f"input sampling_parameters has {len(listed[0])} bytes; at most {MAX_SAMPLING_BYTES} are taken"
            )
        try:
            values = parse_json(listed[0])
        except ValueError as error:
            raise RequestError(f"input sampling_parameters is not JSON: {str(error).partition(';')[0]}") from None
        if not isinstance(values, dict):
            raise RequestError(f"input sampling_parameters: expected a JSON object, found {shown(values)}")
    timeout = None
    for name, parameter in parameters.items():
        choice = parameter.WhichOneof("parameter_choice")
        if choice is None:
            raise RequestError(f"parameter {name:.80} has no value of a kind that this server knows; leave it out")
        value = getattr(parameter, choice)
        if name == "timeout":  # microseconds
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise RequestError(f"parameter timeout is {shown(value, 40)}; expected microseconds")
            timeout = value / 1e6 if value else None
        elif name == "priority" and choice == "uint64_param":
            continue  # it is for Triton's queue, which does not exist here
        elif name not in TRITONS:
            values[name] = value
    if isinstance(bias := values.get("logit_bias"), dict):
        values["logit_bias"] = logit_bias_of(bias)
    return values, timeout


def _outputs(request: pb.ModelInferRequest) -> tuple[str, ...]:
    known = [name for name, *_ in OUTPUTS]
    asked: list[str] = []
    for output in request.outputs:
        name = output.name
        if name not in known:
            raise RequestError(f"output {shown(name)} is unknown; known: {', '.join(known)}")
        if name in asked:
            raise RequestError(f"output {name} is there twice")
        _check_no_parameters(f"output {name}", output.parameters)
        asked.append(name)
    return tuple(asked) or ("text_output",)


def _response(work: _CheckedRequest, answers: Sequence[_Answer]) -> pb.ModelInferResponse:
    response = pb.ModelInferResponse(model_name=work.model.name, model_version=VERSION, id=work.id)
    for name in work.outputs:
        if name == "text_output":
            _add_texts(response, name, [answer.text for answer in answers])
        elif name == "finish_reason":
            _add_texts(response, name, [answer.finish_reason for answer in answers])
        elif name == "output_ids":
            _add_numbers(response, name, [token for answer in answers for token in answer.token_ids])
        else:
            _add_numbers(response, name, [getattr(answer, name) for answer in answers])
    return response


def _add_texts(response: pb.ModelInferResponse, name: str, texts: Sequence[str]) -> None:
    tensor = pb.ModelInferResponse.InferOutputTensor(name=name, datatype="BYTES", shape=[len(texts)])
    response.outputs.append(tensor)
    parts = [text.encode() for text in texts]
    response.raw_output_contents.append(b"".join(struct.pack("<I", len(part)) + part for part in parts))


def _add_numbers(response: pb.ModelInferResponse, name: str, values: Sequence[int]) -> None:
    tensor = pb.ModelInferResponse.InferOutputTensor(name=name, datatype="INT32", shape=[len(values)])
    response.outputs.append(tensor)
    response.raw_output_contents.append(np.array(values, "<i4").tobytes())


def _reason(entry: ModelEntry) -> str:
    return reason_of(entry) or ("" if entry.state in STATES else entry.state)
