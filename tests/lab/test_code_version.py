"""The fingerprint of the code that trains: it changes with the code, and with nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import quacklr
from quacklr.lab.sweep import code_version as subject
from quacklr.lab.sweep.code_version import TRAINS, without_docstrings

SOURCE = Path(quacklr.__file__).parent


def test_comments_docstrings_and_format_do_not_count_and_code_does() -> None:
    one = "class A:\n    x: int = 1\n    '''A field.'''\n\n    def f(self):\n        '''Doc.'''\n        return 1\n"
    other = "class A:\n    x: int = 1  # why\n    def f(self):\n        return (1)\n"
    assert without_docstrings(one) == without_docstrings(other)
    assert without_docstrings(one) != without_docstrings(other.replace("(1)", "(2)"))
    assert without_docstrings("f('a')") != without_docstrings("f('b')"), "a string that is used counts"


@pytest.mark.parametrize(
    ("changed", "counts"), [("core/norms.py", True), ("lab/optim/muon.py", True), ("lab/report/page.py", False)]
)
def test_only_files_that_a_run_executes_count(
    changed: str, counts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "quacklr"
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(quacklr, "__file__", str(copy / "__init__.py"))
    before = subject.code_version.__wrapped__()
    with (copy / changed).open("a") as file:
        file.write("ANOTHER_LINE = 1\n")
    assert (subject.code_version.__wrapped__() != before) == counts


def test_every_part_exists() -> None:
    assert all((SOURCE / part).exists() for part in TRAINS)
