"""The style of figures, and writing them to files. Equal figures are equal files, byte by byte."""

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
    "svg.hashsalt": "quacklr",  # the default is random
    "pdf.fonttype": 42,
}
FORMATS: dict[str, dict[str, Any]] = {  # metadata that would differ between two files of the same figure
    "pdf": {"CreationDate": None, "ModDate": None, "Producer": None},
    "png": {"Software": None},
    "svg": {"Date": None},
}


def drawn(figure: Figure, kind: str) -> bytes:
    """The content of a figure's file; `kind` is pdf, png or svg."""
    file = io.BytesIO()
    with mpl.rc_context(RC):
        figure.savefig(file, format=kind, dpi=150, metadata=FORMATS[kind])
    return file.getvalue()


def save(figure: Figure, path: Path) -> None:
    """Write a figure atomically, in the format of the suffix."""
    kind = path.suffix.removeprefix(".").lower()
    if kind not in FORMATS:
        raise ValueError(f"{path}: a figure is written as one of {', '.join('.' + each for each in FORMATS)}")
    content = drawn(figure, kind)
    with atomic_write(path) as out:
        out.write(content)
