"""A size at which studies are run: a preset, its kinds of attention, and the learning rates that matter there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import tyro

from quacklr.lab.config import Config
from quacklr.lab.errors import UserError
from quacklr.lab.methods import Method
from quacklr.lab.model import MHA, MLA
from quacklr.lab.presets import ATTENTIONS, PRESETS

RATES: dict[str, tuple[float, ...]] = {
    "cpu": (1e-3, 1e-2, 1e-1),  # the paper's in thirds: the rate at which logits explode falls as the model grows
    "100m": (3e-4, 3e-3, 3e-2),
    "paper": (3e-4, 3e-3, 3e-2),
}


@dataclass(frozen=True)
class StudyScale:
    """Everything that a study leaves fixed."""

    name: str
    base: Config
    attentions: dict[str, MHA | MLA]
    rates: tuple[float, ...]
    """Base learning rates, from the lowest to the one at which the default breaks."""

    @property
    def high(self) -> float:
        """The highest of the learning rates."""
        return self.rates[-1]

    def run(self, attention: str, method: Method, lr: float, **changes: Any) -> Config:
        """One configuration of a study; `changes` replace other parts of the base."""
        optimizer = replace(changes.pop("optimizer", self.base.optimizer), lr=lr)
        config = replace(self.base, attention=self.attentions[attention], **changes)
        return replace(config, method=method, optimizer=optimizer)


@dataclass(frozen=True)
class Size:
    """The size of the models, their data, and the length of the runs."""

    scale: Annotated[Literal["cpu", "100m", "paper"], tyro.conf.arg(help_behavior_hint="")] = "cpu"
    """The size of the models; the larger ones need GPUs."""
    corpus: Annotated[str | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="")] = None
    """Other data than that of the scale."""
    steps: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")] = None
    """Shorter or longer runs than those of the scale."""


def scale_of(size: Size) -> StudyScale:
    """The scale that the options mean, named for people: `cpu`, `cpu, 150 steps`."""
    preset = "paper-mha" if size.scale == "paper" else size.scale
    given: dict[str, Any] = {
        name: value for name, value in {"corpus": size.corpus, "steps": size.steps}.items() if value is not None
    }
    base = PRESETS[preset]
    if size.steps is not None and size.steps < base.schedule.warmup:
        raise UserError(f"--steps {size.steps} is less than the warmup of {base.schedule.warmup} steps")
    watch = replace(base.watch, eval_every=base.watch.eval_every // 2, probe_every=base.watch.probe_every // 2)
    base = replace(base, training=replace(base.training, **given), watch=watch)  # smoother curves
    name = size.scale + "".join(
        [f", {size.steps} steps" if size.steps else "", f", {size.corpus}" if size.corpus else ""]
    )
    return StudyScale(name, base, ATTENTIONS[preset], RATES[size.scale])


def seeded(configs: Iterator[Config], seeds: int) -> Iterator[Config]:
    """All of them with seed 0, then all with seed 1, and so on: what is stopped early has whole seeds."""
    grid = list(configs)
    for seed in range(seeds):
        for config in grid:
            yield replace(config, training=replace(config.training, seed=seed))
