"""The time that work takes on a GPU, between two events of its stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from inferc.runtime.runners.cuda.driver import Driver


def elapsed_ms(driver: Driver, stream: Any, run: Callable[[], object]) -> float:
    """Return the milliseconds that `run` takes on a stream; waits for its end."""
    start, end = driver.new_event(timed=True), driver.new_event(timed=True)
    driver.record(start, stream)
    run()
    driver.record(end, stream)
    driver.wait_event(end)
    spent = driver.milliseconds(start, end)
    for event in (start, end):
        driver.call("cuEventDestroy_v2", event)
    return spent
