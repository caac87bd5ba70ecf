"""The files of a checkpoint, written and read by torch.distributed.checkpoint: each rank writes its own shards.

    .metadata  __0_0.distcp  __1_0.distcp ...       the tensors, and which file holds which shard
    rest.pt                                         the extra state, from rank 0
    checksums.json                                  size and CRC-32 of these files

The folder is named `.<name>.saving` until the files of every rank are on disk; then rank 0 renames it. Each rank
computes checksums while it writes, and torch's own collectives send them to rank 0.
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
from quacklr.lab.files import flush_folder, make_folder
from quacklr.lab.train.tensors import TensorSpec

CHECKSUMS = "checksums.json"
EXTRA_STATE = "rest.pt"


class ChecksumFile(io.BufferedWriter):
    """A file that counts its bytes, computes their CRC-32, and is flushed to disk when it is closed."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "w"))
        self.bytes = self.crc32 = 0

    def write(self, data: Any, /) -> int:
        """Write all data: a buffered file, unlike a system call, never writes less."""
        self.crc32 = zlib.crc32(data, self.crc32)
        written = super().write(data)
        self.bytes += written
        return written

    def close(self) -> None:
        """Flush, then fsync. torch calls fsync before the flush, so the end of a file may not be on disk."""
        if not self.closed:
            try:
                self.flush()
                os.fsync(self.fileno())
            finally:
                super().close()


class ChecksumFileSystem(FileSystem):
    """torch's file system with checksums: one entry of checksums.json per file."""

    def __init__(self) -> None:
        self.checksums: dict[str, dict[str, Any]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Called by torch to open a file, always in mode wb."""
        del mode
        with ChecksumFile(Path(path)) as file:
            yield file
        name = Path(path).name
        self.checksums[name] = {"file": name, "bytes": file.bytes, "crc32": f"{file.crc32:08x}"}

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file and its entry."""
        super().rename(path, new_path)
        name = Path(new_path).name
        self.checksums[name] = self.checksums.pop(Path(path).name) | {"file": name}


class CheckpointWriter(FileSystemWriter):
    """Writes one checkpoint atomically. Rank 0 calls `clean_up` before and after it."""

    def __init__(self, folder: Path, extra_state: bytes, clean_up: Callable[[], None]) -> None:
        super().__init__(folder.with_name(f".{folder.name}.saving"), sync_files=False)
        self.fs: ChecksumFileSystem = ChecksumFileSystem()
        self.folder, self.extra_state, self.clean_up = folder, extra_state, clean_up

    def storage_meta(self) -> StorageMeta | None:
        """None, instead of a path and a random number: equal states give equal files."""
        return None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Write nothing yet: rank 0 first removes the files of a killed save."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create the folder; called on rank 0 before any rank writes."""
        self.clean_up()
        make_folder(Path(self.path))
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        """Write the shards of a rank; the result includes their checksums."""
        try:
            written = super().write_data(plan, planner).value()
        except RuntimeError as error:  # torch wraps the OSError of a failed write
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise
        done: Future[Any] = Future()
        done.set_result((written, self.fs.checksums))
        return done

    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        """Write the other files and rename the folder; called on rank 0 after all ranks have written."""
        super().finish(metadata, [written for written, _ in results])
        with self.fs.create_stream(Path(self.path) / EXTRA_STATE, "wb") as file:
            file.write(self.extra_state)
        entries = self.fs.checksums | {name: entry for _, theirs in results for name, entry in theirs.items()}
        with ChecksumFile(Path(self.path) / CHECKSUMS) as file:
            file.write(json.dumps([entries[name] for name in sorted(entries)], indent=2).encode())
        flush_folder(Path(self.path))
        if self.folder.is_dir():
            set_aside(self.folder)
        Path(self.path).rename(self.folder)
        flush_folder(self.folder.parent)
        self.clean_up()


def set_aside(path: Path) -> Path:
    """Rename a checkpoint so that it no longer counts as one; its files can then be removed one by one."""
    return path.rename(path.with_name(f".{path.name}.removed"))


def write(tensors: Mapping[str, Tensor], writer: CheckpointWriter, group: ProcessGroup | None) -> None:
    """Write a checkpoint; collective. UserError on every rank if any rank fails."""
    with no_single_process_warning(), first_failure(writer):
        save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)


def write_later(
    tensors: Mapping[str, Tensor], writer: CheckpointWriter, group: ProcessGroup | None
) -> Callable[[], None]:
    """Copy the tensors and write the copies in a thread; the returned function waits for it and raises its UserError.

    `group` must be used for nothing else, because the thread's collectives run during training.
    """
    with ExitStack() as stack:
        stack.enter_context(no_single_process_warning())
        future: Any = async_save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)
        until_written = stack.pop_all()

    def wait() -> None:
        with until_written, first_failure(writer):
            future.result()

    return wait


@contextmanager
def first_failure(writer: CheckpointWriter) -> Iterator[None]:
    """Raise the first error of any rank, an OSError as a UserError, instead of torch's CheckpointException."""
    try:
        yield
    except CheckpointException as failed:
        if not writer.rank:
            shutil.rmtree(writer.path, ignore_errors=True)
        error = next(iter(failed.failures.values()))[0]
        if isinstance(error, OSError):
            raise UserError(f"cannot write {writer.folder}: {error.strerror or error}") from error
        raise error from failed


def saved_tensors(path: Path) -> dict[str, TensorSpec]:
    """Shape and dtype of every tensor in a checkpoint."""
    found = CheckpointReader(path).read_metadata().state_dict_metadata
    tensors = {name: each for name, each in found.items() if isinstance(each, TensorStorageMetadata)}
    return {name: (each.size, each.properties.dtype) for name, each in tensors.items()}


def load_tensors(tensors: Mapping[str, Tensor], path: Path, group: ProcessGroup | None) -> None:
    """Read a checkpoint into these tensors; each rank reads its own shards, however many ranks wrote the checkpoint."""
    with no_single_process_warning():
        load(dict(tensors), storage_reader=CheckpointReader(path), process_group=group, no_dist=group is None)


class CheckpointReader(FileSystemReader):
    """torch's reader with a safe unpickler: an untrusted checkpoint cannot run code."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Shapes, dtypes and files of the tensors."""
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata: Metadata = MetadataUnpickler(file).load()
        return metadata


class MetadataUnpickler(pickle.Unpickler):
    """Unpickles only the types that torch writes to `.metadata`."""

    def find_class(self, module: str, name: str) -> Any:
        """Allow torch's metadata classes, shapes, dtypes and layouts; UnpicklingError for everything else."""
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
def no_single_process_warning() -> Iterator[None]:
    """Ignore torch's warning that there is one process only. The filter applies to all threads, also to torch's."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)
    filters: Any = warnings.filters
    added = filters[0]
    try:
        yield
    finally:
        with suppress(ValueError):  # already removed by other code
            filters.remove(added)
