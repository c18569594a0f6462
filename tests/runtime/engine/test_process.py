"""Engines behind a client: in a thread and in a process; crashes reach every open request with the reason."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from fake_runner import make_engine, next_id, oracle
from serving import wait_until

from inferc.errors import ConfigError, GenerationError, InfercError, ObjectiveError
from inferc.runtime.engine import process as engine_process
from inferc.runtime.engine.engine import Engine
from inferc.runtime.engine.loop import (
    Abort,
    Add,
    Embedded,
    EmbedText,
    EngineClient,
    EngineThread,
    Event,
    Failed,
    GetStats,
    Scored,
    ScoredRows,
    ScoreText,
    Shutdown,
    Stats,
)
from inferc.runtime.engine.messages import (
    ENTRIES_OF_PART,
    EventReader,
    EventWriter,
    Name,
    decode_command,
    encode_command,
)
from inferc.runtime.engine.process import (
    STOPPED,
    EngineProcess,
)
from inferc.runtime.engine.scoring import Score
from inferc.runtime.engine.stats import EngineStats
from inferc.runtime.kv_cache.events import KvBatch
from inferc.runtime.step.plan import Logprobs
from inferc.runtime.step.sampling_params import SamplingParams
from inferc.runtime.step.sequence import Output, Sequence, StepOutputs

FACTORY = "fake_runner:make_engine"


def process(**options: object) -> EngineProcess:
    return EngineProcess(options, factory=FACTORY).wait_until_ready()


def thread(**options: object) -> EngineThread:
    return EngineThread(lambda: make_engine(**options))  # type: ignore[arg-type]


@pytest.fixture(params=["thread", "process"], scope="module")
def client(request: pytest.FixtureRequest) -> Iterator[EngineClient]:
    made = (thread if request.param == "thread" else process)(max_model_len=2000, num_blocks=2000, eos=(7,))
    yield made
    made.close()


def collect(events: queue.SimpleQueue[Event], count: int = 1) -> tuple[dict[tuple[str, int], list[int]], list[str]]:
    """The ids of `count` sequences and their finish reasons, in the order they ended."""
    ids: dict[tuple[str, int], list[int]] = {}
    reasons: list[str] = []
    while len(reasons) < count:
        event = events.get(timeout=20)
        assert isinstance(event, Output), event
        ids.setdefault((event.request_id, event.index), []).extend(event.token_ids)
        if event.finish_reason is not None:
            reasons.append(event.finish_reason)
    return ids, reasons


def test_requests_are_answered(client: EngineClient) -> None:
    params = SamplingParams(temperature=0, max_tokens=9, logprobs=2, n=2)
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    names = [client.add([1, 2, 3], params, events.put) for _ in range(3)]
    ids, reasons = collect(events, 6)
    want, reason = oracle([1, 2, 3], params, (7,), 2000)
    assert ids == {(name, index): want for name in names for index in range(2)}
    assert reasons == [reason] * 6
    assert client.num_open == 0


def test_refusals_reach_the_request(client: EngineClient) -> None:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    client.add([1] * 3000, SamplingParams(), events.put)
    event = events.get(timeout=20)
    assert isinstance(event, Failed)
    assert event.is_request_error
    assert "3000 tokens" in event.reason


@pytest.mark.parametrize("token_id", [2**31, 2**64, -(2**70)])
def test_a_number_that_no_token_id_can_be_is_refused(client: EngineClient, token_id: int) -> None:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    client.add([1, token_id], SamplingParams(), events.put)
    client.score([1, token_id], events.put, num_top=1)
    for _ in range(2):
        event = events.get(timeout=20)
        assert isinstance(event, Failed) and event.is_request_error and "token id" in event.reason
    assert client.num_open == 0


@pytest.mark.parametrize("make", [thread, process])
def test_a_batch_waits_for_its_window_and_its_engine_sleeps_meanwhile(make: Callable[..., EngineClient]) -> None:
    client = make(policy="window:300ms")
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    params = SamplingParams(temperature=0, max_tokens=3)
    names = [client.add([1, 2], params, events.put) for _ in range(2)]
    first = [events.get(timeout=20) for _ in range(2)]
    assert [event.request_id for event in first] == names, "they run side by side"
    client.add([3], SamplingParams(max_tokens=1), events.put)
    client.drain()  # ends only when what waits for its window is done
    client.join(timeout=20)
    ends = 0
    while not events.empty():
        event = events.get()
        ends += isinstance(event, Output) and event.finish_reason == "length"
    assert ends == 3
    client.close()


@pytest.mark.parametrize("make", [thread, process])
def test_an_objective_that_can_not_be_met_fails_its_request_alone(make: Callable[..., EngineClient]) -> None:
    client = make(policy="slo", max_model_len=2000, num_blocks=1000)
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    for _ in range(40):  # learns what steps cost
        client.add([1, 2], SamplingParams(temperature=0, max_tokens=9), events.put)
    collect(events, 40)
    client.add([1] * 1900, SamplingParams(max_tokens=50, ttft_ms=0.001), events.put)
    client.add([5], SamplingParams(temperature=0, max_tokens=1), events.put)
    failed, output = events.get(timeout=20), events.get(timeout=20)
    assert isinstance(failed, Failed) and isinstance(failed.error, ObjectiveError), failed
    assert "ttft_ms is 0.001" in failed.reason and "when it is idle" in failed.reason
    assert isinstance(output, Output) and output.finish_reason == "length"
    assert client.stats().num_refused == 1
    client.close()


def test_after_an_abort_nothing_more_comes(client: EngineClient) -> None:
    """Outputs that are on their way at an abort belong to nobody, least of all to the request that comes next."""
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    for _ in range(20):
        aborted: queue.SimpleQueue[Event] = queue.SimpleQueue()
        first = client.add([1], params, aborted.put)
        aborted.get(timeout=20)
        client.abort(first)
        while not aborted.empty():
            aborted.get()
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        second = client.add([2], SamplingParams(temperature=0, max_tokens=2), events.put)
        assert second != first
        assert collect(events)[0] == {(second, 0): [next_id([2]), next_id([2, next_id([2])])]}
        assert events.empty() and aborted.empty()


def test_one_broken_sequence_ends_its_own_request_only() -> None:
    def broken() -> Engine:
        engine = make_engine(max_model_len=400, num_blocks=400)
        engine.runner.broken_prompt = [9, 9]  # type: ignore[attr-defined]
        return engine

    client = EngineThread(broken)
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    failures: queue.SimpleQueue[Event] = queue.SimpleQueue()
    client.add([1], SamplingParams(temperature=0, max_tokens=100), events.put)
    client.add([9, 9], SamplingParams(n=3), failures.put)
    client.add([2], SamplingParams(temperature=0, max_tokens=100), events.put)
    failed = failures.get(timeout=20)
    assert isinstance(failed, Failed) and isinstance(failed.error, GenerationError) and not failed.is_request_error
    assert collect(events, 2)[1] == ["length", "length"]
    assert client.stats().num_running == 0 and failures.empty() and client.stopped is None
    client.close()


def adding_breaks(where: str, method: str) -> Callable[[], Engine]:
    """Return a maker of engines in whose scheduler or scorer a method fails for ids that begin with 9."""

    def make() -> Engine:
        engine = make_engine(max_model_len=400, num_blocks=400)
        part = getattr(engine, where)
        right = getattr(part, method)

        def wrong(*given: Any) -> Any:
            ids = given[0].token_ids if isinstance(given[0], Sequence) else given[1]
            if ids[0] == 9:
                raise ZeroDivisionError("a mistake of ours")
            return right(*given)

        setattr(part, method, wrong)
        return engine

    return make


@pytest.mark.parametrize(
    ("where", "method", "send"),
    [
        ("scheduler", "objection", lambda client, sink: client.add([9, 1], SamplingParams(n=3), sink)),
        ("_scorer", "add", lambda client, sink: client.score([9, 1], sink)),
    ],
)
def test_what_fails_before_a_request_has_begun_fails_it_alone(
    where: str,
    method: str,
    send: Callable[[EngineClient, Callable[[Event], None]], str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = EngineThread(adding_breaks(where, method))
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    failures: queue.SimpleQueue[Event] = queue.SimpleQueue()
    client.add([1], SamplingParams(temperature=0, max_tokens=100), events.put)
    send(client, failures.put)
    client.add([2], SamplingParams(temperature=0, max_tokens=100), events.put)
    failed = failures.get(timeout=20)
    assert isinstance(failed, Failed) and isinstance(failed.error, GenerationError) and not failed.is_request_error
    assert "ZeroDivisionError" in caplog.text and "mistake of ours" not in failed.reason
    assert collect(events, 2)[1] == ["length", "length"]
    stats = client.stats()
    assert (stats.num_running, stats.num_waiting, stats.prompt_tokens) == (0, 0, 2) and client.stopped is None
    assert failures.empty() and client.num_open == 0
    client.close()


def test_what_fails_in_the_scheduler_ends_the_engine() -> None:
    """Nobody knows what of the request is left in there."""
    client = EngineThread(adding_breaks("scheduler", "add"))
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    client.add([9, 1], SamplingParams(), events.put)
    client.join(20)
    failed = events.get(timeout=20)
    assert isinstance(failed, Failed) and client.stopped == failed.reason


def test_one_sequence_of_several_can_be_aborted(client: EngineClient) -> None:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    name = client.add([1], SamplingParams(n=2, max_tokens=500, ignore_eos=True), events.put)
    first = events.get(timeout=20)
    assert isinstance(first, Output)
    client.abort(name, 1 - first.index)
    ids, reasons = collect(events, 1)
    assert len(ids[name, first.index]) == 499
    assert reasons == ["length"]
    assert client.num_open == 0


def test_scores_and_stats(client: EngineClient) -> None:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    client.score([5, 6, 7], events.put)
    event = events.get(timeout=20)
    assert isinstance(event, Scored)
    assert event.score.logprobs == [-6.0, -7.0]
    client.score([5, 6, 7], events.put, num_top=2)
    with_top = events.get(timeout=20)
    assert isinstance(with_top, Scored)
    assert [(row.token_id, len(row.top)) for row in with_top.score.rows] == [(6, 2), (7, 2)]
    assert client.stats().block_size == 4


def test_an_idle_engine_does_what_is_left_for_then_and_a_request_does_not_wait_for_all_of_it() -> None:
    done: list[int] = []
    may_go_on = threading.Semaphore(2)

    def idle_work() -> bool:
        may_go_on.acquire()
        done.append(1)
        return len(done) < 5

    client = EngineThread(lambda: make_engine(idle_work=idle_work))
    wait_until(lambda: len(done) == 2, "two pieces are done")
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    client.add([1, 2], SamplingParams(max_tokens=3, ignore_eos=True), events.put)
    may_go_on.release()  # the piece under way
    assert collect(events)[1] == ["length"] and len(done) == 3
    for _ in range(10):
        may_go_on.release()
    wait_until(lambda: len(done) == 5, "the others follow")
    client.add([1, 2], SamplingParams(max_tokens=3, ignore_eos=True), events.put)
    assert collect(events)[1] == ["length"] and len(done) == 5, "which were all"
    client.close()


@pytest.mark.parametrize("make", [thread, process])
def test_draining_finishes_what_is_open(make: Callable[..., EngineClient]) -> None:
    client = make(max_model_len=400, num_blocks=400)
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    name = client.add([1], SamplingParams(max_tokens=200), events.put)
    client.drain()
    with pytest.raises(InfercError, match="draining"):
        client.add([1], SamplingParams(), events.put)
    ids, _ = collect(events)
    assert len(ids[name, 0]) == 200
    client.join(20)
    assert client.stopped == "the engine was closed"
    with pytest.raises(InfercError, match="was closed"):
        client.add([1], SamplingParams(), events.put)


@pytest.mark.parametrize("make", [thread, process])
def test_closing_fails_what_is_open(make: Callable[..., EngineClient]) -> None:
    client = make(max_model_len=50000, num_blocks=20000)
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    name = client.add([1], SamplingParams(max_tokens=None), events.put)
    events.get(timeout=20)
    client.close()
    last = [events.get() for _ in range(events.qsize())][-1]
    assert last == Failed(name, "the engine was closed")


def test_a_failing_step_fails_every_request() -> None:
    def broken() -> Engine:
        engine = make_engine()
        engine.runner.fail_at = 3  # type: ignore[attr-defined]
        return engine

    stops: list[str] = []
    client = EngineThread(broken, on_stop=stops.append)
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    names = {client.add([1], SamplingParams(max_tokens=20), events.put) for _ in range(2)}
    client.join(20)
    failed = [event for event in (events.get() for _ in range(events.qsize())) if isinstance(event, Failed)]
    assert {event.request_id for event in failed} == names
    assert all("the fake model broke" in event.reason for event in failed)
    assert client.stopped == stops[0] == failed[0].reason
    assert not failed[0].is_request_error


def test_a_killed_engine_is_noticed_at_once() -> None:
    stops: queue.SimpleQueue[str] = queue.SimpleQueue()
    client = EngineProcess({"max_model_len": 50000, "num_blocks": 20000}, factory=FACTORY, on_stop=stops.put)
    client.wait_until_ready()
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    name = client.add([1], SamplingParams(max_tokens=None), events.put)
    events.get(timeout=20)
    os.kill(client.pid, signal.SIGKILL)
    reason = stops.get(timeout=5)
    client.join(5)
    last = [events.get() for _ in range(events.qsize())][-1]
    assert last == Failed(name, reason)
    assert "killed by SIGKILL" in reason
    with pytest.raises(InfercError, match="SIGKILL"):
        client.add([1], SamplingParams(), events.put)
    client.close()


def test_an_engine_that_cannot_start_says_why() -> None:
    with pytest.raises(ConfigError, match="less than max_num_seqs"):
        process(max_num_seqs=99)
    with pytest.raises(InfercError, match="unexpected keyword"):
        process(no_such_option=1)


def test_a_process_that_the_system_does_not_give(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(InfercError, match="the engine's process cannot be started: Resource temporarily unavailable"):
        process()
    assert set(os.listdir("/proc/self/fd")) == before


def test_what_an_engine_stops_for_is_for_its_log(capfd: pytest.CaptureFixture[str]) -> None:
    client = EngineProcess({}, factory="fake_runner:make_breaking").wait_until_ready()
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    client.add([1], SamplingParams(max_tokens=20), events.put)
    client.join(20)
    last = [events.get() for _ in range(events.qsize())][-1]
    assert isinstance(last, Failed) and last.reason == client.stopped == STOPPED
    assert "the fake model broke" in capfd.readouterr().err


def test_a_broken_engine_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one needs its memory, and nobody holds on to this one any more."""
    monkeypatch.setattr(engine_process, "KILL_AFTER_SECONDS", 0.3)
    client = EngineProcess({"ends": False}, factory="fake_runner:make_breaking").wait_until_ready()
    client.add([1], SamplingParams(max_tokens=20), lambda event: None)
    client.join(20)
    assert client.stopped == STOPPED and not is_alive(client.pid)


def test_a_child_that_reads_nothing_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sends may be the thread that has to notice that the child hangs."""
    monkeypatch.setattr(engine_process, "KILL_AFTER_SECONDS", 0.5)
    client = process(max_model_len=50000, num_blocks=20000)
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    long_ones: queue.SimpleQueue[Event] = queue.SimpleQueue()
    prompt = list(range(1, 20001))

    def send() -> None:
        for _ in range(20):  # two megabytes: no socket takes so much
            client.abort(client.add(prompt, SamplingParams(max_tokens=1), long_ones.put))
        client.add([1, 2, 3], SamplingParams(max_tokens=4), events.put)

    def in_time(work: Callable[[], None]) -> bool:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(10)
        return not thread.is_alive()

    try:
        os.kill(client.pid, signal.SIGSTOP)
        assert in_time(send), "sending waits for the child"
        os.kill(client.pid, signal.SIGCONT)
        ids, _ = collect(events)
        assert [len(each) for each in ids.values()] == [4]
        assert client.stats().num_running == 0 and long_ones.empty()
        os.kill(client.pid, signal.SIGSTOP)
        assert in_time(send) and in_time(client.close), "closing waits for the child"
        assert not is_alive(client.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(client.pid, signal.SIGKILL)


def test_closing_while_it_loads_ends_the_wait(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    os.mkfifo(begun)
    client = EngineProcess({"begun": str(begun)}, factory="fake_runner:make_for_ever")

    def close_when_it_loads() -> None:
        begun.read_bytes()
        client.close()

    closing = threading.Thread(target=close_when_it_loads, daemon=True)
    closing.start()
    with pytest.raises(InfercError, match="ended before it was ready"):
        client.wait_until_ready()
    closing.join(20)
    assert not closing.is_alive() and not is_alive(client.pid)


def test_the_engine_ends_with_its_parent() -> None:
    program = (
        "from inferc.runtime.engine.process import EngineProcess\n"
        "import sys\n"
        f"print(EngineProcess({{}}, factory={FACTORY!r}).wait_until_ready().pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        ended = os.pidfd_open(child)
        parent.kill()
    try:
        assert select.select([ended], [], [], 20)[0], "the engine process outlives its parent"
    finally:
        os.close(ended)


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_neither_torch_nor_transformers_is_imported() -> None:
    program = (
        "import sys, inferc\n"
        "from inferc import LLM, SamplingParams, load\n"
        "import inferc.runtime.engine.process, inferc.runtime.engine.load, inferc.runtime.runners.cpu.runner\n"
        "assert not {'torch', 'transformers', 'triton'} & set(sys.modules), 'heavy imports'\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)


def test_messages_survive_the_pipe() -> None:
    params = SamplingParams(stop=("é\n",), logit_bias={3: -1.5}, seed=2**64 - 1, stop_token_ids=(4,), max_tokens=None)
    listed = SamplingParams(allowed_token_ids=tuple(range(50_000)), logit_bias={3: -1.5})
    for command in (
        Add("a", [1, 2], params),
        Add("l", [*range(50_000)], params),
        Add("m", [1], listed),
        Abort("a", 1),
        Add("t", [], SamplingParams(temperature=0, stop=("a", "é"), stop_token_ids=(3,), ttft_ms=1.5), "mine"),
        Abort("a", 1),
        Abort("b"),
        ScoreText("s", [1, 2], 3, "salt"),
        EmbedText("e", [1]),
        GetStats("g"),
        Shutdown(drain=True),
    ):
        assert decode_command(encode_command(command)) == command
    with pytest.raises(msgspec.ValidationError, match="Expected `int`, got `str`"):
        decode_command(msgspec.msgpack.encode(("EmbedText", "e", ["1"])))
    events: list[Event] = [
        Output("a", 1, [5], "stop", [Logprobs(5, -0.1, 2, ((1, -0.05), (5, -0.1)))]),
        Output("a", 0, [6], num_cached=32),
        Failed(None, "gone"),
        Scored("s", Score([-1.5], [3])),
        Stats("t", EngineStats(finished={"stop": 2}, cost_error=np.float64(0.5))),
    ]
    reader, writer = EventReader(), EventWriter()
    assert _decoded(reader, [*writer.encode(events)]) == events
    names = [Name("a", 0), Name("b", 3)]
    sizes = []
    for ids in ([5, 6], [7, 8], [9, 10]):
        others = {1: Output("b", 3, [ids[1]], "length"), 0: None} if ids[0] == 7 else {}
        step = StepOutputs(names, np.array(ids, np.int32), others)
        data = [*writer.encode(step)]
        assert _decoded(reader, data) == list(step)
        sizes.append(len(data[0]))
    assert sizes[2] < sizes[0], "whose rows they are is said once"
    step = StepOutputs(names[::-1], np.array([1, 2], np.int32), {})
    assert _decoded(reader, [*writer.encode(step)]) == [Output("b", 3, [1]), Output("a", 0, [2])]


def test_what_was_checked_is_not_checked_by_the_engines_process(monkeypatch: pytest.MonkeyPatch) -> None:
    message = encode_command(Add("a", [1], SamplingParams(logit_bias={3: -1.5})))
    checks: list[SamplingParams] = []
    monkeypatch.setattr(SamplingParams, "__post_init__", checks.append)
    command = decode_command(message)
    assert isinstance(command, Add) and command.params.logit_bias == {3: -1.5} and not checks


def test_long_scores_come_in_parts_and_what_is_no_number_or_no_text_comes_too() -> None:
    minus, top = -float("inf"), tuple((token, -float(token)) for token in range(31))
    rows = [Logprobs(token, minus, 1, top) for token in range(1000)]
    events: list[Event] = [
        ScoredRows("a", rows[:500]),
        Scored("a", Score.of_rows(rows[500:])),
        Failed("c", "/mo\udcffdel"),
        Embedded("d", [0.5]),
    ]
    messages = [*EventWriter().encode(events)]
    assert max(map(len, messages)) < 16 * ENTRIES_OF_PART
    found = _decoded(EventReader(), messages)
    of_rows = [event for event in found if isinstance(event, ScoredRows)]
    assert len(of_rows) == 8 and [row for event in of_rows for row in event.rows] == rows
    assert found[8:] == [Scored("a", Score([], [])), Failed("c", "/mo\\udcffdel"), Embedded("d", [0.5])]


@pytest.mark.parametrize("make", [thread, process])
def test_a_long_text_is_scored_as_one_that_fits_a_step(make: Callable[..., EngineClient]) -> None:
    text = [number % 40 + 10 for number in range(300)]
    scores = []
    for budget in (16, 512):
        client = make(max_num_batched_tokens=budget, max_model_len=400, num_blocks=400)
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        client.score(text, events.put, num_top=2)
        event = events.get(timeout=20)
        assert isinstance(event, Scored) and events.empty()
        scores.append(event.score)
        client.close()
    assert scores[0] == scores[1] and len(scores[0].rows) == len(scores[0].logprobs) == 299


def _decoded(reader: EventReader, messages: list[bytes]) -> list[Event]:
    found: list[Event] = []
    for message in messages:
        events = reader.decode(message)
        assert not isinstance(events, KvBatch)
        found += events
    return found
