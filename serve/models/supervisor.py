"""Keeps a model's engine process running: starts it, notices that it died or hangs, starts it again, puts it to sleep.

What is between two engines waits (async_engine.py). An engine that dies again and again is given up.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol

from inferc.errors import ArtifactError, InfercError
from inferc.runtime.engine.loop import Event, Stats
from inferc.serve.errors import EngineUnavailable, NoPlace, RequestAborted
from inferc.serve.models.artifact_watch import FileFault
from inferc.serve.models.async_engine import AsyncEngine, State
from inferc.serve.models.residency import NotWanted, Places
from inferc.serve.models.streams import EngineLike

log = logging.getLogger(__name__)

PING_SECONDS = 1.0  # how often the engine is asked whether it still steps
HANG_SECONDS = 60.0  # a step that lasts longer is no step any more
START_SECONDS = 1800.0  # a start after a death or a sleep that takes longer hangs
MAX_DEATHS = 5  # within DEATHS_WINDOW_SECONDS: then it is given up
DEATHS_WINDOW_SECONDS = 300.0
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.0, 10.0  # before it is started again; doubled from the second death on
FILES_SECONDS = 2.0  # how often the artifact's files are looked at
FIRST_LOOK_SECONDS, MAX_LOOK_SECONDS = 1.0, 30.0  # at damaged ones, doubled from look to look

# What clients are told, who may be anybody: what it cannot start for has names of files in it.
NO_START = "the engine does not start; the server's log says why"
HARMED = "the engine was killed: a file that it reads was changed"
DAMAGED = (
    "the model's files are damaged or missing, the server's log says which: it serves again when they are as they were"
)
GIVEN_UP = "the engine was given up, the server's log says why: restart the server, or load the model again"


class EngineProcessLike(EngineLike, Protocol):
    """What the supervisor asks of an engine's process (EngineProcess). The first three wait."""

    def wait_until_ready(self) -> object: ...

    def close(self) -> None: ...

    def kill(self, reason: str) -> None: ...


class Files(Protocol):
    """What the supervisor asks of the artifact's files (ArtifactWatch). `fault` may wait for the disk."""

    def fault(self, thorough: bool = False) -> FileFault | None: ...

    def mapped_anew(self) -> None: ...


class NoFiles:
    """An engine without files, of which nothing can be wrong."""

    def fault(self, thorough: bool = False) -> FileFault | None:
        return None

    def mapped_anew(self) -> None:
        pass


Launch = Callable[[Callable[[str], None]], EngineProcessLike]


class Supervisor:
    """Runs the engine of one AsyncEngine. launch starts a process, and gets whom to tell, on any thread, that it stopped.

    on_state hears of every change of the engine's state. places: of which it takes one while there is an engine. files: those
    that the engine maps; while one of them is damaged there is no engine, and none that serves what it should not.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        launch: Launch,
        hang_seconds: float = HANG_SECONDS,
        on_state: Callable[[State], None] = lambda state: None,
        places: Places | None = None,
        files: Files | None = None,
    ) -> None:
        self.engine = engine
        self._files = files or NoFiles()
        self._told = ""  # of a file
        self._num_looks = 0  # at damaged ones
        self.num_restarts = 0
        self.num_swaps = 0  # sleeps that made room for another
        self.is_waking = False  # started because it was asked for: it was well when it went to sleep
        self._places = places or Places()
        self._room_asked = asyncio.Event()
        self.is_leaving = False  # the engine ends, for a sleep
        self._num_waking = 0  # who waits in `wake`
        self._refusal: NoPlace | None = None  # why it was not woken
        self._launch = launch
        self._hang_seconds = hang_seconds
        self._on_state = on_state
        self._loop = asyncio.get_running_loop()
        self._process: EngineProcessLike | None = None
        self._died = asyncio.Event()
        self._wake = asyncio.Event()
        self._sleep_asked = asyncio.Event()
        self._changed = asyncio.Event()  # of the state
        self._deaths: deque[float] = deque()
        self._task: asyncio.Task[None] | None = None
        engine.wanted = self._wake.set
        engine.rested = self._places.look

    async def start(self) -> None:
        """Start the engine and return when it takes requests; without a place for it, let it sleep until it is asked for. Raises
        what it cannot start for."""
        if self._places.take_free(self):
            await self._start_process()
        else:
            self._detach("asleep")
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """End the engine; whatever still runs fails."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        if self._process is not None:
            await asyncio.to_thread(self._process.close)
        self._places.leave(self)

    async def sleep(self) -> None:
        """Let running requests end, then give the engine's memory back. The next request wakes it.

        Raises EngineUnavailable if it cannot sleep now, and RequestAborted if somebody wakes it before it does.
        """
        if self.engine.state == "asleep":
            return
        if self.engine.state != "serving":
            raise EngineUnavailable(f"the engine is {self.engine.state}; it cannot sleep now", retry_after=1.0)
        self._sleep_asked.set()
        await self._wait_for("asleep", self._woken)

    async def wake(self) -> None:
        """Return when the engine takes requests. Raises EngineUnavailable if it is gone for good, or has no place in time."""
        self._sleep_asked.clear()
        self._changed.set()  # for who waits for the sleep
        self._refusal = None
        self._num_waking += 1
        try:
            if self.engine.state == "asleep":
                self._wake.set()
            await self._wait_for("serving", lambda: self._refusal)
        finally:
            self._num_waking -= 1
            self._places.look()

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits for the engine."""
        return bool(self.engine.num_requests or self._num_waking)

    def make_room(self) -> None:
        """Begin nothing more, and sleep when what runs is over, for another to be awake."""
        self.engine.hold()
        self._room_asked.set()

    def stay_awake(self) -> None:
        """Take `make_room` back, unless it sleeps by now."""
        self._room_asked.clear()
        self.engine.release()

    def _woken(self) -> RequestAborted | None:
        return None if self._sleep_asked.is_set() else RequestAborted("the model was woken before it slept")

    async def _wait_for(self, state: State, refusal: Callable[[], InfercError | None]) -> None:
        """refusal: why it will not come to that."""
        while self.engine.state != state:
            if (closed := self.engine.refusal) is not None:
                raise EngineUnavailable(closed)
            if (error := refusal()) is not None:
                raise error
            self._changed.clear()
            await self._changed.wait()

    # -------------------------------------------------------------------------------------------- the task

    async def _run(self) -> None:
        try:
            await self._supervise()
        except Exception:  # a mistake here, and nobody would start an engine again: better to say so
            log.exception("the engine is given up")
            if self._process is not None:
                await asyncio.to_thread(self._process.close)
            self._detach("dead", GIVEN_UP)
            self._places.leave(self)

    async def _supervise(self) -> None:
        if self.engine.client is None and not await self._wake_up():
            return
        while True:
            why = await self._watch()
            if why is None:
                await self._sleep()
                if not await self._wake_up():
                    return
                continue
            now = time.monotonic()
            self._deaths.append(now)
            while self._deaths[0] < now - DEATHS_WINDOW_SECONDS:
                self._deaths.popleft()
            log.error("%s; %d requests were open", why, self.engine.num_requests)
            self._detach("starting")
            if not await self._start_again(why):
                return

    async def _start_again(self, why: str) -> bool:
        """Start the engine after a death, and again if it does not start; False: it is given up."""
        while True:
            if len(self._deaths) > MAX_DEATHS:
                within = max(DEATHS_WINDOW_SECONDS, time.monotonic() - self._deaths[0])  # starts may take long
                reason = (
                    f"{why}; that was its {len(self._deaths)}th end within {within:.0f} s, so it is not"
                    " started again: restart the server, or load the model again"
                )
                log.error("%s", reason)
                self._detach("dead", reason)
                self._places.leave(self)
                return False
            thorough = len(self._deaths) > 1  # it may die of what nobody has written to since it was loaded
            fault = await asyncio.to_thread(self._files.fault, thorough)
            if fault is not None:
                await self._outlast(fault.reason)
            pause = FIRST_PAUSE_SECONDS if len(self._deaths) == 1 else 0.5 * 2 ** (len(self._deaths) - 2)
            await asyncio.sleep(min(pause, MAX_PAUSE_SECONDS) if fault is None else 0.0)
            started = time.monotonic()
            try:
                await self._start_process(START_SECONDS)
            except ArtifactError as error:  # of a file that is read and not mapped
                await self._outlast(str(error), looks_again=False)
                continue
            except (InfercError, OSError) as error:  # OSError: no memory for a process, say
                log.error("the engine does not start again: %s", error)
                why = NO_START
                self._deaths.append(time.monotonic())
                continue
            self.num_restarts += 1
            log.warning("the engine was started again, in %.2f s", time.monotonic() - started)
            return True

    async def _outlast(self, reason: str, looks_again: bool = True) -> None:
        """Refuse requests until the artifact's files are as they were; what ended of them is no death of the engine's.

        looks_again False: another start shows whether they are; wait for as long as for a look.
        """
        if self.engine.reason != DAMAGED:
            self._num_looks, self._told = 0, ""  # what was told while an engine ran is not that requests are refused
            self._detach("damaged", DAMAGED)
        if self._told != reason:
            log.error("%s; requests are refused until it is as it was", reason)
            self._told = reason
        while True:
            await asyncio.sleep(min(FIRST_LOOK_SECONDS * 2**self._num_looks, MAX_LOOK_SECONDS))
            self._num_looks = min(self._num_looks + 1, 16)
            if not looks_again:
                return
            fault = await asyncio.to_thread(self._files.fault)
            if fault is None:
                break
            if self._told != fault.reason:
                log.error("%s", fault.reason)
                self._told = fault.reason
        log.warning("the artifact's files are as they were")
        self._told = ""
        self._deaths.clear()

    async def _start_process(self, limit_seconds: float | None = None) -> None:
        """Raises what it cannot start for, and InfercError if it takes longer than that; it is killed then."""
        self._died = died = asyncio.Event()

        def on_stop(reason: str) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(died.set)

        process = self._process = self._launch(on_stop)
        # On a thread of its own: it may take minutes, and those of asyncio are few and everybody's.
        thread = ThreadPoolExecutor(1, "inferc-start")
        starting = self._loop.run_in_executor(thread, process.wait_until_ready)
        thread.shutdown(wait=False)  # what it is at goes on
        try:
            await asyncio.wait((starting,), timeout=limit_seconds)
        except asyncio.CancelledError:
            starting.cancel()
            process.close()  # which ends the thread's wait
            raise
        if not starting.done():
            starting.cancel()
            await asyncio.to_thread(process.close)
            raise InfercError(f"it was not ready within {limit_seconds:g} s and was killed")
        starting.result()
        await asyncio.to_thread(self._files.mapped_anew)
        self.engine.attach(process)
        self._state_changed()

    async def _watch(self) -> str | None:
        """Why the engine has ended, or has to; None: it shall sleep.

        It is asked for its counters again and again; when it does not answer within hang_seconds, it is killed. So it is when a
        file that it maps was harmed.
        """
        process = self._process
        assert process is not None
        files = asyncio.create_task(self._watch_files(process))
        try:
            return await self._watch_process(process)
        finally:
            files.cancel()

    async def _watch_files(self, process: EngineProcessLike) -> None:
        """Kill an engine that reads what it should not."""
        is_watched = True
        while process.stopped is None:
            await asyncio.sleep(FILES_SECONDS)
            try:
                fault = await asyncio.to_thread(self._files.fault)
            except Exception:  # the engine is well as far as anybody knows
                if is_watched:
                    log.exception("the artifact's files cannot be watched")
                is_watched = False
                continue
            is_watched = True
            if fault is None:
                self._told = ""
            if fault is not None and fault.in_place:
                log.error("%s; the engine, which reads it, is killed", fault.reason)
                await asyncio.to_thread(process.kill, HARMED)
            elif fault is not None and self._told != fault.reason:
                log.warning(
                    "%s; the engine that runs keeps what lay there before, and another could not start", fault.reason
                )
                self._told = fault.reason

    async def _watch_process(self, process: EngineProcessLike) -> str | None:
        answered, asked = asyncio.Event(), time.monotonic()
        self._ping(process, answered)
        while process.stopped is None:
            if self._shall_sleep and self.engine.is_at_rest:
                return None
            await self._next_event(PING_SECONDS)
            now = time.monotonic()
            if answered.is_set():
                answered, asked = asyncio.Event(), now
                self._ping(process, answered)
            elif self._hang_seconds and now - asked > self._hang_seconds and process.stopped is None:
                reason = f"the engine has not ended its step for {self._hang_seconds:g} s and was killed"
                await asyncio.to_thread(process.kill, reason)
                return reason
        return process.stopped

    @property
    def _shall_sleep(self) -> bool:
        return self._sleep_asked.is_set() or self._room_asked.is_set()

    async def _next_event(self, seconds: float) -> None:
        """Wait at most this long for the engine's end, or for what a sleep waits for."""
        events: list[Callable[[], Coroutine[None, None, bool]]] = [self._died.wait]
        if self._shall_sleep:
            events.append(self.engine.wait_until_at_rest)
        else:
            events += [self._sleep_asked.wait, self._room_asked.wait]
        waits = [asyncio.ensure_future(wait()) for wait in events]
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _ping(self, process: EngineProcessLike, answered: asyncio.Event) -> None:
        def sink(event: Event) -> None:
            if isinstance(event, Stats):
                with suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(answered.set)

        with suppress(InfercError):  # it has stopped: `_watch` sees that
            process.ask_stats(sink)

    async def _sleep(self) -> None:
        """End the engine's process."""
        process = self._process
        assert process is not None
        self._wake.clear()
        self._sleep_asked.clear()
        self.num_swaps += self._room_asked.is_set()
        self._room_asked.clear()
        self.is_leaving = True
        self._detach("asleep")
        await asyncio.to_thread(process.close)
        self.is_leaving = False
        self.engine.release()
        self._places.leave(self)

    async def _wake_up(self) -> bool:
        """Start an engine when a request wants one and there is a place for it; False: it is given up."""
        while True:
            await self._wake.wait()
            try:
                await self._places.take(self)
                break
            except NotWanted:
                self._wake.clear()
            except NoPlace as error:
                self._wake.clear()
                self._refusal = error
                self.engine.refuse_parked(error)
                self._state_changed()
        self.is_waking = True
        self._detach("starting")
        try:
            await self._start_process(START_SECONDS)
        except (InfercError, OSError) as error:
            self._deaths.append(time.monotonic())
            log.error("the engine does not wake: %s", error)
            self.is_waking = False
            self._state_changed()
            return await self._start_again(NO_START)
        finally:
            self.is_waking = False
        return True

    def _detach(self, state: State, reason: str = "") -> None:
        self.engine.detach(state, reason)
        self._state_changed()

    def _state_changed(self) -> None:
        self._changed.set()
        self._places.look()
        self._on_state(self.engine.state)
