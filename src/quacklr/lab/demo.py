"""`quacklr demo`: shows what QuacK is for, in a few minutes on a CPU.

Small decoders with MLA and MHA are trained on the source of Python's standard library at a learning rate that is too
high for them: without a method, with QK clip, with the limit of QuacK, with the paper's rule, and with QK norm. The
demo is a small study: a sweep with a ledger, then a table, a figure, a page, and a sentence that states the outcome.
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
from quacklr.lab.methods import Default, Limit, Method, QKClipping, QKNorm, Quack
from quacklr.lab.options import read
from quacklr.lab.report.command import draw, write
from quacklr.lab.report.page import page
from quacklr.lab.report.style import largest_logits, method_curve, panels, validation
from quacklr.lab.studies.comparison import MARGIN
from quacklr.lab.studies.measures import largest_logit, loss
from quacklr.lab.studies.names import method_name, readable_number
from quacklr.lab.studies.questions import demo as grid
from quacklr.lab.studies.results import Results
from quacklr.lab.studies.scale import Size, StudyScale, scale_of
from quacklr.lab.studies.verdicts import STABLE
from quacklr.lab.sweep.display import display
from quacklr.lab.sweep.local import Local
from quacklr.lab.sweep.sweep import missing, sweep

METHODS: tuple[Method, ...] = (Default(), QKClipping(), Limit(), Quack(), QKNorm())
ROWS = """\
QuacK limit is what the two lines do: a head's step is scaled down if it would change the head's logits by more than
0.02 nats. QuacK is the paper's rule, tau=1: learning rates go with 1 / norm of the weights that are multiplied with."""
NEXT = """\
In your own script, once the weights are initialised or loaded, add two lines; the training loop stays as it is:

    from quacklr import QuacK
    quack = QuacK(model, optimizer)"""


@dataclass(frozen=True)
class Demo:
    """Train small models at a learning rate that is too high for them: as they are, with QK clip, QuacK and QK norm.

    Ten runs, with MLA and MHA, on the source of Python's standard library. Takes about four minutes on two cores.
    The results are a table, a figure, a page to open in a browser, and a sentence that states the outcome.
    """

    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("runs/demo")
    """Output folder. Runs that are in it already are not run again."""
    steps: int = 150
    """Training steps of each run."""
    seed: int = 0
    """Seed of the initial weights and the batches."""
    jobs: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")] = None
    """Runs at once; one per core unless given."""


def configs_of(options: Demo) -> tuple[StudyScale, list[Config]]:
    """The scale of the demo, and the configurations of its runs."""
    validate_positive(steps=options.steps, jobs=1 if options.jobs is None else options.jobs)
    validate_at_most(MAX_THREADS, jobs=options.jobs)
    validate(lambda seed: 0 <= seed < 2**63, "from 0 to 2^63 - 1", {"seed": options.seed})
    scale = scale_of(Size(steps=options.steps))
    return scale, [replace(each, training=replace(each.training, seed=options.seed)) for each in grid(scale)]


def run(options: Demo, argv: Sequence[str]) -> int:
    """Run the demo; 130 or 143 when stopped by a signal."""
    scale, configs = configs_of(options)
    ledger = Ledger(options.out / "ledger.jsonl", details=True)
    todo = missing(configs, ledger.entries(), retry=True)
    with locked(options.out), display("quacklr demo", len(configs) - len(todo)) as show:
        ledger.validate_writable()
        state = sweep(todo, ledger, Local(options.jobs), options.out / "runs", show)
    if state.stopped is not None:
        print(f"Stopped; go on with: {shlex.join(['quacklr', 'demo', *argv])}", file=sys.stderr)
        return 128 + state.stopped
    entries = ledger.entries()
    mine = [entries[fingerprint(config)] for config in configs]
    for entry in mine:
        if entry.status == "crashed":
            raise UserError(f"a run crashed: {entry.reason}; see {options.out / 'runs' / entry.key / 'log.txt'}")
    show_results(Results(mine, scale, [options.seed]), options.out)
    return 0


def show_results(results: Results, out: Path) -> None:
    """Write the figure and the page; print the table and the sentence."""
    figures = draw({"demo": figure}, results, out)
    write(out / "demo.html", page(results.ledger, [], figures, "quacklr demo"))
    print(f"{table(results)}\n\n{ROWS}\n\n{sentence(results)}\n")
    print(f"The picture is {out / 'demo.png'}, the page {out / 'demo.html'}.\n\n{NEXT}")


def only(results: Results, attention: str, method: Method) -> Entry:
    """The only run of a method."""
    return next(iter(results.best(attention, method, results.scale.high).runs.values()))


def table(results: Results) -> str:
    """Loss and largest logit of every method, for both kinds of attention."""
    attentions = list(reversed(results.scale.attentions))
    rows = [("", [f"{name.upper():>30}" for name in attentions])]
    rows += [("", [f"{'validation loss':>17}{'max logit':>13}" for _ in attentions])]
    for method in METHODS:
        runs = [only(results, attention, method) for attention in attentions]
        rows += [(method_name(method), [f"{loss_text(run):>17}{logit_text(run):>13}" for run in runs])]
    return "\n".join(f"{name:14}{''.join(cells)}" for name, cells in rows)


def loss_text(entry: Entry) -> str:
    """The final validation loss, or the status of a run that has none."""
    return f"{loss(entry):.3f}" if entry.status == "finished" else entry.status


def logit_text(entry: Entry) -> str:
    """The largest logit of all heads at the end."""
    return readable_number(10 ** largest_logit(entry))


def sentence(results: Results) -> str:
    """The outcome: whether the default was unstable, and whether it was stable with the two lines of QuacK."""
    parts = []
    for attention in reversed(results.scale.attentions):
        default, quack = only(results, attention, Default()), only(results, attention, Limit())
        broken = default.status != "finished" or largest_logit(default) > STABLE
        stable = quack.status == "finished" and largest_logit(quack) < STABLE
        better = stable and (default.status != "finished" or loss(quack) < loss(default) - MARGIN)
        logits = f"largest logit {logit_text(default)} against {logit_text(quack)}"
        losses = f"validation loss {loss_text(default)} against {loss_text(quack)}"
        if broken and stable and better:
            verdict = "the default broke and QuacK stayed stable"
        elif not broken:
            verdict = "the default did not break, so there was nothing for QuacK to fix"
        else:
            verdict = "the default broke and QuacK did not fix it"
        parts.append(f"With {attention.upper()} {verdict} ({logits}, {losses}).")
    return " ".join(parts)


def figure(results: Results) -> Figure:
    """Results of the demo.

    Validation loss and largest logit of all heads while training, at a learning rate that is too high for the default.
    """
    drawing, rows = panels(2, 2, 3.6, 2.6)
    for attention, (left, right) in zip(reversed(results.scale.attentions), rows, strict=True):
        for method in METHODS:
            for axes, points in ((left, validation), (right, largest_logits)):
                method_curve(axes, results, attention, method, results.scale.high, points)
        left.set(title=attention.upper(), xlabel="step", ylabel="validation loss")
        right.set(title=attention.upper(), xlabel="step", ylabel="largest logit", yscale="log")
    if rows[0][0].lines:
        rows[0][0].legend()
    return drawing


def main(argv: Sequence[str]) -> int:
    """Run the command: 0, 2 for an error that the user can correct, 130 when stopped by Ctrl-C."""
    return exit_code("quacklr demo", lambda: run(read(Demo, "quacklr demo", argv), argv))
