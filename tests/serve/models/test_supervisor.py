"""The life of an engine process, over scripted ones: death, hangs, giving up, sleep."""

import asyncio
from collections.abc import Callable
from functools import partial

import pytest
from scripted_process import Process
from virtual_time import run

from inferc.errors import ArtifactError, InfercError
from inferc.runtime.engine.loop import Scored
from inferc.runtime.engine.scoring import Score
from inferc.serve.errors import EngineUnavailable, RequestAborted
from inferc.serve.models import supervisor
from inferc.serve.models.artifact_watch import FileFault
from inferc.serve.models.async_engine import AsyncEngine, State
from inferc.serve.models.streams import ModelFacts
from inferc.serve.models.supervisor import MAX_DEATHS, START_SECONDS, Supervisor


class Stage:
    """A supervisor, the processes it started, and the states it told of. errors: what the next processes fail by."""

    def __init__(self, hang_seconds: float = 60.0, files: supervisor.Files | None = None) -> None:
        self.processes: list[Process] = []
        self.errors: list[InfercError | OSError | None] = []
        self.states: list[State] = []
        self.may_start = True
        self.engine = AsyncEngine(None, ModelFacts(128, 64))
        self.supervisor = Supervisor(self.engine, self.launch, hang_seconds, self.states.append, files=files)

    def launch(self, on_stop: Callable[[str], None]) -> Process:
        self.processes.append(Process(on_stop, self.errors.pop(0) if self.errors else None))
        if not self.may_start:
            self.processes[-1].start_gate.close()
        return self.processes[-1]

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.1)


def test_what_cannot_start_the_first_time_is_raised() -> None:
    async def work() -> None:
        stage = Stage()
        stage.errors = [ArtifactError("damaged")]
        with pytest.raises(ArtifactError, match="damaged"):
            await stage.supervisor.start()
        await stage.supervisor.close()
        assert stage.processes[0].closed

    run(work())


def test_a_dead_engine_is_started_again() -> None:
    async def work() -> None:
        stage = Stage()
        await stage.supervisor.start()
        assert stage.states == ["serving"]
        stage.processes[0].die("killed by SIGKILL")
        await stage.until(lambda: stage.states == ["serving", "starting", "serving"])
        assert stage.engine.client is stage.processes[1] and stage.supervisor.num_restarts == 1
        await stage.supervisor.close()
        assert stage.processes[1].closed

    run(work())


def test_one_that_dies_again_and_again_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        stage = Stage()
        await stage.supervisor.start()
        stage.errors = [None, InfercError("no memory in /home/me")]  # of the second and the third process
        while stage.engine.state != "dead":
            if stage.engine.state == "serving" and stage.processes[-1].stopped is None:
                stage.processes[-1].die("killed by SIGSEGV")
            await asyncio.sleep(0.1)
        with pytest.raises(EngineUnavailable, match="6th end within 300 s, so it is not started again"):
            stage.engine.check_open()
        with pytest.raises(EngineUnavailable, match="not started again"):
            await stage.supervisor.wake()
        assert len(stage.processes) == MAX_DEATHS + 1
        await stage.supervisor.close()

    run(work())
    assert "the engine does not start again: no memory in /home/me" in caplog.text


@pytest.mark.parametrize("falls_asleep", [False, True])
def test_a_start_that_the_system_refuses_is_tried_again(falls_asleep: bool) -> None:
    async def work() -> None:
        stage = Stage()
        await stage.supervisor.start()
        stage.errors = [OSError(12, "Cannot allocate memory")]
        if falls_asleep:
            await stage.supervisor.sleep()
            asking = asyncio.ensure_future(stage.supervisor.wake())
        else:
            stage.processes[0].die("killed by SIGSEGV")
            asking = asyncio.ensure_future(asyncio.sleep(0))
        await stage.until(lambda: len(stage.processes) == 3 and stage.engine.state == "serving")
        await asking
        await stage.supervisor.close()

    run(work())


def test_a_mistake_of_its_own_gives_the_engine_up_by_name(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        stage = Stage()
        await stage.supervisor.start()

        def broken(sink: object) -> str:
            raise ValueError("/home/me/secret")

        stage.processes[0].ask_stats = broken  # type: ignore[method-assign]
        await stage.until(lambda: stage.engine.state == "dead")
        with pytest.raises(EngineUnavailable, match="the engine was given up, the server's log says why"):
            stage.engine.check_open()
        assert stage.states[-1] == "dead" and stage.processes[0].closed
        await stage.supervisor.close()

    run(work())
    assert "ValueError: /home/me/secret" in caplog.text


@pytest.mark.parametrize("falls_asleep", [False, True])
def test_why_it_does_not_start_is_for_the_log(falls_asleep: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        stage = Stage()
        await stage.supervisor.start()
        stage.errors = [InfercError("/home/me/socket is in use")] * 9
        if falls_asleep:
            await stage.supervisor.sleep()
        else:
            stage.processes[0].die("killed by SIGSEGV")
        with pytest.raises(EngineUnavailable, match="the engine does not start; the server's log says why; that was"):
            await asyncio.ensure_future(stage.engine.score([1, 2]))
        with pytest.raises(EngineUnavailable) as raised:
            stage.engine.check_open()
        assert "/home/me" not in str(raised.value) and "/home/me" not in stage.engine.reason
        await stage.supervisor.close()

    run(work())
    assert "/home/me/socket is in use" in caplog.text


def test_a_hung_engine_is_killed_and_started_again() -> None:
    async def work() -> None:
        stage = Stage(hang_seconds=30)
        await stage.supervisor.start()
        await asyncio.sleep(100)
        assert len(stage.processes) == 1, "it answers"
        stage.processes[0].is_hung = True
        await stage.until(lambda: len(stage.processes) == 2)
        assert stage.processes[0].stopped == "the engine has not ended its step for 30 s and was killed"
        await stage.supervisor.close()

    run(work())


def test_hanging_may_be_allowed() -> None:
    async def work() -> None:
        stage = Stage(hang_seconds=0)
        await stage.supervisor.start()
        stage.processes[0].is_hung = True
        await asyncio.sleep(1000)
        assert stage.processes[0].stopped is None
        await stage.supervisor.close()

    run(work())


def test_sleep_waits_for_what_runs_and_the_next_request_wakes() -> None:
    async def work() -> None:
        stage = Stage()
        await stage.supervisor.start()
        scoring = asyncio.ensure_future(stage.engine.score([1, 2]))
        await asyncio.sleep(0)
        sleeping = asyncio.ensure_future(stage.supervisor.sleep())
        await asyncio.sleep(10)
        assert not sleeping.done() and not stage.processes[0].closed
        stage.processes[0].sinks[0](Scored("1", Score([-1.0], [2])))
        assert (await scoring).argmax == [2]
        await sleeping
        await stage.until(lambda: stage.processes[0].closed)
        assert len(stage.processes) == 1
        await stage.supervisor.sleep()  # it does already
        stage.engine.requested()
        await stage.until(lambda: stage.engine.client is stage.processes[-1])
        assert stage.states == ["serving", "asleep", "starting", "serving"] and len(stage.processes) == 2
        await stage.supervisor.close()

    run(work())


def test_one_that_does_not_wake_is_tried_again() -> None:
    async def work() -> None:
        stage = Stage()
        await stage.supervisor.start()
        await stage.supervisor.sleep()
        stage.errors = [InfercError("no memory")]
        await stage.supervisor.wake()
        assert len(stage.processes) == 3 and stage.engine.client is stage.processes[2]
        await stage.supervisor.close()

    run(work())


def test_who_put_it_to_sleep_hears_that_it_was_woken_before() -> None:
    async def work() -> None:
        stage = Stage()
        await stage.supervisor.start()
        scoring = asyncio.ensure_future(stage.engine.score([1, 2]))
        await asyncio.sleep(0)
        sleeping = asyncio.ensure_future(stage.supervisor.sleep())
        await asyncio.sleep(10)
        await stage.supervisor.wake()
        with pytest.raises(RequestAborted, match="the model was woken before it slept"):
            await sleeping
        stage.processes[0].answer()
        await scoring
        await asyncio.sleep(10)
        assert stage.states == ["serving"] and not stage.processes[0].closed
        await stage.supervisor.sleep()
        assert stage.states == ["serving", "asleep"]
        await stage.supervisor.close()

    run(work())


@pytest.mark.parametrize("falls_asleep", [False, True])
def test_a_start_that_hangs_is_killed_and_counts_as_a_death(
    falls_asleep: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        stage = Stage()
        await stage.supervisor.start()
        stage.may_start = False
        if falls_asleep:
            await stage.supervisor.sleep()
            stage.engine.requested()
        else:
            stage.processes[0].die("killed by SIGSEGV")
        await stage.until(lambda: len(stage.processes) == 3)
        assert stage.processes[1].closed and stage.engine.client is None
        stage.may_start = True
        await stage.until(lambda: stage.engine.state == "serving")
        await stage.supervisor.close()

    run(work())
    assert f"it was not ready within {START_SECONDS:g} s and was killed" in caplog.text


def test_one_whose_starts_hang_is_given_up() -> None:
    async def work() -> None:
        stage = Stage()
        await stage.supervisor.start()
        stage.may_start = False
        stage.processes[0].die("killed by SIGSEGV")
        await stage.until(lambda: stage.engine.state == "dead")
        assert len(stage.processes) == MAX_DEATHS + 1 and all(process.closed for process in stage.processes[1:])
        await stage.supervisor.close()

    run(work())


def test_the_first_start_may_take_as_long_as_it_takes() -> None:
    async def work() -> None:
        stage = Stage()
        stage.may_start = False
        starting = asyncio.ensure_future(stage.supervisor.start())
        await asyncio.sleep(10 * START_SECONDS)
        assert not starting.done() and not stage.processes[0].closed
        stage.processes[0].start_gate.open()
        await starting
        await stage.supervisor.close()

    run(work())


class Files:
    """Files of an artifact, of which the test says what is wrong."""

    def __init__(self) -> None:
        self.found: FileFault | None = None
        self.looks: list[bool] = []  # whether each was a thorough one

    def fault(self, thorough: bool = False) -> FileFault | None:
        self.looks.append(thorough)
        return self.found

    def mapped_anew(self) -> None:
        pass


def test_an_engine_waits_for_its_files_and_is_never_given_up(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        files = Files()
        stage = Stage(files=files)
        await stage.supervisor.start()
        files.found = FileFault("/home/me/weights is truncated: it has 1 bytes, expected 9", in_place=False)
        scoring = asyncio.ensure_future(stage.engine.score([1, 2]))
        await asyncio.sleep(0)
        stage.processes[0].die("killed by SIGBUS")
        with pytest.raises(
            EngineUnavailable, match="the model's files are damaged or missing, the server's log says which"
        ):
            await scoring
        assert stage.engine.state == "damaged" and "/home/me" not in stage.engine.reason
        with pytest.raises(EngineUnavailable, match="damaged or missing"):
            stage.engine.check_open()
        looks = len(files.looks)
        await stage.until(lambda: len(files.looks) > looks + MAX_DEATHS)
        assert len(stage.processes) == 1, "nothing is started meanwhile"
        files.found = None
        await stage.until(lambda: stage.engine.state == "serving")
        assert stage.engine.reason == "" and stage.supervisor.num_restarts == 1
        assert stage.states == ["serving", "starting", "damaged", "serving"]
        await stage.supervisor.close()

    run(work())
    assert caplog.text.count("/home/me/weights is truncated: it has 1 bytes, expected 9") == 1, (
        "said once, not in a loop"
    )
    assert "the artifact's files are as they were" in caplog.text


def test_an_engine_whose_file_is_overwritten_is_killed(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        files = Files()
        stage = Stage(files=files)
        await stage.supervisor.start()
        files.found = FileFault("/home/me/weights is damaged within bytes 0 to 8", in_place=True)
        await stage.until(lambda: stage.engine.state == "damaged")
        assert stage.processes[0].stopped == "the engine was killed: a file that it reads was changed"
        files.found = None
        await stage.until(lambda: stage.engine.state == "serving")
        await stage.supervisor.close()

    run(work())
    assert "/home/me/weights is damaged within bytes 0 to 8; the engine, which reads it, is killed" in caplog.text


def test_a_file_that_was_replaced_is_told_once_and_the_engine_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        files = Files()
        stage = Stage(files=files)
        await stage.supervisor.start()
        files.found = FileFault("/home/me/weights is missing", in_place=False)
        await stage.until(lambda: len(files.looks) > 5)
        assert stage.states == ["serving"] and stage.processes[0].stopped is None
        await stage.supervisor.close()

    run(work())
    assert caplog.text.count("/home/me/weights is missing; the engine that runs keeps what lay there before") == 1


def test_that_requests_are_refused_is_told_each_time(caplog: pytest.LogCaptureFixture) -> None:
    """The refusal is told again for a file whose change was told before."""

    def is_told(count: int) -> bool:
        return caplog.text.count("keeps what lay there before") == count

    async def work() -> None:
        files = Files()
        stage = Stage(files=files)
        await stage.supervisor.start()
        for count in (1, 2):
            files.found = FileFault("/home/me/weights is missing", in_place=False)
            await stage.until(partial(is_told, count))
            stage.processes[-1].die("killed by SIGKILL")
            await stage.until(lambda: stage.engine.state == "damaged")
            files.found = None
            await stage.until(lambda: stage.engine.state == "serving")
        await stage.supervisor.close()

    run(work())
    assert caplog.text.count("/home/me/weights is missing; requests are refused until it is as it was") == 2


def test_files_that_cannot_be_looked_at_once_are_looked_at_again(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Files):
        def fault(self, thorough: bool = False) -> FileFault | None:
            found = super().fault(thorough)
            if len(self.looks) < 4:
                raise OSError("no look")
            return found

    async def work() -> None:
        files = Broken()
        stage = Stage(files=files)
        await stage.supervisor.start()
        files.found = FileFault("/home/me/weights is damaged within bytes 0 to 8", in_place=True)
        await stage.until(lambda: stage.engine.state == "damaged")
        await stage.supervisor.close()

    run(work())
    assert caplog.text.count("the artifact's files cannot be watched") == 1


def test_files_that_only_a_start_reads_are_waited_for_as_well() -> None:
    async def work() -> None:
        stage = Stage()
        await stage.supervisor.start()
        count = 3 * MAX_DEATHS
        stage.errors = [ArtifactError("kernels/cpu-avx2.so is damaged")] * count
        stage.processes[0].die("killed by SIGSEGV")
        await stage.until(lambda: len(stage.processes) == count + 2 and stage.engine.state == "serving")
        assert "damaged" in stage.states
        await stage.supervisor.close()

    run(work())


def test_a_second_death_has_all_files_hashed() -> None:
    async def work() -> None:
        files = Files()
        stage = Stage(files=files)
        await stage.supervisor.start()
        assert True not in files.looks
        stage.processes[0].die("killed by SIGSEGV")
        await stage.until(lambda: len(stage.processes) == 2 and stage.engine.state == "serving")
        assert True not in files.looks
        stage.processes[1].die("killed by SIGSEGV")
        await stage.until(lambda: len(stage.processes) == 3 and stage.engine.state == "serving")
        assert True in files.looks
        await stage.supervisor.close()

    run(work())
