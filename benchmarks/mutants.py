"""Changes one line of each module, runs the tests of its package, and lists the changes that no test noticed.

    python benchmarks/mutants.py core find/rules          # packages or modules below src/quacklr; hours for all of them
    python benchmarks/mutants.py core/norms --each 5      # five changes of one module
    python benchmarks/mutants.py core --seed 1            # other lines

A change (a mutant) replaces an operator, a comparison, a condition or a number. It is made in a copy of the repository.
A mutant that survives is a line without a test, or one whose change makes no difference: read it and decide.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


def mutate(node: Any) -> bool:
    """Change a node in place; False if there is no change for it."""
    if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPS:
        node.op = SWAPS[type(node.op)]()  # type: ignore[assignment]
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        node.ops[0] = SWAPS[type(node.ops[0])]()  # type: ignore[call-overload]
    elif isinstance(node, ast.If | ast.IfExp):
        node.test = ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        node.value += 1
    else:
        return False
    return True


def places(tree: ast.Module) -> list[int]:
    """The numbers of the nodes, in the order of `ast.walk`, that can be changed and are inside of a function."""
    inside = {id(node) for each in ast.walk(tree) if isinstance(each, ast.FunctionDef) for node in ast.walk(each)}
    kinds = (ast.BinOp, ast.BoolOp, ast.Compare, ast.If, ast.IfExp, ast.Constant)
    return [i for i, node in enumerate(ast.walk(tree)) if isinstance(node, kinds) and id(node) in inside]


def mutants(source: str, count: int, seed: str) -> Iterator[tuple[int, str, str]]:
    """Line, its text after the change, and the whole changed source."""
    candidates = places(ast.parse(source))
    random.Random(seed).shuffle(candidates)
    for place in candidates:
        tree = ast.parse(source)
        node = list(ast.walk(tree))[place]
        line = getattr(node, "lineno", 0)
        if not mutate(node):
            continue
        changed = ast.unparse(ast.fix_missing_locations(tree))
        if changed == ast.unparse(ast.parse(source)):
            continue
        yield line, ast.unparse(node).splitlines()[0], changed
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


def survives(copy: Path, module: Path, source: str) -> bool:
    """Whether the tests of the module's package pass with this source."""
    target = copy / module.relative_to(ROOT)
    before = target.read_text()
    target.write_text(source)
    package = module.relative_to(ROOT / "src/quacklr").parts[0]
    tests = f"tests/{package}" if (copy / "tests" / package).is_dir() else "tests/core"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", tests]
    done = subprocess.run(command, cwd=copy, env=environment(copy), capture_output=True, check=False)
    target.write_text(before)
    return done.returncode == 0


def environment(copy: Path) -> dict[str, str]:
    """The environment in which the copy is imported instead of what is installed."""
    return {**os.environ, "PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"}


def main() -> int:
    """Exit code 1 if a mutant survived."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("names", nargs="+", help="packages or modules below src/quacklr")
    options.add_argument("--each", type=int, default=1, help="changes of each module")
    options.add_argument("--seed", type=int, default=0, help="chooses the lines")
    given = options.parse_args()
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "quacklr"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "*cache*", "demo"))
        for module in modules(given.names):
            name = module.relative_to(ROOT / "src/quacklr").with_suffix("")
            for line, text, source in mutants(module.read_text(), given.each, f"{name} {given.seed}"):
                alive = survives(copy, module, source)
                survivors += alive
                print(f"{'SURVIVED' if alive else 'noticed':8}  {name}:{line}  {text}", flush=True)
    print(f"{survivors} survived")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
