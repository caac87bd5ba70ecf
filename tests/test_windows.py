"""What runs on Windows: the library and `inspect` and `check`; the lab says that it does not. Simulated on POSIX."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from quacklr.cli import COMMANDS

ROOT = Path(__file__).parent.parent
POSIX = ("fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty")
"""Modules that Python has on POSIX systems only."""
CALLS = {
    "fork",
    "forkpty",
    "getuid",
    "getpgid",
    "killpg",
    "mkfifo",
    "setsid",
    "SIGHUP",
    "SIGKILL",
    "SIGUSR1",
    "SIGUSR2",
}
"""Functions of os and signals that Windows does not have."""
LIBRARY = [file for file in sorted((ROOT / "src/quacklr").rglob("*.py")) if "lab" not in file.parts]


def run_without_posix(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    blocked = f"import sys; sys.modules.update(dict.fromkeys({POSIX}))\n"
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", blocked + script], cwd=folder, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("file", LIBRARY, ids=lambda file: file.stem)
def test_the_library_uses_no_module_or_function_of_posix_and_names_the_encoding_of_files(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            assert not {alias.name for alias in node.names} & set(POSIX)
        elif isinstance(node, ast.ImportFrom):
            assert node.module not in POSIX
        elif isinstance(node, ast.Attribute):
            assert node.attr not in CALLS
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("read_text", "write_text"):
            assert "encoding" in {keyword.arg for keyword in node.keywords}, node.lineno


def test_the_first_example_of_readme_and_inspect_run_without_posix(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    example = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)[0]
    factory = "from torch import nn\nmodel = lambda: nn.TransformerEncoderLayer(8, 2, batch_first=True)\n"
    (tmp_path / "mine.py").write_text(factory)
    commands = "from quacklr.cli import main\nassert main(['inspect', 'mine.py:model']) == 0\n"
    done = run_without_posix(example + commands, tmp_path)
    assert done.stderr == ""
    assert "self_attn" in done.stdout
    assert "\n".join(f"    {line}" for line in done.stdout.splitlines()[:4]) in readme


@pytest.mark.parametrize("command", [name for name, (module, _) in COMMANDS.items() if ".lab." in module])
def test_a_command_of_the_lab_says_what_it_needs(command: str, tmp_path: Path) -> None:
    done = run_without_posix(f"import quacklr.cli; sys.exit(quacklr.cli.main(['{command}']))", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"quacklr {command} needs Linux or macOS; on Windows, run it in WSL\n"
