"""Every option of every command, given nonsense: a sentence and exit code 2, or a right run; never a traceback.

The options are those that `--help` lists, so a new one is tried without a change here. A command is stopped where its
work would begin.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from lab_runs import ATTENTIONS, small
from quacklr.cli import COMMANDS, main
from quacklr.lab.config import KINDS
from quacklr.lab.data import open_corpus
from quacklr.lab.methods import Default
from quacklr.lab.train.runner import run
from swept_runs import made

HUGE = str(10**20)
VALUES = ("-1", "0", "nan", "1e99", "", "x" * 300, HUGE, "9" * 400)
SIZES = "--d-model=16 --layers=1 --d-ff=24 --context=16 --heads=4 --batch-tokens=128 --threads=1 --steps=5 --warmup=1"
WORK = {  # where the work of each command begins
    "quacklr.lab.train.runner": ("_train",),
    "quacklr.lab.demo": ("sweep",),
    "quacklr.lab.sweep.command": ("sweep",),
    "quacklr.lab.report.command": ("claim_results",),
    "quacklr.lab.export.command": ("atomic_folder",),
    "quacklr.lab.inference.command": ("print_continuation",),
    "quacklr.lab.data.prepare": ("open_journal",),
    "quacklr.inspect.command": ("report",),
    "quacklr.checking.command": ("check",),
}


class Reached(BaseException):
    """Raised where the work would begin: the options are valid."""


def reached(*_: object, **__: object) -> NoReturn:
    raise Reached


def remembered(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same, with what it found or raised: tyro parses the source of every dataclass anew for every command."""
    known: dict[Any, Any] = {}

    def found(of: Any) -> Any:
        key = (of.__module__, of.__qualname__) if isinstance(of, type) else of
        if key not in known:
            try:
                known[key] = find(of)
            except OSError as error:
                known[key] = error
        if isinstance(known[key], OSError):
            raise known[key]
        return known[key]

    return found


@pytest.fixture(scope="module")
def base(corpus: Path, tmp_path_factory: pytest.TempPathFactory, stdlib: None) -> Iterator[dict[str, list[str]]]:  # noqa: ARG001
    """By command: arguments with which it would begin."""
    folder = tmp_path_factory.mktemp("options")
    open_corpus("stdlib")
    run(small(corpus, Default(), ATTENTIONS["mha"], steps=6), folder / "run")
    (folder / "ledger.jsonl").write_text("")
    (folder / "mine.py").write_text("import torch\ndef model(): return torch.nn.Linear(2, 2), torch.ones(1, 2)\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")
        patch.setattr(inspect, "findsource", remembered(inspect.findsource))
        for module, names in WORK.items():
            for name in names:
                patch.setattr(f"{module}.{name}", reached)
        yield {
            "demo": [],
            "inspect": [f"{folder / 'mine.py'}:model"],
            "check": [f"{folder / 'mine.py'}:model"],
            "train": [f"--corpus={corpus}", "--out=out", *SIZES.split()],
            "sweep": ["demo"],
            "report": [str(folder)],
            "generate": [str(folder / "run"), "--prompt=the"],
            "export": [str(folder / "run"), "--out=out"],
            "prepare": [str(corpus.parent / "source.jsonl"), "--out=out"],
        }


CHOICES: list[tuple[str, list[str]]] = [
    *((name, []) for name in COMMANDS),
    *(("train", [f"--{field}={kind}"]) for field, kinds in KINDS.items() for kind in kinds),
]


def outcome(argv: list[str]) -> int | str:
    try:
        return main(argv)
    except Reached:
        return "reached"


def without(argv: list[str], option: str, kinds: list[str]) -> list[str]:
    """The arguments but for an option; and but for those that go with other kinds."""
    return [each for each in argv if each.partition("=")[0] != option and not (kinds and each.startswith("--kv-heads"))]


@pytest.mark.parametrize(("command", "kinds"), CHOICES, ids=str)
def test_nonsense_is_a_sentence_for_every_option(
    base: dict[str, list[str]],
    command: str,
    kinds: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    attention = ["--attention=mla"] if kinds == ["--method=absorbed-qk-norm"] else []
    options = listed(command, [*kinds, *attention], capsys)
    if kinds:  # the others are tried without
        common = listed(command, attention, capsys)
        options = [option for option in options if option not in common]
    for number, (option, value) in enumerate((option, value) for option in options for value in VALUES):
        monkeypatch.chdir(folder := empty(tmp_path / str(number)))
        argv = [command, *without(base[command], option, kinds), *kinds, *attention, f"{option}={value}"]
        code = outcome(argv)
        said = capsys.readouterr()
        assert code in (2, "reached"), (option, value)
        assert "Traceback" not in said.err
        if code == 2:
            assert said.err.strip(), (option, value)
            assert files_in(folder) == [], "nothing was touched"
        if value == "":
            assert said.err.startswith(f"quacklr {command}: {option} is empty"), (option, value)


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]


def empty(folder: Path) -> Path:
    folder.mkdir()
    return folder


def listed(command: str, kinds: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The options in the help of a command."""
    assert main([command, *kinds, "--help"]) == 0
    found = re.findall(r"(?<![\w-])--[a-z][a-z-]*", capsys.readouterr().out)
    return [option for option in dict.fromkeys(found) if option != "--help"]


def test_the_help_lists_what_the_fuzz_is_to_try(base: dict[str, list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    for command in base:
        assert listed(command, [], capsys) or command == "report"
    assert {"--lr", "--steps", "--threads", "--vocab", "--heads", "--layers", "--out", "--resume", "--wandb"} <= {
        *listed("train", [], capsys)
    }
    assert {"--tau", "--floor"} <= {*listed("train", ["--method=quack"], capsys)}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_arguments_that_the_fuzz_starts_from_are_right(
    base: dict[str, list[str]], command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the tests above would try no option."""
    monkeypatch.chdir(tmp_path)
    if command == "report":
        entry = made(small(Path("nowhere"), Default(), ATTENTIONS["mha"]), 3.0)
        monkeypatch.setattr("quacklr.lab.report.command.Ledger", lambda _: Entries(entry))
        monkeypatch.setattr("quacklr.lab.report.command.Results", lambda *_: Entries(entry))
    assert outcome([command, *base[command]]) == "reached"


class Entries:
    """In place of a ledger, and of its results."""

    def __init__(self, entry: Any) -> None:
        self.entry = entry

    def entries(self) -> dict[str, Any]:
        return {"one": self.entry}


@pytest.mark.parametrize("command", COMMANDS)
def test_an_empty_argument_is_a_sentence_wherever_it_stands(
    base: dict[str, list[str]],
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for argv in ([*base[command], "--out", ""], [*base[command], ""], ["", *base[command]]):
        assert main([command, *argv]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"quacklr {command}: ")
        assert " is empty" in said
    assert list(tmp_path.iterdir()) == []
