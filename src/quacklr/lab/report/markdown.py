"""Tables for reading where there is no browser: what was claimed and found, and what each method reached."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

from quacklr.lab.studies.finding import ClaimResult
from quacklr.lab.studies.names import NAMES
from quacklr.lab.studies.results import NotRun, Results, chosen, largest_logit, lr_sensitivity
from quacklr.lab.studies.verdicts import level, power

MARKS = {"paper": "The paper's claims", "own": "Questions of our own"}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in lines)


def claims(findings: Sequence[ClaimResult]) -> str:
    """Every claim with its verdict, in two tables."""
    parts = []
    for source, heading in MARKS.items():
        rows = [(each.name, each.claim, f"**{each.verdict}**") for each in findings if each.source == source]
        if rows:
            parts.append(f"## {heading}\n\n{table(('', 'claim', 'verdict'), rows)}")
    return "\n".join(parts)


def evidence(findings: Sequence[ClaimResult]) -> str:
    """What was found about each claim, and the comparisons that the verdict rests on."""
    parts = []
    for each in findings:
        lines = "".join(f"- {comparison}\n" for comparison in each.evidence)
        text = f"### {each.name}: {each.verdict}\n\n{each.claim}\n\nFound: {each.summary}.\n"
        parts.append(text + (f"\n{lines}" if lines else ""))
    return "\n".join(parts)


def methods(results: Results) -> str:
    """For both kinds of attention what each method reached at each learning rate, at its best setting."""
    parts = []
    rates = results.scale.rates
    head = (
        "method",
        *(f"lr {lr:g}" for lr in rates),
        f"largest logit at lr {rates[-1]:g}",
        "lr sensitivity",
        f"setting at lr {rates[-1]:g}",
    )
    for attention in results.scale.attentions:
        rows = []
        for method, name in NAMES.items():
            cells, best, top, sensitive = [], "", "", ""
            for lr in rates:
                with suppress(NotRun):
                    runs = results.best(attention, method, lr)
                    if lr == rates[-1]:
                        best, top = chosen(runs), power(runs, largest_logit)
                    cells.append(level(runs))
                    continue
                cells.append("")
            with suppress(NotRun):
                values = lr_sensitivity(results, attention, method).values()
                sensitive = f"{sum(values) / len(values):.3f}"
            if any(cells):
                rows.append((name, *cells, top, sensitive, best))
        parts.append(f"## {attention.upper()}, validation loss\n\n{table(head, rows)}")
    return "\n".join(parts)
