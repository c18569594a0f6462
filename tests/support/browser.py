"""A real browser, headless."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def chromium() -> Iterator[Browser]:
    """The system's Chromium; the test is skipped without one."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("chromium is not installed: apt install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])  # tests may run as root
        try:
            yield browser
        finally:
            browser.close()


class Watched:
    """A page of which everything is kept that a visitor would not see: errors, and whom it asks."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.errors: list[str] = []
        self.asked: list[str] = []
        page.on("pageerror", self._on_error)
        page.on("console", self._on_console)
        page.on("request", self._on_request)

    def _on_error(self, error: object) -> None:
        self.errors.append(str(error))

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def _on_request(self, request: Request) -> None:
        self.asked.append(request.url)
