"""The built site without a browser: links, included parts, references."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import quacklr
from quacklr import cli
from quacklr.lab.config import KINDS
from website.pages import section_of

ROOT = Path(__file__).parent.parent.parent
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
LOADED = {"script": "src", "img": "src", "iframe": "src", "link": "href", "source": "src"}
"""Attributes of elements that a browser loads by itself."""
HOSTS = {"zensical.org", "keepachangelog.com", urlsplit(REPOSITORY).netloc}
"""Other sites that pages link to. A new one is added here on purpose."""


@dataclass
class Found(HTMLParser):
    """The ids, links and loaded files of a page."""

    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in LOADED and LOADED[tag] in given and given.get("rel") not in ("canonical", "prev", "next"):
            self.loaded.append(given[LOADED[tag]])


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Found]:
    found = {}
    for file in sorted(site.rglob("*.html")):
        if file not in (site / "404.html", site / "results/report.html"):  # made by zensical, and by quacklr report
            found[file] = Found()
            found[file].feed(file.read_text(encoding="utf-8"))
    return found


def test_every_page_of_docs_is_on_the_site_and_in_the_navigation(site: Path) -> None:
    config = (ROOT / "zensical.toml").read_text()
    without = set() if (ROOT / "examples/quickstart.ipynb").exists() else {"tutorial.md"}
    for file in (ROOT / "docs").rglob("*.md"):
        name = file.relative_to(ROOT / "docs").as_posix()
        assert f'"{name}"' in config
        assert (site / name).with_suffix(".html").exists() == (name not in without)


def test_no_link_and_no_anchor_is_dead(pages: dict[Path, Found]) -> None:
    dead = []
    for file, found in pages.items():
        for link in [*found.links, *found.loaded]:
            parts = urlsplit(link)
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            if parts.scheme or parts.netloc:
                continue
            anchored = target in pages and parts.fragment and unquote(parts.fragment) not in pages[target].ids
            if not target.is_file() or anchored:
                dead.append((file.name, link))
    assert dead == []


def test_nothing_is_loaded_from_another_host(pages: dict[Path, Found]) -> None:
    loaded = {link for found in pages.values() for link in found.loaded if urlsplit(link).netloc}
    assert loaded == set()


def test_links_to_other_hosts_are_those_that_we_know(pages: dict[Path, Found]) -> None:
    assert {host for found in pages.values() for link in found.links if (host := urlsplit(link).netloc)} == HOSTS


def test_a_link_to_the_repository_names_a_file_of_it(pages: dict[Path, Found]) -> None:
    start = f"{REPOSITORY}/blob/main/"
    named = {link.removeprefix(start) for found in pages.values() for link in found.links if link.startswith(start)}
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_public_name_has_an_entry(site: Path) -> None:
    page = (site / "reference/api.html").read_text(encoding="utf-8")
    ids = set(re.findall(r'id="quacklr\.([\w.]+)"', page))
    assert set(quacklr.__all__) <= ids
    assert "QuacK.rates" in ids


def test_every_integration_that_docs_and_examples_import_has_an_entry(site: Path) -> None:
    files = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.py"), ROOT / "README.md"]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    names = set(re.findall(r"quacklr\.integrations\.\w+\.[A-Z]\w+", text))
    for module, imported in re.findall(r"from (quacklr\.integrations\.\w+) import ([\w, ]+)", text):
        names |= {f"{module}.{name.strip()}" for name in imported.split(",")}
    assert len(names) >= 6
    page = (site / "reference/integrations.html").read_text(encoding="utf-8")
    assert [name for name in names if f'id="{name}"' not in page] == []


def test_the_command_line_has_every_command_and_every_kind(site: Path) -> None:
    page = re.sub(r"<[^>]+>", "", (site / "reference/commands.html").read_text(encoding="utf-8"))
    for name in cli.COMMANDS:
        assert f"usage: quacklr {name} " in page
    for name, kinds in KINDS.items():
        assert f"Options of --{name}" in page
        for kind in kinds:
            assert (
                re.search(rf"^ {kind} options$", page, re.MULTILINE) or kind in page.split("options of their own:")[-1]
            )
    assert "--isotropic" in page


def test_formulas_are_mathml_and_none_is_left_as_text(site: Path) -> None:
    for name in ("idea", "theory"):
        page = (site / f"{name}.html").read_text(encoding="utf-8")
        assert page.count("<math") > 10
        assert not re.search(r"\$`|```math|wzxhzdk", page)
        assert not re.search(r"<m(?:i|o|text)>\\", page), "a command that latex2mathml does not know"


def test_a_page_that_is_named_by_its_file_is_a_link_with_its_title(site: Path) -> None:
    check, rules = ((site / f"{name}.html").read_text(encoding="utf-8") for name in ("check", "rules"))
    assert '<a href="theory.html">Theory</a>' in check
    assert '<a href="theory.html#a-budget-for-the-change-of-logits">Theory</a>' in rules


def test_links_of_the_notebook_lead_to_pages_of_the_site(site: Path) -> None:
    if (ROOT / "examples/quickstart.ipynb").exists():
        page = (site / "tutorial.html").read_text(encoding="utf-8")
        assert 'href="check.html"' in page
        assert f"{REPOSITORY}/blob/main/docs" not in page


def test_a_comment_in_code_does_not_end_a_section(tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    file.write_text("# Title\n\n## One\n\n```sh\n# a comment\n```\nafter\n\n## Two\n")
    assert section_of(file, "One").endswith("after")
    assert section_of(file, None).endswith("## Two")


def test_the_pages_that_include_other_files_have_their_text(site: Path) -> None:
    for page, text in {
        "start": "pip install .",
        "index": "Verdicts on the",
        "contributing": "A rate on the wrong rows is worse than an error",
        "changelog": "Unreleased",
        "howto/deepspeed": "deepspeed.initialize",
        "howto/transformers": 'class="example"',
        "figures": "figure-1-critical-rate.svg",
        "reference/formats": "step_seconds",
    }.items():
        assert text in (site / f"{page}.html").read_text(encoding="utf-8"), page
    assert not any("<!-- include" in file.read_text(encoding="utf-8") for file in site.rglob("*.html"))
