"""A cell: everything of a run except the method and the seed. Methods are compared within a cell."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from quacklr.lab.config import Config
from quacklr.lab.methods import Default, Method
from quacklr.lab.optim import AdamWRecipe

TUNING_SEED = 0
"""The seed that settings are selected on. Methods are judged on the seeds 1, 2, ..."""


@dataclass(frozen=True)
class Cell:
    """Where methods are compared: a model, its data, an optimizer and a learning rate."""

    model: str
    """The attention and the optimizer, such as `MLA with latent norms, AdamW`."""
    base: Config

    @property
    def lr(self) -> float:
        """The learning rate."""
        return self.base.optimizer.lr

    @property
    def adamw(self) -> bool:
        """Whether AdamW trains all weights, and not Muon."""
        return isinstance(self.base.optimizer, AdamWRecipe)

    @property
    def latent_norm(self) -> bool:
        """Whether the latents of MLA have norms."""
        return bool(getattr(self.base.attention, "latent_norm", False))

    def __str__(self) -> str:
        return f"{self.model}, lr {self.lr:g}"

    def changed(self, description: str, **parts: Any) -> Cell:
        """The cell with other parts of its configuration, and a description of the change for its name."""
        return Cell(f"{self.model}, {description}", replace(self.base, **parts))

    def run(self, method: Method, seed: int) -> Config:
        """The run of a method in this cell."""
        return replace(with_seed(self.base, seed), method=method)


def cell_of(model: str, config: Config) -> Cell:
    """The cell of a run."""
    return Cell(model, replace(with_seed(config, TUNING_SEED), method=Default()))


def with_seed(config: Config, seed: int) -> Config:
    """The run with another seed."""
    return replace(config, training=replace(config.training, seed=seed))
