"""`quacklr sweep`: studies to a list of runs, a place to execute them, and a table of how they go."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from quacklr.lab.config import MOST_THREADS, Config, fingerprint
from quacklr.lab.data import open_corpus
from quacklr.lab.errors import UserError, exit_code, refuse_above, refuse_unless_positive
from quacklr.lab.files import locked
from quacklr.lab.options import read
from quacklr.lab.studies.questions import STUDIES
from quacklr.lab.studies.scale import Size, scale_of, seeded
from quacklr.lab.sweep.display import display, listing
from quacklr.lab.sweep.ledger import Entry, Ledger
from quacklr.lab.sweep.place import Executor
from quacklr.lab.sweep.sweep import State, missing, sweep
from quacklr.lab.sweep.turns import Interleaved
from quacklr.util import terminal

TIMED = "speed"  # the study whose runs take turns


ABOUT = """\
Run the grids of studies, several runs at once, and write every run that ends to a ledger. What the ledger has is not
run again, and what was stopped goes on from its checkpoint: after Ctrl-C, a crash or a power cut just give the same
command. `quacklr report` makes figures, claims and a page from the ledger.

""" + "\n\n".join(f"{name}: {(study.__doc__ or '').splitlines()[0]}" for name, study in STUDIES.items())


@dataclass(frozen=True)
class Sweep:
    """What to run, and where."""

    studies: tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="STUDY", help_behavior_hint="")]]
    """Which questions to answer, in this order."""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("results")
    """Folder of the ledger."""
    runs: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("runs/sweep")
    """Where each run has its folder, with metrics, log and checkpoints."""
    size: Size = field(default=Size())
    seeds: Annotated[int, tyro.conf.arg(metavar="INT")] = 3
    """How often each run is repeated, with seeds 0, 1, ..."""
    on: Literal["here", "ray", "slurm"] = "here"
    """Where to run: this machine, a Ray cluster, or a Slurm cluster."""
    jobs: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Runs at once; here one a core (or a GPU), elsewhere 16."""
    threads: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """CPU threads of a run; here the cores are shared out, elsewhere 1."""
    slurm: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=VALUE")] = ()
    """Options for sbatch, such as partition=gpu time=600 (minutes)."""
    retry: bool = False
    """Run again what crashed."""
    dry_run: bool = False
    """List the runs and how they ended, and do nothing."""


def configs_of(given: Sweep) -> list[Config]:
    """Every run that the options mean, each once."""
    chosen = scale_of(given.size)

    def all_of_them() -> Iterator[Config]:
        for name in dict.fromkeys(given.studies):
            yield from seeded(STUDIES[name](chosen), given.seeds)

    return list({fingerprint(config): config for config in all_of_them()}.values())


def place_of(given: Sweep, jobs: int) -> Executor:
    """The place that the options mean for so many jobs; its package may be missing."""
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
    from quacklr.lab.sweep.local import Local

    return Local(given.jobs, given.threads)


def execute(given: Sweep) -> State | None:
    """Do what the options say; None if it was only to be listed."""
    counts = {"seeds": given.seeds, "jobs": given.jobs, "threads": given.threads}
    refuse_unless_positive(**{name: value for name, value in counts.items() if value is not None})
    refuse_above(MOST_THREADS, **counts)
    if TIMED in given.studies and (given.on != "here" or given.jobs or given.slurm or len(given.studies) > 1):
        raise UserError(f"{TIMED} compares times of runs in one process: alone, without --on and --jobs")
    configs, ledger = configs_of(given), Ledger(given.out / "ledger.jsonl")
    known = ledger.entries()
    if TIMED in given.studies:  # the same run in a process of its own says nothing about times
        known = {key: entry for key, entry in known.items() if entry.environment.get("turns")}
    if given.dry_run:
        terminal.answer(listing(configs, known))
        return None
    todo = missing(configs, known, given.retry)
    refuse_other_corpora(configs, known)
    place = place_of(given, len(configs))
    try:
        with terminal.tolerant(), locked(given.runs):
            ledger.refuse_unless_writable()
            with display(" ".join(given.studies), len(configs) - len(todo)) as show:
                return sweep(todo, ledger, place, given.runs, show)
    finally:
        place.close()


def refuse_other_corpora(configs: list[Config], known: dict[str, Entry]) -> None:
    """UserError if a corpus cannot be opened, or is not the one that the ledger's runs were made with."""
    for name in {config.training.corpus for config in configs}:
        here = open_corpus(name).fingerprint
        for entry in known.values():
            there = entry.environment.get("corpus")
            if entry.config.training.corpus == name and there not in (None, here):
                raise UserError(
                    f"the ledger has runs on another version of the corpus {name} ({there}, here it is {here}), which "
                    "cannot be compared; give another --out and other --runs"
                )


def main(argv: Sequence[str]) -> int:
    """Run the command: 0, 1 if a run crashed, 2 for what a user can mend, 130 or 143 when stopped by a signal."""

    def call() -> int:
        given = read(Sweep, "quacklr sweep", argv, ABOUT, tyro.conf.PositionalRequiredArgs)
        if not given.studies or not set(given.studies) <= set(STUDIES):
            raise UserError(f"which study? One or more of {', '.join(STUDIES)}; see quacklr sweep --help")
        state = execute(given)
        return 0 if state is None else conclude(given, state, argv)

    return exit_code("quacklr sweep", call)


@terminal.tolerant()
def conclude(given: Sweep, state: State, argv: Sequence[str]) -> int:
    """A sentence about how it went, and the exit code."""
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
