"""Answers of many entries: made beside the event loop, in parts that are together what one message is."""

import asyncio
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from inferc.runtime.step.plan import Logprobs
from inferc.serve.grpc import answers as grpc_answers
from inferc.serve.grpc import inference_service
from inferc.serve.grpc.answers import MANY_ENTRIES, as_bytes, joined
from inferc.serve.grpc.inference_service import InferenceService
from inferc.serve.models import text_calls
from inferc.serve.models.embedding import Vectors
from inferc.serve.models.streams import Delta
from inferc.serve.protos.inferc.v1 import inference_pb2 as pb

ROWS = [Logprobs(number, -0.5, 1, ((number, -0.5), (7, -1.25))) for number in range(20)]


class Stream:
    request_id, num_cached = "mine", 3

    def __init__(self) -> None:
        self.num_forgotten: dict[int, int] = {}
        self._pieces = [
            Delta(0, "a", [1, 2], None, ROWS[:2]),
            Delta(1, "b", [3], "stop", ROWS[2:3]),
            Delta(0, "c", [4], "length", ROWS[3:4]),
        ]

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Delta:
        if not self._pieces:
            raise StopAsyncIteration
        return self._pieces.pop(0)

    def close(self) -> None:
        pass


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> InferenceService:
    async def score(prompt: list[int], *_: object, **__: object) -> Any:
        return SimpleNamespace(rows=ROWS)

    async def embed(*_: object) -> Vectors:
        return Vectors(np.arange(12, dtype=np.float32).reshape(4, 3), 9)

    async def tokenize(*_: object) -> list[int]:
        return list(range(300, 320))

    monkeypatch.setattr(inference_service, "embed", embed)
    monkeypatch.setattr(text_calls, "tokenize", tokenize)
    model = SimpleNamespace(
        engine=SimpleNamespace(facts=SimpleNamespace(defaults={})),
        check_open=lambda params, num_prompts, num_sequences: None,
        check_length=lambda num_tokens, room: None,
        embeds=True,
        score=score,
        open=lambda *_, **__: Stream(),
    )
    models: Any = SimpleNamespace(get=lambda name: model)
    return InferenceService(models)


async def answers_of(service: InferenceService) -> list[Any]:
    ids = pb.TokenIds(ids=range(21))
    sampling = pb.SamplingParams(n=2, logprobs=2)
    generate = pb.GenerateRequest(token_ids=ids, sampling=sampling, prompt_logprobs=2)
    streamed = [pb.GenerateResponse.FromString(as_bytes(each)) async for each in service.generate(generate)]
    return [
        streamed,
        pb.CompleteResponse.FromString(as_bytes(await service.complete(generate))),
        pb.ScoreResponse.FromString(as_bytes(await service.score(pb.ScoreRequest(token_ids=ids)))),
        pb.EmbedResponse.FromString(as_bytes(await service.embed(pb.EmbedRequest(inputs=[pb.EmbedInput(text="a")])))),
        pb.TokenizeResponse.FromString(as_bytes(await service.tokenize(pb.TokenizeRequest(text="a")))),
    ]


def test_an_answer_in_parts_is_the_same(service: InferenceService, monkeypatch: pytest.MonkeyPatch) -> None:
    want = asyncio.run(answers_of(service))
    monkeypatch.setattr(grpc_answers, "MANY_ENTRIES", 0)
    monkeypatch.setattr(grpc_answers, "ENTRIES_OF_PART", 7)
    assert asyncio.run(answers_of(service)) == want
    streamed, whole, scored, embedded, tokenized = want
    assert [len(each.prompt_logprobs) for each in streamed] == [20, 0, 0]
    assert [output.text for output in whole.outputs] == ["ac", "b"] and len(whole.prompt_logprobs) == 20
    assert [len(output.logprobs) for output in whole.outputs] == [3, 1] and whole.usage.output_tokens == 4
    assert [row.token_id for row in scored.logprobs] == list(range(20)) and len(scored.token_ids) == 21
    assert [list(each.values) for each in embedded.embeddings] == np.arange(12).reshape(4, 3).tolist()
    assert embedded.usage.prompt_tokens == 9 and list(tokenized.token_ids) == list(range(300, 320))


@pytest.mark.parametrize(("num_entries", "is_beside"), [(MANY_ENTRIES, False), (MANY_ENTRIES + 1, True)])
def test_only_what_takes_long_is_made_in_a_thread(num_entries: int, is_beside: bool) -> None:
    threads: list[threading.Thread] = []

    def parts() -> Iterator[pb.TokenizeResponse]:
        threads.append(threading.current_thread())
        yield pb.TokenizeResponse(token_ids=[1])

    assert asyncio.run(joined(parts(), num_entries)) == pb.TokenizeResponse(token_ids=[1]).SerializeToString()
    assert (threads != [threading.main_thread()]) == is_beside


def test_a_part_has_few_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """While protobuf makes or writes one message, all other threads wait for it."""
    monkeypatch.setattr(grpc_answers, "ENTRIES_OF_PART", 7)
    assert [list(part) for part in grpc_answers.slices(range(5), size=3)] == [[0, 1], [2, 3], [4]]
    assert [list(part) for part in grpc_answers.slices(range(3), size=100)] == [[0], [1], [2]]
