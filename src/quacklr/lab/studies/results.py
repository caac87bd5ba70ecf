"""Queries on a ledger: the runs of a method, its best setting, and differences between methods, paired by seed.

The runs of one method at one learning rate differ in its settings (tau, threshold). Methods are compared at their best
setting. For each seed the setting is selected on the other seeds, so no run is selected by its own result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import mean, stdev
from typing import Any, TypeVar

from quacklr.lab.config import values_of
from quacklr.lab.ledger import Entry
from quacklr.lab.methods import Budget, ConstantTau, Default, Method
from quacklr.lab.model import MLA
from quacklr.lab.optim import MuonRecipe
from quacklr.lab.studies.names import METHOD_NAMES, method_name, settings_of
from quacklr.lab.studies.scale import StudyScale

Key = TypeVar("Key")
Value = TypeVar("Value")
RunsBySeed = dict[int, Entry]
Measure = Callable[[Entry], float]
DIVERGED_LOG10 = 38.0
"""log10 of the largest float32, which stands for the logits of a run that diverged."""


class NotRun(Exception):  # noqa: N818 - not an error: a study may be partly done
    """The ledger has no runs, or too few seeds, for a question."""


@dataclass(frozen=True)
class Comparison:
    """A mean difference between two quantities measured with the same seeds, and its confidence interval."""

    label: str
    """Which minus which, such as `MLA, lr 0.1: QuacK (tau 1) - constant tau (tau 0.1), validation loss`."""
    mean: float
    low: float
    high: float
    """Ends of the 95 % interval of the mean over seeds (Student's t)."""
    seeds: int
    spread: float
    """Standard deviation over the seeds."""

    def __str__(self) -> str:
        interval = f"[{self.low:+.3g}, {self.high:+.3g}]"
        return f"{self.label}: {self.mean:+.3g} {interval}, {self.seeds} seeds, sd {self.spread:.2g}"


class Results:
    """The runs of a ledger that belong to one scale."""

    def __init__(self, entries: Iterable[Entry], scale: StudyScale) -> None:
        self.scale, self.ledger = scale, list(entries)
        of_scale = [entry for entry in self.ledger if scale.contains(entry.config)]
        self.entries = [entry for entry in of_scale if entry.status != "crashed"]
        self.crashed = [entry for entry in of_scale if entry.status == "crashed"]

    def runs(
        self,
        attention: str,
        method: type[Method] | Method,
        lr: float | None = None,
        optimizer: type = MuonRecipe,
        latent_norm: bool = False,
    ) -> dict[tuple[Method, float], RunsBySeed]:
        """The runs of a method by setting and learning rate, then by seed.

        A type selects all values of its first field (tau, threshold), which its paper sweeps; ConstantTau includes the
        default, which has tau 1. Budget selects its default only. An instance selects only itself.
        """
        spec = self.scale.attentions[attention]
        spec = replace(spec, latent_norm=latent_norm) if isinstance(spec, MLA) else spec
        found: dict[tuple[Method, float], RunsBySeed] = {}
        for entry in self.entries:
            config = entry.config
            setting = matching_setting(config.method, method)
            selected = config.attention == spec and isinstance(config.optimizer, optimizer)
            if setting is not None and selected and lr in (None, config.optimizer.lr):
                run = replace(entry, config=replace(config, method=setting))
                found.setdefault((setting, config.optimizer.lr), {})[config.training.seed] = run
        if not found:
            name = (
                METHOD_NAMES[method] if isinstance(method, type) else f"{method_name(method)} ({settings_of(method)})"
            )
            raise NotRun(f"no run of {name} with {attention.upper()}" + (f" at lr {lr:g}" if lr else ""))
        return found

    def best(self, attention: str, method: type[Method] | Method, lr: float | None = None, **where: Any) -> RunsBySeed:
        """The runs of a method by seed, each at the best setting (and learning rate, unless given) on other seeds."""
        return leave_one_out_best(self.runs(attention, method, lr, **where).values())

    def lr_sensitivity(self, attention: str, method: type[Method]) -> dict[int, float]:
        """The sensitivity to the learning rate by seed, of a method at its best setting at every rate."""
        return lr_sensitivity([self.best(attention, method, lr) for lr in self.scale.rates])


def available(keys: Iterable[Key], query: Callable[[Key], Value]) -> dict[Key, Value]:
    """The query's result for every key for which the ledger has runs."""
    found = {}
    for key in keys:
        with suppress(NotRun):
            found[key] = query(key)
    return found


def lr_sensitivity(of_rates: Sequence[RunsBySeed]) -> dict[int, float]:
    """Learning-rate sensitivity by seed (Wortsman et al. 2023): mean minus minimum of the loss over learning rates.

    The loss of a run that diverged is that of the untrained model.
    """
    rows = [by_seed(runs, loss) for runs in of_rates]
    seeds = sorted(set.intersection(*(set(row) for row in rows)))
    if not seeds:
        raise NotRun("its learning rates have no seed in common")
    return {seed: mean(row[seed] for row in rows) - min(row[seed] for row in rows) for seed in seeds}


def matching_setting(method: Method, wanted: type[Method] | Method) -> Method | None:
    """The method, if it equals `wanted`, or has this type and only its first field is not at the default; else None."""
    if wanted is Budget:  # one budget for all runs
        wanted = Budget()
    if not isinstance(wanted, type):
        return method if method == wanted else None
    if wanted is ConstantTau and method == Default():
        return ConstantTau(1.0)
    matches = type(method) is wanted and list(values_of(method).values())[1:] == list(values_of(wanted()).values())[1:]
    return method if matches else None


def leave_one_out_best(settings: Iterable[RunsBySeed]) -> RunsBySeed:
    """For each seed, the run of the setting with the lowest mean loss on all other seeds.

    Only seeds that all settings have are used. A setting with fewer than three seeds is ignored if others have more.
    """
    candidates = list(settings)
    enough = min(3, max(len(runs) for runs in candidates))
    candidates = [runs for runs in candidates if len(runs) >= enough]
    seeds = set.intersection(*(set(runs) for runs in candidates))
    if not seeds:
        raise NotRun("its settings have no seed in common")
    if len(candidates) == 1:
        return {seed: candidates[0][seed] for seed in sorted(seeds)}

    def best_without(seed: int) -> RunsBySeed:
        others = seeds - {seed} or seeds
        return min(candidates, key=lambda runs: mean(loss(runs[other]) for other in others))

    return {seed: best_without(seed)[seed] for seed in sorted(seeds)}


def loss(entry: Entry) -> float:
    """The final validation loss; for a run that diverged, that of the untrained model (Wortsman et al. 2023)."""
    if entry.status == "finished":
        return float(entry.result["val_loss"])
    for _, value in entry.curve("val_loss"):
        return float(value)
    raise NotRun(f"{entry.key} has no validation loss, not even of the untrained model")


def largest_logit(entry: Entry) -> float:
    """log10 of the largest logit over layers and heads at the last measurement."""
    return _log10_of_largest(entry, "max", -1)


def step_change(entry: Entry) -> float:
    """log10 of the mean change of the logits by one step, of the head where it is largest, at the last measurement."""
    return _log10_of_largest(entry, "step_change", -1)


def middle_step_change(entry: Entry) -> float:
    """`step_change` in the middle of training."""
    return _log10_of_largest(entry, "step_change", sum(1 for _ in entry.curve("logits", "step_change")) // 2)


def step_time(entry: Entry) -> float:
    """log10 of the median time of a step."""
    if not entry.step_seconds or entry.step_seconds < 0:
        raise NotRun(f"{entry.key} has no times")
    return math.log10(entry.step_seconds)


def _log10_of_largest(entry: Entry, name: str, index: int) -> float:
    """log10 of the largest value over layers and heads in one measurement; DIVERGED_LOG10 if the run diverged."""
    tables = [table for _, table in entry.curve("logits", name)]
    values = [value for row in tables[index] for value in row] if tables else []
    if entry.status == "diverged" or None in values:
        return DIVERGED_LOG10
    if not values:
        raise NotRun(f"{entry.key} has no measurement of {name}")
    return math.log10(max(*values, 1e-12))


def compare(label: str, one: Mapping[int, float], other: Mapping[int, float]) -> Comparison:
    """The mean difference over the seeds that both have, with its 95 % interval."""
    shared = sorted(one.keys() & other.keys())
    if len(shared) < 2:
        raise NotRun(f"{label}: {len(shared)} seeds in common, an interval needs two")
    differences = [one[seed] - other[seed] for seed in shared]
    center, spread = mean(differences), stdev(differences)
    half = t_quantile(len(shared) - 1) * spread / math.sqrt(len(shared))
    return Comparison(label, center, center - half, center + half, len(shared), spread)


def by_seed(runs: RunsBySeed, measure: Measure) -> dict[int, float]:
    """The measure of each run, by seed."""
    return {seed: measure(entry) for seed, entry in runs.items()}


def settings_text(runs: RunsBySeed) -> str:
    """The settings of these runs of one method, such as `tau 1` or `tau 0.1 or tau 0.3`."""
    return " or ".join(dict.fromkeys(text for entry in runs.values() if (text := settings_of(entry.config.method))))


def t_quantile(freedom: int, level: float = 0.975) -> float:
    """Quantile of Student's t distribution, by bisection of its integral; scipy is not a dependency of the lab."""
    scale = math.gamma((freedom + 1) / 2) / math.sqrt(freedom * math.pi) / math.gamma(freedom / 2)

    def cdf(t: float) -> float:
        # substituting t = sqrt(freedom) tan(a) makes the density a power of cos(a), which Simpson's rule integrates
        angle, parts = math.atan(t / math.sqrt(freedom)), 400
        values = [math.cos(angle * k / parts) ** (freedom - 1) for k in range(parts + 1)]
        simpson = values[0] + values[-1] + 4 * sum(values[1:-1:2]) + 2 * sum(values[2:-1:2])
        return 0.5 + scale * math.sqrt(freedom) * simpson * angle / parts / 3

    low, high = 0.0, 1e3
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if cdf(middle) < level else (low, middle)
    return low
