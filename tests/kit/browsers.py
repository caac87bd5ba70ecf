"""A real browser for the tests of HTML pages: the first of BROWSERS that is installed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PATIENCE = 600_000  # milliseconds, on a machine that has better things to do


@contextmanager
def launched() -> Iterator[Browser]:
    """The browser; the test is skipped if there is none. While it runs, asyncio.run does not work in this process."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")
    with sync_playwright() as playwright:
        expect.set_options(timeout=PATIENCE)
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"], timeout=PATIENCE)
        yield browser
        browser.close()
