"""Streams over a scripted engine: merging, stop strings, aborts, drain and death."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from letters import Letters
from virtual_time import run

from inferc.errors import GenerationError, ObjectiveError, RequestError
from inferc.runtime.engine.beam_search import BeamSearchParams
from inferc.runtime.engine.loop import Failed, Scored, Sink, Stats
from inferc.runtime.engine.scoring import Score
from inferc.runtime.engine.stats import EngineStats
from inferc.runtime.step.plan import Logprobs
from inferc.runtime.step.sampling_params import SamplingParams
from inferc.runtime.step.sequence import Output
from inferc.serve.errors import (
    EngineUnavailable,
    NoRoomToWake,
    QueueFull,
    RequestAborted,
    RequestIdInUse,
    RequestTimeout,
)
from inferc.serve.models import async_engine, streams
from inferc.serve.models.async_engine import MAX_STARTS, TAKEN_AT_ONCE, AsyncEngine
from inferc.serve.models.queue_forecast import ARRIVED_AT
from inferc.serve.models.streams import Delta, ModelFacts, Stream


class Script:
    """Remembers what was asked of the engine, and says what the test makes it say."""

    def __init__(self) -> None:
        self.stopped: str | None = None
        self.prompts: list[list[int]] = []
        self.sinks: dict[str, Sink] = {}
        self.aborted: list[tuple[str, int | None]] = []
        self.asked: list[Sink] = []  # for counters

    def add(self, prompt_token_ids: Sequence[int], params: SamplingParams, sink: Sink, name: str = "") -> str:
        """Ids are letters: the first request is "a"."""
        request_id = chr(ord("a") + len(self.sinks))
        self.sinks[request_id] = sink
        self.prompts.append(list(prompt_token_ids))
        return request_id

    def score(
        self,
        token_ids: Sequence[int],
        sink: Sink,
        num_top: int = 0,
        cache_salt: str = "",
        first: int = 1,
        adapter: str = "",
    ) -> str:
        return self.add(token_ids, SamplingParams(), sink)

    def load_adapter(self, name: str, path: str, sink: Sink) -> str:
        self.asked.append(sink)
        return f"load-{name}"

    def unload_adapter(self, name: str, sink: Sink) -> str:
        self.asked.append(sink)
        return f"unload-{name}"

    def embed(self, token_ids: Sequence[int], sink: Sink) -> str:
        return self.add(token_ids, SamplingParams(), sink)

    def ask_stats(self, sink: Sink) -> str:
        self.asked.append(sink)
        return f"stats-{len(self.asked)}"

    def die(self, reason: str) -> None:
        self.stopped = reason
        for request_id, sink in self.sinks.items():
            sink(Failed(request_id, reason))

    def abort(self, request_id: str, index: int | None = None) -> None:
        self.aborted.append((request_id, index))

    async def say(self, request_id: str, text: bytes, reason: str | None = None, index: int = 0) -> None:
        self.sinks[request_id](Output(request_id, index, list(text), reason))
        await asyncio.sleep(0)


def make_engine(script: Script, max_sequences: int = 8) -> AsyncEngine:
    engine = AsyncEngine(Letters(), ModelFacts(vocab_size=128, max_model_len=64), max_sequences)
    engine.attach(script)
    return engine


async def rest(stream: Stream) -> list[Delta]:
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
            Delta(0, "hello", list(b"hello"), None, []),
            Delta(0, "!", list(b"!"), "length", []),
        ]

    run(work())


def test_a_search_that_is_over_leaves_nobody_waiting() -> None:
    """Beams are no outputs: as many wait for a first token as answers were asked for."""

    async def work() -> None:
        engine = make_engine(Script())
        stream = engine.open([1], SamplingParams(), "a", beams=BeamSearchParams(4, max_tokens=3))
        assert (engine.num_sequences, engine.queue.num_waiting) == (4, 1)
        stream.close()
        assert (engine.num_sequences, engine.queue.num_waiting) == (0, 0)

    run(work())


def test_likely_tokens_that_nobody_reads_come_in_parts_and_not_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "LIKELY_AT_ONCE", 6)
    monkeypatch.setattr(streams, "MAX_UNREAD", 30)

    async def work() -> None:
        script = Script()
        engine = make_engine(script)
        stream = engine.open([1], SamplingParams(logprobs=1, max_tokens=60), "a")

        async def say(text: bytes, reason: str | None = None) -> None:
            for letter in text:
                row = Logprobs(letter, -1.0, 1, ((letter, -1.0),))
                script.sinks["a"](Output("a", 0, [letter], reason, [row]))
            await asyncio.sleep(0)

        await say(b"abcdefgh")
        first = [await anext(stream) for _ in range(3)]
        assert [piece.text for piece in first] == ["abc", "def", "gh"]
        assert [len(piece.logprobs) for piece in first] == [3, 3, 2]
        await say(b"x" * 15)
        assert not script.aborted, "what was read counts no more"
        await say(b"yz")
        assert script.aborted == [("a", None)]
        last = [await anext(stream) for _ in range(6)]
        assert "".join(piece.text for piece in last) == "x" * 15 + "y"
        with pytest.raises(RequestTimeout, match="wait to be read; read faster"):
            await anext(stream)
        stream.close()

    run(work())


def test_what_a_step_brings_is_handed_out_a_few_requests_at_a_time() -> None:
    """Between them others have their turn of the loop; what has come again meanwhile is taken together."""

    async def work() -> None:
        script = Script()
        engine = make_engine(script, max_sequences=3 * TAKEN_AT_ONCE)
        names = [chr(ord("a") + number) for number in range(3 * TAKEN_AT_ONCE)]
        streams = {name: engine.open([1], SamplingParams(), name) for name in names}

        readers = [asyncio.ensure_future(rest(stream)) for stream in streams.values()]
        await asyncio.sleep(0)

        def step(letter: bytes, reason: str | None = None) -> None:
            for name in names:
                script.sinks[name](Output(name, 0, list(letter), reason))

        def reached() -> list[str]:
            return [name for name, stream in streams.items() if stream.num_output]

        step(b"a")
        await asyncio.sleep(0)
        assert reached() == names[:TAKEN_AT_ONCE]
        step(b"b", "length")
        await asyncio.sleep(0)
        assert reached() == names[: 2 * TAKEN_AT_ONCE]
        texts = [[piece.text for piece in pieces] for pieces in await asyncio.gather(*readers)]
        assert texts == [["a", "b"]] * TAKEN_AT_ONCE + [["ab"]] * (2 * TAKEN_AT_ONCE)

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
        assert await waiting == Delta(0, "ß", list(whole), None, [])

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
        assert await rest(stream) == [Delta(0, "", [ord("y")], "stop", [], ord("y"))]

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
        with pytest.raises(QueueFull, match="1 sequences are running or waiting, and 4 are admitted; try again later"):
            engine.open([1], SamplingParams(n=4))
        with pytest.raises(
            RequestError, match="found 5 sequences .prompts times n., and the server takes 4; send fewer"
        ):
            engine.open([1], SamplingParams(n=5))
        engine.open([1], SamplingParams(n=3))
        with pytest.raises(QueueFull):
            engine.check_open()

    run(work())


def test_token_ids_in_parameters_are_bounded_over_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Token ids take six times their space in a body, and are sent for each prompt anew."""
    monkeypatch.setattr(async_engine, "MAX_LISTED", 10)

    async def work() -> None:
        engine = make_engine(Script())
        params = SamplingParams(allowed_token_ids=(1, 2, 3), stop_token_ids=(4,), banned_token_ids=(5,))
        with pytest.raises(
            RequestError, match="have 15 token ids in lists, .* at most 10 are allowed; send fewer prompts"
        ):
            engine.check_open(3, num_listed=3 * params.num_listed)
        streams = [engine.open([1], params) for _ in range(2)]
        with pytest.raises(QueueFull, match="have 10 token ids in lists, and 10 are admitted; try again later"):
            engine.open([1], params)
        engine.open([1], SamplingParams())
        streams[0].close()
        engine.open([1], params)

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
        stream.close()
        # What is wrong with a request is no word on how well this server keeps objectives, nor on how much room it has.
        metrics = engine.metrics
        assert dict(metrics.outcomes) == {"invalid": 1} and not metrics.refusals and metrics.num_counted == 0

    run(work())


def test_an_objective_that_cannot_be_met_is_a_refusal_with_its_reason() -> None:
    async def work() -> None:
        script = Script()
        engine = make_engine(script)
        stream = engine.open([1], SamplingParams(ttft_ms=1), "a")
        script.sinks["a"](Failed("a", "it takes 2 ms", kind="ObjectiveError"))
        with pytest.raises(ObjectiveError, match="2 ms"):
            await rest(stream)
        stream.close()
        metrics = engine.metrics
        assert dict(metrics.outcomes) == {"refused": 1} and dict(metrics.refusals) == {"objective": 1}

    run(work())


def test_times_count_from_when_the_call_came() -> None:
    async def work() -> None:
        script = Script()
        engine = make_engine(script)
        ARRIVED_AT.set(asyncio.get_running_loop().time())
        await asyncio.sleep(5)  # meanwhile its prompt is tokenized
        stream = engine.open([1], SamplingParams(), "a")
        await script.say("a", b"x", "length")
        await rest(stream)
        stream.close()
        metrics = engine.metrics
        assert all(each.sum == 5 for each in (metrics.ttft, metrics.e2e, metrics.prepare))
        assert metrics.prefill.sum == 0 and metrics.num_good == 0
        parts = (metrics.prepare, metrics.queue, metrics.prefill, metrics.decode)
        assert sum(each.sum for each in parts) == metrics.e2e.sum
        assert engine.queue.seconds(asyncio.get_running_loop().time()) == 0, "nobody waited for the engine meanwhile"

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


def test_what_nothing_came_of_is_started_again_and_the_rest_fails(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        script = Script()
        engine = make_engine(script)
        begun = engine.open([1], SamplingParams(), "begun")
        fresh = engine.open([2], SamplingParams(), "fresh")
        scoring = asyncio.ensure_future(engine.score([5, 6]))
        await asyncio.sleep(0)
        await script.say("a", b"x")
        script.die("killed by SIGKILL")
        await asyncio.sleep(0)
        engine.detach("starting")
        late = engine.open([3], SamplingParams(), "late")  # waits for the next engine, as the fresh one does
        assert (await anext(begun)).text == "x"
        with pytest.raises(EngineUnavailable, match="SIGKILL") as raised:
            await anext(begun)
        assert raised.value.retry_after == 1.0
        second = Script()
        engine.attach(second)
        assert second.prompts == [[2], [5, 6], [3]]
        await second.say("a", b"y", "length")
        second.sinks["b"](Scored("b", Score([-1.0], [6])))
        await second.say("c", b"z", "length")
        assert [[piece.text for piece in await rest(stream)] for stream in (fresh, late)] == [["y"], ["z"]]
        assert (await scoring).logprobs == [-1.0]
        script.sinks["b"](Output("b", 0, [ord("!")]))  # of the engine that died: nobody's any more
        await asyncio.sleep(0)
        assert engine.num_sequences == 3

    run(work())
    assert "request fresh: killed by SIGKILL; it is started again" in caplog.text


def test_what_engines_die_of_is_not_started_for_ever() -> None:
    async def work() -> None:
        script = Script()
        engine = make_engine(script)
        stream = engine.open([1], SamplingParams(), "a")
        for _ in range(MAX_STARTS):
            script.die("killed by SIGSEGV")
            await asyncio.sleep(0)
            engine.detach("starting")
            script = Script()
            engine.attach(script)
        assert not script.prompts
        # It is not said to be worth another try: that would be the death of the next ones.
        with pytest.raises(GenerationError, match="the engine died 3 times while it worked on this request"):
            await rest(stream)

    run(work())


def test_an_engine_that_is_given_up_fails_what_waits_for_one() -> None:
    async def work() -> None:
        script = Script()
        engine = make_engine(script)
        stream = engine.open([1], SamplingParams(), "a")
        script.die("killed by SIGKILL")
        await asyncio.sleep(0)
        engine.detach("dead", "it died too often")
        with pytest.raises(EngineUnavailable, match="it died too often"):
            await rest(stream)
        with pytest.raises(EngineUnavailable, match="it died too often"):
            engine.open([1], SamplingParams())

    run(work())


def test_a_request_wants_an_engine_that_sleeps() -> None:
    async def work() -> None:
        wanted: list[str] = []
        engine = make_engine(Script())
        engine.requested = lambda: wanted.append("wanted")
        engine.detach("asleep")
        assert not wanted
        stream = engine.open([1], SamplingParams(), "a")
        assert wanted == ["wanted"]
        stream.close()
        script = Script()
        engine.attach(script)
        assert not script.prompts, "its client left before there was an engine"

    run(work())


def test_who_stops_waiting_for_a_score_ends_the_work() -> None:
    async def work() -> None:
        script = Script()
        engine = make_engine(script)
        scoring = asyncio.ensure_future(engine.score([5, 6]))
        await asyncio.sleep(0)
        scoring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await scoring
        assert script.aborted == [("a", None)] and not engine.num_requests

    run(work())


def test_what_was_ended_while_it_waited_for_an_engine_is_not_begun() -> None:
    async def work() -> None:
        script = Script()
        engine = AsyncEngine(Letters(), ModelFacts(128, 64))
        stream = engine.open([1], SamplingParams(), "a")
        assert engine.is_idle and engine.abort("a")
        engine.attach(script)  # before its reader has seen the end
        assert not script.prompts
        with pytest.raises(RequestAborted):
            await rest(stream)
        stream.close()
        assert engine.is_idle and not engine.num_requests

    run(work())


def test_what_was_late_while_it_waited_for_an_engine_is_not_begun() -> None:
    async def work() -> None:
        script = Script()
        engine = AsyncEngine(Letters(), ModelFacts(128, 64))
        stream = engine.open([1], SamplingParams(), "a", max_seconds=10)
        await asyncio.sleep(20)
        engine.attach(script)
        assert not script.prompts
        with pytest.raises(RequestTimeout):
            await rest(stream)
        stream.close()
        assert engine.is_idle and not engine.num_requests

    run(work())


def test_a_held_engine_goes_on_with_what_runs_and_begins_nothing() -> None:
    async def work() -> None:
        script = Script()
        engine = make_engine(script)
        running = engine.open([1], SamplingParams(), "a")
        engine.hold()
        waiting = engine.open([2], SamplingParams(), "b")
        await script.say("a", b"x", "length")
        assert [piece.text for piece in await rest(running)] == ["x"]
        assert script.prompts == [[1]] and not engine.is_idle
        running.close()
        assert engine.is_idle and engine.num_requests == 1
        engine.release()
        assert script.prompts == [[1], [2]] and not engine.is_idle
        waiting.close()

    run(work())


def test_what_gets_no_engine_in_time_is_counted_once() -> None:
    async def work() -> None:
        engine = AsyncEngine(Letters(), ModelFacts(128, 64))
        stream = engine.open([1], SamplingParams(), "a")
        engine.refuse_parked(NoRoomToWake("none", 1.0))
        with pytest.raises(NoRoomToWake):
            await rest(stream)
        stream.close()
        metrics = engine.metrics
        assert dict(metrics.outcomes) == {"refused": 1} and dict(metrics.refusals) == {"unavailable": 1}

    run(work())


def test_who_waits_for_counters_holds_no_thread() -> None:
    async def work() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        script = Script()
        engine = make_engine(script)
        asking = [asyncio.ensure_future(engine.stats()) for _ in range(8)]
        await asyncio.sleep(0)
        assert await asyncio.wait_for(asyncio.to_thread(lambda: 1), 5) == 1
        for number, sink in enumerate(script.asked):
            await asyncio.to_thread(sink, Stats("stats", EngineStats(num_steps=number)))
        assert [stats.num_steps for stats in await asyncio.gather(*asking)] == list(range(8)) and not script.aborted

    run(work())


def test_counters_that_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        script = Script()
        engine = make_engine(script)
        monkeypatch.setattr(async_engine, "STATS_SECONDS", 0.01)
        with pytest.raises(EngineUnavailable, match="the engine did not answer within 0.01 s; a step may be running"):
            await engine.stats()
        script.asked[0](Stats("stats", EngineStats()))  # too late: nobody's
        monkeypatch.setattr(async_engine, "STATS_SECONDS", 10)
        asking = asyncio.ensure_future(engine.stats())
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert script.aborted == [("stats-1", None), ("stats-2", None)], "nothing is kept of them"
        asking = asyncio.ensure_future(engine.stats())
        await asyncio.sleep(0)
        script.asked[2](Failed("stats-3", "killed by SIGKILL"))
        with pytest.raises(EngineUnavailable, match="killed by SIGKILL"):
            await asking

    run(work())
