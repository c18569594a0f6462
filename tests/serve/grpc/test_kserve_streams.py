"""Requests that share a stream of the Open Inference Protocol, over a model that does what the test says."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from virtual_time import run

from inferc.runtime.step.sampling_params import SamplingParams
from inferc.serve.answering.answering import MANY_LISTED, OPENED_AT_ONCE
from inferc.serve.grpc.answers import as_bytes
from inferc.serve.grpc.kserve_service import MAX_AT_ONCE, KServeService
from inferc.serve.models.streams import Delta
from inferc.serve.protos.inference import grpc_service_pb2 as pb


class Answer:
    """A piece whenever it is asked for one, without end; `is_closed` once nobody wants more."""

    def __init__(self) -> None:
        self.is_closed = False

    def __aiter__(self) -> "Answer":
        return self

    async def __anext__(self) -> Delta:
        await asyncio.sleep(0)
        return Delta(0, "a", [1], None, [])

    def close(self) -> None:
        self.is_closed = True


class Model:
    name = "endless"
    engine = SimpleNamespace(facts=SimpleNamespace(defaults={}, max_model_len=256))

    def __init__(self) -> None:
        self.answers: list[Answer] = []

    def check_open(self, params: SamplingParams, num_prompts: int = 1, num_sequences: int = 0) -> None:
        pass

    async def encode(self, text: str) -> list[int]:
        return [1]

    def open(self, *_: object) -> Answer:
        self.answers.append(Answer())
        return self.answers[-1]


class OneAfterTheOther(Model):
    """A handler with whole answers, which notes how many are opened in a turn of the event loop."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[int] = []  # by turn

    async def count(self) -> None:
        while True:
            self.opened.append(0)
            await asyncio.sleep(0)

    async def encode_all(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        return [[1]] * len(texts)

    def open(self, *given: Any) -> Any:
        self.opened[-1] += 1
        news = next(each for each in given if isinstance(each, asyncio.Event))
        news.set()
        pieces = [Delta(0, "a", [1], "stop", [])]
        return SimpleNamespace(
            take=lambda: pieces.pop() if pieces else None, is_done=True, num_cached=0, close=lambda: None
        )


def service(model: Model) -> KServeService:
    models: Any = SimpleNamespace(get=lambda name: model)
    return KServeService(models)


def request(number: int = 0) -> pb.ModelInferRequest:
    made = pb.ModelInferRequest(id=str(number))
    made.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"a")
    made.inputs.add(name="stream", datatype="BOOL", shape=[1]).contents.bool_contents.append(True)
    return made


@pytest.mark.parametrize(("num_listed", "at_once"), [(0, OPENED_AT_ONCE), (1024, MANY_LISTED // 1024)])
def test_many_prompts_of_one_request_are_opened_in_several_turns(num_listed: int, at_once: int) -> None:
    """The more token ids their parameters have, the fewer at once."""
    made = pb.ModelInferRequest()
    bias = {str(token): 1.0 for token in range(num_listed)}
    listed = made.inputs.add(name="sampling_parameters", datatype="BYTES", shape=[1])
    listed.contents.bytes_contents.append(json.dumps({"logit_bias": bias} if bias else {}).encode())
    tensor = made.inputs.add(name="text_input", datatype="BYTES", shape=[1000])
    tensor.contents.bytes_contents.extend([b"a"] * 1000)

    async def requests() -> AsyncIterator[pb.ModelInferRequest]:
        yield made

    async def work() -> None:
        model = OneAfterTheOther()
        counting = asyncio.create_task(model.count())
        await asyncio.sleep(0)
        answer = pb.ModelInferResponse()
        answer.ParseFromString(as_bytes(await service(model).model_infer(made)))
        (streamed,) = [each async for each in service(model).model_stream_infer(requests())]
        assert answer.raw_output_contents == streamed.infer_response.raw_output_contents == [b"\x01\0\0\0a" * 1000]
        assert sum(model.opened) == 2 * 1000 and max(model.opened) <= at_once
        counting.cancel()

    run(work())


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
