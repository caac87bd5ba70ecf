"""Trains every method with both attentions three ways: whole; killed in the middle; and on from there to the end.

    python forked_runs.py CORPUS OUT      fills OUT/whole/<attention>-<method> and OUT/killed/<attention>-<method>

Each run is a process of its own, forked from this one, so that torch is imported once and not fifty times.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import redirect_stdout
from importlib import import_module
from io import StringIO
from pathlib import Path

from lab_runs import ATTENTIONS, METHODS, PAIRS, small
from paused import decode_step, pause, wait_until_paused
from quacklr.lab.config import Config
from quacklr.lab.train.runner import run

for slow in ("torch._dynamo", "torch.utils.tensorboard"):  # every run would import them anew
    import_module(slow)

STEPS, KILL_AFTER = 18, 8  # the last checkpoint is that of step 6


def fork(config: Config, folder: Path) -> int:
    child = os.fork()
    if child == 0:
        with redirect_stdout(StringIO()):
            run(config, folder, resume=folder.exists())
        os._exit(0)
    return child


def kill_in_the_middle(config: Config, folder: Path) -> None:
    pause(folder, KILL_AFTER)
    child = fork(config, folder)
    wait_until_paused(folder)
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert not (folder / "result.json").exists()
    decode_step(folder)


def main(corpus: Path, out: Path) -> None:
    for attention, method in PAIRS:
        config, run_name = small(corpus, METHODS[method], ATTENTIONS[attention], steps=STEPS), f"{attention}-{method}"
        whole = fork(config, out / "whole" / run_name)
        kill_in_the_middle(config, out / "killed" / run_name)
        resumed = fork(config, out / "killed" / run_name)
        for child in (whole, resumed):
            assert os.waitpid(child, 0)[1] == 0, run_name


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
