"""Kills a process at every moment of a save, looks at what is left, and saves again.

    python killed_saves.py OUT      prints how often the older and the newer checkpoint was the last, and how often
                                    something was left to clean up: a line for a save, one for a save in the background

A moment is just before a call that changes the disk: that opens, writes, flushes, renames or removes a file.
Each save is a process of its own, forked from this one, so that torch is imported once. It is killed by SIGKILL.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quacklr.lab.train.checkpoint import Checkpoints, checkpoints
from quacklr.lab.train.tensors import named_tensors

CHANGES = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir"}
NONE: list[torch.optim.Optimizer] = []


def model_at(step: int) -> nn.Linear:
    """With weights that say which step they are of."""
    model = nn.Linear(30, 20, bias=False)
    nn.init.constant_(model.weight, step)
    return model


def save(folder: Path, step: int, later: bool) -> None:
    with Checkpoints(folder, "a-b", keep=1) as saves:
        saves.save(step, named_tensors(model_at(step), NONE), {"step": step}, later)
        saves.wait()


def die_at(moment: int) -> None:
    """From here on, kill this process at its so manieth change of the disk."""
    left = moment

    def change(event: str, args: Any = ()) -> None:
        nonlocal left
        if event in CHANGES and not (event == "open" and args[1] in ("r", "rb")):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def counted(call: Any) -> Any:
        def called(*args: Any) -> Any:
            change("os.rename")
            return call(*args)

        return called

    from quacklr.lab.train.storage import ChecksumFile

    for owner, name in ((os, "fsync"), (ChecksumFile, "write"), (ChecksumFile, "flush")):
        setattr(owner, name, counted(getattr(owner, name)))
    sys.addaudithook(change)


def killed(folder: Path, later: bool, moment: int) -> bool:
    """Whether a process that saved step 2 was killed at this moment, or had ended before."""
    child = os.fork()
    if child == 0:
        die_at(moment)
        save(folder, 2, later)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), status
    return status != 0


def last_of(folder: Path) -> int:
    """The step of the last checkpoint. All of it must be there, and of one before it too if it can be seen."""
    for path in checkpoints(folder):
        model = model_at(0)
        rest = Checkpoints(folder, "a-b", keep=1).load(path, model, NONE)
        assert (model.weight == rest["step"]).all()
    return int(rest["step"])


def main(out: Path, later: bool) -> None:
    found: Counter[int] = Counter()
    left_behind = 0
    for moment in range(10_000):
        folder = out / str(moment)
        save(folder, 1, later)
        was_killed = killed(folder, later, moment)
        found[last_of(folder)] += 1
        left_behind += len(list(folder.iterdir())) > 1
        save(folder, 3, later)
        assert [path.name for path in folder.iterdir()] == ["step-0000003"], "the next save cleans up"
        if not was_killed:
            break
    print(found[1], found[2], left_behind)


if __name__ == "__main__":
    torch.set_num_threads(1)
    assert "torch.distributed.checkpoint" not in sys.modules, "it is to be imported when it is needed"
    vars(os)["fsync"] = lambda _: None  # slow, and of no use to a process that is killed
    for way in (False, True):
        main(Path(sys.argv[1]) / str(way), way)
