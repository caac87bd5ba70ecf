"""One HTML page from a ledger: claims, figures, and every run with its curves. It opens from disk, without a network.

All that the page needs is in the file: style, scripts, plotly.js as text that is read when the first run is opened, and
each run as JSON. Text is escaped wherever it stands. A policy in the page lets a browser run these scripts and no
other, and load nothing.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

from quacklr import __version__
from quacklr.lab.config import Config, kind_of, to_json
from quacklr.lab.ledger import Entry, rounded
from quacklr.lab.studies.finding import ClaimResult, Comparison
from quacklr.lab.studies.names import NAMES, describe, method_name, settings_of
from quacklr.lab.train.rows import Row

HERE = Path(__file__).parent
SCRIPTS = ("run.js", "page.js")
IN_COLUMNS = ("lr", "seed", "latent_norm")  # options that the table of runs shows anyway


@dataclass(frozen=True)
class Figure:
    """A plot, and what to say about it."""

    name: str
    """For links, in one word."""
    title: str
    caption: str
    svg: str
    """The text of an SVG file, such as matplotlib writes. It is shown as an image: its ids and styles stay its own."""

    @property
    def address(self) -> str:
        """The image as a URL that contains it."""
        return "data:image/svg+xml;base64," + base64.b64encode(self.svg.encode()).decode()


@dataclass(frozen=True)
class Line:
    """A run in the table."""

    entry: Entry
    attention: str
    method: str
    settings: str
    optimizer: str

    @property
    def name(self) -> str:
        """The run in one line."""
        return describe(self.entry.config)

    @property
    def recipe(self) -> str:
        """The optimizer and its learning rate, which are filtered by as one."""
        return f"{self.optimizer}, lr {self.entry.config.optimizer.lr:g}"

    @property
    def steps(self) -> int:
        """How many were taken."""
        step: int = self.entry.result.get("step", len(self.entry.losses))
        return step

    @property
    def data(self) -> Row:
        """What the page shows when the run is opened."""
        exact = {"config": to_json(self.entry.config), "name": self.name}
        return rounded(self.entry.to_json()) | exact


def page(entries: Sequence[Entry], findings: Sequence[ClaimResult], figures: Sequence[Figure], title: str) -> str:
    """The whole page; the same for the same input. About 5 MB of it are plotly.js, and 13 KB each run of size `cpu`."""
    plotly, scripts = inline(get_plotlyjs()), [inline((HERE / name).read_text()) for name in SCRIPTS]
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"number": number, "signed": signed, "reach": reach, "finite": finite}
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    lines = lines_of(entries)
    return environment.get_template("page.html.j2").render(
        title=title,
        sentence=sentence([entry.config for entry in entries]),
        groups=groups(findings),
        verdicts=Counter(finding.verdict for finding in findings),
        figures=figures,
        lines=lines,
        choices=choices(lines),
        style=Markup((HERE / "page.css").read_text()),
        plotly=plotly,
        scripts=scripts,
        hashes=Markup(" ".join(f"'sha256-{digest(script)}'" for script in (plotly, *scripts))),
        version=__version__,
    )


def inline(script: str) -> Markup:
    """A script of ours as the content of a <script>, which nothing in it can end."""
    return Markup(script.replace("\r\n", "\n").replace("</script", "<\\/script").replace("<!--", "<\\!--"))


def digest(script: str) -> str:
    """The name under which a content security policy knows a script."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def sentence(configs: Sequence[Config]) -> str:
    """How much the page rests on: `24 runs with 3 seeds, of 1 size (4 layers of width 128), trained on stdlib`."""
    if not configs:
        return "No run has ended yet"
    seeds = {config.training.seed for config in configs}
    sizes = dict.fromkeys(f"{config.shape.layers} layers of width {config.shape.d_model}" for config in configs)
    corpora = dict.fromkeys(config.training.corpus for config in configs)
    runs = f"{count(configs, 'run')} with {count(seeds, 'seed')}, of {count(sizes, 'size')} ({'; '.join(sizes)})"
    return f"{runs}, trained on {', '.join(corpora)}"


def count(things: Iterable[object], word: str) -> str:
    """`1 run`, `2 runs`."""
    number = len(list(things))
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def groups(findings: Sequence[ClaimResult]) -> dict[str, list[ClaimResult]]:
    """The paper's claims, then our own questions; only what there is."""
    titles = {"paper": "What the paper claims", "own": "What we asked ourselves"}
    found = {title: [each for each in findings if each.source == source] for source, title in titles.items()}
    return {title: each for title, each in found.items() if each}


def lines_of(entries: Sequence[Entry]) -> list[Line]:
    """The table, in the ledger's order."""
    unusual = peculiarities([entry.config for entry in entries])
    return [line_of(entry, extra) for entry, extra in zip(entries, unusual, strict=True)]


def line_of(entry: Entry, extra: str) -> Line:
    """One line of the table; `extra` are settings beside those of the method."""
    config = entry.config
    latent = ", latent norms" if getattr(config.attention, "latent_norm", False) else ""
    return Line(
        entry,
        attention=kind_of("attention", config.attention).upper() + latent,
        method=method_name(config.method),
        settings=", ".join(part for part in (settings_of(config.method), extra) if part),
        optimizer=kind_of("optimizer", config.optimizer),
    )


def peculiarities(configs: Sequence[Config]) -> list[str]:
    """For each run the options without a column in which it is unlike most others, lest two lines look the same."""
    options = [other_options(config) for config in configs]
    seen: dict[tuple[str, str, str], Counter[str]] = {}
    for each in options:
        for option, value in each.items():
            seen.setdefault(option, Counter())[value] += 1
    usual = {option: values.most_common(1)[0][0] for option, values in seen.items()}
    return [
        ", ".join(f"{option[-1]} {value}" for option, value in each.items() if value != usual[option])
        for each in options
    ]


def other_options(config: Config) -> dict[tuple[str, str, str], str]:
    """What decides a run and has no column, by part, kind of that part, and name."""
    parts = {name: part for name, part in to_json(config).items() if name not in ("method", "machine", "watch")}
    options = {
        (name, part.get("kind", ""), option): f"{value:g}" if isinstance(value, float) else str(value)
        for name, part in parts.items()
        for option, value in part.items()
        if option not in ("kind", *IN_COLUMNS)
    }
    return options | {("", "", "schedule"): parts["schedule"]["kind"], ("", "", "precision"): config.machine.precision}


def choices(lines: Sequence[Line]) -> dict[str, list[str]]:
    """What each filter offers."""
    order = list(NAMES.values())
    by_rate = sorted(lines, key=lambda line: (line.optimizer, line.entry.config.optimizer.lr))
    return {
        "attention": sorted({line.attention for line in lines}),
        "method": sorted({line.method for line in lines}, key=order.index),
        "optimizer": list(dict.fromkeys(line.recipe for line in by_rate)),
        "status": sorted({line.entry.status for line in lines}),
    }


def finite(value: Any) -> bool:
    """Whether there is a number to show."""
    return value is not None and math.isfinite(value)


def number(value: float | None) -> str:
    """Four digits, or a dash for no number."""
    return f"{value:.4g}" if value is not None and math.isfinite(value) else "-"


def signed(value: float) -> str:
    """A difference, to three digits."""
    return f"{value:+.3g}" if math.isfinite(value) else "-"


def reach(evidence: Sequence[Comparison]) -> float:
    """The farthest end of the intervals from zero, so that all can be drawn on one scale."""
    ends = (abs(end) for each in evidence for end in (each.mean, each.low, each.high) if math.isfinite(end))
    return max(ends, default=0) or 1
