"""`quacklr demo`: what QuacK is for, seen in a few minutes on a CPU.

A small decoder with MLA, and one with MHA, learn the source of Python's standard library at a learning rate that is too
high for them: as they are, with QK clip, with QuacK, with QK norm. It is a small study like any other: a sweep with a
ledger, then a table, a picture, a page, and a sentence on what was seen, whichever way it went.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro
from matplotlib.figure import Figure

from quacklr.lab.config import MAX_THREADS, Config, fingerprint
from quacklr.lab.errors import UserError, exit_code, validate, validate_at_most, validate_positive
from quacklr.lab.files import locked
from quacklr.lab.ledger import Entry, Ledger
from quacklr.lab.methods import Default, Method, QKClipping, QKNorm, Quack
from quacklr.lab.options import read
from quacklr.lab.report.command import draw, write
from quacklr.lab.report.page import page
from quacklr.lab.report.style import colour, curve, panels, validation
from quacklr.lab.studies.names import NAMES, plain
from quacklr.lab.studies.questions import demo as grid
from quacklr.lab.studies.results import Results, largest_logit, loss
from quacklr.lab.studies.scale import Size, StudyScale, scale_of
from quacklr.lab.studies.verdicts import MARGIN, STABLE
from quacklr.lab.sweep.display import display
from quacklr.lab.sweep.local import Local
from quacklr.lab.sweep.sweep import missing, sweep
from quacklr.util import terminal

METHODS: tuple[type[Method], ...] = (Default, QKClipping, Quack, QKNorm)
NEXT = """\
In your own script, once the weights are initialised or loaded, add two lines; the training loop stays as it is:

    from quacklr import QuacK
    quack = QuacK(model, optimizer)"""


@dataclass(frozen=True)
class Demo:
    """Train small models at a learning rate that is too high for them: as they are, with QK clip, QuacK and QK norm.

    Eight runs, with MLA and MHA, on the source of Python's standard library. Takes about three minutes on two cores; at
    the end there are a table, a picture, a page to open in a browser, and a sentence on what was seen.
    """

    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("runs/demo")
    """Where everything goes. What is there already is not run again."""
    steps: int = 150
    """Training steps of each run."""
    seed: int = 0
    """For the initial weights and the batches."""
    jobs: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")] = None
    """Runs at once; one a core unless given."""


def configs_of(given: Demo) -> tuple[StudyScale, list[Config]]:
    """The demo's scale, and its runs."""
    validate_positive(steps=given.steps, jobs=1 if given.jobs is None else given.jobs)
    validate_at_most(MAX_THREADS, jobs=given.jobs)
    validate(lambda seed: 0 <= seed < 2**63, "from 0 to 2^63 - 1", {"seed": given.seed})
    chosen = scale_of(Size(steps=given.steps))
    seeded = [replace(each, training=replace(each.training, seed=given.seed)) for each in grid(chosen)]
    return chosen, seeded


@terminal.tolerant()
def run(given: Demo, argv: Sequence[str]) -> int:
    """All of it; 130 or 143 when stopped by a signal."""
    scale, configs = configs_of(given)
    ledger = Ledger(given.out / "ledger.jsonl")
    known = ledger.entries()
    todo = missing(configs, known, retry=True)
    with locked(given.out), display("quacklr demo", len(configs) - len(todo)) as show:
        ledger.validate_writable()
        state = sweep(todo, ledger, Local(given.jobs), given.out / "runs", show)
    if state.stopped is not None:
        print(f"Stopped; go on with: {shlex.join(['quacklr', 'demo', *argv])}", file=sys.stderr)
        return 128 + state.stopped
    entries = ledger.entries()
    mine = [entries[fingerprint(config)] for config in configs]
    for entry in mine:
        if entry.status == "crashed":
            raise UserError(f"a run crashed: {entry.reason}; see {given.out / 'runs' / entry.key / 'log.txt'}")
    show_results(Results(mine, scale), given.out)
    return 0


def show_results(results: Results, out: Path) -> None:
    """The table, the picture, the page, the sentence."""
    figures = draw({"demo": picture}, results, out)
    write(out / "demo.html", page(results.every, [], figures, "quacklr demo"))
    print(table(results))
    print(f"\n{sentence(results)}\n\nThe picture is {out / 'demo.png'}, the page {out / 'demo.html'}.\n\n{NEXT}")


def only(results: Results, attention: str, method: type[Method]) -> Entry:
    """The demo's one run of a method."""
    return next(iter(results.best(attention, method, results.scale.high).values()))


def table(results: Results) -> str:
    """Loss and largest logit of every method, for both kinds of attention."""
    attentions = list(reversed(results.scale.attentions))
    lines = ["".join([f"{'':14}", *(f"{name.upper():>30}" for name in attentions)])]
    lines += ["".join([f"{'':14}", *(f"{'validation loss':>17}{'max logit':>13}" for _ in attentions)])]
    for method in METHODS:
        runs = [only(results, attention, method) for attention in attentions]
        cells = [f"{shown_loss(run):>17}{shown_logit(run):>13}" for run in runs]
        lines.append("".join([f"{NAMES[method]:14}", *cells]))
    return "\n".join(lines)


def shown_loss(entry: Entry) -> str:
    """The validation loss, or that there is none."""
    return f"{loss(entry):.3f}" if entry.status == "finished" else entry.status


def shown_logit(entry: Entry) -> str:
    """The largest logit of all heads at the end."""
    return plain(10 ** largest_logit(entry))


def sentence(results: Results) -> str:
    """What was seen, whichever way it went."""
    parts = []
    for attention in reversed(results.scale.attentions):
        default, quack = only(results, attention, Default), only(results, attention, Quack)
        broken = default.status != "finished" or largest_logit(default) > STABLE
        stable = quack.status == "finished" and largest_logit(quack) < STABLE
        better = stable and (default.status != "finished" or loss(quack) < loss(default) - MARGIN)
        logits = f"largest logit {shown_logit(default)} against {shown_logit(quack)}"
        losses = f"validation loss {shown_loss(default)} against {shown_loss(quack)}"
        if broken and stable and better:
            verdict = "the default broke and QuacK stayed stable"
        elif not broken:
            verdict = "the default did not break, so there was nothing for QuacK to mend"
        else:
            verdict = "the default broke and QuacK did not mend it"
        parts.append(f"With {attention.upper()} {verdict} ({logits}, {losses}).")
    return " ".join(parts)


def picture(results: Results) -> Figure:
    """What the demo saw.

    Validation loss and largest logit of all heads while training, at a learning rate that is too high for the default.
    """
    figure, grid_ = panels(2, 2, 3.6, 2.6)
    for attention, (left, right) in zip(reversed(results.scale.attentions), grid_, strict=True):
        for method in METHODS:
            runs = results.best(attention, method, results.scale.high)
            curve(left, runs, validation, color=colour(method), label=NAMES[method])
            curve(right, runs, largest, color=colour(method), label=NAMES[method])
        left.set(title=attention.upper(), xlabel="step", ylabel="validation loss")
        right.set(title=attention.upper(), xlabel="step", ylabel="largest logit", yscale="log")
    if grid_[0][0].lines:
        grid_[0][0].legend()
    return figure


def largest(entry: Entry) -> list[tuple[int, float]]:
    """The largest logit of all layers and heads by step."""
    rows = ((step, [value for row in table for value in row if value]) for step, table in entry.curve("logits", "max"))
    return [(step, max(values)) for step, values in rows if values and step and max(values) > 0]


def main(argv: Sequence[str]) -> int:
    """Run the command: 0, 2 for what a user can mend, 130 when stopped by Ctrl-C."""
    return exit_code("quacklr demo", lambda: run(read(Demo, "quacklr demo", argv), argv))
