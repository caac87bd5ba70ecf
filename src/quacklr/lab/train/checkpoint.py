"""Checkpoints: whole or not there, checked for damage before they are used, the last few kept.

A checkpoint is a folder, `step-0000100`, of plain tensors and numbers, the same for one process and for many: what was
saved by four ranks is loaded by two or by one. What it looks like inside is in storage.py, which is imported when it is
first needed.
"""

from __future__ import annotations

import io
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from quacklr.lab.errors import UserError
from quacklr.lab.files import parse_json
from quacklr.lab.train.tensors import MODEL, tensors_for

FORMAT = 2
"""1 was one file, `step-0000100.pt`."""
WRONG = (
    OSError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    RuntimeError,
    EOFError,
    UnpicklingError,
)  # what it raises to read something else as a checkpoint
LEFT = re.compile(r"\.step-[0-9]{7,}\.(saving|removed)")
"""What a killed save or removal leaves; see storage.py."""


class Checkpoints:
    """The checkpoints of the run with this `<configuration>-<corpus>`; all its ranks make one and use it together."""

    def __init__(self, folder: Path, name: str, keep: int) -> None:
        self.folder, self.name, self.keep = folder, name, keep
        ranks = dist.is_available() and dist.is_initialized()
        # of its own, because a save in the background talks while the training does; and gloo, for it is about files
        self._group = dist.new_group(backend="gloo") if ranks else None
        self._rank = dist.get_rank() if ranks else 0
        self._wait: Callable[[], None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """No save is left under way, however the run ended. What ended it is not hidden by what ends the save."""
        with suppress(UserError, RuntimeError) if kind else nullcontext():
            self.wait()

    def save(self, step: int, tensors: Mapping[str, Tensor], rest: Mapping[str, Any], later: bool = False) -> None:
        """Write the state of a run at a step, then remove all but the last `keep`.

        `rest` is for what is the same on all ranks: plain tensors, numbers and strings. With `later` it returns when
        both are copied, and a thread writes them; `wait` says when, and whether, that was done. There is one save at a
        time: a second waits for the first.
        """
        from quacklr.lab.train import storage

        self.wait()
        path = self.folder / name_of(step)
        content = {"format": FORMAT, "config": self.name, "state": dict(rest)}
        writer = storage.Writer(path, packed(content) if self._rank == 0 else b"", self._tidy)
        if later:
            self._wait = storage.write_later(tensors, writer, self._group)
        else:
            storage.write(tensors, writer, self._group)

    def wait(self) -> None:
        """Return when no save is under way; UserError if the last one failed."""
        waiting, self._wait = self._wait, None
        if waiting:
            waiting()

    def _tidy(self) -> None:
        """Remove what killed saves and removals have left, and all but the last few."""
        from quacklr.lab.train.storage import hidden

        for left in self.folder.glob(".step-*"):
            if LEFT.fullmatch(left.name):
                erase(left)
        for old in checkpoints(self.folder)[: -self.keep]:
            erase(hidden(old))

    def load(self, path: Path, model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        """Fill the model and its optimizers from a checkpoint, and return the rest of it.

        Without optimizers, what the checkpoint has of them is left there. UserError if it is damaged, not one of this
        run, or does not fit the model; then no number was read.
        """
        from quacklr.lab.train import storage

        if damage := self._damage_of(path):
            every = checkpoints(path.parent)
            older = [other.name for other in every[: every.index(path)]] if path in every else []
            way = f"remove it to go on from {older[-1]}" if older else "there is no older one, so start the run anew"
            raise UserError(f"the checkpoint {path} is damaged ({damage}); {way}")
        rest = rest_of(path, self.name)
        with ours(path):
            saved = storage.contents(path)
        if not optimizers:
            saved = {name: kind for name, kind in saved.items() if name.startswith(MODEL)}
        storage.fill(tensors_for(saved, model, optimizers), path, self._group)
        return rest

    def _damage_of(self, path: Path) -> str | None:
        """What is wrong with the files, if anything is. Each rank reads its share of them."""
        if self._group is None:
            return damage_of(path)
        found: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(found, damage_of(path, self._rank, len(found)), self._group)
        return next((each for each in found if each), None)


def name_of(step: int) -> str:
    """The name of the checkpoint after a step: seven digits, or more from step 10,000,000 on."""
    return f"step-{step:07}"


def step_of(path: Path) -> int | None:
    """The step of a checkpoint, from its name; None for every name that `name_of` does not give."""
    digits = path.name.removeprefix("step-")
    step = int(digits) if digits.isascii() and digits.isdecimal() else 0
    return step if path.name == name_of(step) else None


def checkpoints(folder: Path) -> list[Path]:
    """All that are there, oldest first. Whatever else a user keeps beside them, such as a copy, is none."""
    found = {step_of(path): path for path in (folder.iterdir() if folder.exists() else ()) if path.is_dir()}
    return [found[step] for step in sorted(step for step in found if step is not None)]


def refuse_older_format(folder: Path) -> None:
    """UserError if a folder has checkpoints of format 1."""
    for path in sorted(folder.glob("step-*.pt")):
        if step_of(path.with_suffix("")) is not None:
            raise UserError(f"the checkpoint {path} was made by an older quacklr; start the run anew in another --out")


def erase(path: Path) -> None:
    """Remove a folder, or a file; of a symbolic link only the link."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def damage_of(path: Path, rank: int = 0, ranks: int = 1) -> str | None:
    """What is wrong with every `ranks`-th file, from number `rank` on, if anything is."""
    try:
        lines = parse_json((path / "checksums.json").read_text(encoding="utf-8"))
        damages = (damage_of_file(path / line["file"], line["bytes"], line["crc32"]) for line in lines[rank::ranks])
        return next((damage for damage in damages if damage), None)
    except (OSError, ValueError, KeyError, TypeError) as error:  # damaged JSON can be anything
        return f"checksums.json: {getattr(error, 'strerror', None) or error}"


def damage_of_file(path: Path, expected: int, crc32: str) -> str | None:
    """What is wrong with one of its files, if anything is."""
    try:
        found = 0
        with path.open("rb") as content:
            while part := content.read(2**20):
                found = zlib.crc32(part, found)
            size = content.tell()
    except OSError as error:
        return f"{path.name}: {error.strerror or error}"
    if size != expected:
        return f"{path.name} has {size:,} bytes, not {expected:,}"
    return None if f"{found:08x}" == crc32 else f"the checksum of {path.name} is wrong"


def packed(content: Mapping[str, Any]) -> bytes:
    """As torch saves it."""
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def rest_of(path: Path, name: str) -> dict[str, Any]:
    """What a checkpoint has beside the tensors; UserError if it is not of the run with this name."""
    with ours(path):
        saved = torch.load(path / "rest.pt", map_location="cpu", weights_only=True)
        made_by, of, state = saved["format"], str(saved["config"]), saved["state"]
    if made_by == FORMAT and of == name:
        return dict(state)
    if made_by != FORMAT:
        raise UserError(f"the checkpoint {path} was made by another quacklr; use that one, or start the run anew")
    if of.rpartition("-")[0] == name.rpartition("-")[0]:
        raise UserError(f"the checkpoint {path} was trained on other text: the corpus has changed since")
    raise UserError(f"the checkpoint {path} is of another run: its configuration is not that of this folder")


@contextmanager
def ours(path: Path) -> Iterator[None]:
    """UserError for whatever a folder that is no checkpoint of quacklr makes torch say."""
    try:
        yield
    except WRONG as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UserError(f"{path} is not a checkpoint of quacklr: {reason}") from error
