"""Runs commands on a terminal that fails: full, closed, read by nobody, hung up; and prints how each has ended.

    python terminal_runs.py CORPUS OUT      a line of JSON: exit code and stderr by command and way to fail

Each command is a process of its own, forked from this one, so that torch is imported once.
"""

from __future__ import annotations

import json
import os
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from lab_runs import ATTENTIONS, small
from quacklr.cli import main
from quacklr.lab.ledger import Ledger
from quacklr.lab.methods import Default, QKNorm, Quack
from quacklr.lab.report import command as report
from quacklr.lab.studies.scale import Size, scale_of
from quacklr.lab.sweep import command as sweeping
from quacklr.lab.sweep.sweep import State
from quacklr.lab.train.command import main as train
from quacklr.lab.train.folder import Folder
from quacklr.lab.train.runner import run
from swept_runs import made

SIZES = "--d-model 16 --layers 1 --d-ff 24 --context 16 --heads 2 --kv-heads 2 --head-dim 8 --batch-tokens 128"
STEPS = "--threads 1 --steps 6 --warmup 2 --checkpoint-every 3"
MODEL = """
import torch
from models import PerHead, layers
def model():
    return layers(1, PerHead), torch.randn(1, 3, 16)
"""


def full(descriptor: int) -> Any:
    """What /dev/full does: a disk without space."""
    os.dup2(os.open("/dev/full", os.O_WRONLY), descriptor)
    return open(descriptor, "w", closefd=False)


def unread(descriptor: int) -> Any:
    """What `| true` does: a pipe without a reader."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, descriptor)
    os.close(writer)
    return open(descriptor, "w", closefd=False)


def closed(descriptor: int) -> Any:
    """What `>&-` does: no descriptor. Python then has no stream."""
    os.close(descriptor)


WAYS: dict[str, Callable[[int], Any]] = {"full": full, "unread": unread, "closed": closed}


def ended(call: Callable[[], int], way: str, both: bool, log: Path) -> tuple[int, str]:
    """The exit code of a process in which stdout (and stderr, if it is both) fails; and what stderr said if not."""
    child = os.fork()
    if child == 0:
        sys.stderr = WAYS[way](2) if both else log.open("w")
        sys.stdout = WAYS[way](1)
        leave(call())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), log.read_text() if log.exists() else ""


def leave(code: int) -> NoReturn:
    """Exit as Python does, with code 120 if there is text that cannot be written; but without a clean-up."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        code = 120
    os._exit(code)


def hung_up(out: Path, options: list[str]) -> int:
    """The exit code of a run on a terminal that is gone after its third row."""
    ready, at_row = os.pipe()
    gone, hang_up = os.pipe()
    append = Folder.append

    def waiting(folder: Folder, row: dict[str, Any]) -> None:
        append(folder, row)
        if row["step"] == 3:
            os.write(at_row, b"x")
            os.read(gone, 1)

    child, terminal = os.forkpty()
    if child == 0:
        os.environ["TERM"] = "xterm"
        setattr(Folder, "append", waiting)  # noqa: B010
        leave(train([*options, "--out", str(out)]))
    os.read(ready, 1)
    os.close(terminal)
    os.write(hang_up, b"x")
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def shown(
    _todo: object, _ledger: object, _place: object, _runs: object, show: Callable[[State], None], *_: object
) -> State:
    """In place of a sweep: its display, without the runs."""
    state = State(waiting=deque(), ended=[made(scale_of(Size()).run("mha", Default(), 0.1), 3.0)])
    show(state)
    return state


def commands(corpus: Path, out: Path) -> dict[str, list[str]]:
    """Those whose output is a display, or a sentence about the files that they write."""
    return {
        "train": ["train", *SIZES.split(), *STEPS.split(), "--corpus", str(corpus), "--out", str(out / "train")],
        "prepare": ["prepare", str(corpus.parent / "source.jsonl"), "--out", str(out / "prepare"), "--val", "0.1"],
        "report": ["report", str(out / "report")],
        "sweep": ["sweep", "demo", "--out", str(out / "sweep"), "--runs", str(out / "sweep/runs")],
    }


def products(out: Path) -> dict[str, list[str]]:
    """Those whose output is what they are for."""
    return {
        "generate": ["generate", str(out / "run"), "--prompt", "the"],
        "inspect": ["inspect", f"{out / 'made.py'}:model"],
        "check": ["check", f"{out / 'made.py'}:model", "--steps", "1"],
        "dry run": ["sweep", "demo", "--out", str(out / "sweep"), "--dry-run"],
    }


def all_of_them(corpus: Path, out: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    run(small(corpus, Default(), ATTENTIONS["mha"], steps=6), out / "run")
    (out / "made.py").write_text(MODEL)
    for way in WAYS:
        here = out / way
        ledger = Ledger(here / "report/ledger.jsonl")
        for method in (Default(), Quack(), QKNorm()):
            ledger.append(made(scale_of(Size()).run("mha", method, 0.1), 3.0))
        for name, argv in commands(corpus, here).items():
            found[f"{name}, {way}"] = ended(lambda argv=argv: main(argv), way, True, out / f"{name}-{way}")  # type: ignore[misc]
        for name, argv in products(out).items():
            found[f"{name}, {way}"] = ended(lambda argv=argv: main(argv), way, False, out / f"{name}-{way}")  # type: ignore[misc]
    found["hung up"] = hung_up(out / "hung up", commands(corpus, out)["train"][1:-2])
    return found


if __name__ == "__main__":
    vars(report).update(draw=lambda *_: [], page=lambda *_: "")  # which take long, and print nothing
    vars(sweeping).update(sweep=shown, validate_corpora=lambda *_: None)
    print(json.dumps(all_of_them(Path(sys.argv[1]), Path(sys.argv[2]))))
