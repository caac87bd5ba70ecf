"""The identity of a run: which options a resumed run must share, and which run a checkpoint belongs to."""

from __future__ import annotations

from dataclasses import replace

from quacklr.lab.config import Config, Machine, Watch, fingerprint
from quacklr.lab.optim import Constant


def resume_key(config: Config) -> Config:
    """The options that a resumed run cannot change: all but measurements, machine and number of steps.

    With a schedule that ends, the number of steps is included. The corpus is not: its fingerprint is compared instead.
    """
    steps = 10**9 if isinstance(config.schedule, Constant) else config.training.steps
    training = replace(config.training, steps=steps, corpus="")
    return replace(config, training=training, watch=Watch(), machine=Machine())


def run_identity(config: Config, corpus: str) -> str:
    """The identity of a run in its checkpoints: fingerprints of the configuration and of the corpus."""
    return f"{fingerprint(resume_key(config))}-{corpus}"
