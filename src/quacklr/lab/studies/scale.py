"""A scale of the studies: a preset, its kinds of attention, and its learning rates."""

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
    "cpu": (1e-3, 1e-2, 1e-1),  # above the paper's, because the rate at which logits explode falls as models grow
    "100m": (3e-4, 3e-3, 3e-2),
    "paper": (3e-4, 3e-3, 3e-2),
}


@dataclass(frozen=True)
class StudyScale:
    """The part of a configuration that studies do not vary, and the values of the parts that they vary."""

    name: str
    base: Config
    attentions: dict[str, MHA | MLA]
    rates: tuple[float, ...]
    """Learning rates, ascending. At the last one the default is unstable."""

    @property
    def high(self) -> float:
        """The highest learning rate."""
        return self.rates[-1]

    def run(self, attention: str, method: Method, lr: float, **changes: Any) -> Config:
        """One configuration of a study; `changes` replace other parts of the base."""
        optimizer = replace(changes.pop("optimizer", self.base.optimizer), lr=lr)
        config = replace(self.base, attention=self.attentions[attention], **changes)
        return replace(config, method=method, optimizer=optimizer)

    def with_latent_norms(self) -> StudyScale:
        """The scale with norms on the latents of MLA."""
        normed = {
            name: replace(spec, latent_norm=True) if isinstance(spec, MLA) else spec
            for name, spec in self.attentions.items()
        }
        return replace(self, attentions=normed)

    def contains(self, config: Config) -> bool:
        """Whether a run is of this scale: equal to the base in everything that studies do not vary."""
        base = self.base
        varied = {name: getattr(base, name) for name in ("attention", "method", "optimizer")}
        training = replace(config.training, seed=base.training.seed)
        machine = replace(config.machine, threads=base.machine.threads)
        return replace(config, **varied, training=training, machine=machine) == base


@dataclass(frozen=True)
class Size:
    """The size of the models, their data, and the length of the runs."""

    scale: Annotated[Literal["cpu", "100m", "paper"], tyro.conf.arg(help_behavior_hint="")] = "cpu"
    """The size of the models; the larger ones need GPUs."""
    corpus: Annotated[str | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="")] = None
    """Training data; that of the scale unless given."""
    steps: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")] = None
    """Steps of each run; those of the scale unless given."""


def scale_of(size: Size) -> StudyScale:
    """The scale that the options select, with a name such as `cpu` or `cpu, 150 steps`."""
    preset = "paper-mha" if size.scale == "paper" else size.scale
    base = PRESETS[preset]
    if size.steps is not None and size.steps < base.schedule.warmup:
        raise UserError(f"--steps {size.steps} is less than the warmup of {base.schedule.warmup} steps")
    options: dict[str, Any] = {"corpus": size.corpus, "steps": size.steps}
    training = replace(base.training, **{name: value for name, value in options.items() if value is not None})
    watch = replace(base.watch, eval_every=base.watch.eval_every // 2, probe_every=base.watch.probe_every // 2)
    parts = [size.scale, *([f"{size.steps} steps"] if size.steps else []), *([size.corpus] if size.corpus else [])]
    return StudyScale(
        ", ".join(parts), replace(base, training=training, watch=watch), ATTENTIONS[preset], RATES[size.scale]
    )


def seeded(configs: Iterator[Config], seeds: int) -> Iterator[Config]:
    """All configurations with seed 0, then all with seed 1, and so on, so an interrupted sweep has complete seeds."""
    grid = list(configs)
    for seed in range(seeds):
        for config in grid:
            yield with_seed(config, seed)


def with_seed(config: Config, seed: int) -> Config:
    """The run with another seed."""
    return replace(config, training=replace(config.training, seed=seed))
