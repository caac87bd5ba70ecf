"""The reference of the command line, from the help texts of the real parsers."""

from __future__ import annotations

import os
import re
from contextlib import redirect_stdout, suppress
from importlib import import_module
from io import StringIO
from textwrap import fill
from unittest.mock import patch

from quacklr import cli
from quacklr.lab.config import KINDS

WIDTH = 84


def commands() -> str:
    """Markdown: the help of every command, and of every kind that `train` can be given."""
    texts = [f"```text\n{help_of('')}\n```"]
    for name in cli.COMMANDS:
        texts.append(f"## quacklr {name}\n\n```text\n{help_of(name)}\n```")
        if name == "train":
            texts.append(kinds())
    return "\n\n".join(texts)


def help_of(command: str, *options: str) -> str:
    """What `quacklr COMMAND OPTIONS --help` prints."""
    out = StringIO()
    with patch.dict(os.environ, {"COLUMNS": str(WIDTH), "NO_COLOR": "1"}), redirect_stdout(out):
        if command:
            _help(command, options)
        else:
            cli.main(["--help"])
    if not out.getvalue().strip():
        raise RuntimeError(f"quacklr {command} {' '.join(options)} --help prints nothing")
    paragraphs = re.sub(r" +$", "", out.getvalue(), flags=re.MULTILINE).strip("\n").split("\n\n")
    return "\n\n".join(map(wrapped, paragraphs))


def wrapped(paragraph: str) -> str:
    """Prose with lines that are too long is filled again; tables of options are left as they are."""
    lines = paragraph.splitlines()
    if max(map(len, lines), default=0) <= WIDTH or any(line.startswith(" ") for line in lines):
        return paragraph
    return fill(" ".join(lines), WIDTH, break_on_hyphens=False)


def _help(command: str, options: tuple[str, ...]) -> None:
    with suppress(SystemExit):  # argparse exits after --help
        import_module(cli.COMMANDS[command][0]).main([*options, "--help"])


def kinds() -> str:
    """The options that each kind of attention, method, optimizer and schedule adds to `quacklr train`."""
    texts = []
    for name, known in KINDS.items():
        needed = ("--attention", "mla") if name == "method" else ()  # absorbed-qk-norm exists for MLA only
        boxes = [box(kind, help_of("train", f"--{name}", kind, *needed)) for kind in known]
        own = "\n\n".join(filter(None, boxes))
        without = ", ".join(f"`{kind}`" for kind, found in zip(known, boxes, strict=True) if not found)
        texts.append(f"### Options of --{name}\n\n```text\n{own}\n```")
        if without:
            texts.append(f"Without options of their own: {without}.")
    return "\n\n".join(texts)


def box(kind: str, text: str) -> str:
    """The section with the options of a kind in a help text; empty if there is none."""
    found = re.search(rf"^ {kind} options\n.*?(?=\n\n|\Z)", text, re.MULTILINE | re.DOTALL)
    return found[0] if found else ""
