"""A checkpoint's folder, written and read by torch.distributed.checkpoint: each rank has its own part of the tensors.

    .metadata  __0_0.distcp  __1_0.distcp ...       the tensors, and which part of them is where
    rest.pt                                         all that is no tensor of the run, from rank 0
    checksums.json                                  of all these files

The folder is `.<its name>.saving` until every rank's last byte is on the disk; then rank 0 gives it its name. A rank
adds up what it writes while it writes, and the collectives that torch needs anyway carry the sums to rank 0.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.futures import Future

from quacklr.lab.errors import UserError
from quacklr.lab.train.tensors import Kind
from quacklr.util.atomic_files import flush_folder, make_folder

CHECKSUMS = "checksums.json"
REST = "rest.pt"


class Summed(io.BufferedWriter):
    """A file that adds up what is written to it, and is on the disk when it is closed."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "w"))
        self.bytes = self.crc32 = 0

    def write(self, data: Any, /) -> int:
        """All of it: unlike a system call, a buffered file writes no less than it is given."""
        self.crc32 = zlib.crc32(data, self.crc32)
        written = super().write(data)
        self.bytes += written
        return written

    def close(self) -> None:
        """torch's own fsync comes before the flush, so that the end of a file may not be on the disk."""
        if not self.closed:
            try:
                self.flush()
                os.fsync(self.fileno())
            finally:
                super().close()


class SummedFiles(FileSystem):
    """The files that a rank writes, with a line for each in checksums.json."""

    def __init__(self) -> None:
        self.lines: dict[str, dict[str, Any]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """As torch wants it; it only ever writes here, in mode wb."""
        del mode
        with Summed(Path(path)) as file:
            yield file
        name = Path(path).name
        self.lines[name] = {"file": name, "bytes": file.bytes, "crc32": f"{file.crc32:08x}"}

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """The sum goes with the file."""
        super().rename(path, new_path)
        name = Path(new_path).name
        self.lines[name] = self.lines.pop(Path(path).name) | {"file": name}


class Writer(FileSystemWriter):
    """Writes one checkpoint, and makes it appear whole; `tidy` is what rank 0 does before that and after it."""

    def __init__(self, folder: Path, rest: bytes, tidy: Callable[[], None]) -> None:
        super().__init__(folder.with_name(f".{folder.name}.saving"), sync_files=False)
        self.fs: SummedFiles = SummedFiles()
        self.folder, self.rest, self.tidy = folder, rest, tidy

    def storage_meta(self) -> StorageMeta | None:
        """Not the path and the random number that torch would write: equal states give equal bytes."""
        return None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Touch nothing yet: rank 0 has to remove what a killed save may have left in the same place."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On rank 0, before any rank writes."""
        self.tidy()
        make_folder(Path(self.path))
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        """On every rank: its part, and the checksums of that."""
        try:
            written = super().write_data(plan, planner).value()
        except RuntimeError as error:  # torch's words for a write that failed; the system's are behind them
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise
        done: Future[Any] = Future()
        done.set_result((written, self.fs.lines))
        return done

    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        """On rank 0, when all have written theirs."""
        super().finish(metadata, [written for written, _ in results])
        with self.fs.create_stream(Path(self.path) / REST, "wb") as file:
            file.write(self.rest)
        lines = self.fs.lines | {name: line for _, theirs in results for name, line in theirs.items()}
        with Summed(Path(self.path) / CHECKSUMS) as file:
            file.write(json.dumps([lines[name] for name in sorted(lines)], indent=2).encode())
        flush_folder(Path(self.path))
        if self.folder.is_dir():
            hidden(self.folder)
        Path(self.path).rename(self.folder)
        flush_folder(self.folder.parent)
        self.tidy()


def hidden(path: Path) -> Path:
    """A checkpoint under a name that is no checkpoint's: it is gone at once, and can then be removed file by file."""
    return path.rename(path.with_name(f".{path.name}.removed"))


def write(tensors: Mapping[str, Tensor], writer: Writer, group: ProcessGroup | None) -> None:
    """Write a checkpoint; all ranks together. UserError on every rank if any could not."""
    with one_process_allowed(), broadcast_from_rank0(writer):
        save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)


def write_later(tensors: Mapping[str, Tensor], writer: Writer, group: ProcessGroup | None) -> Callable[[], None]:
    """Copy the tensors, and write the copies in a thread; what is returned waits for that, and has its UserError.

    The thread's collectives must not meet those of the training, so `group` is to be used for nothing else.
    """
    with ExitStack() as stack:
        stack.enter_context(one_process_allowed())
        future: Any = async_save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)
        until_written = stack.pop_all()

    def wait() -> None:
        with until_written, broadcast_from_rank0(writer):
            future.result()

    return wait


@contextmanager
def broadcast_from_rank0(writer: Writer) -> Iterator[None]:
    """What went wrong on some rank, as itself or in a sentence; by then no rank writes any more."""
    try:
        yield
    except CheckpointException as failed:
        if not writer.rank:
            shutil.rmtree(writer.path, ignore_errors=True)
        error = next(iter(failed.failures.values()))[0]
        if isinstance(error, OSError):
            raise UserError(f"cannot write {writer.folder}: {error.strerror or error}") from error
        raise error from failed


def contents(path: Path) -> dict[str, Kind]:
    """Every tensor in a checkpoint, without its numbers."""
    found = Reader(path).read_metadata().state_dict_metadata
    tensors = {name: each for name, each in found.items() if isinstance(each, TensorStorageMetadata)}
    return {name: (each.size, each.properties.dtype) for name, each in tensors.items()}


def fill(tensors: Mapping[str, Tensor], path: Path, group: ProcessGroup | None) -> None:
    """Read the numbers of these tensors, each rank those of its own shards, from however many ranks wrote them."""
    with one_process_allowed():
        load(dict(tensors), storage_reader=Reader(path), process_group=group, no_dist=group is None)


class Reader(FileSystemReader):
    """torch's, but a stranger's checkpoint runs no code: of the pickle in `.metadata` only known types are made."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Which tensors there are, and where."""
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata: Metadata = Known(file).load()
        return metadata


class Known(pickle.Unpickler):
    """Makes what torch writes into `.metadata`, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """torch's records of tensors, their shapes, types and layouts."""
        if (module, name) in {("torch", "Size"), ("torch.serialization", "_get_layout")}:
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if module.startswith("torch.distributed.checkpoint.") and "." not in name:
            found = super().find_class(module, name)
            if is_dataclass(found) or (isinstance(found, type) and issubclass(found, Enum)):
                return found
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint")


@contextmanager
def one_process_allowed() -> Iterator[None]:
    """Ignore torch's warning that there are no ranks. Filters of warnings hold for all threads, torch's own too."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)
    filters: Any = warnings.filters
    added = filters[0]
    try:
        yield
    finally:
        with suppress(ValueError):  # somebody else has removed it
            filters.remove(added)
