"""The notebook of examples/ runs, and its stored outputs are those of the code that is in it."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import nbformat
import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "examples/quickstart.ipynb"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def code_cells(path: Path) -> list[Any]:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def execute(notebook: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks/execute_notebook.py"), str(notebook), "--out", str(out)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def shapes(cells: list[Any]) -> list[list[tuple[str, str | None]]]:
    """The type of each output of each cell, and its stream."""
    return [[(output.output_type, output.get("name")) for output in cell.outputs] for cell in cells]


def texts(cells: list[Any]) -> str:
    outputs = [output for cell in cells for output in cell.outputs]
    return "\n".join(output.get("text") or output.data["text/plain"] for output in outputs)


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The cells after an execution. The last cell asserts that the default broke and that QuacK did not."""
    out = tmp_path_factory.mktemp("notebook") / "quickstart.ipynb"
    done = execute(NOTEBOOK, out)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return code_cells(out)


def test_the_notebook_runs_and_prints_and_draws_as_the_stored_one(fresh: list[Any]) -> None:
    stored = code_cells(NOTEBOOK)
    assert [cell.source for cell in fresh] == [cell.source for cell in stored]
    assert shapes(fresh) == shapes(stored)
    assert ("stream", "stderr") not in [each for outputs in shapes(fresh) for each in outputs]
    assert sum("image/png" in output.get("data", {}) for cell in fresh for output in cell.outputs) == 2


def test_what_the_notebook_shows_of_quack(fresh: list[Any]) -> None:
    """Its attention, written in a cell, is measured; that of transformers is verified; the check is ok."""
    shown = texts(fresh)
    assert len(re.findall(r"blocks\.\d\.attention +measured", shown)) == 3
    assert len(re.findall(r"model\.layers\.\d\.self_attn +verified", shown)) == 3
    assert "\ncorrect: 3 of 3 layers" in shown


def test_the_stored_outputs_are_of_the_stored_code() -> None:
    """If this fails, a cell was edited: run `make notebook`."""
    notebook, cells = nbformat.read(NOTEBOOK, as_version=4), code_cells(NOTEBOOK)
    code = "\n\n".join(cell.source for cell in cells)
    assert notebook.metadata["executed"] == hashlib.sha256(code.encode()).hexdigest()
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert all(shape != "error" for outputs in shapes(cells) for shape, _ in outputs)


def test_the_stored_notebook_has_no_path_and_no_version_of_this_machine() -> None:
    assert re.findall(r"(?<![\w.<])/\w[\w.-]*/", texts(code_cells(NOTEBOOK))) == []
    metadata = nbformat.read(NOTEBOOK, as_version=4).metadata
    assert metadata.language_info == {"name": "python"}
    assert all(cell.metadata == {} for cell in nbformat.read(NOTEBOOK, as_version=4).cells)


def test_the_text_of_the_notebook_has_no_measured_number_and_its_links_exist() -> None:
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    prose = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    assert re.findall(r"\d+[.,]\d+", prose) == []
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", prose)
    assert links
    start = f"{PROJECT['urls']['Repository']}/blob/main/"
    assert [link for link in links if not link.startswith(start)] == [], "on Colab only absolute links work"
    assert [link for link in links if not (ROOT / link.removeprefix(start)).exists()] == []


def test_the_first_cell_installs_this_package_on_colab_only() -> None:
    source = code_cells(NOTEBOOK)[0].source
    assert f'if "google.colab" in sys.modules:\n    %pip install --quiet {PROJECT["name"]}\n' in source


def test_a_cell_that_fails_is_an_error_and_nothing_is_written(tmp_path: Path) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("print(missing)")])
    nbformat.write(notebook, tmp_path / "wrong.ipynb")
    done = execute(tmp_path / "wrong.ipynb", tmp_path / "out.ipynb")
    assert done.returncode == 1
    assert "name 'missing' is not defined" in done.stderr
    assert not (tmp_path / "out.ipynb").exists()
