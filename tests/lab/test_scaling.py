"""The tables of the studies `sizes` and `longer`. The losses are made from formulas, so that the numbers are known."""

from __future__ import annotations

from collections.abc import Callable

from made_ledger import SCALE
from quacklr.lab.config import Config
from quacklr.lab.ledger import Entry
from quacklr.lab.methods import Budget, Default, Method, QKNorm, Quack
from quacklr.lab.report.scaling import lengths, scaling, sizes
from quacklr.lab.studies.questions import runs_of
from quacklr.lab.studies.results import Results
from quacklr.lab.sweep.sweep import missing
from swept_runs import made

HEIGHT: dict[type[Method], float] = {Default: 1.0, Quack: 0.0, Budget: 0.1, QKNorm: -0.2}
"""The loss of a method minus that of QuacK."""


def by_width(config: Config) -> Entry:
    """The largest logit of the default is 100 at lr 0.064 * 64 / width. Seed 2 ends 0.3 higher than seed 1."""
    width, seed = config.shape.d_model, config.training.seed
    default = isinstance(config.method, Default)
    top = 100 * (config.optimizer.lr / (0.064 * 64 / width)) ** 2 if default else width / 2
    return made(config, 2.0 + HEIGHT[type(config.method)] + 0.3 * (seed == 2) + 64 / width, top)


def by_length(config: Config) -> Entry:
    """Ten times as many steps make the loss lower by 1 and logits ten times as large."""
    longer = config.training.steps > SCALE.base.training.steps
    height = HEIGHT[type(config.method)]
    return made(config, 3.0 + height - longer + 0.1 * config.training.seed, 10.0 ** (longer + 1))


def study(name: str, run: Callable[[Config], Entry], seeds: int) -> dict[str, Entry]:
    known: dict[str, Entry] = {}
    while todo := missing(runs_of(name, SCALE, known, seeds), known):
        known |= {(entry := run(config)).key: entry for config in todo}
    return known


def cells(table: str) -> list[list[str]]:
    """The rows of a Markdown table below its head."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_a_row_of_sizes_has_the_critical_rate_and_differences_over_common_seeds() -> None:
    known = study("sizes", by_width, 2)

    def is_missing(config: Config) -> bool:
        """Seed 2 of QK norm, and at 4M also of QuacK."""
        missing_methods = (QKNorm, Quack) if config.shape.d_model == 256 else (QKNorm,)
        return config.training.seed == 2 and isinstance(config.method, missing_methods)

    found = cells(sizes(Results([entry for entry in known.values() if not is_missing(entry.config)], SCALE)))
    assert [row[0] for row in found] == ["0.3M", "1M", "4M", "16M"]
    assert [row[1] for row in found] == ["0.064 (n 2)", "0.032 (n 2)", "0.016 (n 2)", "0.008 (n 2)"]
    assert [row[2] for row in found] == ["1", "0.3", "0.1", "0.1"], "ten times the critical rate, rounded"
    assert [row[3] for row in found] == ["15.6", "9.4", "6.3", "12.5"], "lr / critical rate"
    assert [row[4] for row in found[:2]] == ["3.150 (sd 0.212, n 2)", "2.650 (sd 0.212, n 2)"]
    assert [row[5] for row in found] == ["32.1", "64.1", "128", "256"], "`made` adds 0.1"
    assert all(row[6:] == ["+1.000 (n 2)", "+0.100 (n 2)", "-0.200 (n 1)"] for row in found[:2])
    assert found[2][6:] == ["+1.000 (n 1)", "+0.100 (n 1)", "-0.200 (n 1)"]
    assert found[3][6:] == ["+1.000 (n 2)", "", ""], "the largest model is trained with two methods only"


def test_a_row_of_lengths_has_both_lengths_and_is_left_out_without_runs() -> None:
    known = study("longer", by_length, 2)
    short = SCALE.cell("mla", SCALE.high)
    for method in (Default(), Quack()):
        known |= {(entry := by_length(short.run(method, seed))).key: entry for seed in (1, 2, 3)}
    results = Results(known.values(), SCALE)
    table, steps = lengths(results), SCALE.base.training.steps
    assert table.splitlines()[0].split(" | ")[1::3] == [f"{steps:,} steps", f"{10 * steps:,} steps"]
    assert cells(table) == [
        ["QuacK", "3.200 (sd 0.100, n 3)", "10.1", "", "2.150 (sd 0.071, n 2)", "100", ""],
        ["default", "4.200 (sd 0.100, n 3)", "10.1", "+1.000 (n 3)", "3.150 (sd 0.071, n 2)", "100", "+1.000 (n 2)"],
        ["budget", "", "", "", "2.250 (sd 0.071, n 2)", "100", "+0.100 (n 2)"],
        ["QK norm", "", "", "", "1.950 (sd 0.071, n 2)", "100", "-0.200 (n 2)"],
    ]
    kept = [entry for entry in results.ledger if not isinstance(entry.config.method, Budget)]
    assert [row[0] for row in cells(lengths(Results(kept, SCALE)))] == ["QuacK", "default", "QK norm"]


def test_without_runs_the_tables_are_empty() -> None:
    text = scaling(Results([], SCALE))
    assert [line for line in text.splitlines() if line.startswith("#")] == ["## Size of the model", "## Longer runs"]
    assert cells(sizes(Results([], SCALE))) == cells(lengths(Results([], SCALE))) == []
