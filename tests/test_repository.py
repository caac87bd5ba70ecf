"""Rules a linter cannot see."""

from __future__ import annotations

import ast
import inspect
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import Tensor, nn

import quacklr
from quacklr import QuacK
from quacklr.find.discover import found_by_table
from quacklr.find.first_batch import FirstBatch

ROOT = Path(__file__).parent.parent
CODE = sorted(
    file for folder in ("src", "tests", "examples", "benchmarks", "website") for file in (ROOT / folder).rglob("*.py")
)
PROSE = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
NOT_ON_WALKS = tuple(
    f"src/quacklr/{path}" for path in ("util/", "sharded/", "core/local.py", "find/finding.py", "find/tables/naming.py")
)
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def imported(file: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


def test_the_core_imports_torch_and_the_standard_library_only() -> None:
    for file in (ROOT / "src/quacklr").rglob("*.py"):
        if {"lab", "integrations", "inspect"} & set(file.parts):
            continue
        roots = {name.split(".")[0] for name in imported(file)}
        assert roots <= {"torch", "quacklr", *sys.stdlib_module_names}, file


def test_the_lab_imports_public_names_and_the_modules_that_it_says() -> None:
    package = ROOT / "src/quacklr/lab"
    said = set(re.findall(r"`(quacklr\.\w+)`", (package / "__init__.py").read_text()))
    names = {name for file in package.rglob("*.py") for name in imported(file) if name.startswith("quacklr.")}
    assert {".".join(name.split(".")[:2]) for name in names} - {"quacklr.lab"} == said


@pytest.mark.parametrize("file", CODE, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_file_says_what_it_is_for_and_is_ascii_and_source_has_less_than_300_lines(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 300 or "tests" in file.relative_to(ROOT).parts
    assert ast.get_docstring(ast.parse(text))
    assert text.isascii()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_an_example_runs_and_its_assertions_hold(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [str(example)])  # what pytest was called with is not for it
    runpy.run_path(str(example), run_name="__main__")


def blocks() -> list[str]:
    files = ("README.md", "docs/attach.md", "docs/check.md")
    return [
        block for file in files for block in re.findall(r"```python\n(.*?)```", (ROOT / file).read_text(), re.DOTALL)
    ]


@pytest.mark.parametrize("block", blocks(), ids=lambda block: block.splitlines()[0])
def test_a_python_block_of_readme_and_docs_runs(block: str) -> None:
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})


@pytest.mark.parametrize("file", PROSE, ids=lambda file: str(file.relative_to(ROOT)))
def test_every_path_named_in_prose_exists(file: Path) -> None:
    text = file.read_text()
    named = re.findall(r"`((?:src|tests|docs|examples|benchmarks|results|\.ci)/[\w./-]*)`", text)
    named += [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in link]
    for name in named:
        assert (ROOT / name).exists() or (file.parent / name).exists(), name


def test_the_architecture_page_names_every_module_but_those_of_the_lab_and_every_package() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    for file in (ROOT / "src/quacklr").rglob("*.py"):
        if file.name != "__init__.py" and "lab" not in file.parts:
            assert re.search(rf"`(\w+\.)?{file.stem}`", text), file
        assert f"{file.parent.name}/`" in text, file.parent


def test_at_most_eight_modules_are_at_the_root() -> None:
    assert len(list((ROOT / "src/quacklr").glob("*.py"))) <= 8


def test_readme_has_at_most_130_lines() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


def test_the_version_is_the_same_everywhere() -> None:
    assert f"version: {quacklr.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_command_line_answers_without_torch() -> None:
    script = "import sys, quacklr.cli; quacklr.cli.main(['--help']); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)


def test_the_public_names_are_there() -> None:
    assert set(quacklr.__all__) >= {
        "QuacK",
        "LogitPath",
        "Weight",
        "logit_paths",
        "sensitivity",
        "frobenius",
        "spectral",
    }
    assert all(hasattr(quacklr, name) for name in quacklr.__all__)
    assert set(quacklr.__all__) <= set(dir(quacklr))
    assert not hasattr(quacklr, "nonsense")


def test_the_rule_on_the_page_of_rules_is_that_of_the_example() -> None:
    (shown,) = re.findall(r"```py\n(.*?)```", (ROOT / "docs/rules.md").read_text(), re.DOTALL)
    assert shown in (ROOT / "examples/own_rule.py").read_text()
    assert 15 <= len(shown.splitlines()) <= 25


class Walk:
    """The files of quacklr with functions that run while this is entered."""

    def __init__(self) -> None:
        self.files: set[str] = set()

    def __enter__(self) -> Walk:
        sys.setprofile(self._see)
        return self

    def _see(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # not the body of a module or a class
            self.files.add(frame.f_code.co_filename.removeprefix(f"{ROOT}/"))

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        self.files = {file for file in self.files if file.startswith("src/")}


class OwnAttention(nn.Module):
    """Of no package: it has to be measured."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)


def test_the_walks_of_the_architecture_page_are_those_that_are_run() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    sections = {title.split(":")[0]: part for title, part in re.findall(r"\n### (.*?)\n(.*?)(?=\n##)", text, re.DOTALL)}
    model = nn.TransformerEncoderLayer(16, 4, batch_first=True)
    optimizer = torch.optim.AdamW(model.parameters())
    attach, later, measure = Walk(), Walk(), Walk()
    with attach:
        QuacK(model, optimizer)
    for walk in (Walk(), later):
        model(torch.ones(2, 8, 16)).square().mean().backward()
        with walk:
            optimizer.step()
    own, x = OwnAttention(), torch.randn(2, 8, 16)
    first_batch = FirstBatch(own, found_by_table(own))
    own(x)
    with measure:
        first_batch.measure()
    named = {"Attach": (attach, 18), "A later step": (later, 6), "Measure": (measure, 12)}
    for name, (walk, most) in named.items():
        listed = re.findall(r"^\d+\. `(.*?)`", sections[name], re.MULTILINE)
        assert 5 < len(listed) <= most
        assert set(listed) == {file for file in walk.files if not file.startswith(NOT_ON_WALKS)}, name
