"""The parts of the site that show the study: its figures, and the page of all runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quacklr.lab.ledger import Ledger
from quacklr.lab.report.figures import FIGURES
from quacklr.lab.report.page import PageFigure, page
from quacklr.lab.studies.all_claims import claim_results
from quacklr.lab.studies.results import Results
from quacklr.lab.studies.scale import Size, scale_of

RESULTS = Path(__file__).parent.parent / "results"


def figures() -> list[PageFigure]:
    """The figures in results/, with the titles and captions of the functions that draw them."""
    shown = []
    for name, function in FIGURES.items():
        file = RESULTS / f"figures/{name}.svg"
        if file.exists():
            title, _, caption = (function.__doc__ or "").partition("\n\n")
            shown.append(PageFigure(name, title, " ".join(caption.split()), file.read_text(encoding="utf-8")))
    return shown


def figures_as_markdown() -> str:
    """A section for each figure, for a page at the root of the site."""
    return "\n\n".join(
        f"## {each.title.rstrip('.')}\n\n{each.caption}\n\n![{each.title}](results/figures/{each.name}.svg)"
        f"{{ .figure }}\n\n[PDF](results/figures/{each.name}.pdf) [PNG](results/figures/{each.name}.png)"
        for each in figures()
    )


def first_line() -> str:
    """The first line of the ledger as readable JSON, without most items of long lists."""
    with (RESULTS / "ledger.jsonl").open(encoding="utf-8") as lines:
        return f"```json\n{json.dumps(shortened(json.loads(next(lines))), indent=1)}\n```"


def shortened(value: Any) -> Any:
    """JSON whose lists have at most two items, then "..."."""
    if isinstance(value, dict):
        return {name: shortened(each) for name, each in value.items()}
    if isinstance(value, list):
        return [shortened(each) for each in value[:2]] + ["..."] * (len(value) > 2)
    return value


def write_report(file: Path) -> None:
    """The page of all runs, as `quacklr report` makes it, from the ledger and the figures in results/."""
    entries = list(Ledger(RESULTS / "ledger.jsonl").entries().values())
    claims = claim_results(Results(entries, scale_of(Size())))
    file.write_text(page(entries, claims, figures(), "All runs of the study"), encoding="utf-8")
