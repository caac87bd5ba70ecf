"""The command `quacklr prepare`: text to a folder of tokens.

Exit codes: 0, also if the folder was finished before; 2 for a mistake of the user; 130 after Ctrl-C.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from quacklr.lab.data.corpus import STDLIB, Corpus, open_folder
from quacklr.lab.data.journal import read_journal
from quacklr.lab.data.manifest import MANIFEST, SPLITS
from quacklr.lab.data.prepare import prepare
from quacklr.lab.data.request import SHARD_TOKENS, Request
from quacklr.lab.data.sources import Cosmopedia, Local, Stdlib, TextSource
from quacklr.lab.data.tokens import DTYPE
from quacklr.lab.errors import UserError, exit_code
from quacklr.lab.options import read
from quacklr.lab.progress import progress

NAME = "quacklr prepare"
COSMOPEDIA = "cosmopedia-v2"


def _arg(metavar: str, default: str = "") -> Any:
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})" if default else "")


@dataclass(frozen=True, slots=True)
class Options:
    """Convert text to memory-mapped tokens. Documents for validation and for the logit probe are held out.

    After an interruption, the same command continues where it stopped.

    For instance:

    quacklr prepare stdlib --out data/stdlib

    quacklr prepare notes.txt folder/ --tokenizer train:2048 --out data/notes

    quacklr prepare cosmopedia-v2 --files 0-3 --tokenizer cosmo2 --out data/cosmopedia-v2

    quacklr prepare --verify data/notes
    """

    sources: Annotated[tuple[str, ...], tyro.conf.Positional, _arg("SOURCE ...")] = ()
    """Files: .txt (one document), .jsonl (one per line), .parquet (one per row); folders of such files; stdlib (the
    source of the running Python); or cosmopedia-v2."""
    out: Annotated[Path | None, _arg("DIR")] = None
    """The folder to write."""
    tokenizer: Annotated[str, _arg("NAME", "bytes")] = "bytes"
    """bytes, gpt2, cosmo2, the path of a tokenizer.json, or train:SIZE to train one on the text."""
    end_token: Annotated[str | None, _arg("TOKEN")] = None
    """The token of a tokenizer.json that ends a document, if it has none of the usual names."""
    column: Annotated[str | None, _arg("NAME", "text")] = None
    """The column of the text in .jsonl and .parquet files."""
    files: Annotated[str | None, _arg("LIST")] = None
    """Which of the 104 files of cosmopedia-v2, such as 0-3 or 0,5; each has about 1.2 GB and 270M tokens."""
    val: Annotated[float | None, _arg("SHARE", "0.02; stdlib 0.04")] = None
    """Fraction of documents for validation."""
    probe: Annotated[float | None, _arg("SHARE", "0.005; stdlib 0.02")] = None
    """Fraction of documents for the logit probe."""
    shard_tokens: Annotated[int, _arg("N", f"{SHARD_TOKENS:,}")] = SHARD_TOKENS
    """Tokens per file; an interrupted command continues after the last complete file."""
    verify: Annotated[Path | None, _arg("DIR")] = None
    """Only compare the hashes of the files of a finished folder with its manifest."""


def main(argv: list[str]) -> int:
    """Run the command and return its exit code."""
    return exit_code(NAME, lambda: _main(read(Options, NAME, argv)))


def _main(options: Options) -> int:
    try:
        _run(options)
    except KeyboardInterrupt:
        print(f"{NAME}: stopped; {_progress_kept(options.out)}", file=sys.stderr)
        return 130
    return 0


def _run(options: Options) -> None:
    if options.verify is not None:
        _verify(options, options.verify)
        return
    if options.out is None:
        raise UserError(f"--out DIR is missing, the folder to write; see {NAME} --help")
    request = _request(options)
    ready = (options.out / MANIFEST).exists()
    prepare(request, options.out)
    corpus = open_folder(options.out)
    print(f"{options.out} {'was finished before; nothing to do' if ready else 'is finished'}")
    print(_table(corpus))


def _verify(options: Options, folder: Path) -> None:
    if options != Options(verify=folder):
        raise UserError("--verify DIR looks at a finished folder, and takes no other option")
    corpus = open_folder(folder)
    total = sum(split.tokens for split in corpus.manifest.splits.values()) * DTYPE.itemsize
    with progress("verifying", total / 1e6, "MB") as show:
        corpus.verify(lambda tokens: show(tokens * DTYPE.itemsize / 1e6))
    print(f"{folder}: all hashes are those of its manifest")
    print(_table(corpus))


def _request(options: Options) -> Request:
    source = _source(options)
    shares = {"val": options.val, "probe": options.probe}
    held_out = {name: source.held_out[name] if share is None else share for name, share in shares.items()}
    return Request(source, held_out, options.tokenizer, options.end_token, options.shard_tokens)


def _source(options: Options) -> TextSource:
    if not options.sources:
        raise UserError(f"no source; give files or folders, {STDLIB}, or {COSMOPEDIA}")
    named = {STDLIB, COSMOPEDIA} & set(options.sources)
    if named and len(options.sources) > 1:
        raise UserError(f"{named.pop()} cannot be mixed with other sources; prepare each into a folder of its own")
    if options.files is not None and COSMOPEDIA not in named:
        raise UserError(f"--files is for {COSMOPEDIA} only")
    if options.column is not None and named:
        raise UserError(f"--column is for local files; {named.pop()} has no choice of columns")
    if STDLIB in named:
        return Stdlib()
    if COSMOPEDIA in named:
        return Cosmopedia(_numbers(options.files))
    return Local(tuple(map(Path, options.sources)), options.column or "text")


def _numbers(files: str | None) -> tuple[int, ...]:
    """The numbers in `0-3` or `0,5`, in the order given."""
    if files is None:
        raise UserError(f"say which files of {COSMOPEDIA}: --files 0-3 takes the first four of {Cosmopedia.COUNT}")
    ranges = [(first, last or first) for first, _, last in (part.partition("-") for part in files.split(","))]
    if not all(end.isdecimal() for ends in ranges for end in ends):
        raise UserError(f"--files {files} is not numbers and ranges such as 0-3 or 0,5")
    known = all(len(end) < 9 and int(end) < Cosmopedia.COUNT for ends in ranges for end in ends)
    numbers = [number for first, last in ranges for number in range(int(first), int(last) + 1)] if known else []
    if not numbers or len(set(numbers)) < len(numbers):
        raise UserError(f"--files {files}: each file once, from 0 to {Cosmopedia.COUNT - 1}")
    return tuple(numbers)


def _progress_kept(out: Path | None) -> str:
    if out is None:
        return "nothing was changed"
    journal = read_journal(out)
    safe = sum(split.documents for split in journal.splits.values()) if journal is not None else 0
    if not safe:
        return "no shard was whole yet, so the same command begins again"
    return f"{safe:,} documents are safe in whole shards, and the same command goes on after them"


def _table(corpus: Corpus) -> str:
    """One line per split, with aligned columns."""
    rows: list[Sequence[str]] = [("split", "documents", "tokens", "MB", "tokens per byte")]
    for name in SPLITS:
        split = corpus.manifest.splits[name]
        ratio = f"{1 / corpus.bytes_per_token(name):.3f}"
        rows.append((name, f"{split.documents:,}", f"{split.tokens:,}", f"{split.bytes / 1e6:,.2f}", ratio))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
