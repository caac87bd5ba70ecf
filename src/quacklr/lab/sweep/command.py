"""The command `quacklr sweep`: executes the runs of studies that are not in the ledger."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from quacklr.lab.config import MAX_THREADS, Config, fingerprint
from quacklr.lab.data import open_corpus
from quacklr.lab.errors import UserError, exit_code, validate_at_most, validate_positive
from quacklr.lab.files import locked
from quacklr.lab.ledger import Entry, Ledger
from quacklr.lab.options import read
from quacklr.lab.studies.questions import ADAPTIVE_STUDIES, STUDIES, AdaptiveStudy, Study, runs_of
from quacklr.lab.studies.scale import Size, scale_of
from quacklr.lab.sweep.display import display, listing
from quacklr.lab.sweep.executor import Executor
from quacklr.lab.sweep.interleaved import Interleaved
from quacklr.lab.sweep.local import Local
from quacklr.lab.sweep.sweep import State, missing, sweep
from quacklr.util import terminal

TIMED = "speed"  # the study whose runs are interleaved

ALL: dict[str, Study | AdaptiveStudy] = STUDIES | ADAPTIVE_STUDIES
ABOUT = """\
Run the grids of studies, several runs at once, and append every run that ends to a ledger. Runs in the ledger are not
repeated, and stopped runs continue from their checkpoints: after Ctrl-C, a crash or a power failure, give the same
command again. `quacklr report` makes figures, claims and a page from the ledger.

""" + "\n\n".join(f"{name}: {(study.__doc__ or '').splitlines()[0]}" for name, study in ALL.items())


@dataclass(frozen=True)
class Sweep:
    """Options of `quacklr sweep`."""

    studies: tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="STUDY", help_behavior_hint="")]]
    """The studies to run, in this order."""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("results")
    """Folder of the ledger."""
    runs: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("runs/sweep")
    """Parent of the folders of the runs, with metrics, logs and checkpoints."""
    size: Size = field(default=Size())
    seeds: Annotated[int, tyro.conf.arg(metavar="INT")] = 3
    """Number of seeds of each run: 0, 1, ... (budgets: 1, 2, ...; seed 0 selects its settings)"""
    on: Literal["here", "ray", "slurm"] = "here"
    """Where to run: this machine, a Ray cluster, or a Slurm cluster."""
    jobs: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Simultaneous runs; by default one per core or GPU of this machine, 16 on a cluster."""
    threads: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """CPU threads per run; by default an equal share of the cores of this machine, 1 on a cluster."""
    slurm: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=VALUE")] = ()
    """Options for sbatch, such as partition=gpu time=600 (minutes)."""
    retry: bool = False
    """Repeat the runs that crashed."""
    dry_run: bool = False
    """Only list the runs and how they ended."""


def configs_of(given: Sweep, known: dict[str, Entry]) -> list[Config]:
    """Every run of the studies that is known to be needed, each once."""
    scale = scale_of(given.size)
    configs = (config for name in given.studies for config in runs_of(name, scale, known, given.seeds))
    return list({fingerprint(config): config for config in configs}.values())


def executor_of(given: Sweep, jobs: int) -> Executor:
    """The executor that the options select; UserError if its package is missing."""
    if TIMED in given.studies:
        return Interleaved(jobs // given.seeds, given.threads)
    if given.slurm and given.on != "slurm":
        raise UserError("--slurm is about jobs of a Slurm cluster, so it needs --on slurm")
    try:
        if given.on == "ray":
            from quacklr.lab.sweep.on_ray import Ray

            return Ray(given.jobs or 16, given.threads or 1)
        if given.on == "slurm":
            from quacklr.lab.sweep.on_slurm import Slurm

            return Slurm(given.runs / "slurm", given.jobs or 16, given.threads or 1, options=given.slurm)
    except ModuleNotFoundError as missing_package:
        raise UserError(f"--on {given.on} needs {missing_package.name}: pip install 'quacklr[{given.on}]'") from None
    return Local(given.jobs, given.threads)


def execute(given: Sweep) -> State | None:
    """Run the sweep, or with --dry-run list its runs and return None."""
    counts = {"seeds": given.seeds, "jobs": given.jobs, "threads": given.threads}
    validate_positive(**{name: value for name, value in counts.items() if value is not None})
    validate_at_most(MAX_THREADS, **counts)
    if TIMED in given.studies and (given.on != "here" or given.jobs or given.slurm or len(given.studies) > 1):
        raise UserError(f"{TIMED} compares times of runs in one process: alone, without --on and --jobs")
    ledger = Ledger(given.out / "ledger.jsonl")
    known = ledger.entries()
    if TIMED in given.studies:  # times of runs that were not interleaved cannot be compared
        known = {key: entry for key, entry in known.items() if entry.environment.get("turns")}
    configs = configs_of(given, known)
    if given.dry_run:
        terminal.answer(listing(configs, known))
        return None
    todo = missing(configs, known, given.retry)

    def more() -> list[Config]:
        if ADAPTIVE_STUDIES.keys().isdisjoint(given.studies):
            return []
        known = ledger.entries()
        return missing(configs_of(given, known), known)

    validate_corpora(configs, known)
    executor = executor_of(given, len(configs))
    try:
        with terminal.tolerant(), locked(given.runs):
            ledger.validate_writable()
            with display(" ".join(given.studies), len(configs) - len(todo)) as show:
                return sweep(todo, ledger, executor, given.runs, show, more)
    finally:
        executor.close()


def validate_corpora(configs: list[Config], known: dict[str, Entry]) -> None:
    """Raise UserError if a corpus cannot be opened, or differs from that of the runs in the ledger."""
    for name in {config.training.corpus for config in configs}:
        current = open_corpus(name).fingerprint
        for entry in known.values():
            used = entry.environment.get("corpus")
            if entry.config.training.corpus == name and used not in (None, current):
                raise UserError(
                    f"the ledger has runs on another version of the corpus {name} ({used}, here it is {current}), "
                    "which cannot be compared; give another --out and other --runs"
                )


def main(argv: Sequence[str]) -> int:
    """Run the command. Exit codes: 1 if a run crashed, 2 for a mistake of the user, 130 or 143 after a signal."""

    def call() -> int:
        given = read(Sweep, "quacklr sweep", argv, ABOUT, tyro.conf.PositionalRequiredArgs)
        if not given.studies or not set(given.studies) <= set(ALL):
            raise UserError(f"which study? One or more of {', '.join(ALL)}; see quacklr sweep --help")
        state = execute(given)
        return 0 if state is None else print_summary(given, state, argv)

    return exit_code("quacklr sweep", call)


@terminal.tolerant()
def print_summary(given: Sweep, state: State, argv: Sequence[str]) -> int:
    """Print how many runs ended how, and return the exit code."""
    if state.stopped is not None:
        print(f"Stopped; go on with: quacklr sweep {shlex.join(argv)}", file=sys.stderr)
        return 128 + state.stopped
    counts = {kind: sum(entry.status == kind for entry in state.ended) for kind in ("diverged", "crashed")}
    troubles = "".join(f", {count} {kind}" for kind, count in counts.items() if count)
    print(f"{len(state.ended)} runs{troubles}; the ledger is {given.out / 'ledger.jsonl'}")
    if counts["crashed"]:
        print("A crashed run says why in the ledger and in its log.txt; try again with --retry.", file=sys.stderr)
    return 1 if counts["crashed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
