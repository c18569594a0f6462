"""Load on servers of others, which lack something or fail, and what is made of it."""

import asyncio
import os
import signal

import numpy as np
import pytest
from fake_openai import Behaviour, FakeOpenAI

from inferc.bench.answers import Answer
from inferc.bench.endpoints import Kind, ServerFacts, Target
from inferc.bench.figures import Goals, ServeResult
from inferc.bench.http_endpoint import WORDS, as_text
from inferc.bench.load import Interrupt, run_load
from inferc.bench.session import Measured, Settings, measure
from inferc.bench.workload import Arrivals, Lengths, Plan, Planned, Texts, Workload
from inferc.errors import InfercError, RequestError

LENGTHS = Lengths(6, 8)


def settings_of(workload: Workload = LENGTHS, requests: int | None = 5, **fields: object) -> Settings:
    fields = {"concurrency": 2, "warmup": 0, **fields}
    return Settings(workload, requests=requests, **fields)  # type: ignore[arg-type]


def measured_on(
    fake: FakeOpenAI, settings: Settings | None = None, kind: Kind = "completions", timeout: float = 60.0
) -> Measured:
    with fake:
        target = Target(kind, fake.url + "/v1", timeout=timeout)
        return measure(target, settings or settings_of(), lambda stage, done, total: None)


def result_of(behaviour: Behaviour, kind: Kind = "completions", timeout: float = 60.0) -> ServeResult:
    (result,) = measured_on(FakeOpenAI(behaviour), kind=kind, timeout=timeout).results
    return result


def test_a_server_that_has_everything() -> None:
    fake = FakeOpenAI(Behaviour(tokens=3, tells_each_chunk=True))
    found = measured_on(fake)
    (result,) = found.results
    assert (result.completed, result.failed, result.goodput) == (5, {}, 1.0)
    assert result.tokens_counted == {"told": 5} and result.prompts == "token ids" and not found.facts.notes
    assert (result.prompt_tokens, result.cached_tokens, result.short_answers) == (45, 20, 0)
    assert [each.num_tokens for each in found.loads[0].answers] == [8] * 5
    body = fake.bodies[-1]
    assert body["model"] == "fake" and body["max_tokens"] == 8 and body["ignore_eos"] is True and body["stream"] is True
    assert len(body["prompt"]) == 6 and all(type(token) is int for token in body["prompt"])
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert len({str(each["prompt"]) for each in fake.bodies}) == 6  # the first one finds out what the server takes


def test_a_server_that_tells_tokens_only_in_the_end() -> None:
    result = result_of(Behaviour(tokens=3))
    assert result.tokens_counted == {"shared": 5} and result.output_tokens_per_s * result.seconds == pytest.approx(40)
    assert any("tells only at the end" in each for each in result.warnings)


def test_a_server_without_usage() -> None:
    result = result_of(Behaviour(tells_usage=False, lists_models=False))
    assert result.tokens_counted == {"chunks": 5} and result.prompt_tokens is None
    assert result.total_tokens_per_s == pytest.approx((40 + 30) / result.seconds)  # prompts were sent as token ids
    assert any("a chunk counts as one" in each for each in result.warnings)


def test_a_server_that_takes_no_token_ids() -> None:
    fake = FakeOpenAI(Behaviour(takes_ids=False))
    found = measured_on(fake)
    assert found.results[0].prompts == "text" and found.results[0].completed == 5
    assert len(fake.bodies[-1]["prompt"].split()) == 6
    (note,) = found.facts.notes
    assert note.startswith("the server does not take prompts as token ids (422: prompt: Input should be")


def test_a_server_that_takes_openai_s_own_fields_alone() -> None:
    fake = FakeOpenAI(Behaviour(takes_ids=False, takes_extras=False))
    found = measured_on(fake)
    assert found.results[0].completed == 5 and "ignore_eos and continuous_usage_stats" in found.facts.notes[0]
    assert "ignore_eos" not in fake.bodies[-1] and fake.bodies[-1]["stream_options"] == {"include_usage": True}
    fake = FakeOpenAI(Behaviour(takes_extras=False, takes_stream_options=False))
    assert measured_on(fake).results[0].tokens_counted == {"chunks": 5}
    assert "stream_options" not in fake.bodies[-1] and isinstance(fake.bodies[-1]["prompt"], list)


def test_chats() -> None:
    fake = FakeOpenAI(Behaviour(role_first=True, tells_each_chunk=True))
    chats = Texts(([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "hello"), (3, 0), 4)
    (result,) = measured_on(fake, settings_of(chats, 4), "chat").results
    assert result.completed == 4 and result.prompts == "text" and result.input_len == 0 and result.short_answers == 0
    asked = {str(body["messages"][-1]["content"]): body["max_tokens"] for body in fake.bodies[1:]}
    assert asked == {"u": 3, "hello": 4}


def test_refusals_are_counted_by_status() -> None:
    result = result_of(Behaviour(refusals=[200, 429, 503, 429, 200]))
    assert (result.requests, result.completed, result.failed) == (5, 2, {"429": 2, "503": 1})
    assert result.goodput == pytest.approx(2 / 5)
    assert any("3 requests failed, the first with 429: come back later" in each for each in result.warnings)


@pytest.mark.parametrize(
    ("behaviour", "status"),
    [
        (Behaviour(dies_after=4), "cut short"),
        (Behaviour(ends_after=4), "cut short"),
        (Behaviour(error_after=4), "error in stream"),
    ],
)
def test_answers_that_break_off_have_failed_with_what_had_come(behaviour: Behaviour, status: str) -> None:
    # An answer of two tokens, with which it is found out what the server takes, ends well.
    found = measured_on(FakeOpenAI(behaviour))
    (result,) = found.results
    assert result.completed == 0 and result.failed == {status: 5} and result.goodput == 0.0 and result.ttft_ms is None
    # What had been read; of a connection that is cut, that may be nothing.
    counts = [each.num_tokens for each in found.loads[0].answers]
    assert max(counts) <= 4 and (min(counts) == 4 or behaviour.dies_after)
    assert all(each.detail for each in found.loads[0].answers)


def test_an_answer_that_takes_too_long_has_failed() -> None:
    with FakeOpenAI() as fake:

        def hold(count: int) -> None:
            fake.behaviour.holds = count > 1

        fake._on_request = hold
        target = Target("completions", fake.url + "/v1", timeout=0.3)
        (result,) = measure(target, settings_of(requests=2), lambda stage, done, total: None).results
    assert result.failed == {"timeout": 2}


@pytest.mark.parametrize(("status", "error"), [(401, RequestError), (503, InfercError), (429, InfercError)])
def test_a_server_that_refuses_the_first_request(status: int, error: type[Exception]) -> None:
    fake = FakeOpenAI(Behaviour(takes_extras=False, takes_stream_options=False))
    fake._refusal = lambda wanted: (status, "not you")  # type: ignore[method-assign]
    with pytest.raises(error, match=f"/completions answers a first request with {status}: not you") as raised:
        measured_on(fake)
    assert type(raised.value) is error and len(fake.bodies) == 1


def test_nobody_there() -> None:
    with pytest.raises(InfercError, match="no connection"):
        measure(Target("completions", "http://127.0.0.1:9/v1"), settings_of(), lambda stage, done, total: None)
    with pytest.raises(InfercError, match=r"127\.0\.0\.1:9 does not answer: UNAVAILABLE"):
        measure(Target("grpc", "127.0.0.1:9"), settings_of(), lambda stage, done, total: None)


def test_an_open_loop_does_not_wait_for_answers() -> None:
    """A server that answers nobody until all have come: a closed loop would wait for ever."""
    everybody = asyncio.Event()

    class Waiting:
        facts = ServerFacts("x", 100)
        num_open = 0

        def prepare(self, prompt: object, output_len: int) -> object:
            return prompt

        async def send(self, prepared: object, answer: Answer) -> None:
            self.num_open += 1
            if self.num_open == 20:
                everybody.set()
            await everybody.wait()
            answer.messages.append((0.001, 2))
            answer.end(0.002)

        async def close(self) -> None: ...

    plan = Plan([Planned(number, 0.0005 * number, 4, 2) for number in range(20)], lambda request: "x")
    load = asyncio.run(run_load(Waiting(), plan, Interrupt()))
    assert [each.number for each in load.answers] == list(range(20)) and all(each.is_ok for each in load.answers)
    assert len(load.lags) == 20 and min(load.lags) >= 0 and not load.is_interrupted


def test_a_closed_loop_keeps_as_many_under_way() -> None:
    class Counting:
        facts = ServerFacts("x", 100)
        now = most = 0

        def prepare(self, prompt: object, output_len: int) -> object:
            return prompt

        async def send(self, prepared: object, answer: Answer) -> None:
            self.now += 1
            self.most = max(self.most, self.now)
            await asyncio.sleep(0)
            self.now -= 1
            answer.messages.append((0.001, 1))
            answer.end(0.001)

        async def close(self) -> None: ...

    endpoint = Counting()
    plan = Plan([Planned(number, 0.0, 4, 1) for number in range(11)], lambda request: "x")
    load = asyncio.run(run_load(endpoint, plan, Interrupt(), concurrency=3))
    assert endpoint.most == 3 and len(load.answers) == 11
    load = asyncio.run(run_load(endpoint, plan, Interrupt(), concurrency=3, seconds=0.0))
    assert not load.answers


def test_an_interrupt_ends_the_load_and_keeps_what_has_ended() -> None:
    """The third request is held by the server, and then ^C comes."""
    fake = FakeOpenAI(Behaviour(tells_each_chunk=True))

    def on_request(count: int) -> None:  # the first one finds out what the server takes
        if count == 4:
            fake.behaviour.holds = True
            os.kill(os.getpid(), signal.SIGINT)

    fake._on_request = on_request
    found = measured_on(fake, settings_of(requests=50, concurrency=1))
    (result,) = found.results
    assert found.is_interrupted and (result.requests, result.completed, result.unfinished) == (3, 2, 1)
    assert result.goodput == 1.0 and any(each.startswith("interrupted") for each in result.warnings)


def test_a_fault_of_our_own_is_not_a_result() -> None:
    class Broken:
        facts = ServerFacts("x", 100)

        def prepare(self, prompt: object, output_len: int) -> object:
            return prompt

        async def send(self, prepared: object, answer: Answer) -> None:
            raise ZeroDivisionError

        async def close(self) -> None: ...

    plan = Plan([Planned(0, 0.0, 4, 1)], lambda request: "x")
    for concurrency in (None, 1):
        with pytest.raises(ZeroDivisionError):
            asyncio.run(run_load(Broken(), plan, Interrupt(), concurrency))


def test_a_sweep_and_a_search() -> None:
    arrivals = Arrivals("burst", burst_size=100)  # all at once, so that a load takes no time
    swept = settings_of(requests=6, rates=(50.0, 200.0), concurrency=None, arrivals=arrivals, warmup=2)
    fake = FakeOpenAI(Behaviour(tells_each_chunk=True))
    found = measured_on(fake, swept)
    assert [(each.rate, each.requests) for each in found.results] == [(50.0, 6), (200.0, 6)]
    assert found.largest_good(by_speed=False, share=0.9) == 200.0
    assert len({str(body["prompt"]) for body in fake.bodies}) == 1 + 2 + 12  # no load finds what another has cached
    # Nobody can be good: the search goes down until requests are alone, and ends.
    hopeless = settings_of(
        requests=6, rates=(50.0,), concurrency=None, arrivals=arrivals, find=True, goals=Goals(1e-6, None)
    )
    found = measured_on(FakeOpenAI(), hopeless)
    rates = [each.rate for each in found.results]
    assert rates == [50.0 / 2**turn for turn in range(len(rates))] and found.largest_good(False, 0.9) is None


def test_texts_for_ids_begin_alike_where_these_do() -> None:
    ids = np.random.default_rng(0).integers(2, 10**5, 40).tolist()
    words = as_text(ids).split()
    assert len(words) == 40 and words[:20] == as_text(ids[:20]).split() and len(set(words)) > 20
    assert len(set(WORDS)) == len(WORDS)


@pytest.mark.parametrize(
    ("text", "kind", "expected"),
    [
        ("127.0.0.1:50051", None, ("grpc", "127.0.0.1:50051")),
        ("[::1]:50051", "grpc", ("grpc", "[::1]:50051")),
        ("grpc://host:1", None, ("grpc", "host:1")),
        ("http://host:8000", None, ("completions", "http://host:8000/v1")),
        ("https://host/v3/", "chat", ("chat", "https://host/v3")),
        ("out/qwen3", None, None),
        ("name", None, None),
    ],
)
def test_where_a_server_is(text: str, kind: Kind | None, expected: object) -> None:
    assert Target.address_of(text, kind) == expected
