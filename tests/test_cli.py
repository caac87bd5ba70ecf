"""The command, as a person types it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import quacklr
from quacklr.cli import COMMANDS, main
from quacklr.util.arguments import empty_argument


@pytest.mark.usefixtures("stdlib")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--steps", "0"], "--steps must be a positive number, not 0"),
        (["sweep", "nonsense"], "which study? One or more of critical, interventions"),
        (["sweep", "demo", "--steps", "9", "--dry-run"], "--steps 9 is less than the warmup of 30 steps"),
        (["sweep", "speed", "demo"], "speed compares times of runs in one process; give no other study"),
        (["report", "nowhere"], "nowhere/ledger.jsonl has no runs yet; make some with `quacklr sweep STUDY"),
        (["fly"], "invalid choice: 'fly'"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_bad_options_get_one_sentence_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: object
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(str(tmp_path))
        assert main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1
    assert captured.out == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert f"usage: quacklr {command}" in capsys.readouterr().out


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"quacklr {quacklr.__version__}\n"
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)


def test_a_missing_package_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    loaded = [name for name in sys.modules if name.startswith(("quacklr.lab.report", "quacklr.lab.demo"))]
    for parent, _, child in (name.rpartition(".") for name in loaded):
        monkeypatch.setattr(
            sys.modules[parent], child, sys.modules[f"{parent}.{child}"]
        )  # to be there again afterwards
    for name in loaded:
        monkeypatch.delitem(sys.modules, name)
    assert main(["report"]) == 2
    assert "quacklr report needs matplotlib: pip install 'quacklr[lab]'" in capsys.readouterr().err


def test_an_empty_argument_is_named() -> None:
    assert empty_argument(["--out", ""]).startswith("--out is empty")
    assert empty_argument(["--out="]).startswith("--out is empty")
    assert empty_argument(["--out=here", ""]).startswith("an argument is empty")
    assert empty_argument(["--out", "here", "--force", "--name=a"]) == ""


@pytest.mark.parametrize("arguments", [["--help"], ["inspect", "gpt2"]])
def test_a_reader_who_has_read_enough_ends_a_command_without_a_word(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command, buffered = [sys.executable, "-m", "quacklr", *arguments], os.environ | {"PYTHONUNBUFFERED": ""}
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, env=buffered)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")
