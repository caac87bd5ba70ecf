"""A folder of tokens, opened: what training, validation and the logit probe read.

Opening compares sizes only. `suspects` says which files to hash before they are read, and `verify` hashes.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from quacklr.lab.data.manifest import (
    AGAIN,
    FORMAT,
    MANIFEST,
    TOKENIZER,
    Manifest,
    Shard,
    Vocabulary,
    check_hash,
    hash_of,
    made,
    read_manifest,
)
from quacklr.lab.data.tokenizer import Bytes, FromJson, Tokenizer
from quacklr.lab.data.tokens import DTYPE, Tokens
from quacklr.lab.errors import UserError
from quacklr.lab.files import atomic_write, read_json, write_json

STDLIB = "stdlib"
VOCABULARY = "vocabulary.json"
CHEAP = 500_000_000
"""Bytes of tokens that are hashed at every start: a second at most, on most machines."""


@dataclass(frozen=True)
class Corpus:
    """A finished folder. Tokens are mapped, and the tokenizer read, when they are asked for."""

    where: Path
    manifest: Manifest

    @property
    def vocab(self) -> int:
        """Every id is smaller."""
        return self.manifest.tokenizer.vocab

    @property
    def fingerprint(self) -> str:
        """Eight letters that are the same for the same tokens."""
        return hash_of(self.where / MANIFEST)[:8]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """What it was written with; needs the extra `quacklr[data]` unless that is bytes."""
        return _tokenizer(self.manifest.tokenizer, self.where, AGAIN)

    def leave_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer to a folder, so that `left_tokenizer` needs no corpus."""
        stated = self.manifest.tokenizer
        if stated.sha256 is not None:
            with atomic_write(folder / TOKENIZER) as copy:
                copy.write(check_hash(self.where / TOKENIZER, stated.sha256).read_bytes())
        write_json(folder / VOCABULARY, asdict(stated))

    def tokens(self, split: str) -> Tokens:
        """The tokens of train, val or probe."""
        shards = self.manifest.splits[split].shards
        return Tokens(f"the {split} split of {self.where}", [self.where / shard.name for shard in shards], self.vocab)

    def bytes_per_token(self, split: str) -> float:
        """How many bytes of text a token stands for, on the mean: a loss per token divided by it is one per byte."""
        counts = self.manifest.splits[split]
        return counts.bytes / counts.tokens

    @property
    def shards(self) -> list[Shard]:
        """The files of all splits."""
        return [shard for split in self.manifest.splits.values() for shard in split.shards]

    def suspects(self, every: bool) -> list[Shard]:
        """The shards to hash before a run reads them: all if it is resumed (`every`), or if that is cheap.

        A large corpus has only those hashed that were written after its manifest, as a shard never is.
        """
        if every or sum(shard.tokens for shard in self.shards) * DTYPE.itemsize <= CHEAP:
            return self.shards
        finished = (self.where / MANIFEST).stat().st_mtime_ns
        return [shard for shard in self.shards if (self.where / shard.name).stat().st_mtime_ns > finished]

    def verify(self, show: Callable[[float], None], shards: Sequence[Shard] | None = None) -> None:
        """Hash the tokenizer and these shards, or all; UserError names the first that is not what was written.

        `show` is called with the tokens so far.
        """
        if self.manifest.tokenizer.sha256 is not None:
            check_hash(self.where / TOKENIZER, self.manifest.tokenizer.sha256)
        tokens = 0
        for shard in self.shards if shards is None else shards:
            check_hash(self.where / shard.name, shard.sha256)
            tokens += shard.tokens
            show(tokens)


def left_tokenizer(folder: Path) -> Tokenizer:
    """What `leave_tokenizer` has left; UserError if it is not there, or damaged."""
    if not (folder / VOCABULARY).exists():
        raise UserError(
            f"{folder} has no {VOCABULARY}, which says what its tokens mean: an older quacklr made it; `quacklr train "
            f"--resume {folder}` with more --steps adds it"
        )
    try:
        stated = made(Vocabulary, dict(read_json(folder / VOCABULARY)))
    except (TypeError, ValueError) as error:
        raise UserError(f"{folder / VOCABULARY} is damaged: it is not what quacklr writes") from error
    return _tokenizer(stated, folder, "the corpus of the run has a copy of it")


def _tokenizer(stated: Vocabulary, folder: Path, way_out: str) -> Tokenizer:
    if stated.sha256 is None:
        return Bytes()
    content = check_hash(folder / TOKENIZER, stated.sha256, way_out).read_bytes()
    return FromJson(content, stated.name, stated.end_token)


def open_corpus(where: str) -> Corpus:
    """A folder that `quacklr prepare` finished, or "stdlib": Python's own source as bytes, made on first use."""
    if not where:
        raise UserError("--corpus is empty; name a folder that quacklr prepare has made, or stdlib")
    return open_folder(_embedded() if where == STDLIB else Path(where))


def open_folder(folder: Path) -> Corpus:
    """A folder that `quacklr prepare` finished; UserError when it is none, or has lost a shard or a part of one."""
    if not (folder / MANIFEST).exists():
        is_what = "is not finished or was not made by quacklr prepare" if folder.is_dir() else "does not exist"
        raise UserError(f"{folder} {is_what}: quacklr prepare SOURCE --out {folder}")
    corpus = Corpus(folder, read_manifest(folder))
    for shard in corpus.shards:
        _sized(folder / shard.name, shard.tokens * DTYPE.itemsize)
    return corpus


def _sized(path: Path, size: int) -> None:
    if not path.exists():
        raise UserError(f"{path} is missing; {AGAIN}")
    if path.stat().st_size != size:
        raise UserError(f"{path} has {path.stat().st_size:,} bytes instead of {size:,}; {AGAIN}")


def _embedded() -> Path:
    """The folder of the standard library's tokens, made if need be. Another Python makes its own."""
    path = sysconfig.get_path("stdlib")
    here = hashlib.sha256(path.encode()).hexdigest()[:8]
    folder = _cache() / f"{STDLIB}-{platform.python_version()}-{here}-{FORMAT}"
    if not (folder / MANIFEST).exists():
        from quacklr.lab.data.prepare import prepare
        from quacklr.lab.data.request import Request
        from quacklr.lab.data.sources import Stdlib

        try:
            prepare(Request(Stdlib(), Stdlib.held_out), folder, "preparing the standard library", wait=True)
        except UserError as error:
            raise UserError(f"{error} (QUACKLR_CACHE names another place for it)") from error
    return folder


def _cache() -> Path:
    if os.environ.get("QUACKLR_CACHE"):
        return Path(os.environ["QUACKLR_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quacklr"
