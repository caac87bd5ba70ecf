"""What runs on Windows: the library and `inspect` and `check`; the lab says that it does not. Simulated on POSIX."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
POSIX = ("fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty")
"""Modules that Python has on POSIX systems only."""


def run_without_posix(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    blocked = f"import sys; sys.modules.update(dict.fromkeys({POSIX}))\n"
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", blocked + script], cwd=folder, capture_output=True, text=True, check=False
    )


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


def test_a_command_of_the_lab_says_what_it_needs(tmp_path: Path) -> None:
    done = run_without_posix("import quacklr.cli; sys.exit(quacklr.cli.main(['train']))", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "quacklr train needs Linux or macOS\n"
