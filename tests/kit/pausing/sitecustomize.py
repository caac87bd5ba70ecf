"""Makes a training run wait at a step until a test lets it go on. Python imports this when the folder is on PYTHONPATH.

A run in the folder `name` waits after it has written the row of step N, as long as a file `name.pause` beside the
folder holds N, or until it gets a signal. If the file holds `N deaf`, signals do not end the waiting.
tests/kit/paused.py has the functions for tests.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any

MODULE = "quacklr.lab.train.folder"
MINUTES = 20  # in case the test is gone


class Patch(MetaPathFinder):
    """Wraps `Folder.append` when its module is imported, so that other processes do not import quacklr."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        """The module's own spec, with a loader that adds the waiting."""
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        assert spec is not None
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_wrap(module: Any) -> None:
            execute(module)
            module.Folder.append = waiting(module.Folder.append)

        loader.exec_module = execute_and_wrap
        return spec


def waiting(append: Any) -> Any:
    """`Folder.append`, and then the pause if it is one at this step."""

    def append_and_wait(folder: Any, row: dict[str, Any]) -> None:
        append(folder, row)
        if words(folder.path)[:1] == [str(row["step"])]:
            wait(folder.path)

    return append_and_wait


def words(run: Path) -> list[str]:
    """What a test has written for this run: nothing, a step, or a step and `deaf`."""
    try:
        return run.with_name(f"{run.name}.pause").read_text().split()
    except FileNotFoundError:
        return []


def wait(run: Path) -> None:
    """Until the test lets the run go on."""
    end = time.monotonic() + 60 * MINUTES
    with signalled() as pipe:
        while (given := words(run)) and ("deaf" in given or not select.select([pipe], [], [], 0)[0]):
            assert time.monotonic() < end, "nobody has let the run go on"
            time.sleep(0.01)


@contextmanager
def signalled() -> Iterator[int]:
    """The end of a pipe into which Python writes a byte for each signal that comes."""
    pipe, theirs = os.pipe()
    os.set_blocking(theirs, False)
    before = signal.set_wakeup_fd(theirs)
    try:
        yield pipe
    finally:
        signal.set_wakeup_fd(before)
        os.close(pipe)
        os.close(theirs)


sys.meta_path.insert(0, Patch())
