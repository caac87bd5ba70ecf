"""Preparation of a corpus: text to shards of tokens. A killed process can continue, with bitwise the same result.

After each set of shards the journal records how far the source has been read. Shards that are not in the journal, which
a killed process may leave, are written again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quacklr.lab.data.journal import JOURNAL, Journal, open_journal, validate_same_request
from quacklr.lab.data.manifest import MANIFEST, SPLITS, TOKENIZER, Manifest, Split, check_hash, read_manifest
from quacklr.lab.data.request import Request
from quacklr.lab.data.shards import write_set
from quacklr.lab.data.sources import Fractions, SourceFile, TextPosition, documents, split_of
from quacklr.lab.data.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer, vocabulary
from quacklr.lab.data.vocabularies import tokenizer_json
from quacklr.lab.errors import UserError
from quacklr.lab.files import atomic_write, locked
from quacklr.lab.progress import progress

CHUNK = 1 << 20  # bytes of text per call of the tokenizer: enough work for all cores, little memory


def prepare(request: Request, folder: Path, title: str = "preparing", wait: bool = False) -> Manifest:
    """Prepare a folder, or continue an unfinished one; a finished one is not changed.

    While another process holds the folder, `wait` for it, or raise UserError.
    """
    described = request.describe()
    with locked(folder, wait):
        if (folder / MANIFEST).exists():
            manifest = read_manifest(folder)
            validate_same_request(folder, described, manifest.request)
            (folder / JOURNAL).unlink(missing_ok=True)  # a process was killed after it wrote the manifest
            return manifest
        journal = open_journal(folder, described)
        files = request.source.files()
        tokenizer, journal = _tokenizer(request, folder, journal, files)
        return _finish(folder, _write(request, folder, journal, files, tokenizer, title))


def _tokenizer(
    request: Request, folder: Path, journal: Journal, files: Sequence[SourceFile]
) -> tuple[Tokenizer, Journal]:
    """The tokenizer of the journal, or a new one, which is saved and entered in the journal."""
    name, path = Path(request.tokenizer).name, folder / TOKENIZER
    if request.tokenizer == "bytes":
        return ByteTokenizer(), replace(journal, tokenizer=vocabulary(ByteTokenizer(), name, None))
    if journal.tokenizer is not None and journal.tokenizer.sha256 is not None:
        return JsonTokenizer(check_hash(path, journal.tokenizer.sha256).read_bytes(), name, request.end_token), journal
    raw = tokenizer_json(request.tokenizer, lambda: _training_texts(files, request.held_out))
    tokenizer = JsonTokenizer(raw, name, request.end_token)
    with atomic_write(path) as file:
        file.write(raw)
    journal = replace(journal, tokenizer=vocabulary(tokenizer, name, hashlib.sha256(raw).hexdigest()))
    journal.write(folder)
    return tokenizer, journal


def _training_texts(files: Sequence[SourceFile], held_out: Fractions) -> Iterator[str]:
    with progress("training the tokenizer", sum(file.size for file in files) / 1e6, "MB") as show:
        for document, place in documents(files, TextPosition()):
            show(place.read / 1e6)
            if split_of(document, held_out) == "train":
                yield document.decode()


def _write(
    request: Request, folder: Path, journal: Journal, files: Sequence[SourceFile], tokenizer: Tokenizer, title: str
) -> Journal:
    """Write sets of shards to the end of the source; return the last journal."""
    stream = _encoded(documents(files, journal.place), tokenizer)
    place, tokens = journal.place, sum(split.tokens for split in journal.splits.values())

    def pieces() -> Iterator[tuple[str, bytes, NDArray[np.uint16]]]:
        nonlocal place, tokens
        for document, ids, after in stream:
            place = after
            if document:
                tokens += len(ids)
                show(place.read / 1e6, f"{tokens:,} tokens")
                yield split_of(document, request.held_out), document, ids

    with progress(title, sum(file.size for file in files) / 1e6, "MB", place.read / 1e6) as show:
        while (splits := write_set(folder, journal.splits, request.shard_tokens, pieces())) != journal.splits:
            journal = replace(journal, place=place, splits=splits)
            journal.write(folder)
    return journal


def _encoded(
    stream: Iterator[tuple[bytes, TextPosition]], tokenizer: Tokenizer
) -> Iterator[tuple[bytes, NDArray[np.uint16], TextPosition]]:
    for chunk in _chunks(stream):
        ids = tokenizer.encode_documents([document for document, _ in chunk])
        yield from ((document, each, place) for (document, place), each in zip(chunk, ids, strict=True))


def _chunks(stream: Iterator[tuple[bytes, TextPosition]]) -> Iterator[list[tuple[bytes, TextPosition]]]:
    chunk, size = [], 0
    for document, place in stream:
        chunk.append((document, place))
        size += len(document) + 1
        if size >= CHUNK:
            yield chunk
            chunk, size = [], 0
    yield chunk


def _finish(folder: Path, journal: Journal) -> Manifest:
    empty = [name for name in SPLITS if not journal.splits[name].tokens]
    if empty:
        _discard(folder, journal)
        raise UserError(_too_few(journal.splits, empty))
    assert journal.tokenizer is not None
    manifest = Manifest(journal.request, journal.tokenizer, journal.splits)
    manifest.write(folder)
    (folder / JOURNAL).unlink()
    return manifest


def _too_few(splits: Mapping[str, Split], empty: Sequence[str]) -> str:
    count = sum(split.documents for split in splits.values())
    if count < len(SPLITS):
        return f"too few documents ({count}): train, val and probe need one each; give more files, or a jsonl"
    enough = f"{min(0.25, 5 / count):.1g}"  # five documents on average
    raised = " and ".join(f"--{name} to {enough}" for name in empty)
    way_out = "lower --val and --probe" if "train" in empty else f"raise {raised} or so"
    return f"none of {count} documents fell to {' and '.join(empty)}; {way_out}"


def _discard(folder: Path, journal: Journal) -> None:
    """Remove the shards, so that the folder can be reused with other options."""
    Journal(journal.request).write(folder)
    for split in journal.splits.values():
        for shard in split.shards:
            (folder / shard.name).unlink()
