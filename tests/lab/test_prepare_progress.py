"""The display of a long job, on a real terminal and on a pipe."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from quacklr.lab import progress as module
from quacklr.lab.progress import progress

JOB = f"""
import sys
sys.path.insert(0, {str(Path(module.__file__).parent)!r})  # by itself, which spares the import of torch
from progress import progress
with progress("training", total=200, unit="steps", done=100) as show:
    for step in range(100, 201):
        show(step, f"loss [{{step}}]")
        if step == 150:
            show.line("a line that stays")
            sys.stdin.readline()  # when the test has seen it
"""


def test_a_log_gets_plain_lines_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with progress("training", total=4, unit="steps") as show:
        for step, clock[0] in ((1, 4.0), (2, 9.9)):
            show(step, "loss 2.5")
        assert capsys.readouterr().err == ""
        clock[0] = 12.0
        show(3, "loss 2.4")
        assert capsys.readouterr().err == "training: 3/4 steps, 0.25/s, 0:00:04 left, loss 2.4\n"
        show.line("a result")
        clock[0] = 16.0
        show(4)
        assert capsys.readouterr() == ("a result\n", "")
    assert capsys.readouterr() == ("", "training: 4/4 steps, 0.25/s, 0:00:16 so far\n")


def test_time_left_counts_from_where_a_resumed_job_began(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 30.0, 30.0, 30.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    with progress("training", total=1000, unit="steps", done=940) as show:
        show(970)  # 30 steps in 30 s, and 30 to go
    assert capsys.readouterr().err == "training: 970/1,000 steps, 1/s, 0:00:30 left\n"


def test_without_a_total_it_tells_what_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("reading", unit="documents") as show:
        show(1234567)
    said = capsys.readouterr().err
    assert said.startswith("reading: 1,234,567 documents, ")
    assert said.endswith(" so far\n")


@pytest.mark.parametrize("both", [True, False], ids=["all on the terminal", "stdout in a file"])
def test_a_terminal_gets_a_bar_and_lines_that_stay_go_to_stdout(both: bool) -> None:
    terminal, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    stdout = theirs if both else subprocess.PIPE
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": stdout, "stderr": theirs}
    process = subprocess.Popen([sys.executable, "-c", JOB], env=environment, **pipes)
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(terminal, 65536):
            shown += piece
            if process.stdin and b"150/200 steps" in shown:
                process.stdin.close()
                process.stdin = None
    except OSError:  # Linux's way to say that the other side is closed
        pass
    out, _ = process.communicate()
    assert process.returncode == 0
    assert b"training" in shown
    assert b"150/200 steps" in shown
    assert b"loss [200]" in shown
    assert b"\x1b[" in shown
    assert (b"a line that stays" in shown) == both
    assert out == (None if both else b"a line that stays\n")
