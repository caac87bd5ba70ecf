"""How a file becomes documents: one reader for each kind, none of which holds more than it must in memory.

A reader yields a text and its share of the file's bytes, for a progress bar, for every document from number `skip` on;
one that is not a text (a blank line, a null) yields "", so that documents keep their numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from quacklr.lab.data.extra import extra
from quacklr.lab.errors import UserError
from quacklr.lab.files import parse_json

Reader = Callable[[Path, str, int], Iterator[tuple[str, float]]]


def text(path: Path, _column: str, skip: int) -> Iterator[tuple[str, float]]:
    """The whole file is one document."""
    if not skip:
        raw = _contents(path)
        try:
            yield raw.decode(), len(raw)
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is not UTF-8 text (byte {error.start:,}); convert it or leave it out") from error


def source_code(path: Path, _column: str, skip: int) -> Iterator[tuple[str, float]]:
    """The whole file is one document, or none: some tests of Python's are in other encodings on purpose."""
    if not skip:
        raw = _contents(path)
        try:
            yield raw.decode(), len(raw)
        except UnicodeDecodeError:
            yield "", len(raw)


def jsonl(path: Path, column: str, skip: int) -> Iterator[tuple[str, float]]:
    """A document a line, under the key `column`."""
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if number > skip:
                    yield _field(line, column, f"{path}, line {number}") if line.strip() else "", len(line)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def parquet(path: Path, column: str, skip: int) -> Iterator[tuple[str, float]]:
    """A document a row, in `column`; row groups before `skip` are not read."""
    with extra("reading parquet"):
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


def _contents(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def _field(line: bytes, column: str, where: str) -> str:
    try:
        record = parse_json(line)
    except ValueError as error:
        raise UserError(f"{where} is not JSON: {error}") from error
    if not isinstance(record, dict) or column not in record:
        keys = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        raise UserError(f"{where} has no {column}, only {keys}: choose one with --column")
    return _string(record[column], f"{where}, {column}")


def _string(value: object, where: str) -> str:
    if value is not None and not isinstance(value, str):
        raise UserError(f"{where} holds {type(value).__name__}, not text")
    return value or ""
