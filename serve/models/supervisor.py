"""The supervisor of a model's engine process: it starts, watches and restarts the process, and puts it to sleep.

It notices that the process died or hangs. Requests that come while there is no engine wait (async_engine.py). An engine
that dies again and again is given up.
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
from inferc.serve.errors import EngineUnavailable, NoRoomToWake, RequestAborted
from inferc.serve.models.artifact_watch import FileFault
from inferc.serve.models.async_engine import AsyncEngine, State
from inferc.serve.models.residency import Residency, WakeCancelled
from inferc.serve.models.streams import EngineLike

log = logging.getLogger(__name__)

PING_SECONDS = 1.0  # how often the engine is asked for its counters, to see whether it still runs steps
HANG_SECONDS = 60.0  # an engine whose step lasts longer is taken to hang
START_SECONDS = 1800.0  # time limit of a start after a death or a sleep
MAX_DEATHS = 5  # an engine with more deaths within DEATHS_WINDOW_SECONDS is given up
DEATHS_WINDOW_SECONDS = 300.0
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.0, 10.0  # pause before a restart; from the second death on it doubles
FILES_SECONDS = 2.0  # how often the artifact's files are checked
FIRST_LOOK_SECONDS, MAX_LOOK_SECONDS = 1.0, 30.0  # interval of checks of damaged files; it doubles each time

# Messages for clients, who may be anybody: the real error of a failed start may name files of the server.
NO_START = "the engine does not start; the server's log says why"
HARMED = "the engine was killed: a file that it reads was changed"
DAMAGED = (
    "the model's files are damaged or missing, the server's log says which: it serves again when they are as they were"
)
GIVEN_UP = "the engine was given up, the server's log says why: restart the server, or load the model again"


class EngineProcessLike(EngineLike, Protocol):
    """The protocol of an engine's process for the supervisor (EngineProcess); the three methods below block."""

    def wait_until_ready(self) -> object: ...

    def close(self) -> None: ...

    def kill(self, reason: str) -> None: ...


class Files(Protocol):
    """The protocol of the artifact's files for the supervisor (ArtifactWatch); `fault` may wait for the disk."""

    def fault(self, thorough: bool = False) -> FileFault | None: ...

    def mapped_anew(self) -> None: ...


class NoFiles:
    """The files of an engine that maps none, so that they never have a fault."""

    def fault(self, thorough: bool = False) -> FileFault | None:
        return None

    def mapped_anew(self) -> None:
        pass


Launch = Callable[[Callable[[str], None]], EngineProcessLike]


class Supervisor:
    """The supervisor of the engine process behind one AsyncEngine.

    launch: starts a process; its argument is called, on any thread, when the process has stopped.
    on_state is called at every change of the engine's state.
    residency: gives out the places for awake engines; this takes one as long as there is an engine.
    files: the files that the engine maps; while one is damaged, there is no engine, so that no wrong weights are
    served.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        launch: Launch,
        hang_seconds: float = HANG_SECONDS,
        on_state: Callable[[State], None] = lambda state: None,
        residency: Residency | None = None,
        files: Files | None = None,
    ) -> None:
        self.engine = engine
        self._files = files or NoFiles()
        self._reported = ""  # the fault of a file that was logged last
        self._num_looks = 0  # checks of the damaged files so far
        self.num_restarts = 0
        self.num_swaps = 0  # sleeps that made room for another model
        self.is_waking = False  # starts from sleep, for a request; the engine was well when it went to sleep
        self._residency = residency or Residency()
        self._room_asked = asyncio.Event()
        self.is_leaving = False  # the engine's process is being ended for a sleep
        self._num_waking = 0  # calls of `wake` that wait
        self._refusal: NoRoomToWake | None = None  # why the last attempt to wake failed
        self._launch = launch
        self._hang_seconds = hang_seconds
        self._on_state = on_state
        self._loop = asyncio.get_running_loop()
        self._process: EngineProcessLike | None = None
        self._died = asyncio.Event()
        self._wake = asyncio.Event()
        self._sleep_asked = asyncio.Event()
        self._changed = asyncio.Event()  # set whenever the engine's state changes
        self._deaths: deque[float] = deque()
        self._num_lost = 0  # the engine's, as of the last start
        self._task: asyncio.Task[None] | None = None
        engine.requested = self._wake.set
        engine.on_idle = self._residency.look

    async def start(self) -> None:
        """Start the engine and return when it takes requests; if no place is free, let it sleep until it is needed.

        Raises the error for which the engine cannot start.
        """
        if self._residency.take_free(self):
            await self._start_process()
        else:
            self._detach("asleep")
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """End the engine's process; requests that still run fail."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        if self._process is not None:
            await asyncio.to_thread(self._process.close)
        self._residency.leave(self)

    async def sleep(self) -> None:
        """Let running requests end, then free the engine's memory; the next request wakes the engine.

        Raises EngineUnavailable if it cannot sleep now, and RequestAborted if it is woken before it sleeps.
        """
        if self.engine.state == "asleep":
            return
        if self.engine.state != "serving":
            raise EngineUnavailable(f"the engine is {self.engine.state}; it cannot sleep now", retry_after=1.0)
        self._sleep_asked.set()
        await self._wait_for("asleep", self._woken)

    async def wake(self) -> None:
        """Wake the engine, and return when it takes requests.

        Raises EngineUnavailable if the engine is gone for good, or gets no place in time.
        """
        self._sleep_asked.clear()
        self._changed.set()  # so that a call of `sleep` that waits sees it
        self._refusal = None
        self._num_waking += 1
        try:
            if self.engine.state == "asleep":
                self._wake.set()
            await self._wait_for("serving", lambda: self._refusal)
        finally:
            self._num_waking -= 1
            self._residency.look()

    @property
    def is_requested(self) -> bool:
        """True if somebody waits for the engine."""
        return bool(self.engine.num_requests or self._num_waking)

    def make_room(self) -> None:
        """Start no more requests, and sleep when the running ones have ended, so that another model can be awake."""
        self.engine.hold()
        self._room_asked.set()

    def stay_resident(self) -> None:
        """Cancel `make_room`, unless the engine sleeps by now."""
        self._room_asked.clear()
        self.engine.release()

    def _woken(self) -> RequestAborted | None:
        return None if self._sleep_asked.is_set() else RequestAborted("the model was woken before it slept")

    async def _wait_for(self, state: State, refusal: Callable[[], InfercError | None]) -> None:
        """Wait until the engine is in `state`; raise the error that `refusal` returns once this cannot happen."""
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
        except Exception:  # a bug in the supervisor: no engine would be restarted any more, so say so
            log.exception("the engine is given up")
            if self._process is not None:
                await asyncio.to_thread(self._process.close)
            self._detach("dead", GIVEN_UP)
            self._residency.leave(self)

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
            log.error("%s", why)
            self._detach("starting")
            if not await self._start_again(why):
                return

    async def _start_again(self, why: str) -> bool:
        """Restart the engine after a death, and try again while it fails to start; return False if it is given up."""
        while True:
            if len(self._deaths) > MAX_DEATHS:
                within = max(DEATHS_WINDOW_SECONDS, time.monotonic() - self._deaths[0])  # starts may take long
                reason = (
                    f"{why}; that was its {len(self._deaths)}th end within {within:.0f} s, so it is not"
                    " started again: restart the server, or load the model again"
                )
                log.error("%s", reason)
                self._detach("dead", reason)
                self._residency.leave(self)
                return False
            # From the second death on, also hash files that look unchanged: the engine may die of a file that was
            # damaged without a write since it was loaded.
            thorough = len(self._deaths) > 1
            fault = await asyncio.to_thread(self._files.fault, thorough)
            if fault is not None:
                await self._outlast(fault.reason)
            pause = FIRST_PAUSE_SECONDS if len(self._deaths) == 1 else 0.5 * 2 ** (len(self._deaths) - 2)
            await asyncio.sleep(min(pause, MAX_PAUSE_SECONDS) if fault is None else 0.0)
            started = time.monotonic()
            try:
                await self._start_process(START_SECONDS)
            except ArtifactError as error:  # a fault of a file that is read and not mapped
                await self._outlast(str(error), looks_again=False)
                continue
            except (InfercError, OSError) as error:  # OSError: no memory for a process, for example
                log.error("the engine does not start again: %s", error)
                why = NO_START
                self._deaths.append(time.monotonic())
                continue
            self.num_restarts += 1
            lost, self._num_lost = self.engine.num_lost - self._num_lost, self.engine.num_lost
            log.warning("the engine was started again, in %.2f s; requests lost: %d", time.monotonic() - started, lost)
            return True

    async def _outlast(self, reason: str, looks_again: bool = True) -> None:
        """Refuse requests for as long as files of the artifact are damaged.

        Deaths that damaged files caused are then forgotten. looks_again False: do not check the files, since the next
        start will; only wait as long as until the next check.
        """
        if self.engine.reason != DAMAGED:
            self._num_looks, self._reported = 0, ""  # log again: the earlier line did not say that requests are refused
            self._detach("damaged", DAMAGED)
        if self._reported != reason:
            log.error("%s; requests are refused until it is as it was", reason)
            self._reported = reason
        while True:
            await asyncio.sleep(min(FIRST_LOOK_SECONDS * 2**self._num_looks, MAX_LOOK_SECONDS))
            self._num_looks = min(self._num_looks + 1, 16)
            if not looks_again:
                return
            fault = await asyncio.to_thread(self._files.fault)
            if fault is None:
                break
            if self._reported != fault.reason:
                log.error("%s", fault.reason)
                self._reported = fault.reason
        log.warning("the artifact's files are as they were")
        self._reported = ""
        self._deaths.clear()

    async def _start_process(self, limit_seconds: float | None = None) -> None:
        """Start a process and wait until it is ready.

        Raises the error for which it cannot start, and InfercError, after killing it, if it takes longer than the
        limit.
        """
        self._died = died = asyncio.Event()

        def on_stop(reason: str) -> None:
            with suppress(RuntimeError):  # the loop is closed, so nobody waits for this
                self._loop.call_soon_threadsafe(died.set)

        process = self._process = self._launch(on_stop)
        # The start gets a thread of its own: it may take minutes, and asyncio's threads are few and shared.
        thread = ThreadPoolExecutor(1, "inferc-start")
        starting = self._loop.run_in_executor(thread, process.wait_until_ready)
        thread.shutdown(wait=False)  # the thread's present work goes on
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
        """Watch the running engine, and return the reason why it ended, or None if it is to sleep.

        The engine is asked for its counters again and again, and killed if it does not answer within hang_seconds. It
        is also killed if a file that it maps was changed.
        """
        process = self._process
        assert process is not None
        files = asyncio.create_task(self._watch_files(process))
        try:
            return await self._watch_process(process)
        finally:
            files.cancel()

    async def _watch_files(self, process: EngineProcessLike) -> None:
        """Kill the engine if a file that it has mapped is changed in place."""
        is_watched = True
        while process.stopped is None:
            await asyncio.sleep(FILES_SECONDS)
            try:
                fault = await asyncio.to_thread(self._files.fault)
            except Exception:  # the check failed, which says nothing against the engine
                if is_watched:
                    log.exception("the artifact's files cannot be watched")
                is_watched = False
                continue
            is_watched = True
            if fault is None:
                self._reported = ""
            if fault is not None and fault.in_place:
                log.error("%s; the engine, which reads it, is killed", fault.reason)
                await asyncio.to_thread(process.kill, HARMED)
            elif fault is not None and self._reported != fault.reason:
                log.warning(
                    "%s; the engine that runs keeps what lay there before, and another could not start", fault.reason
                )
                self._reported = fault.reason

    async def _watch_process(self, process: EngineProcessLike) -> str | None:
        answered, asked = asyncio.Event(), time.monotonic()
        self._ping(process, answered)
        while process.stopped is None:
            if self._shall_sleep and self.engine.is_idle:
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
        """Wait at most this long for the engine's death, for a wish to sleep, or, if there is one, for idleness."""
        events: list[Callable[[], Coroutine[None, None, bool]]] = [self._died.wait]
        if self._shall_sleep:
            events.append(self.engine.wait_until_idle)
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

        with suppress(InfercError):  # the process has stopped, which `_watch` sees
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
        self._residency.leave(self)

    async def _wake_up(self) -> bool:
        """Start an engine once a request needs it and there is a place; return False if the engine is given up."""
        while True:
            await self._wake.wait()
            try:
                await self._residency.take(self)
                break
            except WakeCancelled:
                self._wake.clear()
            except NoRoomToWake as error:
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
        self._residency.look()
        self._on_state(self.engine.state)
