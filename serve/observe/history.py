"""The last hour of a server's metrics, so that a dashboard that is opened after an incident shows it."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections import deque

from inferc.serve.observe.metrics_page import MetricsPage

EVERY_SECONDS = 10.0
MOST = 360  # pages: an hour
AT = "# at "  # the beginning of the line in front of a page's samples: its time, in seconds since 1970
NOW = "# now "


class MetricsHistory:
    """The samples of the metrics page, as it was every ten seconds, compressed."""

    def __init__(self, page: MetricsPage) -> None:
        self._page = page
        self._pages: deque[tuple[float, bytes]] = deque(maxlen=MOST)

    async def run(self) -> None:
        """Take the metrics for ever."""
        while True:
            await self.take()
            await asyncio.sleep(EVERY_SECONDS)

    async def take(self) -> None:
        """Keep the metrics as they are now."""
        data, _ = await self._page.render()
        samples = b"\n".join(line for line in data.splitlines() if not line.startswith(b"#"))
        self._pages.append((time.time(), zlib.compress(samples)))

    def text(self) -> str:
        """Return all pages that are kept, oldest first, each behind a line that says when it was."""
        parts = [f"{NOW}{time.time():.1f}"]
        for at, samples in self._pages:
            parts += [f"{AT}{at:.1f}", zlib.decompress(samples).decode()]
        return "\n".join(parts) + "\n"
