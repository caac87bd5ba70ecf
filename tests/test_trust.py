"""What SECURITY.md says: files are read as data, and only code that the user names is run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = sorted((ROOT / "src").rglob("*.py"))
UNPICKLER = ROOT / "src/quacklr/lab/train/storage.py"
FACTORY = ROOT / "src/quacklr/inspect/resolve.py"


def calls(file: Path) -> Iterator[tuple[str, ast.Call]]:
    """Every call in a file, with the dotted name of what is called."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def argument(call: ast.Call, name: str) -> str | None:
    found = [ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg == name]
    return found[0] if found else None


def test_every_torch_load_reads_weights_only() -> None:
    loads = [(file, call) for file in SOURCE for name, call in calls(file) if name.split(".")[-2:] == ["torch", "load"]]
    assert len(loads) >= 2
    assert [file for file, call in loads if argument(call, "weights_only") != "True"] == []


@pytest.mark.parametrize("file", SOURCE, ids=lambda file: str(file.relative_to(ROOT / "src")))
def test_no_module_runs_text_unpickles_or_starts_programs(file: Path) -> None:
    tree = ast.parse(file.read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names = {name for name, _ in calls(file)}
    assert not names & {"eval", "exec", "compile", "os.system", "os.popen", "pickle.load", "pickle.loads"}
    assert not imported & {"subprocess", "marshal", "shelve", "cloudpickle", "dill", "yaml"}
    assert not {name for name in names if name.endswith("exec_module")} or file == FACTORY
    assert not {name for name in names if name.endswith("Unpickler")} or file == UNPICKLER
    for name, call in calls(file):
        if name.endswith(".from_pretrained"):
            assert argument(call, "trust_remote_code") in (None, "False")  # the default is False
        assert argument(call, "pretrained") in (None, "False")
        assert argument(call, "weights_only") in (None, "True")
