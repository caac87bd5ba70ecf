"""A ledger, asked questions: which runs are there, what did a method reach at its best, how do two differ by seed.

The runs of one method at one learning rate differ in its settings (tau, threshold). A method is compared at its best
setting, and so that no run is judged by the seed that chose its setting, the one for a seed is chosen on the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from statistics import mean, stdev
from typing import Any

from quacklr.lab.config import Config, values_of
from quacklr.lab.ledger import Entry
from quacklr.lab.methods import ConstantTau, Default, Method
from quacklr.lab.model import MLA
from quacklr.lab.optim import MuonRecipe
from quacklr.lab.studies.finding import Comparison
from quacklr.lab.studies.names import NAMES, method_name, settings_of
from quacklr.lab.studies.scale import StudyScale

Seeds = dict[int, Entry]
Measure = Callable[[Entry], float]
LOST = 38.0
"""The power of ten at which floating-point numbers end: logits of a run that was lost."""


class NotRun(Exception):  # noqa: N818 - not an error: a study may be partly done
    """The ledger has no runs, or too few seeds, for a question."""


class Results:
    """The runs of a ledger that were made at one scale."""

    def __init__(self, entries: Iterable[Entry], scale: StudyScale) -> None:
        self.scale, self.every = scale, list(entries)
        here = [entry for entry in self.every if _fixed(entry.config, scale) == scale.base]
        self.entries = [entry for entry in here if entry.status != "crashed"]
        self.crashed = [entry for entry in here if entry.status == "crashed"]

    def runs(
        self,
        attention: str,
        method: type[Method] | Method,
        lr: float | None = None,
        optimizer: type = MuonRecipe,
        latent_norm: bool = False,
    ) -> dict[tuple[Method, float], Seeds]:
        """By method with its settings and learning rate: its runs by seed.

        A type means all that its paper sweeps over, which is its first field (tau, threshold), and for a constant tau
        the default too, which has tau 1; an instance means itself only.
        """
        spec = self.scale.attentions[attention]
        spec = replace(spec, latent_norm=latent_norm) if isinstance(spec, MLA) else spec
        found: dict[tuple[Method, float], Seeds] = {}
        for entry in self.entries:
            config = entry.config
            seen_as = as_kind(config.method, method)
            here = config.attention == spec and isinstance(config.optimizer, optimizer)
            if seen_as is not None and here and lr in (None, config.optimizer.lr):
                run = replace(entry, config=replace(config, method=seen_as))
                found.setdefault((seen_as, config.optimizer.lr), {})[config.training.seed] = run
        if not found:
            name = NAMES[method] if isinstance(method, type) else f"{method_name(method)} ({settings_of(method)})"
            raise NotRun(f"no run of {name} with {attention.upper()}" + (f" at lr {lr:g}" if lr else ""))
        return found

    def best(self, attention: str, method: type[Method] | Method, lr: float | None = None, **where: Any) -> Seeds:
        """The method's runs by seed, each at the setting that was best with the others; the rate too, unless given."""
        return best_by_the_others(self.runs(attention, method, lr, **where).values())


def lr_sensitivity(results: Results, attention: str, method: type[Method]) -> dict[int, float]:
    """Wortsman et al. 2023: how far the loss is above its minimum over learning rates, in the mean over them, by seed.

    The method is at its best setting at every rate; a loss counts as at most that of the untrained model.
    """
    rows = [measured(results.best(attention, method, lr), loss) for lr in results.scale.rates]
    seeds = sorted(set.intersection(*(set(row) for row in rows)))
    if not seeds:
        raise NotRun("its learning rates have no seed in common")
    return {seed: mean(row[seed] for row in rows) - min(row[seed] for row in rows) for seed in seeds}


def as_kind(method: Method, kind: type[Method] | Method) -> Method | None:
    """The method, if it is this one, or of this type with everything but its first field at the default; else None."""
    if not isinstance(kind, type):
        return method if method == kind else None
    if kind is ConstantTau and method == Default():
        return ConstantTau(1.0)
    swept = type(method) is kind and list(values_of(method).values())[1:] == list(values_of(kind()).values())[1:]
    return method if swept else None


def best_by_the_others(settings: Iterable[Seeds]) -> Seeds:
    """For each seed the run of the setting with the lowest mean loss on all other seeds.

    The seeds are those that all settings have; one tried with a single seed while others have more is left out.
    """
    candidates = list(settings)
    enough = min(2, max(len(runs) for runs in candidates))
    candidates = [runs for runs in candidates if len(runs) >= enough]
    seeds = set.intersection(*(set(runs) for runs in candidates))
    if not seeds:
        raise NotRun("its settings have no seed in common")
    if len(candidates) == 1:
        return {seed: candidates[0][seed] for seed in sorted(seeds)}

    def elsewhere(seed: int) -> Seeds:
        others = seeds - {seed} or seeds
        return min(candidates, key=lambda runs: mean(loss(runs[at]) for at in others))

    return {seed: elsewhere(seed)[seed] for seed in sorted(seeds)}


def loss(entry: Entry) -> float:
    """Validation loss at the end; of a run that diverged, that of the untrained model (Wortsman et al. 2023)."""
    if entry.status == "finished":
        return float(entry.result["val_loss"])
    for _, value in entry.curve("val_loss"):
        return float(value)
    raise NotRun(f"{entry.key} has no validation loss, not even of the untrained model")


def largest_logit(entry: Entry) -> float:
    """The largest logit of all heads at the last measurement, as a power of ten."""
    return _worst(entry, "max", -1)


def step_change(entry: Entry) -> float:
    """How far one step moved the logits of the worst head in the mean, at the last measurement, as a power of ten."""
    return _worst(entry, "step_change", -1)


def middle_step_change(entry: Entry) -> float:
    """The same in the middle of training."""
    return _worst(entry, "step_change", sum(1 for _ in entry.curve("logits", "step_change")) // 2)


def step_time(entry: Entry) -> float:
    """Median time of a step, as a power of ten."""
    if not entry.step_seconds or entry.step_seconds < 0:
        raise NotRun(f"{entry.key} has no times")
    return math.log10(entry.step_seconds)


def _worst(entry: Entry, name: str, place: int) -> float:
    """The largest over layers and heads of one of the measurements; of a run that diverged, more than any number."""
    tables = [table for _, table in entry.curve("logits", name)]
    values = [value for row in tables[place] for value in row] if tables else []
    if entry.status == "diverged" or None in values:
        return LOST
    if not values:
        raise NotRun(f"{entry.key} has no measurement of {name}")
    return math.log10(max(*values, 1e-12))


def compare(label: str, one: Mapping[int, float], other: Mapping[int, float]) -> Comparison:
    """The difference over the seeds that both have, with the 95 % interval of its mean."""
    shared = sorted(one.keys() & other.keys())
    if len(shared) < 2:
        raise NotRun(f"{label}: {len(shared)} seeds in common, an interval needs two")
    differences = [one[seed] - other[seed] for seed in shared]
    spread = stdev(differences)
    half = t_quantile(len(shared) - 1) * spread / math.sqrt(len(shared))
    center = mean(differences)
    return Comparison(label, center, center - half, center + half, len(shared), spread)


def measured(runs: Seeds, measure: Measure) -> dict[int, float]:
    """A number of each run."""
    return {seed: measure(entry) for seed, entry in runs.items()}


def chosen(runs: Seeds) -> str:
    """The settings at which a method was best, such as `tau 1` or `tau 0.1 or tau 0.3`."""
    return " or ".join(dict.fromkeys(text for entry in runs.values() if (text := settings_of(entry.config.method))))


def t_quantile(freedom: int, level: float = 0.975) -> float:
    """Student's t: the number that its variable is below with this probability. By bisection of the integral."""
    scale = math.gamma((freedom + 1) / 2) / math.sqrt(freedom * math.pi) / math.gamma(freedom / 2)

    def below(t: float) -> float:
        # with t = sqrt(freedom) tan(a) the density becomes a power of cos(a), which Simpson's rule likes
        angle, parts = math.atan(t / math.sqrt(freedom)), 400
        values = [math.cos(angle * k / parts) ** (freedom - 1) for k in range(parts + 1)]
        simpson = values[0] + values[-1] + 4 * sum(values[1:-1:2]) + 2 * sum(values[2:-1:2])
        return 0.5 + scale * math.sqrt(freedom) * simpson * angle / parts / 3

    low, high = 0.0, 1e3
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < level else (low, middle)
    return low


def _fixed(config: Config, scale: StudyScale) -> Config:
    """The configuration with everything that studies vary set back to the scale's base."""
    base = scale.base
    training = replace(config.training, seed=base.training.seed)
    return replace(
        config,
        attention=base.attention,
        method=base.method,
        optimizer=base.optimizer,
        training=training,
        machine=replace(config.machine, threads=base.machine.threads),
    )
