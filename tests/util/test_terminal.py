"""Nothing that happens to the terminal ends a run; and a command whose output is its product says that it is lost."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lab_runs import environment, read_rows
from quacklr.lab.progress import duration, is_terminal, progress
from quacklr.util import terminal
from terminal_runs import WAYS

DISPLAYS = ("train", "prepare", "report", "sweep")
PRODUCTS = ("generate", "inspect", "check", "dry run")
REASONS = {"full": "No space left on device", "closed": "Bad file descriptor"}


@pytest.fixture(scope="module")
def runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("terminal")
    script = [sys.executable, str(Path(__file__).parents[1] / "kit/terminal_runs.py"), str(corpus), str(out)]
    done = subprocess.run(script, capture_output=True, text=True, check=False, env=environment())
    assert done.returncode == 0, done.stderr
    return out, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("command", DISPLAYS)
def test_a_command_whose_product_are_files_is_not_ended_by_its_terminal(
    runs: tuple[Path, dict[str, Any]], command: str, way: str
) -> None:
    out, found = runs
    assert found[f"{command}, {way}"] == [0, ""]
    if command == "train":
        assert [row["step"] for row in read_rows(out / way / "train")] == list(range(7))
        assert json.loads((out / way / "train/result.json").read_text())["status"] == "finished"
    written = {"prepare": "manifest.json", "report": "report.html", "sweep": "ledger.jsonl"}
    assert command == "train" or (out / way / command / written[command]).exists()


@pytest.mark.parametrize("way", REASONS)
@pytest.mark.parametrize("command", PRODUCTS)
def test_a_command_whose_product_is_its_output_says_that_it_is_lost(
    runs: tuple[Path, dict[str, Any]], command: str, way: str
) -> None:
    code, said = runs[1][f"{command}, {way}"]
    assert code == 2
    assert REASONS[way] in said
    assert said.count("\n") == 1
    assert said.startswith(f"quacklr {command if command != 'dry run' else 'sweep'}: ")


@pytest.mark.parametrize("command", PRODUCTS)
def test_a_reader_who_has_read_enough_ends_a_command_without_a_word(
    runs: tuple[Path, dict[str, Any]], command: str
) -> None:
    assert runs[1][f"{command}, unread"] == [1, ""]


def test_a_run_goes_on_when_its_terminal_is_gone(runs: tuple[Path, dict[str, Any]]) -> None:
    out, found = runs
    assert found["hung up"] == 0
    assert [row["step"] for row in read_rows(out / "hung up")] == list(range(7))


class Failing(io.StringIO):
    """A stream that raises whatever is done with it."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def write(self, _: str) -> int:
        raise self.error

    def flush(self) -> None:
        raise self.error

    def isatty(self) -> bool:
        raise self.error


ERRORS = [OSError(errno.ENOSPC, "full"), BrokenPipeError(), OSError(errno.EIO, "gone"), ValueError("closed file")]


@pytest.mark.parametrize("error", [*ERRORS, None], ids=["full", "unread", "hung up", "closed", "none"])
def test_no_display_raises_what_its_stream_raises(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("stdout", "stderr"):
            patch.setattr(sys, name, Failing(error) if error else None)
        assert not is_terminal()
        for terminal_ in (False, True):
            monkeypatch.setattr("quacklr.lab.progress.is_terminal", lambda terminal_=terminal_: terminal_)
            monkeypatch.setattr("quacklr.lab.progress.LOG_INTERVAL", 0.0)
            with progress("working", 3) as show:
                show.line("a line")
                show(1, "a word")
        with terminal.tolerant():
            print("a word", flush=True)
            print("another", file=sys.stderr)
        terminal.discard_unwritten()


def test_characters_that_the_terminal_does_not_have_are_escaped() -> None:
    raw = io.BytesIO()
    stream = terminal.Tolerant(io.TextIOWrapper(raw, encoding="ascii"))
    assert stream.write("caf\u00e9 \udcff\n") == 7
    stream.flush()
    assert raw.getvalue() == b"caf\\xe9 \\udcff\n"


def test_a_process_without_descriptors_gets_those_that_nothing_can_be_written_to(tmp_path: Path) -> None:
    script = (
        "import os, sys; from quacklr.util import terminal; terminal.open_missing();"
        f"file = open({str(tmp_path / 'file')!r}, 'w'); file.write(str(file.fileno())); file.close();"
        "sys.exit(os.write(2, b'of a library'))"
    )
    closed = subprocess.run(["sh", "-c", f'exec "{sys.executable}" -c "$1" <&- >&- 2>&-', "sh", script], check=False)
    assert int((tmp_path / "file").read_text()) > 2
    assert closed.returncode not in (0, 12), "whoever writes there learns that nobody reads"


@pytest.mark.parametrize(("seconds", "shown"), [(80, "0:01:20"), (1e9, "11574 days, 1:46:40"), (1e300, "11574 days")])
def test_however_long_it_takes_it_can_be_said(seconds: float, shown: str) -> None:
    assert duration(seconds).startswith(shown)
    assert os.environ.get("TERM") is not None or not is_terminal()
