"""A set of shards, one of each split, written side by side and closed after the document that fills one of them.

A document is never cut, so a shard is a little longer than asked. A set has no file for a split that got no document.
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
from quacklr.lab.errors import UserError
from quacklr.lab.files import atomic_write


def write_set(
    folder: Path, splits: Mapping[str, Split], full: int, pieces: Iterable[tuple[str, bytes, NDArray[np.uint16]]]
) -> dict[str, Split]:
    """Write (split, text, ids) until a shard has `full` tokens or there are no more; the splits with these shards."""
    with ExitStack() as files:
        pens = {name: _Pen(files, folder, name, splits[name]) for name in SPLITS}
        for name, text, ids in pieces:
            pens[name].write(text, ids)
            if pens[name].tokens >= full:
                break
    return {name: pen.written() for name, pen in pens.items()}


@final
class _Pen:
    """Writes the next shard of a split, and counts."""

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
        try:
            self._file.write(raw)
        except OSError as error:  # told here: another split's file may be open around this one, and would be blamed
            raise UserError(f"cannot write {self._path}: {error.strerror or error}") from error
        self._hash.update(raw)
        self.documents += 1
        self.tokens += len(ids)
        self.bytes += len(text) + 1

    def written(self) -> Split:
        """The split with this shard, if it has one."""
        if not self.tokens:
            return self._before
        return Split(
            self._before.documents + self.documents,
            self._before.tokens + self.tokens,
            self._before.bytes + self.bytes,
            (*self._before.shards, Shard(self._path.name, self.tokens, self._hash.hexdigest())),
        )
