"""How figures look and how they are written, here and in the lab: the same figure is the same file."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from quacklr.util.atomic_files import atomic_write

RC: Any = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": "medium",
    "font.size": 9,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.hashsalt": "quacklr",  # the same figure is the same file
    "pdf.fonttype": 42,
}
FORMATS: dict[str, dict[str, Any]] = {  # with what would make two files of the same figure differ
    "pdf": {"CreationDate": None, "ModDate": None, "Producer": None},
    "png": {"Software": None},
    "svg": {"Date": None},
}


def drawn(figure: Figure, kind: str) -> bytes:
    """The file that a figure makes: kind is pdf, png or svg."""
    file = io.BytesIO()
    with mpl.rc_context(RC):
        figure.savefig(file, format=kind, dpi=150, metadata=FORMATS[kind])
    return file.getvalue()


def save(figure: Figure, path: Path) -> None:
    """Write a figure as what the name ends in; the file is whole or not there."""
    kind = path.suffix.removeprefix(".").lower()
    if kind not in FORMATS:
        raise ValueError(f"{path}: a figure is written as one of {', '.join('.' + each for each in FORMATS)}")
    content = drawn(figure, kind)
    with atomic_write(path) as out:
        out.write(content)
