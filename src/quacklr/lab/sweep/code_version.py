"""A fingerprint of the source code that trains a run, so that runs of older code can be recognised.

It covers the library, and the parts of the lab that a run executes. Studies, sweeps and reports are left out: they only
decide which runs are done and how they are shown. Comments and docstrings do not count.
"""

from __future__ import annotations

import ast
import hashlib
from functools import cache
from pathlib import Path

import quacklr

TRAINS = (
    *("quack.py", "core", "sharded", "find", "attention", "attach", "util"),
    *("lab/config.py", "lab/methods.py", "lab/presets.py", "lab/model", "lab/optim", "lab/data", "lab/train"),
)


@cache
def code_version() -> str:
    """Eight hexadecimal digits, which differ for different code. It takes about a second."""
    root, digest = Path(quacklr.__file__).parent, hashlib.sha256()
    for part in TRAINS:
        folder = root / part
        for path in sorted(folder.rglob("*.py")) if folder.is_dir() else [folder]:
            digest.update(path.relative_to(root).as_posix().encode())
            digest.update(without_docstrings(path.read_text(encoding="utf-8")).encode())
    return digest.hexdigest()[:8]


def without_docstrings(source: str) -> str:
    """The syntax tree of a module as text, without strings that are statements."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [each for each in node.body if not is_text(each)]
    return ast.dump(tree)


def is_text(statement: ast.stmt) -> bool:
    """Whether a statement is only a string: a docstring, or the description of a field."""
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)
