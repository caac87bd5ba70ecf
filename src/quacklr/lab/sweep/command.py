"""The command `quacklr sweep`: executes the runs of studies that are not in the ledger."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, Protocol

import tyro

from quacklr.lab.config import MAX_THREADS, Config, fingerprint
from quacklr.lab.data import open_corpus
from quacklr.lab.errors import UserError, exit_code, validate_at_most, validate_positive
from quacklr.lab.files import locked
from quacklr.lab.ledger import Entry, Ledger
from quacklr.lab.options import read
from quacklr.lab.progress import duration
from quacklr.lab.studies.all_claims import CLAIM_NAMES, claim_results
from quacklr.lab.studies.intervals import MOST_SEEDS
from quacklr.lab.studies.questions import ADAPTIVE, GRIDS, STUDIES, runs_of
from quacklr.lab.studies.results import Results
from quacklr.lab.studies.run_cost import RunCost
from quacklr.lab.studies.scale import Size, StudyScale, scale_of
from quacklr.lab.studies.undecided import describe_open, plan
from quacklr.lab.studies.verdicts import ClaimResult
from quacklr.lab.sweep.display import display, listing
from quacklr.lab.sweep.executor import Executor
from quacklr.lab.sweep.interleaved import Interleaved
from quacklr.lab.sweep.local import Local
from quacklr.lab.sweep.sweep import State, missing, sweep

TIMED = "speed"  # the study whose runs are interleaved

DOCS: dict[str, str] = {name: study.__doc__ or "" for name, study in (STUDIES | ADAPTIVE | GRIDS).items()}
ALL_STUDIES = list(DOCS)
ABOUT = f"""\
Run studies, several runs at once, and append every run that ends to a ledger. Runs in the ledger are not repeated, and
stopped runs continue from their checkpoints: after Ctrl-C, a crash or a power failure, give the same command again.
Settings such as tau are selected on seed 0, and methods are judged on the seeds 1, 2, ... `quacklr report` makes
figures, claims and a page from the ledger.

With --until-decided, NAME is a claim (without a name, all claims): comparisons that are not decided get one seed after
another, up to {MOST_SEEDS}, the claim that is expected to be decided soonest first.

""" + "\n\n".join(f"{name}: {doc.splitlines()[0]}" for name, doc in DOCS.items())


@dataclass(frozen=True)
class Sweep:
    """Options of `quacklr sweep`."""

    names: tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME", help_behavior_hint="")]] = ()
    """The studies to run, in this order. With --until-decided, the claims to decide."""
    until_decided: bool = False
    """Add seeds to the comparisons of claims that are not decided; the claim that is decided soonest first."""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("results")
    """Folder of the ledger."""
    runs: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("runs/sweep")
    """Parent of the folders of the runs, with metrics, logs and checkpoints."""
    size: Size = field(default=Size())
    seeds: Annotated[int, tyro.conf.arg(metavar="INT")] = 3
    """Number of seeds that the methods of a study are judged on."""
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
    details: bool = False
    """Keep all measurements in the ledger, also entropies, norms and rates: lines are more than twice as long."""
    dry_run: bool = False
    """Only list the runs and how they ended."""


class Goal(Protocol):
    """The goal of a sweep: it computes the next runs from the runs that have ended."""

    def title(self) -> str:
        """The title of the display."""

    def runs(self, known: dict[str, Entry]) -> list[Config]:
        """All runs that are known to be needed, also those that have ended."""

    def next(self, known: dict[str, Entry]) -> list[Config]:
        """The runs that are left, the first to do first."""

    def listing(self, known: dict[str, Entry]) -> str:
        """What --dry-run prints."""


@dataclass(frozen=True)
class StudiesGoal:
    """All runs of some studies."""

    names: Sequence[str]
    scale: StudyScale
    seeds: int
    retry: bool

    def title(self) -> str:
        """The names of the studies."""
        return " ".join(self.names)

    def runs(self, known: dict[str, Entry]) -> list[Config]:
        """Every run that is known to be needed, each once."""
        configs = (config for name in self.names for config in runs_of(name, self.scale, known, self.seeds))
        return list({fingerprint(config): config for config in configs}.values())

    def next(self, known: dict[str, Entry]) -> list[Config]:
        """The runs that are not in the ledger."""
        return missing(self.runs(known), known, self.retry)

    def listing(self, known: dict[str, Entry]) -> str:
        """Each run, and how it ended."""
        return listing(self.runs(known), known)


@dataclass(frozen=True)
class ClaimsGoal:
    """Verdicts on some claims, or on all of them."""

    names: Sequence[str]
    scale: StudyScale

    def title(self) -> str:
        """The names of the claims."""
        return f"until decided: {', '.join(self.names) or 'all claims'}"

    def runs(self, known: dict[str, Entry]) -> list[Config]:
        """The runs that are left, if means and spreads do not change."""
        return plan(self.claims(known), known).left

    def next(self, known: dict[str, Entry]) -> list[Config]:
        """One more seed for each claim, then the runs that follow if means and spreads do not change."""
        found = plan(self.claims(known), known)
        return missing([*found.runs, *found.left], known)

    def listing(self, known: dict[str, Entry]) -> str:
        """The verdicts, the comparisons that are not decided, and an estimate of the runs that they need."""
        claims = self.claims(known)
        found = plan(claims, known)
        time = "" if found.seconds is None else f", {duration(found.seconds)} one after another"
        left = f"{len(found.left)} runs left{time}, if mean and sd stay as they are"
        return f"{describe_open(claims)}\n{left if found.left else 'nothing left to run'}"

    def claims(self, known: dict[str, Entry]) -> list[ClaimResult]:
        """The claims with their verdicts."""
        return claim_results(Results(known.values(), self.scale), self.names)


def executor_of(given: Sweep, jobs: int) -> Executor:
    """The executor that the options select; UserError if its package is missing."""
    if TIMED in given.names:
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
    if TIMED in given.names and (given.on != "here" or given.jobs or given.slurm or len(given.names) > 1):
        raise UserError(
            f"{TIMED} compares times of runs in one process; give no other study, and neither --on, --jobs nor --slurm"
        )
    ledger, goal = Ledger(given.out / "ledger.jsonl", given.details), goal_of(given)
    known = ledger.entries()
    if TIMED in given.names:  # times of runs that were not interleaved cannot be compared
        known = {key: entry for key, entry in known.items() if entry.environment.get("turns")}
    if given.dry_run:
        print(goal.listing(known))
        return None
    configs, todo = goal.runs(known), goal.next(known)

    def next_runs(ended: Sequence[Entry]) -> list[Config]:
        return goal.next(known | {entry.key: entry for entry in ended})

    validate_corpora(configs, known)
    executor = executor_of(given, len(configs))
    try:
        with locked(given.runs):
            ledger.validate_writable()
            cost = RunCost(known.values())
            with display(goal.title(), len(configs) - len(todo), cost.step_seconds) as show:
                return sweep(todo, ledger, executor, given.runs, show, next_runs)
    finally:
        executor.close()


def goal_of(given: Sweep) -> Goal:
    """The goal that the options select."""
    if given.until_decided:
        return ClaimsGoal(given.names, scale_of(given.size))
    return StudiesGoal(given.names, scale_of(given.size), given.seeds, given.retry)


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
        if given.until_decided and not set(given.names) <= set(CLAIM_NAMES):
            raise UserError(f"which claim? Some of {', '.join(CLAIM_NAMES)}; without a name all of them")
        if given.until_decided and (given.retry or given.seeds != Sweep.seeds):
            raise UserError(
                "--until-decided selects seeds itself, and does not repeat crashed runs: without --seeds and --retry"
            )
        if not given.until_decided and (not given.names or not set(given.names) <= set(ALL_STUDIES)):
            raise UserError(f"which study? One or more of {', '.join(ALL_STUDIES)}; see quacklr sweep --help")
        state = execute(given)
        return 0 if state is None else print_summary(given, state, argv)

    return exit_code("quacklr sweep", call)


def print_summary(given: Sweep, state: State, argv: Sequence[str]) -> int:
    """Print how many runs ended, diverged and crashed, and return the exit code."""
    if state.stopped is not None:
        print(f"Stopped; go on with: quacklr sweep {shlex.join(argv)}", file=sys.stderr)
        return 128 + state.stopped
    counts = {kind: sum(entry.status == kind for entry in state.ended) for kind in ("diverged", "crashed")}
    troubles = "".join(f", {count} {kind}" for kind, count in counts.items() if count)
    print(f"{len(state.ended)} runs{troubles}; the ledger is {given.out / 'ledger.jsonl'}")
    if counts["crashed"]:
        print("The ledger and log.txt of a crashed run have the reason; try again with --retry.", file=sys.stderr)
    return 1 if counts["crashed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
