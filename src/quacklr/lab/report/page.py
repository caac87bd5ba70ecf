"""One HTML page from a ledger: claims, figures, and every run with its curves. It opens from disk, without a network.

The file contains everything: style, scripts, each run as JSON, and plotly.js as text that is run when a run is first
opened. All text is escaped. A content security policy allows only these scripts, and no requests.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

from quacklr import __version__
from quacklr.lab.config import Config, kind_of, to_json
from quacklr.lab.ledger import LOSS_DIGITS, Entry, rounded
from quacklr.lab.studies.comparison import Comparison
from quacklr.lab.studies.names import METHOD_NAMES, describe, method_name, settings_of
from quacklr.lab.studies.verdicts import ClaimResult
from quacklr.lab.sweep.code_version import code_version

FOLDER = Path(__file__).parent
SCRIPTS = ("run.js", "page.js")
CLAIMS_FIGURE = "figure-8-claims"  # stands with the claims, not with the other figures
IN_COLUMNS = ("lr", "seed", "latent_norm")  # options that have a column in the table of runs
TITLES = {"paper": "What the paper claims", "own": "What we asked ourselves"}


@dataclass(frozen=True)
class PageFigure:
    """A figure of the page."""

    name: str
    """One word, for links."""
    title: str
    caption: str
    svg: str
    """The content of an SVG file. It is embedded as an image, so its ids and styles do not affect the page."""

    @property
    def address(self) -> str:
        """The image as a data URL."""
        return "data:image/svg+xml;base64," + base64.b64encode(self.svg.encode()).decode()


@dataclass(frozen=True)
class RunRow:
    """A row of the table of runs."""

    entry: Entry
    name: str
    attention: str
    method: str
    settings: str
    optimizer: str
    recipe: str
    """The optimizer and its learning rate, which have one filter."""
    steps: int
    data: dict[str, Any]
    """The data for the view of the run."""


def run_row(entry: Entry, unusual: str) -> RunRow:
    """The row of a run; `unusual` are options without a column in which it differs from most others."""
    config, name = entry.config, describe(entry.config)
    norms = ", latent norms" if getattr(config.attention, "latent_norm", False) else ""
    optimizer = kind_of("optimizer", config.optimizer)
    return RunRow(
        entry,
        name,
        attention=kind_of("attention", config.attention).upper() + norms,
        method=method_name(config.method),
        settings=", ".join(filter(None, (settings_of(config.method), unusual, other_code(entry)))),
        optimizer=optimizer,
        recipe=f"{optimizer}, lr {config.optimizer.lr:g}",
        steps=entry.result.get("step", len(entry.losses)),
        data=rounded(entry.to_json(), LOSS_DIGITS) | {"config": to_json(config), "name": name},
    )


def page(entries: Sequence[Entry], claims: Sequence[ClaimResult], figures: Sequence[PageFigure], title: str) -> str:
    """The whole page; deterministic. About 5 MB of it is plotly.js, and 13 KB each run of the scale `cpu`."""
    plotly, *scripts = map(inline, (get_plotlyjs(), *((FOLDER / name).read_text() for name in SCRIPTS)))
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "reach": reach, "finite": finite}
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    configs = [entry.config for entry in entries]
    rows = [run_row(entry, unusual) for entry, unusual in zip(entries, unusual_options(configs), strict=True)]
    return environment.get_template("page.html.j2").render(
        title=title,
        sentence=overview(configs),
        groups={TITLES[source]: [each for each in claims if each.source == source] for source in TITLES},
        verdicts=Counter(each.verdict for each in claims),
        claims_figures=[figure for figure in figures if figure.name == CLAIMS_FIGURE],
        figures=[figure for figure in figures if figure.name != CLAIMS_FIGURE],
        lines=rows,
        choices=choices(rows),
        style=Markup((FOLDER / "page.css").read_text()),
        plotly=plotly,
        scripts=scripts,
        hashes=Markup(" ".join(f"'sha256-{digest(script)}'" for script in (plotly, *scripts))),
        version=__version__,
    )


def other_code(entry: Entry) -> str:
    """A mark for a run that another version of the code has trained, or code whose version was not recorded."""
    code = entry.environment.get("code", "not recorded")
    return "" if code == code_version() else f"code {code}"


def inline(script: str) -> Markup:
    """A trusted script, escaped so that it cannot end its <script> element."""
    return Markup(script.replace("\r\n", "\n").replace("</script", "<\\/script").replace("<!--", "<\\!--"))


def digest(script: str) -> str:
    """The hash of a script for the content security policy."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def overview(configs: Sequence[Config]) -> str:
    """Such as `24 runs with 3 seeds, of 1 size (4 layers of width 128), trained on stdlib`."""
    if not configs:
        return "No run has ended yet"
    seeds = {config.training.seed for config in configs}
    sizes = dict.fromkeys(f"{config.shape.layers} layers of width {config.shape.d_model}" for config in configs)
    corpora = dict.fromkeys(config.training.corpus for config in configs)
    runs = f"{count(configs, 'run')} with {count(seeds, 'seed')}, of {count(sizes, 'size')} ({'; '.join(sizes)})"
    return f"{runs}, trained on {', '.join(corpora)}"


def count(things: Sized, word: str) -> str:
    """`1 run`, `2 runs`."""
    return f"{len(things)} {word}{'' if len(things) == 1 else 's'}"


def unusual_options(configs: Sequence[Config]) -> list[str]:
    """For each run, the options without a column whose value is not the most common one: no two rows look the same."""
    options = [other_options(config) for config in configs]
    values: dict[tuple[str, str, str], Counter[str]] = {}
    for each in options:
        for option, value in each.items():
            values.setdefault(option, Counter())[value] += 1
    usual = {option: counts.most_common(1)[0][0] for option, counts in values.items()}
    return [
        ", ".join(f"{option[-1]} {value}" for option, value in each.items() if value != usual[option])
        for each in options
    ]


def other_options(config: Config) -> dict[tuple[str, str, str], str]:
    """The options that affect a run and have no column, by part, kind of that part, and name."""
    parts = {name: part for name, part in to_json(config).items() if name not in ("method", "machine", "watch")}
    options = {
        (name, part.get("kind", ""), option): f"{value:g}" if isinstance(value, float) else str(value)
        for name, part in parts.items()
        for option, value in part.items()
        if option not in ("kind", *IN_COLUMNS)
    }
    return options | {("", "", "schedule"): parts["schedule"]["kind"], ("", "", "precision"): config.machine.precision}


def choices(rows: Sequence[RunRow]) -> dict[str, list[str]]:
    """The values that each filter offers."""
    order = list(METHOD_NAMES.values())
    by_rate = sorted(rows, key=lambda row: (row.optimizer, row.entry.config.optimizer.lr))
    return {
        "attention": sorted({row.attention for row in rows}),
        "method": sorted({row.method for row in rows}, key=order.index),
        "optimizer": list(dict.fromkeys(row.recipe for row in by_rate)),
        "status": sorted({row.entry.status for row in rows}),
    }


def finite(value: float | None) -> bool:
    """Whether the value is a finite number."""
    return value is not None and math.isfinite(value)


def number(value: float | None, digits: str = ".4g") -> str:
    """The formatted number, or a dash if it is not finite."""
    return format(value, digits) if value is not None and finite(value) else "-"


def reach(evidence: Iterable[Comparison]) -> float:
    """The largest absolute value of seeds and ends of intervals, which is the scale for drawing them."""
    values = [value for each in evidence for value in (each.mean, each.low, each.high, *each.differences)]
    return max((abs(value) for value in values if math.isfinite(value)), default=0) or 1
