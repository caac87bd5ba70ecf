"""Trains some runs of the study again and compares their losses with those in the ledger.

    python benchmarks/repeat_runs.py                         20 runs, a quarter of an hour on two cores
    python benchmarks/repeat_runs.py --count 40 --seed 1     more runs, and others

The runs are drawn at random, evenly over methods, attentions and optimizers. With the same torch on the same kind of
processor all digits are the same. Another processor rounds sums differently, and training amplifies this: then compare
the differences with those of seeds. Exit code 1 if a loss differs by more than --tolerance. After Ctrl-C, give the same
command again.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import defaultdict
from itertools import zip_longest
from pathlib import Path

from quacklr.lab.config import MAX_THREADS, Config, kind_of
from quacklr.lab.errors import exit_code, validate_at_most, validate_positive
from quacklr.lab.files import locked
from quacklr.lab.ledger import Entry, Ledger
from quacklr.lab.studies.names import describe
from quacklr.lab.studies.run_cost import RunCost
from quacklr.lab.sweep.code_version import code_version
from quacklr.lab.sweep.command import validate_corpora
from quacklr.lab.sweep.display import describe_ending, display
from quacklr.lab.sweep.local import Local
from quacklr.lab.sweep.sweep import missing, sweep


def drawn(entries: list[Entry], count: int, seed: int) -> list[Entry]:
    """`count` runs at random, evenly over methods, attentions and optimizers."""
    groups: dict[tuple[str, ...], list[Entry]] = defaultdict(list)
    for entry in random.Random(seed).sample(entries, len(entries)):
        kinds = (kind_of(part, getattr(entry.config, part)) for part in ("method", "attention", "optimizer"))
        groups[*kinds].append(entry)
    rounds = zip_longest(*groups.values())
    return [entry for each in rounds for entry in each if entry is not None][:count]


def can_be_repeated(entry: Entry) -> bool:
    """Whether a run finished on one thread (those of the study `speed` have two), on a corpus that is here."""
    corpus = entry.config.training.corpus
    here = corpus == "stdlib" or Path(corpus).exists()
    return entry.status == "finished" and entry.environment.get("threads") == 1 and here


def repeat(configs: list[Config], folder: Path, jobs: int | None, cost: RunCost) -> dict[str, Entry] | None:
    """Train the runs that this code has not trained in this folder. Returns them by key, or None after a signal."""
    ledger, code = Ledger(folder / "ledger.jsonl"), code_version()
    known = {key: entry for key, entry in ledger.entries().items() if entry.environment.get("code") == code}
    todo = missing(configs, known)
    with locked(folder), display("again", len(configs) - len(todo), cost.step_seconds) as show:
        state = sweep(todo, ledger, Local(jobs, threads=1), folder / "runs" / code, show)
    return None if state.stopped is not None else ledger.entries()


def compared(old: Entry, new: Entry, tolerance: float) -> tuple[str, bool]:
    """One line about a run and its repetition, and whether they agree."""
    line = f"{describe(old.config)}: "
    if new.status != "finished":
        return f"{line}{describe_ending(new)}", False
    before, now = old.result["val_loss"], new.result["val_loss"]
    if before == now:
        return f"{line}{before:.4f}, the same in all digits", True
    return f"{line}{before:.4f} in the ledger, {now:.4f} now, {now - before:+.2g}", abs(now - before) <= tolerance


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ledger", type=Path, default=Path("results"), help="folder of the ledger")
    parser.add_argument("--out", type=Path, default=Path("runs/again"), help="folder for the repeated runs")
    parser.add_argument("--count", type=int, default=20, help="number of runs")
    parser.add_argument("--seed", type=int, default=0, help="selects the runs")
    parser.add_argument("--minutes", type=float, default=3.0, help="leave out runs that are expected to take longer")
    parser.add_argument("--tolerance", type=float, default=1e-6, help="largest difference of losses that is accepted")
    parser.add_argument("--jobs", type=int, help="simultaneous runs; by default one for each core")
    given = parser.parse_args()

    def call() -> int:
        jobs = {} if given.jobs is None else {"jobs": given.jobs}
        validate_positive(count=given.count, minutes=given.minutes, **jobs)
        validate_at_most(MAX_THREADS, jobs=given.jobs)
        known = Ledger(given.ledger / "ledger.jsonl").entries()
        cost, most = RunCost(known.values()), 60 * given.minutes
        short = [entry for entry in known.values() if can_be_repeated(entry) and cost.seconds(entry.config) < most]
        runs = drawn(short, given.count, given.seed)
        configs = [entry.config for entry in runs]
        validate_corpora(configs, known)
        again = repeat(configs, given.out, given.jobs, cost)
        if again is None:
            return 130
        lines = [compared(entry, again[entry.key], given.tolerance) for entry in runs]
        print("\n".join(line for line, _ in lines))
        agree = sum(good for _, good in lines)
        print(f"{agree} of {len(lines)} runs have the loss of the ledger, up to {given.tolerance:g}")
        return 0 if agree == len(lines) else 1

    return exit_code("repeat_runs", call)


if __name__ == "__main__":
    sys.exit(main())
