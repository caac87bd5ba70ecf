"""Executes a notebook in a new kernel and writes it back with its outputs.

    python benchmarks/execute_notebook.py examples/quickstart.ipynb
    python benchmarks/execute_notebook.py examples/quickstart.ipynb --out other.ipynb    # leaves the notebook as it is

If a cell raises an error, nothing is written and the exit code is not 0. The notebook's metadata then has a digest of
the code that was executed, so that a cell which is edited later can be noticed. Times of execution and the version of
Python are not kept.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from traitlets.config import Config


def executed(path: Path) -> nbformat.NotebookNode:
    """The notebook with the outputs of a new execution, in the notebook's folder."""
    notebook = nbformat.read(path, as_version=4)
    code = "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    metadata = dict(notebook.metadata) | {"executed": hashlib.sha256(code.encode()).hexdigest()}
    config = Config(KernelManager={"transport_encryption": "auto"})  # without it the kernel prints a warning
    resources = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=None, record_timing=False, config=config, resources=resources).execute()
    notebook.metadata = nbformat.from_dict(metadata)  # the kernel adds the version of Python
    return notebook


def main() -> None:
    """Execute the notebook and write it."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("notebook", type=Path)
    options.add_argument("--out", type=Path, help="where to write it; the notebook itself unless given")
    given = options.parse_args()
    nbformat.write(executed(given.notebook), given.out or given.notebook)


if __name__ == "__main__":
    main()
