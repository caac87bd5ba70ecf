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
from quacklr.lab.optim import AdamWRecipe
from quacklr.lab.presets import ATTENTIONS, PRESETS
from quacklr.lab.studies.cell import Cell, cell_of, with_seed

RATES: dict[str, tuple[float, ...]] = {
    "cpu": (1e-3, 1e-2, 1e-1),  # higher than the paper's: in a smaller model, logits explode at a higher rate
    "100m": (3e-4, 3e-3, 3e-2),
    "paper": (3e-4, 3e-3, 3e-2),
}
ADAMW_RELATIVE_RATE = 0.3
"""Learning rates of AdamW, relative to those of Muon. The default is unstable at the highest rate of each."""


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

    def run(self, attention: str, method: Method, lr: float) -> Config:
        """The run of a method with Muon, with seed 0."""
        return self.cell(attention, lr).run(method, 0)

    def cell(self, attention: str, lr: float, *, adamw: bool = False, latent_norm: bool = False) -> Cell:
        """A cell. `lr` is the learning rate of Muon; with `adamw`, it is multiplied by ADAMW_RELATIVE_RATE."""
        spec = self.attentions[attention]
        spec = replace(spec, latent_norm=latent_norm) if isinstance(spec, MLA) else spec
        lr = float(f"{lr * ADAMW_RELATIVE_RATE:.6g}") if adamw else lr  # 0.003, not 0.0029999999999999996
        optimizer = replace(AdamWRecipe() if adamw else self.base.optimizer, lr=lr)
        norms = " with latent norms" if latent_norm else ""
        model = f"{attention.upper()}{norms}, {'AdamW' if adamw else 'Muon'}"
        return cell_of(model, replace(self.base, attention=spec, optimizer=optimizer))

    def cells(self) -> list[Cell]:
        """All kinds of attention, optimizers and learning rates; the highest learning rate first."""
        models = [(attention, False) for attention in self.attentions] + [("mla", True)]
        return [
            self.cell(attention, lr, adamw=adamw, latent_norm=latent_norm)
            for attention, latent_norm in models
            for adamw in (False, True)
            for lr in reversed(self.rates)
        ]

    def contains(self, config: Config) -> bool:
        """Whether a run belongs to this scale: its configuration is the base in everything that studies do not vary."""
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
    """Training data; by default that of the scale."""
    steps: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")] = None
    """Steps of each run; by default those of the scale."""


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
