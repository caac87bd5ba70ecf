"""Cells with other conditions of training than the study's: another schedule, weight decay, corpus or length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from quacklr.lab.optim import Cosine
from quacklr.lab.studies.cell import Cell

Condition = Callable[[Cell], Cell]
SPEECHES = "corpora/speeches"
"""The second corpus: addresses of the presidents of the United States. `make speeches` prepares it."""
LONGER = 10
"""How many times as many steps the longer runs have."""


def cosine_to_zero(cell: Cell) -> Cell:
    """The learning rate decays to zero along half a cosine."""
    return cell.changed("cosine to 0", schedule=Cosine(cell.base.schedule.warmup, final=0.0))


def weight_decay(cell: Cell) -> Cell:
    """Decoupled weight decay of 0.1 on all matrices."""
    return cell.changed("weight decay 0.1", optimizer=replace(cell.base.optimizer, weight_decay=0.1))


def no_gradient_clipping(cell: Cell) -> Cell:
    """The norm of the gradient is not limited."""
    return cell.changed("no gradient clipping", training=replace(cell.base.training, grad_clip=0.0))


def speeches(cell: Cell) -> Cell:
    """Natural language instead of source code."""
    return cell.changed("speeches", training=replace(cell.base.training, corpus=SPEECHES))


def longer(cell: Cell) -> Cell:
    """Ten times as many steps, with the same warmup and as many measurements."""
    training, watch = cell.base.training, cell.base.watch
    steps = LONGER * training.steps
    rarely = replace(watch, eval_every=LONGER * watch.eval_every, probe_every=LONGER * watch.probe_every)
    return cell.changed(f"{steps:,} steps", training=replace(training, steps=steps), watch=rarely)
