"""The browsers that the page is tested in: the first that is installed."""

from __future__ import annotations

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
