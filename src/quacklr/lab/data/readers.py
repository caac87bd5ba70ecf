"""Readers of source files, one for each file type; each streams the documents of a file.

A reader yields every document from number `skip` on, with its share of the bytes of the file, for the progress bar.
A blank line and a null yield "", so that the numbers of documents do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from quacklr.lab.data.extra import requires_extra
from quacklr.lab.errors import UserError, os_errors
from quacklr.lab.files import parse_json

Reader = Callable[[Path, str, int], Iterator[tuple[str, float]]]


def text(path: Path, _column: str, skip: int, strict: bool = True) -> Iterator[tuple[str, float]]:
    """The whole file is one document. If it is not UTF-8: UserError, or without `strict` an empty document."""
    if skip:
        return
    with os_errors(f"cannot read {path}"):
        raw = path.read_bytes()
    try:
        yield raw.decode(), len(raw)
    except UnicodeDecodeError as error:
        if strict:
            raise UserError(f"{path} is not UTF-8 text (byte {error.start:,}); convert it or leave it out") from error
        yield "", len(raw)


source_code: Reader = partial(text, strict=False)  # some of Python's tests have other encodings on purpose


def jsonl(path: Path, column: str, skip: int) -> Iterator[tuple[str, float]]:
    """One document per line, under the key `column`."""
    with os_errors(f"cannot read {path}"), path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if number > skip:
                yield _field(line, column, f"{path}, line {number}") if line.strip() else "", len(line)


def parquet(path: Path, column: str, skip: int) -> Iterator[tuple[str, float]]:
    """One document per row, in `column`; row groups before `skip` are not read."""
    with requires_extra("reading parquet"):
        import pyarrow.parquet as pq  # type: ignore[import-untyped]
        from pyarrow import ArrowException
    try:
        with pq.ParquetFile(path) as file:
            if column not in file.schema_arrow.names:
                names = ", ".join(file.schema_arrow.names)
                raise UserError(f"{path} has no column {column}, only {names}: choose one with --column")
            share = path.stat().st_size / max(1, file.metadata.num_rows)
            for value in _rows(file, column, skip):
                yield _string(value, f"{path}, column {column}"), share
    except (OSError, ArrowException) as error:
        raise UserError(f"cannot read {path}: {str(error).splitlines()[0]}") from error


def _rows(file: Any, column: str, skip: int) -> Iterator[object]:
    for group in range(file.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if skip >= rows:
            skip -= rows
            continue
        for batch in file.iter_batches(1000, row_groups=[group], columns=[column]):
            yield from batch.column(0).to_pylist()[skip:]
            skip = max(0, skip - len(batch))


READERS: dict[str, Reader] = {".txt": text, ".jsonl": jsonl, ".parquet": parquet}


def _field(line: bytes, column: str, location: str) -> str:
    try:
        record = parse_json(line)
    except ValueError as error:
        raise UserError(f"{location} is not JSON: {error}") from error
    if not isinstance(record, dict) or column not in record:
        keys = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        raise UserError(f"{location} has no {column}, only {keys}: choose one with --column")
    return _string(record[column], f"{location}, {column}")


def _string(value: object, location: str) -> str:
    if value is not None and not isinstance(value, str):
        raise UserError(f"{location} holds {type(value).__name__}, not text")
    return value or ""
