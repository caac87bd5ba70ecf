"""Tests which optimizers of other packages work with QuacK: compares QuacK's own check with an independent one.

    pip install --no-deps pytorch_optimizer torch_optimizer schedulefree ...       packages not installed are skipped
    PYTHONPATH=tests/kit python benchmarks/optimizers.py                           writes results/optimizers.md; minutes
    PYTHONPATH=tests/kit python benchmarks/optimizers.py --only schedulefree timm  prints the tables; writes no file

The independent check (`optimizer_judge.py`) trains a model of two attention layers of one head each, twice: with QuacK,
and with one param group per tensor whose lr is that of the paper's Algorithm 1 (`tests/kit/reference.py`). An optimizer
that does not allow different lr is trained with a single one, lr * tau. The deviation is the distance between the
weights of both runs, relative to the distance that the weights moved. The exit code is 1 if the two checks disagree.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import inspect
import io
import math
import pkgutil
import re
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from optimizer_judge import CHAOTIC, EQUAL, SHORT, STEPS, deviation, make, model
from torch.optim import Optimizer

from quacklr import QuacK
from quacklr.attach.optimizers import NOT_LINEAR
from quacklr.util.modules import run_uncompiled

PACKAGES = [
    *("torch.optim", "adabelief_pytorch", "adam_mini", "adamp", "adan_pytorch", "apollo_torch"),
    *("bitsandbytes.optim", "came_pytorch", "dadaptation", "dion", "distributed_shampoo", "dog"),
    *("dowg", "emerging_optimizers", "fairscale.optim", "galore_torch", "grams", "grokfast_pytorch"),
    *("heavyball", "kron_torch", "lion_pytorch", "lomo_optim", "madgrad", "muon", "optimi", "parameterfree"),
    *("prodigyopt", "prodigyplus", "pytorch_lamb", "pytorch_optimizer", "pytorch_ranger", "q_galore_torch"),
    *("ranger21", "ranger_adabelief", "schedulefree", "soap", "sophia_opt", "timm.optim", "torch_optimizer"),
    *("torchao.optim", "transformers.optimization"),
]
PAGE = Path(__file__).parent.parent / "results" / "optimizers.md"
WORKS, WARNS, REFUSED, UNKNOWN, FAILS = "works", "works, with a warning", "refused", "could not be checked", "fails"


class Row(NamedTuple):
    """A class, what QuacK says of it, and what the judge found."""

    name: str
    said: str
    why: str
    judge: str
    agrees: bool | None


def classes(package: str) -> Iterator[type[Optimizer]]:
    """The optimizers of a package and of its modules that can be imported."""
    modules = []
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        modules.append(importlib.import_module(package))
        for found in pkgutil.walk_packages(getattr(modules[0], "__path__", []), f"{package}."):
            if not re.search(r"test|benchmark|algoperf|__main__|prototype|\.models|\.data", found.name):
                with contextlib.suppress(Exception, SystemExit):
                    modules.append(importlib.import_module(found.name))
    values = [value for module in modules for value in vars(module).values() if inspect.isclass(value)]
    mine = [cls for cls in values if issubclass(cls, Optimizer) and cls is not Optimizer]
    root = package.split(".")[0]
    yield from dict.fromkeys(
        c for c in mine if c.__module__.startswith(root) and not re.search(r"\b_|<", c.__qualname__)
    )


def said(cls: type[Optimizer]) -> tuple[str, str]:
    """What QuacK says when it is attached."""
    net = model(torch.float32)
    try:
        optimizer = make(cls, net, [list(net.parameters())])
    except Exception as error:
        return FAILS, f"{type(error).__name__}: {error}"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            QuacK(net, optimizer).remove()
        except ValueError as error:
            return REFUSED, str(error)
    notes = [str(each.message) for each in caught if each.category is UserWarning]
    notes = [note for note in notes if "lr" in note]
    if any("could not be tested" in note for note in notes):
        return UNKNOWN, notes[0]
    return (WARNS, notes[0]) if notes else (WORKS, "")


class TooLong(BaseException):
    """Nobody catches it by accident."""


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TooLong

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def examined(cls: type[Optimizer]) -> Row:
    name = f"{cls.__module__}.{cls.__qualname__}"
    short = long = math.nan
    try:
        with limited(180):
            verdict, why = said(cls)
            if verdict != FAILS:
                short, long, how = deviation(cls)
            if verdict == REFUSED and max(short, long) <= EQUAL:
                short, long, how = deviation(cls, 5 * STEPS)  # some begin slowly
    except TooLong:
        return Row(name, FAILS, "takes too long", "-", None)
    if verdict == FAILS:
        return Row(name, FAILS, shortened(why), "-", None)
    known = [other for other in NOT_LINEAR if issubclass(cls, other)]  # refused by name, for what comes late
    agrees = None
    if short == short and verdict != UNKNOWN and how != CHAOTIC and not known:
        agrees = max(short, long) > EQUAL if verdict == REFUSED else short <= EQUAL
    numbers = f"{short:.0e} {long:.0e}" if short == short else "does not run"
    return Row(name, verdict, shortened(why), shortened(f"{numbers} ({how})" if how else numbers), agrees)


def shortened(text: str) -> str:
    text = re.sub(r"\s+", " ", text).replace("|", "/")
    text = re.sub(r"^\w+ is not linear in lr \((.*?)\), so it cannot.*", r"\1", text)
    text = re.sub(r".*on small parameters its steps scaled by 0.5 are (.*? off).*", r"\1", text)
    return text if len(text) < 100 else f"{text[:97]}..."


def version(package: str) -> str:
    names = importlib.metadata.packages_distributions().get(package.split(".")[0], [package])
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return f"{names[0]} {importlib.metadata.version(names[0])}"
    return package


def table(rows: list[Row]) -> str:
    lines = ["| class | QuacK | why | judge | agree |", "|---|---|---|---|---|"]
    words = {True: "yes", False: "NO", None: "-"}
    lines += [f"| {r.name} | {r.said} | {r.why or '-'} | {r.judge} | {words[r.agrees]} |" for r in rows]
    return "\n".join(lines) + "\n"


def page(found: dict[str, list[Row]]) -> str:
    rows = [row for each in found.values() for row in each if row.said != FAILS]
    counts = Counter(row.said for row in rows)
    judged = [row for row in rows if row.agrees is not None]
    told = ", ".join(f"{counts[word]} {word}" for word in (WORKS, WARNS, REFUSED, UNKNOWN))
    return f"""\
# Optimizers of other packages with QuacK

`PYTHONPATH=tests/kit python benchmarks/optimizers.py`, torch {torch.__version__}, on the CPU. Of {len(rows)} classes
that can be made, {told}. The judge ran {len(judged)} of them, and QuacK's verdict agrees with it on
{sum(bool(row.agrees) for row in judged)}. The judge's numbers are the deviation of QuacK's training from training with
one param group a tensor and lr * rate, relative to the distance travelled, after {SHORT} and after {STEPS} steps.

""" + "\n".join(f"## {version(name)}\n\n{table(rows)}" for name, rows in found.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="PACKAGE", help="import names; test only these, write no file")
    only = parser.parse_args().only
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: dict[str, list[Row]] = {}
    for package in only or PACKAGES:
        try:
            names = list(classes(package))
        except ImportError as error:
            print(f"{package}: {error}", file=sys.stderr)
            continue
        with run_uncompiled():
            for cls in names:
                print(f"\r{cls.__module__}.{cls.__qualname__:<80.80}", end="", file=sys.stderr, flush=True)
                found.setdefault(package, []).append(examined(cls))
    print(file=sys.stderr)
    if only:
        print(*(table(rows) for rows in found.values()), sep="\n")
    else:
        PAGE.write_text(page(found))
    wrong = [row for rows in found.values() for row in rows if row.agrees is False]
    print(*wrong, sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
