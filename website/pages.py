"""The pages of docs/ as the site needs them: included parts, and links that leave docs/.

A comment on a line of its own asks for an included part:

    <!-- include README.md: Install -->     a section, without its heading; without a name, the file
    <!-- example examples/mla.py -->        a whole program, folded
    <!-- commands -->                       the help of every command
    <!-- figures -->                        the figures of the study, with their captions
    <!-- ledger -->                         the first line of the ledger
    <!-- notebook -->                       examples/quickstart.ipynb

The next line may say where the part is for readers of docs/ without the site: `On GitHub: ...`. The site leaves it out.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from textwrap import indent

from website.commands import commands
from website.notebook import notebook
from website.study import figures_as_markdown, first_line

ROOT = Path(__file__).parent.parent
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Files outside docs/ that have a page."""
COPIED = ("results/figures/", "results/decode.png")
"""Files outside docs/ that are copied to the site."""
NOTEBOOK = ROOT / "examples/quickstart.ipynb"

FENCED = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<=\]\()([^)\s#]*)(#[^)\s]*)?(?=\))")
PART = re.compile(r"^<!-- (\w+)(?: ([^:\n]+?))?(?:: (.+?))? -->(?:\nOn GitHub: .*)?$", re.MULTILINE)
NAMED = re.compile(r"(?<![\[`])`docs/([\w/]+\.md)`(?!`)|\[(?:docs/)?([\w/]+\.md)\](?=\()")
"""The file name of a page, as code or as the text of a link."""


def repository() -> str:
    """The address of the repository, from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project["urls"]["Repository"])


@cache
def titles() -> dict[str, str]:
    """The title of each page in the navigation, by its file name in docs/."""
    nav = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]["nav"]
    found: dict[str, str] = {}
    while nav:
        ((title, inside),) = nav.pop().items()
        if isinstance(inside, str):
            found[inside] = title
        else:
            nav += inside
    return found


def page(file: Path) -> str:
    """The text of a page of docs/, for the site."""
    text = linked(file.read_text(encoding="utf-8"), file, file)
    return PART.sub(partial(_part, file), text)


def _part(page: Path, found: re.Match[str]) -> str:
    """What a comment asks for; the comment itself if it asks for nothing."""
    kind, name, section = found.groups()
    if kind == "include":
        source = ROOT / name
        return linked(section_of(source, section), source, page)
    if kind == "example":
        return example(name)
    parts: dict[str, Callable[[], str]] = {
        "commands": commands,
        "figures": figures_as_markdown,
        "ledger": first_line,
        "notebook": lambda: linked(_relative(notebook(NOTEBOOK)), NOTEBOOK, page),
    }
    return parts[kind]() if kind in parts else found[0]


def _relative(text: str) -> str:
    """The notebook's links are absolute, for Colab; on the site they lead to its own pages."""
    return text.replace(f"]({repository()}/blob/main/", "](../")


def section_of(file: Path, title: str | None) -> str:
    """The text below a heading, without its own; all of a file if there is no title."""
    text = file.read_text(encoding="utf-8")
    wanted = "# .*" if title is None else f"#+ {re.escape(title)}"
    prose = FENCED.sub(lambda code: " " * len(code[0]), text)  # a comment in code looks like a heading
    heading = re.search(rf"^{wanted}$", prose, re.MULTILINE)
    if heading is None:
        name = file.relative_to(ROOT)
        raise SystemExit(f"{name} has no section {title!r}, which a page of docs/ includes: rename it there too")
    level = heading[0].index(" ")
    following = re.compile(rf"^#{{1,{level}}} ", re.MULTILINE).search(prose, heading.end())
    return text[heading.end() : following.start() if following else None].strip("\n")


def example(name: str) -> str:
    """A whole file of examples/, folded."""
    code = (ROOT / name).read_text(encoding="utf-8")
    inside = indent(f"```python\n{code}```", "    ")
    return f'??? example "{name}, a complete program"\n\n{inside}'


def linked(text: str, source: Path, page: Path) -> str:
    """Text of a file with links that work on a page of the site; blocks of code are left as they are."""
    parts = FENCED.split(text)
    for place in range(0, len(parts), 2):
        named = NAMED.sub(partial(_named, source), parts[place])
        parts[place] = LINK.sub(partial(_link, source, page), named)
    return "".join(parts)


def _named(source: Path, found: re.Match[str]) -> str:
    """A page that is named as a file is named by its title, and becomes a link if it is none."""
    if found[2]:
        return f"[{titles().get(found[2], found[2])}]"
    return f"[{titles()[found[1]]}]({os.path.relpath(ROOT / 'docs' / found[1], source.parent)})"


def _link(source: Path, page: Path, found: re.Match[str]) -> str:
    link, anchor = found[1], found[2] or ""
    if "://" in link or (not link and source == page):
        return found[0]
    return target((source.parent / link).resolve() if link else source, page) + anchor


def target(file: Path, page: Path) -> str:
    """The address of a file of the repository, as seen from a page."""
    name = file.relative_to(ROOT).as_posix()
    if name.startswith("docs/") or name in PAGES or name.startswith(COPIED):
        inside = name.removeprefix("docs/") if name.startswith("docs/") else PAGES.get(name, name)
        return os.path.relpath(inside, page.parent.relative_to(ROOT / "docs"))
    return f"{repository()}/blob/main/{name}"
