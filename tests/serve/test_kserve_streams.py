"""Requests that share a stream of the Open Inference Protocol, over a model that does what the test says."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from types import SimpleNamespace
from typing import Any, TypeVar

from inferc.runtime.sampling_params import SamplingParams
from inferc.serve.kserve_service import MAX_AT_ONCE, KServeService
from inferc.serve.protos.inference import grpc_service_pb2 as pb
from inferc.serve.streams import Piece

Result = TypeVar("Result")


class Answer:
    """A piece whenever it is asked for one, without end; `is_closed` once nobody wants more."""

    def __init__(self) -> None:
        self.is_closed = False

    def __aiter__(self) -> "Answer":
        return self

    async def __anext__(self) -> Piece:
        await asyncio.sleep(0)
        return Piece(0, "a", [1], None, [])

    def close(self) -> None:
        self.is_closed = True


class Model:
    name = "endless"
    engine = SimpleNamespace(facts=SimpleNamespace(defaults={}, max_model_len=256))

    def __init__(self) -> None:
        self.answers: list[Answer] = []

    def check_open(self, params: SamplingParams, num_prompts: int = 1) -> None:
        pass

    async def encode(self, text: str) -> list[int]:
        return [1]

    def open(self, *_: object) -> Answer:
        self.answers.append(Answer())
        return self.answers[-1]


def service(model: Model) -> KServeService:
    models: Any = SimpleNamespace(get=lambda name: model)
    return KServeService(models)


def request(number: int = 0) -> pb.ModelInferRequest:
    made = pb.ModelInferRequest(id=str(number))
    made.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"a")
    made.inputs.add(name="stream", datatype="BOOL", shape=[1]).contents.bool_contents.append(True)
    return made


def run(work: Coroutine[Any, Any, Result]) -> Result:
    return asyncio.run(asyncio.wait_for(work, 30))


def test_a_time_limit_is_told_to_a_client_that_reads_slowly() -> None:
    """The time may be over while a response waits for the client."""

    async def requests() -> AsyncIterator[pb.ModelInferRequest]:
        made = request()
        made.parameters["timeout"].int64_param = 50_000
        yield made

    async def work() -> None:
        model = Model()
        responses = service(model).model_stream_infer(requests())
        assert not (await anext(responses)).error_message
        await asyncio.sleep(0.2)
        *_, last = [response async for response in responses]
        assert last.error_message == "the request was not done within its 0.05 s"
        assert last.infer_response.id == "0" and last.infer_response.parameters["triton_final_response"].bool_param
        assert model.answers[0].is_closed

    run(work())


def test_a_client_that_only_sends_is_not_read_for_ever() -> None:
    taken = 0

    async def requests() -> AsyncIterator[pb.ModelInferRequest]:
        nonlocal taken
        while True:
            taken += 1
            yield request(taken)
            await asyncio.sleep(0)

    async def work() -> None:
        model = Model()
        responses = service(model).model_stream_infer(requests())
        await anext(responses)
        before = 0
        while before != taken:
            before = taken
            assert taken < 4 * MAX_AT_ONCE
            await asyncio.sleep(0.2)
        assert taken == MAX_AT_ONCE
        await responses.aclose()
        assert all(answer.is_closed for answer in model.answers)

    run(work())
