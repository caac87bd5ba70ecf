"""The command, as a person types it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import pytest

import quacklr
from quacklr.cli import main
from quacklr.demo import Measured, Row, verdict

COMMAND = [sys.executable, "-m", "quacklr.cli"]


def test_the_demo_trains_both_runs_and_says_what_was_seen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--steps", "40", "--lr", "0.02"]) == 0
    out = capsys.readouterr().out
    rows = re.findall(r"^ +(\d+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+)$", out, flags=re.MULTILINE)
    assert [int(row[0]) for row in rows] == list(range(0, 41, 2))
    first, last = ([float(x) for x in row[1:]] for row in (rows[0], rows[-1]))
    assert first[0] == first[1]
    assert first[2] == first[3]
    assert last[2] > 1.5 * last[3], "the plain run's logits grow faster"
    assert last[0] < first[0] - 1, "it learns"
    assert "quack = QuacK(model, optimizer)" in out


def test_the_demo_is_deterministic(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for _ in range(2):
        main(["demo", "--steps", "4", "--seed", "3"])
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]


def row(plain: tuple[float, float], quack: tuple[float, float]) -> Row:
    return Row(9, Measured(*plain, change=0.0), Measured(*quack, change=0.0))


def test_the_demos_sentence_is_honest_whichever_way_it_went() -> None:
    assert "QuacK helped" in verdict(row((2.5, 900.0), (2.0, 40.0)), 0.1)
    assert "QuacK did harm" in verdict(row((2.0, 40.0), (2.5, 40.0)), 0.1)
    assert "did not help" in verdict(row((2.0, 40.0), (2.01, 39.0)), 0.1)
    assert "QuacK helped" in verdict(row((float("nan"), 900.0), (2.0, 40.0)), 0.1)


def heed_ctrl_c() -> None:
    """A shell that runs the suite in the background makes its processes ignore Ctrl-C; this one shall not."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_stops_the_demo_cleanly_with_what_was_seen() -> None:
    with subprocess.Popen(
        [*COMMAND, "demo", "--steps", "100"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_ctrl_c,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            if line.startswith("     5 "):
                break
        process.send_signal(signal.SIGINT)
        rest, errors = process.stdout.read(), process.stderr.read()
    assert process.returncode == 130
    assert "Stopped; this is what was seen so far." in rest
    assert "after 5 steps" in rest or "after 10 steps" in rest
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--steps", "0"], "argument --steps: must be a whole number from 1 to"),
        (["demo", "--lr", "-1"], "argument --lr: must be a positive number, not -1"),
        (["demo", "--tau", "nan"], "argument --tau: must be a positive number, not nan"),
        (["demo", "--speed", "9"], "unrecognized arguments: --speed 9"),
        (["fly"], "invalid choice: 'fly'"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_bad_options_get_one_sentence_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1
    assert captured.out == ""


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"quacklr {quacklr.__version__}\n"
    assert main(["demo", "--help"]) == 0
    assert "--tau" in capsys.readouterr().out
