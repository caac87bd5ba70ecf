"""docs/errors.md quotes messages that exist in the source, and all that a user of the library can meet."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SOURCE = ROOT / "src/quacklr"
PAGE = (ROOT / "docs/errors.md").read_text(encoding="utf-8")
QUOTED = [
    message for row in re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE) for message in re.findall(r"`(.+?)`", row)
]
FIELD = "\0"
"""A part of a message that is filled in."""
USERS = {"ValueError", "RuntimeError", "warnings.warn", "warn"}
LIBRARY = ("quack.py", "rules", "core", "sharded", "attach", "find", "attention", "checking", "integrations")


def text_of(node: ast.expr, constants: dict[str, str]) -> str | None:
    """A string in the source; constants are resolved, also with `.format(...)`."""
    if isinstance(node, ast.Constant):
        return re.sub(r"\{[^{}]*\}", FIELD, node.value) if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part, constants) or FIELD for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return text_of(node.value, constants) if isinstance(node.value, ast.Name) else None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        return text_of(node.func.value, constants)
    return constants.get(node.id) if isinstance(node, ast.Name) else None


def trees(*names: str) -> Iterator[tuple[ast.Module, dict[str, str]]]:
    """The syntax tree of each file, with the strings that its names in capitals stand for."""
    for file in sorted(SOURCE.rglob("*.py")):
        if names and file.relative_to(SOURCE).parts[0] not in names:
            continue
        tree, constants = ast.parse(file.read_text(encoding="utf-8")), dict[str, str]()
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                constants[node.targets[0].id] = text_of(node.value, constants) or FIELD
        yield tree, constants


def pattern(message: str) -> re.Pattern[str]:
    """Matches a message of the source; `...` stands for one or more parts that are filled in."""
    parts = [re.escape(part) for part in message.split("...")]
    return re.compile(".*".join(parts), re.DOTALL)


def strings() -> list[str]:
    """Every string of the source."""
    nodes = ((node, known) for tree, known in trees() for node in ast.walk(tree) if isinstance(node, ast.expr))
    return [text for node, known in nodes if (text := text_of(node, known))]


def raised() -> list[str]:
    """What errors and warnings of the library say."""
    calls = ((node, known) for tree, known in trees(*LIBRARY) for node in ast.walk(tree) if isinstance(node, ast.Call))
    texts = {text_of(call.args[0], known) for call, known in calls if ast.unparse(call.func) in USERS and call.args}
    return sorted(text for text in texts if text and re.search(r"\w", text))


@pytest.fixture(scope="module")
def source() -> list[str]:
    return strings()


def test_there_are_many() -> None:
    assert len(QUOTED) > 100
    assert len(raised()) > 80


@pytest.mark.parametrize("message", QUOTED)
def test_a_quoted_message_is_in_the_source(message: str, source: list[str]) -> None:
    assert any(pattern(message).search(text) for text in source), message


@pytest.mark.parametrize("text", raised(), ids=lambda text: text.replace(FIELD, "...")[:60])
def test_a_message_of_the_library_is_on_the_page(text: str) -> None:
    assert any(pattern(message).search(text) for message in QUOTED), text.replace(FIELD, "...")
