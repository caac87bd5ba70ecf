"""The site in a real browser, opened from disk: no error, no request, search, dark mode, a phone, the figure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from playwright.sync_api import Browser, Page, expect
from playwright.sync_api import TimeoutError as PlaywrightTimeout
from torch import nn

from browsers import PATIENCE
from quacklr import LogitPath, QuacK, packed

ROOT = Path(__file__).parent.parent.parent
NAMES = sorted(file.relative_to(ROOT / "docs").with_suffix("").as_posix() for file in (ROOT / "docs").rglob("*.md"))
PAGES = [name for name in NAMES if name != "tutorial" or (ROOT / "examples/quickstart.ipynb").exists()]
WIDER = "document.documentElement.scrollWidth > innerWidth"


@contextmanager
def opened(browser: Browser, site: Path | str, name: str, **settings: Any) -> Iterator[Page]:
    """A page of the site; it must write nothing to the console and request nothing from elsewhere."""
    wrong: list[str] = []
    address = f"file://{site}" if isinstance(site, Path) else site
    own = (f"{address}/", "data:")
    with browser.new_context(**settings) as context:
        context.set_default_timeout(PATIENCE)
        context.on("console", lambda message: wrong.append(message.text))
        context.on("weberror", lambda error: wrong.append(str(error.error)))
        context.on("request", lambda request: wrong.extend([request.url] * (not request.url.startswith(own))))
        context.on("requestfailed", lambda request: wrong.append(f"failed: {request.url}"))
        tab = context.new_page()
        tab.goto(f"{address}/{name}.html")
        yield tab
    assert wrong == []


@pytest.mark.parametrize("name", PAGES)
def test_a_page_opens_without_an_error_and_fits_a_phone(browser: Browser, site: Path, name: str) -> None:
    with opened(browser, site, name, viewport={"width": 390, "height": 844}) as tab:
        expect(tab.locator("h1")).to_be_visible()
        assert not tab.evaluate(WIDER)


@pytest.fixture(scope="module")
def server(site: Path) -> Iterator[str]:
    """The address of a server of the site, on this machine."""
    handler = partial(Quiet, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def open_search(tab: Page) -> None:
    """Press the shortcut until the search opens: the page may not listen yet when it has loaded."""
    box = tab.get_by_role("combobox", name="Search")
    for _ in range(60):
        tab.keyboard.press("Control+k")
        with suppress(PlaywrightTimeout):
            box.wait_for(timeout=5000)
            return


@pytest.mark.parametrize("where", ["disk", "server"])
def test_search_finds_a_word_and_opens_its_page(browser: Browser, site: Path, server: str, where: str) -> None:
    with opened(browser, site if where == "disk" else server, "index") as tab:
        open_search(tab)
        tab.get_by_role("combobox", name="Search").press_sequentially("register_for_checkpointing")
        result = tab.get_by_role("option", name="Train with Accelerate")
        expect(result).to_be_visible()
        result.click()
        tab.wait_for_url("**/howto/accelerate.html*")


def ground(tab: Page) -> str:
    return str(tab.evaluate("getComputedStyle(document.body).backgroundColor"))


def test_the_scheme_follows_the_system_and_can_be_switched(browser: Browser, site: Path) -> None:
    with opened(browser, site, "idea", color_scheme="dark") as dark, opened(browser, site, "idea") as tab:
        light = ground(tab)
        assert ground(dark) != light
        tab.locator("label[title=Dark]").click()
        expect(tab.locator("body")).to_have_attribute("data-md-color-scheme", "slate")
        assert ground(tab) == ground(dark)
        tab.reload()
        assert ground(tab) == ground(dark), "the choice is kept"


def numbers(tab: Page, panel: str) -> list[float]:
    """The bound and the two rates that a panel of the figure shows."""
    return [float(tab.locator(f".panel.{panel} .{name}").inner_text()) for name in ("change", "rate-q", "rate-k")]


def bound(q: float, k: float, step: float, with_quack: bool) -> list[float]:
    """The same numbers by real steps: weights of norm 1 when QuacK is attached, of norms q and k before the step."""
    weights = [nn.Parameter(torch.ones(1, 1)) for _ in "qk"]
    optimizer = torch.optim.SGD(weights, lr=step)
    named = [packed(weight, (name, 1, 1))[0] for name, weight in zip("qk", weights, strict=True)]
    quack = QuacK([LogitPath(tuple(named), heads=1)], optimizer, tau=1.0) if with_quack else None
    with torch.no_grad():
        for weight, norm in zip(weights, (q, k), strict=True):
            weight.fill_(norm)
            weight.grad = -torch.ones_like(weight)
    rates = [float(rate) for rate in quack.rates().values()] if quack else [1.0, 1.0]
    optimizer.step()
    return [float(weights[0].detach() * weights[1].detach()) - q * k, *rates]


def test_the_figure_moves_and_shows_the_numbers_of_the_library(browser: Browser, site: Path) -> None:
    with opened(browser, site, "idea") as tab:
        start = numbers(tab, "plain")
        tab.locator("input[name=k]").fill("8")
        assert numbers(tab, "plain")[0] > start[0]
        tab.locator("input[name=q]").fill("2.5")
        tab.locator("input[name=step]").fill("0.4")
        for panel in ("plain", "quack"):
            assert numbers(tab, panel) == pytest.approx(bound(2.5, 8.0, 0.4, panel == "quack"), abs=0.0051), panel
        assert tab.locator(".panel.quack svg rect").count() == 3
        tab.locator("input[name=k]").focus()
        tab.keyboard.press("ArrowLeft")
        expect(tab.locator("output[name=k]")).to_have_text("7.9 x")
        tab.get_by_role("button", name="Let the weights grow").click()
        expect(tab.locator("output[name=q]")).to_have_text("4.0 x")
