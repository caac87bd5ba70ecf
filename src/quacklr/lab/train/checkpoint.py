"""Checkpoints of a run: written atomically, verified by checksums before they are loaded, the most recent few kept.

A checkpoint is a folder such as `step-0000100`. It does not depend on the number of processes: four ranks can save it
and two, or one, can load it. storage.py defines its files, and is imported on first use.
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
from quacklr.lab.train.tensors import MODEL, tensors_to_load

FORMAT = 2
"""1 was one file, `step-0000100.pt`."""
READ_ERRORS = (OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, EOFError, UnpicklingError)
"""Errors of reading a folder that is not a checkpoint."""
LEFTOVER = re.compile(r"\.step-[0-9]{7,}\.(saving|removed)")
"""Folders that a killed process leaves while it saves or removes a checkpoint; see storage.py."""


class Checkpoints:
    """The checkpoints of one run, identified by `name`. Every rank creates one, and every call is collective."""

    def __init__(self, folder: Path, name: str, keep: int) -> None:
        self.folder, self.name, self.keep = folder, name, keep
        ranks = dist.is_available() and dist.is_initialized()
        # its own group, because a background save communicates during training; gloo, because the data is on the CPU
        self._group = dist.new_group(backend="gloo") if ranks else None
        self._rank = dist.get_rank() if ranks else 0
        self._wait: Callable[[], None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for a background save. If the body raised, an error of the save does not replace its exception."""
        with suppress(UserError, RuntimeError) if kind else nullcontext():
            self.wait()

    def save(
        self, step: int, tensors: Mapping[str, Tensor], extra_state: Mapping[str, Any], later: bool = False
    ) -> None:
        """Save a checkpoint, then remove all but the last `keep`.

        `extra_state` is equal on all ranks: plain tensors, numbers and strings. With `later` the call returns after
        copying the state, and a thread writes it; `wait` returns when the thread is done and raises its error. A save
        waits for the previous one.
        """
        from quacklr.lab.train import storage

        self.wait()
        path = self.folder / name_of(step)
        content = {"format": FORMAT, "config": self.name, "state": dict(extra_state)}
        writer = storage.CheckpointWriter(path, pack(content) if self._rank == 0 else b"", self._clean_up)
        if later:
            self._wait = storage.write_later(tensors, writer, self._group)
        else:
            storage.write(tensors, writer, self._group)

    def wait(self) -> None:
        """Wait for a background save; UserError if it failed."""
        waiting, self._wait = self._wait, None
        if waiting:
            waiting()

    def _clean_up(self) -> None:
        """Remove incomplete folders of killed processes, and all but the last `keep` checkpoints."""
        from quacklr.lab.train.storage import set_aside

        for left in self.folder.glob(".step-*"):
            if LEFTOVER.fullmatch(left.name):
                remove(left)
        for old in checkpoints(self.folder)[: -self.keep]:
            remove(set_aside(old))

    def load(self, path: Path, model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        """Load a checkpoint into the model and the optimizers, and return its extra state.

        With no optimizers, their state is not read. UserError, before any tensor is changed, if the checkpoint is
        damaged, belongs to another run, or does not fit the model.
        """
        from quacklr.lab.train import storage

        if damage := self._damage_of(path):
            every = checkpoints(path.parent)
            older = [other.name for other in every[: every.index(path)]] if path in every else []
            way = f"remove it to go on from {older[-1]}" if older else "there is no older one, so start the run anew"
            raise UserError(f"the checkpoint {path} is damaged ({damage}); {way}")
        extra_state = read_extra_state(path, self.name)
        with user_errors_for(path):
            saved = storage.saved_tensors(path)
        if not optimizers:
            saved = {name: spec for name, spec in saved.items() if name.startswith(MODEL)}
        storage.load_tensors(tensors_to_load(saved, model, optimizers), path, self._group)
        return extra_state

    def _damage_of(self, path: Path) -> str | None:
        """The first damage found, or None. Each rank checks its share of the files."""
        if self._group is None:
            return damage_of(path)
        found: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(found, damage_of(path, self._rank, len(found)), self._group)
        return next((each for each in found if each), None)


def name_of(step: int) -> str:
    """Folder name of the checkpoint after a step: at least seven digits."""
    return f"step-{step:07}"


def step_of(path: Path) -> int | None:
    """The step of a checkpoint, from its folder name; None if it is not a name that `name_of` gives."""
    digits = path.name.removeprefix("step-")
    step = int(digits) if digits.isascii() and digits.isdecimal() else 0
    return step if path.name == name_of(step) else None


def checkpoints(folder: Path) -> list[Path]:
    """All checkpoints in a folder, oldest first. Folders with other names, such as copies, are ignored."""
    found = {step_of(path): path for path in (folder.iterdir() if folder.exists() else ()) if path.is_dir()}
    return [found[step] for step in sorted(step for step in found if step is not None)]


def validate_format(folder: Path) -> None:
    """Raise UserError if a folder has checkpoints of format 1."""
    for path in sorted(folder.glob("step-*.pt")):
        if step_of(path.with_suffix("")) is not None:
            raise UserError(f"the checkpoint {path} was made by an older quacklr; start the run anew in another --out")


def remove(path: Path) -> None:
    """Remove a folder or a file; of a symbolic link, remove the link only."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def damage_of(path: Path, rank: int = 0, ranks: int = 1) -> str | None:
    """The first damage in the files number `rank`, `rank + ranks`, ... of a checkpoint, or None."""
    try:
        lines = parse_json((path / "checksums.json").read_text(encoding="utf-8"))
        damages = (damage_of_file(path / line["file"], line["bytes"], line["crc32"]) for line in lines[rank::ranks])
        return next((damage for damage in damages if damage), None)
    except (OSError, ValueError, KeyError, TypeError) as error:  # damaged JSON can have any structure
        return f"checksums.json: {getattr(error, 'strerror', None) or error}"


def damage_of_file(path: Path, expected: int, crc32: str) -> str | None:
    """How a file differs from its size and CRC-32 in checksums.json, or None."""
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


def pack(content: Mapping[str, Any]) -> bytes:
    """The bytes that torch.save writes."""
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def read_extra_state(path: Path, name: str) -> dict[str, Any]:
    """The extra state of a checkpoint; UserError if it belongs to another run than `name`."""
    with user_errors_for(path):
        saved = torch.load(path / "rest.pt", map_location="cpu", weights_only=True)
        version, run, state = saved["format"], str(saved["config"]), saved["state"]
    if version == FORMAT and run == name:
        return dict(state)
    if version != FORMAT:
        raise UserError(f"the checkpoint {path} was made by another quacklr; use that one, or start the run anew")
    if run.rpartition("-")[0] == name.rpartition("-")[0]:
        raise UserError(f"the checkpoint {path} was trained on other text: the corpus has changed since")
    raise UserError(f"the checkpoint {path} is of another run: its configuration is not that of this folder")


@contextmanager
def user_errors_for(path: Path) -> Iterator[None]:
    """Raise the errors of reading a folder that is not a checkpoint as a UserError."""
    try:
        yield
    except READ_ERRORS as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UserError(f"{path} is not a checkpoint of quacklr: {reason}") from error
