"""Streams over a scripted engine: merging, stop strings, aborts, drain and death."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import pytest

from inferc.errors import GenerationError, RequestError
from inferc.runtime.engine import EngineStats
from inferc.runtime.engine_loop import Failed, Sink, Stats
from inferc.runtime.sampling_params import SamplingParams
from inferc.runtime.sequence import Output
from inferc.runtime.text import Text
from inferc.serve import async_engine
from inferc.serve.async_engine import (
    AsyncEngine,
    EngineUnavailable,
    ModelFacts,
    Piece,
    QueueFull,
    RequestAborted,
    RequestIdInUse,
    Stream,
)

Result = TypeVar("Result")


class Letters(Text):
    """Token n is the n-th letter; no tokenizer needed."""

    def __init__(self) -> None:
        self.special_ids = frozenset()
        self._kind, self.strips_first_space = "byte_level", False

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


class Script:
    """Remembers what was asked of the engine, and says what the test makes it say."""

    def __init__(self) -> None:
        self.stopped: str | None = None
        self.is_hung = False
        self.sinks: dict[str, Sink] = {}
        self.aborted: list[tuple[str, int | None]] = []

    def add(self, prompt_token_ids: Sequence[int], params: SamplingParams, sink: Sink, name: str = "") -> str:
        """Ids are letters: the first request is "a"."""
        request_id = chr(ord("a") + len(self.sinks))
        self.sinks[request_id] = sink
        return request_id

    def ask_stats(self, sink: Sink) -> str:
        self.unanswered = sink
        if not self.is_hung:
            self.answer()
        return "stats"

    def answer(self) -> None:
        self.is_hung = False
        self.unanswered(Stats("stats", EngineStats()))

    def abort(self, request_id: str, index: int | None = None) -> None:
        self.aborted.append((request_id, index))

    def stats(self) -> EngineStats:
        return EngineStats()

    async def say(self, request_id: str, text: bytes, reason: str | None = None, index: int = 0) -> None:
        self.sinks[request_id](Output(request_id, index, list(text), reason))
        await asyncio.sleep(0)


def run(work: Coroutine[Any, Any, Result]) -> Result:
    return asyncio.run(asyncio.wait_for(work, 10))


def make_engine(script: Script, max_sequences: int = 8) -> AsyncEngine:
    return AsyncEngine(script, Letters(), ModelFacts(vocab_size=128, max_model_len=64), max_sequences)


async def rest(stream: Stream) -> list[Piece]:
    return [piece async for piece in stream]


def test_what_a_slow_reader_misses_is_merged() -> None:
    async def work() -> None:
        script = Script()
        engine = make_engine(script)
        stream = engine.open([1], SamplingParams(), "a")
        await script.say("a", b"he")
        await script.say("a", b"llo")
        first = await anext(stream)
        await script.say("a", b"!", "length")
        assert [first, *await rest(stream)] == [
            Piece(0, "hello", list(b"hello"), None, []),
            Piece(0, "!", list(b"!"), "length", []),
        ]

    run(work())


def test_half_a_character_waits_for_its_other_half() -> None:
    async def work() -> None:
        script = Script()
        engine = make_engine(script)
        stream = engine.open([1], SamplingParams(), "a")
        whole = "ß".encode()
        await script.say("a", whole[:1])
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        assert not waiting.done()
        await script.say("a", whole[1:])
        assert await waiting == Piece(0, "ß", list(whole), None, [])

    run(work())


def test_a_stop_string_ends_the_sequence_in_the_engine_too() -> None:
    async def work() -> None:
        script = Script()
        engine = make_engine(script)
        stream = engine.open([1], SamplingParams(stop=("END",)), "a")
        await script.say("a", b"abE")
        await script.say("a", b"ND and more")
        await script.say("a", b"late")
        pieces = await rest(stream)
        assert "".join(piece.text for piece in pieces) == "ab"
        assert pieces[-1].finish_reason == "stop"
        assert script.aborted == [("a", 0)]
        stream.close()
        assert script.aborted == [("a", 0)] and not engine.num_requests

    run(work())


def test_outputs_of_one_prompt_end_on_their_own() -> None:
    async def work() -> None:
        script = Script()
        engine = make_engine(script)
        stream = engine.open([1], SamplingParams(n=2), "a")
        await script.say("a", b"x", "length", index=1)
        first = await anext(stream)
        assert (first.index, first.finish_reason) == (1, "length") and stream.is_open
        await script.say("a", b"y", "stop")
        # The end token itself is not shown.
        assert await rest(stream) == [Piece(0, "", [ord("y")], "stop", [])]

    run(work())


def test_closing_a_running_stream_aborts_it() -> None:
    async def work() -> None:
        script = Script()
        engine = make_engine(script)
        engine.open([1], SamplingParams(), "a").close()
        assert script.aborted == [("a", None)] and not engine.num_requests

    run(work())


def test_abort_from_elsewhere_ends_the_stream() -> None:
    async def work() -> None:
        script = Script()
        engine = make_engine(script)
        stream = engine.open([1], SamplingParams(), "a")
        assert engine.abort("a") and not engine.abort("a") and not engine.abort("unknown")
        with pytest.raises(RequestAborted):
            await rest(stream)

    run(work())


def test_ids_are_unique_and_the_queue_is_bounded_by_sequences() -> None:
    async def work() -> None:
        engine = make_engine(Script(), max_sequences=4)
        engine.open([1], SamplingParams(), "a")
        with pytest.raises(RequestIdInUse):
            engine.open([1], SamplingParams(), "a")
        with pytest.raises(QueueFull, match="1 sequences are running or waiting, and 4 are let in; try again later"):
            engine.open([1], SamplingParams(n=4))
        engine.open([1], SamplingParams(n=3))
        with pytest.raises(QueueFull):
            engine.check_open()

    run(work())


def test_a_name_used_again_gets_nothing_of_the_request_before() -> None:
    async def work() -> None:
        script = Script()
        engine = make_engine(script)
        engine.open([1], SamplingParams(), "mine").close()
        again = engine.open([2], SamplingParams(), "mine")
        await script.say("a", b"late", "length")
        await script.say("b", b"ok", "length")
        assert [piece.text for piece in await rest(again)] == ["ok"]

    run(work())


def test_a_broken_sequence_is_no_reason_to_call_the_engine_unavailable() -> None:
    async def work() -> None:
        script = Script()
        stream = make_engine(script).open([1], SamplingParams(), "a")
        script.sinks["a"](Failed("a", "not finite", kind="GenerationError"))
        with pytest.raises(GenerationError, match="not finite"):
            await rest(stream)

    run(work())


def test_a_refused_request_says_why() -> None:
    async def work() -> None:
        script = Script()
        engine = make_engine(script)
        stream = engine.open([1], SamplingParams(), "a")
        script.sinks["a"](Failed("a", "the prompt is too long", is_request_error=True))
        with pytest.raises(RequestError, match="too long"):
            await rest(stream)

    run(work())


def test_drain_lets_running_requests_end() -> None:
    async def work() -> None:
        script = Script()
        engine = make_engine(script)
        stream = engine.open([1], SamplingParams(), "a")
        draining = asyncio.ensure_future(engine.drain(5))
        await asyncio.sleep(0)
        with pytest.raises(EngineUnavailable, match="shutting down"):
            engine.open([1], SamplingParams())
        await script.say("a", b"x", "length")
        await rest(stream)
        stream.close()
        assert await draining

    run(work())


def test_drain_ends_what_takes_too_long() -> None:
    async def work() -> None:
        script = Script()
        engine = make_engine(script)
        stream = engine.open([1], SamplingParams(), "a")
        assert not await engine.drain(0.01)
        assert script.aborted == [("a", None)]
        with pytest.raises(EngineUnavailable, match="before the request was done"):
            await rest(stream)

    run(work())


async def ignore(state: str) -> None:
    return None


def test_death_ends_every_stream_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        script = Script()
        engine = make_engine(script)
        stream = engine.open([1], SamplingParams(), "a")
        died = asyncio.Event()
        watching = asyncio.ensure_future(engine.watch(died, ignore))
        await asyncio.sleep(0)
        script.stopped = "killed by SIGKILL"
        died.set()
        await watching
        with pytest.raises(EngineUnavailable, match="SIGKILL"):
            await rest(stream)
        with pytest.raises(EngineUnavailable, match="SIGKILL"):
            engine.open([1], SamplingParams())

    run(work())
    assert "killed by SIGKILL; 1 requests were running" in caplog.text


def test_an_engine_that_does_not_answer_is_hung_until_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_engine, "PING_SECONDS", 0.005)
    monkeypatch.setattr(async_engine, "HUNG_SECONDS", 0.02)

    async def work() -> None:
        script, states = Script(), asyncio.Queue[str]()
        engine = make_engine(script)
        watching = asyncio.ensure_future(engine.watch(asyncio.Event(), states.put))
        await asyncio.sleep(0.05)
        assert engine.state == "serving" and states.empty()
        script.is_hung = True
        assert await states.get() == "hung"
        with pytest.raises(EngineUnavailable, match="has not ended its step"):
            engine.open([1], SamplingParams())
        script.answer()
        assert await states.get() == "serving"
        engine.open([1], SamplingParams())
        watching.cancel()

    run(work())
