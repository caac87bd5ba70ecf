"""`quacklr report`: make figures, a table of claims, and one page from a ledger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import matplotlib as mpl
import tyro

from quacklr.lab.errors import UserError, exit_code
from quacklr.lab.figures import FORMATS, RC, drawn
from quacklr.lab.files import atomic_write
from quacklr.lab.ledger import Ledger
from quacklr.lab.options import read
from quacklr.lab.report import markdown
from quacklr.lab.report.advice import TABLES
from quacklr.lab.report.choosing import choosing, numbers, open_questions
from quacklr.lab.report.figures import FIGURES, Draw
from quacklr.lab.report.page import PageFigure, page
from quacklr.lab.report.scaling import scaling
from quacklr.lab.report.style import hide_empty_panels
from quacklr.lab.studies.all_claims import claim_results
from quacklr.lab.studies.measures import NotRun
from quacklr.lab.studies.results import Results
from quacklr.lab.studies.scale import Size, scale_of
from quacklr.lab.studies.verdicts import ClaimResult
from quacklr.lab.sweep.code_version import code_version


@dataclass(frozen=True)
class ReportOptions:
    """Make figures (PDF, PNG, SVG), a table of claims and one page from the ledger of a sweep.

    The page is a single file that opens from disk: claims first, then figures, then every run.
    """

    ledger: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="DIR")]] = Path("results")
    """Folder with the ledger that `quacklr sweep` wrote; the report is written to the same folder."""
    size: Size = field(default=Size())


def draw(figures: dict[str, Draw], results: Results, folder: Path) -> list[PageFigure]:
    """Write every figure that has runs, in every format, and return them for the page."""
    shown = []
    for name, function in figures.items():
        with mpl.rc_context(RC):
            try:
                figure = function(results)
            except NotRun:
                continue
        hide_empty_panels(figure)
        files = {kind: drawn(figure, kind) for kind in FORMATS}
        for kind, content in files.items():
            write(folder / f"{name}.{kind}", content)
        title, _, caption = (function.__doc__ or "").partition("\n\n")
        shown.append(PageFigure(name, title, " ".join(caption.split()), files["svg"].decode()))
    return shown


def missing(results: Results) -> str:
    """The end of the error message if there are no runs to report: why, and how to get them."""
    scale, crashed = results.scale.name, len(results.crashed)
    if not crashed:
        return f"of the scale {scale}; see --scale, --steps and --corpus"
    return f"that ended: {crashed} of the scale {scale} have crashed; `quacklr sweep STUDY --retry` runs them again"


def summary(results: Results) -> str:
    """How many runs there are, how many of them diverged, and how many others crashed."""
    diverged = sum(entry.status == "diverged" for entry in results.entries)
    share = "all" if diverged == len(results.entries) else str(diverged)
    parts = [f"{len(results.entries)} runs at the scale {results.scale.name}"]
    parts += [f"{share} of them diverged"] if diverged else []
    return ", ".join([*parts, *([f"{len(results.crashed)} others crashed"] if results.crashed else [])])


def code_versions(results: Results) -> str:
    """How many runs were made by which version of the code that trains, and which version this is."""
    counts = Counter(entry.environment.get("code", "not recorded") for entry in results.ledger)
    versions = ", ".join(f"{version} {count}" for version, count in counts.most_common())
    return (
        f"All {len(results.ledger)} runs of the ledger, also those with other sizes, steps or conditions, by version "
        f"of the code that trained them: {versions}. The code is now {code_version()}."
    )


def choosing_page(claims: Sequence[ClaimResult], lr: float) -> str:
    """The tables of advice, the comparisons that they rely on, and the claims without a verdict."""
    advice = "".join(f"## {name}\n\n{choosing(claims, lines, lr)}\n" for name, lines in TABLES.items())
    found = f"## Numbers\n\n{numbers(claims, TABLES.values(), lr)}\n## Open\n\n{open_questions(claims)}"
    return f"# Choosing a method\n\n{advice}{found}"


def write(path: Path, content: str | bytes) -> Path:
    """Write a file atomically."""
    with atomic_write(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)
    return path


def report(options: ReportOptions) -> int:
    """Write the whole report, and print the verdicts."""
    folder, source = options.ledger, options.ledger / "ledger.jsonl"
    entries = list(Ledger(source).entries().values())
    if not entries:
        raise UserError(f"{source} has no runs yet; make some with `quacklr sweep STUDY --out {folder}`")
    results = Results(entries, scale_of(options.size))
    if not results.entries:
        raise UserError(f"{source} has no runs {missing(results)}")
    claims, about = claim_results(results), summary(results)
    figures = draw(FIGURES, results, folder / "figures")
    found = f"# What was found\n\n{about}. {code_versions(results)}\n\n{markdown.claims(claims)}"
    tables = f"{found}\n# Evidence\n\n{markdown.evidence(claims)}"
    written = [
        write(folder / "claims.md", tables),
        write(folder / "methods.md", f"# Methods\n\n{about}.\n\n{markdown.methods(results)}"),
        write(folder / "budget.md", f"# One budget beside tuned methods\n\n{markdown.budget(results)}"),
        write(folder / "scaling.md", f"# Larger models and longer runs\n\n{scaling(results)}"),
        write(folder / "choosing.md", choosing_page(claims, results.scale.high)),
        write(folder / "report.html", page(entries, claims, figures, "Does QuacK hold?")),
    ]
    for each in claims:
        print(f"{each.verdict:>9}  {each.name}: {each.claim}")
    print(f"{about}: {', '.join(str(path) for path in written)}, and {len(figures)} figures beside them")
    return 0


def main(argv: Sequence[str]) -> int:
    """Run the command: 0, or 2 for an error that the user can correct."""
    return exit_code("quacklr report", lambda: report(read(ReportOptions, "quacklr report", argv)))
