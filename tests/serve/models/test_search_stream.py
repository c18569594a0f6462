"""The stream of a beam search over a scripted engine: its steps, an engine that dies, and aborts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from letters import Letters
from virtual_time import run

from inferc.errors import RequestError
from inferc.runtime.engine.beam_search import BeamSearchParams
from inferc.runtime.engine.loop import Failed, Sink
from inferc.runtime.step.plan import Logprobs
from inferc.runtime.step.sampling_params import SamplingParams
from inferc.runtime.step.sequence import Output
from inferc.serve.errors import RequestAborted
from inferc.serve.models.async_engine import AsyncEngine
from inferc.serve.models.streams import Delta, ModelFacts, Stream

A, B, C, END = b"abc."


class Script:
    """Remembers the texts that were asked about, and tells of each that `a`, `b`, `c` and the end may follow."""

    def __init__(self) -> None:
        self.stopped: str | None = None
        self.asked: dict[str, tuple[list[int], SamplingParams, Sink]] = {}
        self.aborted: list[str] = []
        self._count = 0

    def add(self, prompt_token_ids: Sequence[int], params: SamplingParams, sink: Sink, name: str = "") -> str:
        self._count += 1
        self.asked[str(self._count)] = list(prompt_token_ids), params, sink
        return str(self._count)

    def abort(self, request_id: str, index: int | None = None) -> None:
        self.aborted.append(request_id)
        del self.asked[request_id]

    @property
    def texts(self) -> list[bytes]:
        return [bytes(text) for text, _, _ in self.asked.values()]

    async def answer(self, count: int = 1 << 20) -> None:
        """Answer what was asked, the last first."""
        for request_id in list(reversed(self.asked))[:count]:
            _, params, sink = self.asked.pop(request_id)
            row = Logprobs(A, -0.1, 1, ((A, -0.1), (B, -0.3), (C, -2.0), (END, -0.9))[: params.logprobs])
            sink(Output(request_id, 0, [A], "length", [row], num_cached=3, queue_seconds=0.0))
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def die(self) -> None:
        self.stopped = "killed"
        for request_id, (_, _, sink) in self.asked.items():
            sink(Failed(request_id, "killed"))
        await asyncio.sleep(0)


def engine_on(script: Script) -> AsyncEngine:
    engine = AsyncEngine(Letters(), ModelFacts(vocab_size=128, max_model_len=64, eos_token_ids=(END,)), 8)
    engine.attach(script)  # type: ignore[arg-type]
    return engine


def opened(engine: AsyncEngine, max_tokens: int = 2, n: int = 2) -> Stream:
    return engine.open(list(b"go"), SamplingParams(max_tokens=max_tokens, n=n), beams=BeamSearchParams(2))


async def rest(stream: Stream) -> list[Delta]:
    return [piece async for piece in stream]


# Over two tokens: aa -0.2, then ab and ba, of which ab was found first; "." behind nothing is -0.9 a token.
FOUND = [
    Delta(0, "aa", [A, A], "length", []),
    Delta(1, "ab", [A, B], "length", []),
]


def test_each_step_asks_about_every_beam() -> None:
    async def work() -> None:
        script = Script()
        stream = opened(engine_on(script))
        assert script.texts == [b"go"] and stream.num_sequences == 2
        await script.answer()
        assert script.texts == [b"goa", b"gob"] and not stream.is_done
        await script.answer()
        assert script.texts == [] and await rest(stream) == FOUND
        assert (stream.num_output, stream.num_cached) == (4, 3)
        stream.close()

    run(work())


def test_fewer_answers_than_beams_are_the_best() -> None:
    async def work() -> None:
        script = Script()
        stream = opened(engine_on(script), n=1)
        await script.answer()
        await script.answer()
        assert await rest(stream) == FOUND[:1]
        stream.close()

    run(work())


@pytest.mark.parametrize("answered", [0, 1, 2])
def test_a_search_goes_on_where_an_engine_died(answered: int) -> None:
    """The engine dies when none, one or both beams of a step have been answered."""

    async def work() -> None:
        script = Script()
        engine = engine_on(script)
        stream = opened(engine, max_tokens=3)
        await script.answer()
        if answered < 2:
            await script.answer(answered)
            texts = [b"goa", b"gob"]
            await script.die()
        else:
            script.stopped = "killed"
            await script.answer()
            texts = [b"goaa", b"goab"]
        engine.detach("starting")
        another = Script()
        engine.attach(another)  # type: ignore[arg-type]
        assert another.texts == texts
        while another.texts:
            await another.answer()
        assert [delta.text for delta in await rest(stream)] == ["aaa", "aab"]
        stream.close()

    run(work())


def test_an_abort_ends_all_beams() -> None:
    async def work() -> None:
        script = Script()
        engine = engine_on(script)
        stream = engine.open([1], SamplingParams(max_tokens=9, n=2), "name", beams=BeamSearchParams(2))
        await script.answer()
        open_ids = list(script.asked)
        assert engine.abort("name") and script.aborted == open_ids and len(open_ids) == 2
        with pytest.raises(RequestAborted):
            await rest(stream)
        stream.close()
        assert engine.num_sequences == 0

    run(work())


def test_a_refused_step_ends_the_search() -> None:
    async def work() -> None:
        script = Script()
        stream = opened(engine_on(script))
        await script.answer()
        request_id, (_, _, sink) = next(iter(script.asked.items()))
        sink(Failed(request_id, "the prompt is too long", is_request_error=True))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="too long"):
            await rest(stream)
        stream.close()
        assert script.aborted == ["2", "3"]

    run(work())
