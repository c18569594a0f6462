"""Threads for what takes long over texts: nothing else waits behind it, least of all what watches over an engine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

Result = TypeVar("Result")

_POOL = ThreadPoolExecutor(max(2, os.cpu_count() or 1), "inferc-text")


async def in_text_thread(make: Callable[[], Result]) -> Result:
    """What `make` makes, and raises, on one of these threads."""
    return await asyncio.get_running_loop().run_in_executor(_POOL, copy_context().run, make)
