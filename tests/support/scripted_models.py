"""Models of which not all may be awake at once: supervisors over scripted engine processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from scripted_process import Process

from inferc.errors import InfercError
from inferc.runtime.engine.scoring import Score
from inferc.serve.models.async_engine import AsyncEngine
from inferc.serve.models.residency import Residency
from inferc.serve.models.streams import ModelFacts
from inferc.serve.models.supervisor import Supervisor


class Model:
    """A supervisor, and the processes it started. errors: what the next ones fail by; may_start: whether they start by
    themselves."""

    def __init__(self, name: str, residency: Residency, started: list[str]) -> None:
        self.name, self._started = name, started
        self.processes: list[Process] = []
        self.errors: list[InfercError | None] = []
        self.may_start = True
        self.num_begun = 0
        self.engine = AsyncEngine(None, ModelFacts(128, 64))
        self.supervisor = Supervisor(self.engine, self._launch, residency=residency)

    def _launch(self, on_stop: Callable[[str], None]) -> Process:
        self.processes.append(Process(on_stop, self.errors.pop(0) if self.errors else None))
        if not self.may_start:
            self.process.start_gate.close()
        self._started.append(self.name)
        return self.process

    @property
    def process(self) -> Process:
        return self.processes[-1]

    def ask(self) -> asyncio.Task[Score]:
        return asyncio.create_task(self.engine.score([1, 2]))

    async def answer(self) -> None:
        """The oldest request that its engine has or gets."""
        await until(lambda: bool(self.processes and self.process.sinks))
        self.process.answer()

    async def use(self) -> None:
        """Ask and answer."""
        asked = self.ask()
        await self.answer()
        await asked

    @property
    def num_alive(self) -> int:
        return sum(not process.closed and process.stopped is None for process in self.processes)


class House:
    """Models a, b, c …, of which some may be awake. started: whose processes were started, in their order."""

    def __init__(self, num_models: int, limit: int, wait_seconds: float = 60.0) -> None:
        self.started: list[str] = []
        self.residency = Residency(limit, wait_seconds)
        self.models = [Model(name, self.residency, self.started) for name in "abcd"[:num_models]]

    async def __aenter__(self) -> list[Model]:
        for model in self.models:
            await model.supervisor.start()
        return self.models

    async def __aexit__(self, *error: object) -> None:
        for model in self.models:
            for process in model.processes:
                process.start_gate.open()
                process.end_gate.open()
        await asyncio.gather(*(model.supervisor.close() for model in self.models))
        assert not any(model.num_alive for model in self.models)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.1)


async def settle() -> None:
    """Let everything happen that can, where nothing but the test's next word is waited for."""
    for _ in range(50):
        await asyncio.sleep(0)


def states(models: list[Model]) -> list[str]:
    return [model.engine.state for model in models]
