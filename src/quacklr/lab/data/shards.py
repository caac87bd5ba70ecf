"""Writing of a set of shards: one shard per split, closed after the document that fills one of them.

Documents are not split, so a shard may be longer than requested. A split without documents has no file in the set.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, final

import numpy as np
from numpy.typing import NDArray

from quacklr.lab.data.manifest import SPLITS, Shard, Split, shard_name
from quacklr.lab.errors import os_errors
from quacklr.lab.files import atomic_write


def write_set(
    folder: Path, splits: Mapping[str, Split], full: int, pieces: Iterable[tuple[str, bytes, NDArray[np.uint16]]]
) -> dict[str, Split]:
    """Write (split, text, ids) until a shard has `full` tokens or there are no more; return the extended splits."""
    with ExitStack() as files:
        writers = {name: _ShardWriter(files, folder, name, splits[name]) for name in SPLITS}
        for name, text, ids in pieces:
            writers[name].write(text, ids)
            if writers[name].tokens >= full:
                break
    return {name: writer.split() for name, writer in writers.items()}


@final
class _ShardWriter:
    """Writes the next shard of a split. The file is created with the first document."""

    def __init__(self, files: ExitStack, folder: Path, name: str, before: Split) -> None:
        self._path = folder / shard_name(name, len(before.shards))
        self._before, self._files, self._hash = before, files, hashlib.sha256()
        self._file: IO[bytes] | None = None
        self.documents = self.tokens = self.bytes = 0

    def write(self, text: bytes, ids: NDArray[np.uint16]) -> None:
        """Add a document."""
        if self._file is None:
            self._file = self._files.enter_context(atomic_write(self._path))
        raw = ids.tobytes()
        with os_errors(f"cannot write {self._path}"):  # otherwise the error would name the file of another split
            self._file.write(raw)
        self._hash.update(raw)
        self.documents += 1
        self.tokens += len(ids)
        self.bytes += len(text) + 1

    def split(self) -> Split:
        """The split with the new shard, if a document was written."""
        if not self.tokens:
            return self._before
        return Split(
            self._before.documents + self.documents,
            self._before.tokens + self.tokens,
            self._before.bytes + self.bytes,
            (*self._before.shards, Shard(self._path.name, self.tokens, self._hash.hexdigest())),
        )
