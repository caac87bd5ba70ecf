"""An opened corpus: the tokens and the tokenizer of a folder that `quacklr prepare` has finished.

Opening compares file sizes only. `verify` hashes files, and `shards_to_verify` selects those that a run must hash.
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
    FORMAT,
    MANIFEST,
    PREPARE_AGAIN,
    TOKENIZER,
    Manifest,
    Shard,
    Vocabulary,
    check_hash,
    from_dict,
    read_manifest,
    sha256_of,
)
from quacklr.lab.data.prepare import prepare
from quacklr.lab.data.request import Request
from quacklr.lab.data.sources import Stdlib
from quacklr.lab.data.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer
from quacklr.lab.data.tokens import DTYPE, Tokens
from quacklr.lab.errors import UserError
from quacklr.lab.files import atomic_write, read_json, write_json

STDLIB = "stdlib"
VOCABULARY = "vocabulary.json"
ALWAYS_HASHED_BYTES = 500_000_000
"""A corpus of at most this size is hashed at every start, which takes about a second."""


@dataclass(frozen=True)
class Corpus:
    """A finished folder. Token files are mapped, and the tokenizer is loaded, on first use."""

    folder: Path
    manifest: Manifest

    @property
    def vocab(self) -> int:
        """Number of token ids."""
        return self.manifest.tokenizer.vocab

    @property
    def fingerprint(self) -> str:
        """Eight hexadecimal digits that are equal for equal tokens."""
        return sha256_of(self.folder / MANIFEST)[:8]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the corpus; needs the extra `quacklr[data]` unless it is `bytes`."""
        return _open_tokenizer(self.manifest.tokenizer, self.folder, PREPARE_AGAIN)

    def save_tokenizer(self, folder: Path) -> None:
        """Copy the tokenizer to the folder of a run, where `load_tokenizer` reads it without the corpus."""
        vocabulary = self.manifest.tokenizer
        if vocabulary.sha256 is not None:
            with atomic_write(folder / TOKENIZER) as copy:
                copy.write(check_hash(self.folder / TOKENIZER, vocabulary.sha256).read_bytes())
        write_json(folder / VOCABULARY, asdict(vocabulary))

    def tokens(self, split: str) -> Tokens:
        """The tokens of train, val or probe."""
        shards = self.manifest.splits[split].shards
        return Tokens(f"the {split} split of {self.folder}", [self.folder / shard.name for shard in shards], self.vocab)

    def bytes_per_token(self, split: str) -> float:
        """Mean bytes of text per token: converts a loss per token to a loss per byte."""
        counts = self.manifest.splits[split]
        return counts.bytes / counts.tokens

    @property
    def shards(self) -> list[Shard]:
        """The shards of all splits."""
        return [shard for split in self.manifest.splits.values() for shard in split.shards]

    def shards_to_verify(self, every: bool) -> list[Shard]:
        """The shards that a run hashes before it reads them: all if `every` (a resumed run), or if the corpus is small.

        Of a large corpus, only the shards that were modified after the manifest was written.
        """
        if every or sum(shard.tokens for shard in self.shards) * DTYPE.itemsize <= ALWAYS_HASHED_BYTES:
            return self.shards
        finished = (self.folder / MANIFEST).stat().st_mtime_ns
        return [shard for shard in self.shards if (self.folder / shard.name).stat().st_mtime_ns > finished]

    def verify(self, show: Callable[[float], None], shards: Sequence[Shard] | None = None) -> None:
        """Hash the tokenizer and these shards, or all; UserError for the first file whose hash is wrong.

        `show` is called with the number of tokens hashed so far.
        """
        if self.manifest.tokenizer.sha256 is not None:
            check_hash(self.folder / TOKENIZER, self.manifest.tokenizer.sha256)
        tokens = 0
        for shard in self.shards if shards is None else shards:
            check_hash(self.folder / shard.name, shard.sha256)
            tokens += shard.tokens
            show(tokens)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer that `Corpus.save_tokenizer` wrote; UserError if it is missing or damaged."""
    if not (folder / VOCABULARY).exists():
        raise UserError(
            f"{folder} has no {VOCABULARY}, which says what its tokens mean: an older quacklr made it; `quacklr train "
            f"--resume {folder}` with more --steps adds it"
        )
    try:
        vocabulary = from_dict(Vocabulary, dict(read_json(folder / VOCABULARY)))
    except (TypeError, ValueError) as error:
        raise UserError(f"{folder / VOCABULARY} is damaged: it is not what quacklr writes") from error
    return _open_tokenizer(vocabulary, folder, "the corpus of the run has a copy of it")


def _open_tokenizer(vocabulary: Vocabulary, folder: Path, way_out: str) -> Tokenizer:
    if vocabulary.sha256 is None:
        return ByteTokenizer()
    content = check_hash(folder / TOKENIZER, vocabulary.sha256, way_out).read_bytes()
    return JsonTokenizer(content, vocabulary.name, vocabulary.end_token)


def open_corpus(name: str) -> Corpus:
    """Open a finished folder by path, or "stdlib": Python's own source as bytes, prepared on first use."""
    if not name:
        raise UserError("--corpus is empty; name a folder that quacklr prepare has made, or stdlib")
    return open_folder(_stdlib_folder() if name == STDLIB else Path(name))


def open_folder(folder: Path) -> Corpus:
    """Open a finished folder; UserError if it is not finished, or if a shard is missing or has another size."""
    if not (folder / MANIFEST).exists():
        reason = "is not finished or was not made by quacklr prepare" if folder.is_dir() else "does not exist"
        raise UserError(f"{folder} {reason}: quacklr prepare SOURCE --out {folder}")
    corpus = Corpus(folder, read_manifest(folder))
    for shard in corpus.shards:
        path, expected = folder / shard.name, shard.tokens * DTYPE.itemsize
        if not path.exists():
            raise UserError(f"{path} is missing; {PREPARE_AGAIN}")
        if (size := path.stat().st_size) != expected:
            raise UserError(f"{path} has {size:,} bytes instead of {expected:,}; {PREPARE_AGAIN}")
    return corpus


def _stdlib_folder() -> Path:
    """The corpus of the standard library in the cache, prepared if it is missing. Each Python version has its own."""
    source = hashlib.sha256(sysconfig.get_path("stdlib").encode()).hexdigest()[:8]
    folder = _cache_folder() / f"{STDLIB}-{platform.python_version()}-{source}-{FORMAT}"
    if not (folder / MANIFEST).exists():
        try:
            prepare(Request(Stdlib(), Stdlib.held_out), folder, "preparing the standard library", wait=True)
        except UserError as error:
            raise UserError(f"{error} (QUACKLR_CACHE names another place for it)") from error
    return folder


def _cache_folder() -> Path:
    if os.environ.get("QUACKLR_CACHE"):
        return Path(os.environ["QUACKLR_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quacklr"
