"""The list of the requests that are open now, for `GET /requests`: how far each has come, and never its text."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from typing import Any, Literal

from inferc.errors import InfercError
from inferc.serve.models.async_engine import AsyncEngine
from inferc.serve.models.models import Models
from inferc.serve.models.served_model import ServedModel
from inferc.serve.models.streams import EngineTask
from inferc.serve.models.tasks import gather

MOST = 50  # requests that are listed
STATS_SECONDS = 1.0
State = Literal["waiting", "prefill", "decode", "unread"]


async def open_requests(models: Models, owner: str | None) -> dict[str, Any]:
    """Return the open requests of all models that belong to `owner` (None: all), the oldest first, at most MOST.

    `num_open` counts also those that are not listed. A request is listed from when its prompt has been tokenized.
    """
    served = models.served
    waiting = await gather(_waiting(model.engine) for model in served)
    now = time.monotonic()
    found = [
        (task, model, ids)
        for model, ids in zip(served, waiting, strict=True)
        for task in model.engine.tasks
        if owner is None or task.owner == owner
    ]
    found.sort(key=lambda each: each[0].arrived_at)
    return {"num_open": len(found), "requests": [_row(*each, now) for each in found[:MOST]]}


async def _waiting(engine: AsyncEngine) -> Collection[str] | None:
    """Return the engine's ids of requests that wait for a place in the batch; None if it does not say so in time."""
    if all(engine.is_parked(task) for task in engine.tasks):
        return ()
    try:
        async with asyncio.timeout(STATS_SECONDS):
            return frozenset((await engine.stats()).waiting_ids)
    except (InfercError, TimeoutError):
        return None


def _row(task: EngineTask, model: ServedModel, waiting: Collection[str] | None, now: float) -> dict[str, Any]:
    return {
        "id": task.request_id,
        "kind": task.kind,
        "model": model.name,
        "state": _state(task, model.engine, waiting),
        "age_seconds": round(now - task.arrived_at, 3),
        "prompt_tokens": task.prompt_len,
        "output_tokens": task.num_output,
        "priority": task.priority,
        "key": task.owner,
    }


def _state(task: EngineTask, engine: AsyncEngine, waiting: Collection[str] | None) -> State | None:
    """Return how far a request has come; None if it has no token and the engine does not say whether it waits.

    A request of one sequence waits again when it is preempted. "unread" is an answer that is complete, which its client
    has not read to its end.
    """
    if not task.is_open:
        return "unread"
    if engine.is_parked(task):
        return "waiting"
    if waiting is not None and task.engine_id in waiting and (not task.num_output or task.num_sequences == 1):
        return "waiting"
    if task.num_output:
        return "decode"
    return None if waiting is None else "prefill"
