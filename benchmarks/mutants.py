"""Changes a line of each module, runs the tests nearest to it, and lists the changes that no test noticed.

    python benchmarks/mutants.py core find/tables          # packages or modules below src/quacklr; . for all of them
    python benchmarks/mutants.py core/norms --each 5      # five changes of one module
    python benchmarks/mutants.py core --seed 1            # other lines

A change (a mutant) replaces an operator, a comparison, a condition or a number inside of a function. It is made in a
copy of the repository, and in the functions of a forked process that has imported everything already.
A mutant that survives is a line without a test, or one whose change makes no difference: read it and decide.
At the end the tests that noticed something run without a change, and must pass.
"""

from __future__ import annotations

import argparse
import ast
import gc
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
OPPOSITES = ((ast.Add, ast.Sub), (ast.Eq, ast.NotEq), (ast.Lt, ast.GtE), (ast.Gt, ast.LtE), (ast.Is, ast.IsNot))
OTHERS = ((ast.In, ast.NotIn), (ast.And, ast.Or))
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    **{one: other for pair in (*OPPOSITES, *OTHERS) for one, other in (pair, pair[::-1])},
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
}
KINDS = (ast.BinOp, ast.BoolOp, ast.Compare, ast.If, ast.IfExp, ast.Constant)


def mutate(node: Any) -> bool:
    """Change a node in place; False if there is no change for it."""
    if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPS:
        node.op = SWAPS[type(node.op)]()  # type: ignore[assignment]
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        node.ops[0] = SWAPS[type(node.ops[0])]()  # type: ignore[call-overload]
    elif isinstance(node, ast.If | ast.IfExp):
        node.test = ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        node.value = not node.value
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        node.value += 1
    else:
        return False
    return True


def mutants(source: str, count: int, seed: str) -> Iterator[tuple[str, ast.Module]]:
    """The changed statement with its line, and the whole changed module."""
    original = ast.parse(source)
    bodies = [line for each in ast.walk(original) if isinstance(each, ast.FunctionDef) for line in each.body]
    inside = {id(node) for line in bodies for node in ast.walk(line)}
    inside -= {id(each.value) for each in ast.walk(original) if isinstance(each, ast.keyword) and each.arg == "strict"}
    places = [i for i, node in enumerate(ast.walk(original)) if isinstance(node, KINDS) and id(node) in inside]
    random.Random(seed).shuffle(places)
    for place in places:
        tree = ast.parse(source)
        node = list(ast.walk(tree))[place]
        if not mutate(node) or ast.unparse(tree) == ast.unparse(original):
            continue
        around = [each for each in ast.walk(tree) if isinstance(each, ast.stmt) and node in ast.walk(each)][-1]
        yield f"{around.lineno}  {ast.unparse(around).splitlines()[0]}", ast.fix_missing_locations(tree)
        count -= 1
        if not count:
            return


def modules(names: list[str]) -> list[Path]:
    """The files that the names stand for."""
    found = []
    for name in names:
        path = ROOT / "src/quacklr" / name
        found += sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    return [path for path in found if path.name != "__init__.py"]


def nearest(module: Path, count: int) -> list[str]:
    """The test files most likely to notice a change: by words of the module's path, its import, and its names."""
    below = module.relative_to(ROOT / "src/quacklr").with_suffix("")
    top = ast.parse(module.read_text()).body
    names = [node.name for node in top if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    words = {word[:5] for word in re.findall("[a-z]+", str(below))} | ({"core"} if len(below.parts) == 1 else set())

    def rank(test: Path) -> tuple[int, int]:
        text = test.read_text()
        shared = sum(word in str(test.relative_to(ROOT / "tests")) for word in words)
        used = sum(bool(re.search(rf"\b{name}\b", text)) for name in names)
        imported = f"quacklr.{str(below).replace('/', '.')} " in text
        return -(2 * shared + 2 * imported + min(used, 3)), len(text)

    tests = sorted((ROOT / "tests").rglob("test_*.py"), key=rank)
    return [str(test.relative_to(ROOT)) for test in tests[:count]]


def install(code: CodeType) -> None:
    """Give the functions of a module that is imported already the code that they have in this one."""
    new: dict[tuple[str, int], CodeType] = {}
    todo = [code]
    while todo:
        parts = [each for each in todo.pop().co_consts if isinstance(each, CodeType)]
        new |= {(part.co_qualname, part.co_firstlineno): part for part in parts}
        todo += parts
    for function in [each for each in gc.get_objects() if type(each) is FunctionType]:
        old = function.__code__
        if old.co_filename == code.co_filename:
            function.__code__ = new.get((old.co_qualname, old.co_firstlineno), old)


def run(items: Sequence[pytest.Item], code: CodeType | None, failed: Path) -> None:
    """In a forked process: run tests with this code until one fails, or all of them without; write what failed."""
    os.setsid()
    output = os.open(failed.with_name("output"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if code is not None:
        install(code)
    for item, following in zip_longest(items, items[1:]):
        before = item.session.testsfailed
        item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
        if item.session.testsfailed > before:
            failed.write_text(f"{failed.read_text()}{item.nodeid}\n")
            if code is not None:
                break
    os._exit(0)


class Mutants:
    """A plugin of pytest: runs the tests once for each mutant instead of once."""

    def __init__(self, chosen: list[Path], copy: Path, given: argparse.Namespace) -> None:
        self.chosen, self.copy, self.given = chosen, copy, given
        self.failed, self.survived = copy.parent / "failed", 0

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        begin, guards = time.monotonic(), set[str]()
        for number, module in enumerate(self.chosen, 1):
            text, name = module.read_text(), module.relative_to(ROOT / "src/quacklr").with_suffix("")
            near = nearest(module, self.given.files)
            items = [item for file in near for item in session.items if item.nodeid.startswith(f"{file}::")]
            count = self.given.each or 1 + (text.count("\n") > 150)
            for statement, tree in mutants(text, count, f"{name} {self.given.seed}"):
                file = self.copy / module.relative_to(ROOT)
                file.write_text(ast.unparse(tree))  # for processes that the tests start
                by = self.outcome(items, compile(tree, str(file), "exec"), self.given.patience)
                file.write_text(text)
                self.survived += not by
                guards |= {*by.splitlines()}
                verdict = {"": "SURVIVED", "?": "not noticed in time"}.get(by, "noticed")
                where = f"[{number}/{len(self.chosen)}, {(time.monotonic() - begin) / 60:.1f} min]"
                print(f"{where}  {verdict}  {name}:{statement}  {by.rpartition('/')[2].strip()}", flush=True)
        broken = self.outcome([item for item in session.items if item.nodeid in guards], None, 3600)
        print(f"{self.survived} survived" + (f"; FAILS WITHOUT A CHANGE: {broken}" if broken else ""))
        self.survived += bool(broken)
        return True

    def outcome(self, items: list[pytest.Item], code: CodeType | None, patience: float) -> str:
        """The tests that failed, "" if none did, and "?" if the time is over."""
        self.failed.write_text("")
        process = multiprocessing.get_context("fork").Process(target=run, args=(items, code, self.failed))
        process.start()
        process.join(patience)
        late = process.is_alive()
        assert process.pid
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also what the tests have left running
        process.join()
        crashed = "" if process.exitcode == 0 else f"exit code {process.exitcode}"
        return self.failed.read_text() or ("?" if late else crashed)


def main() -> int:
    """Exit code 1 if a mutant survived or a test fails without one."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("names", nargs="+", help="packages or modules below src/quacklr")
    options.add_argument("--each", type=int, help="changes of each module; by default 1, and 2 over 150 lines")
    options.add_argument("--seed", type=int, default=0, help="chooses the lines")
    options.add_argument("--files", type=int, default=8, help="files of tests for each module")
    options.add_argument("--patience", type=float, default=120, help="seconds of tests for each change")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "quacklr"
        kept_out = shutil.ignore_patterns(".git", ".venv", ".*_cache", "__pycache__", "runs", "demo")
        shutil.copytree(ROOT, copy, ignore=kept_out)
        os.chdir(copy)
        os.environ |= {"PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
        sys.path.insert(0, str(copy / "src"))
        chosen = modules(given.names)
        files = sorted({file for module in chosen for file in nearest(module, given.files)})
        plugin = Mutants(chosen, copy, given)
        code = pytest.main(["-s", "-q", "--assert=plain", "-p", "no:cacheprovider", *files], plugins=[plugin])
        os.chdir(ROOT)
    return 1 if plugin.survived else int(code)


if __name__ == "__main__":
    sys.exit(main())
