"""The style of figures, and their files. Equal figures are equal files, byte by byte."""

from __future__ import annotations

import io
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

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
