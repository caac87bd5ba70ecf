"""Check the page on PyPI: every link and image of it is absolute, and those into the repository exist there."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parent.parent


def repository() -> str:
    """The address of the repository, which pyproject.toml has in [project.urls]."""
    address: str = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Repository"]
    return address


def targets(markdown: str) -> list[str]:
    """The targets of all links and images of a text, also of those written in HTML."""
    return list(_targets(MarkdownIt().enable("table").parse(markdown)))


def _targets(tokens: Sequence[Token]) -> Iterator[str]:
    for token in tokens:
        yield from (str(value) for name, value in token.attrs.items() if name in ("href", "src"))
        if token.type in ("html_block", "html_inline"):
            yield from re.findall(r"""\b(?:href|src|srcset)=["']([^"' ]+)""", token.content)
        yield from _targets(token.children or [])


def problems(markdown: str, version: str) -> list[str]:
    """One sentence for each target that does not work on PyPI."""
    found = []
    for target in targets(markdown):
        if not target.startswith("https://"):
            found.append(f"{target} is a relative link, which does not work on PyPI")
        elif (name := path_of(target, version)) and not (ROOT / name).exists():
            found.append(f"{target} does not exist: the repository has no {name}")
    return found


def path_of(target: str, version: str) -> str:
    """The path in the repository that an address has as its target, or nothing."""
    within = re.fullmatch(rf"{re.escape(repository())}/(?:blob|raw)/v{re.escape(version)}/([^#]*).*", target)
    workflow = re.fullmatch(rf"{re.escape(repository())}/actions/workflows/([\w.-]+\.yml)(?:/badge\.svg)?", target)
    return within[1] if within else f".github/workflows/{workflow[1]}" if workflow else ""
