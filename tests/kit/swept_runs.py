"""Sweeps over tiny models, and ledgers with numbers made by hand.

python swept_runs.py CORPUS OUT      a sweep of three runs on this machine, to be killed or stopped
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from lab_runs import ATTENTIONS, small
from quacklr.lab.config import Config
from quacklr.lab.ledger import Entry, Ledger
from quacklr.lab.methods import Default, Method, QKNorm, Quack
from quacklr.lab.studies.scale import StudyScale
from quacklr.lab.sweep.local import Local
from quacklr.lab.sweep.sweep import missing, sweep

TINY_RATES = (0.001, 0.01, 0.1)


def tiny_scale(corpus: Path, **training: Any) -> StudyScale:
    """A scale whose models have a few thousand parameters."""
    return StudyScale("tiny", small(corpus, Default(), ATTENTIONS["mha"], **training), ATTENTIONS, TINY_RATES)


def three(corpus: Path, **training: Any) -> list[Config]:
    methods: tuple[Method, ...] = (Default(), Quack(), QKNorm())
    return [small(corpus, method, ATTENTIONS["mla"], **training) for method in methods]


def made(config: Config, final: float, top: float = 10.0, change: float = 0.1, seconds: float = 0.1) -> Entry:
    """A run that ended like this; its curves are straight lines to the end."""
    layers, heads = config.shape.layers, config.attention.heads

    def table(value: float) -> list[list[float]]:
        return [[value * (layer + 1) * (head + 1) / layers / heads for head in range(heads)] for layer in range(layers)]

    history = []
    for part in (0, 1, 2, 3, 4):
        logits = {"max": table(top * part / 4 + 0.1), "entropy": table(1.0), "change": table(change)}
        logits |= {"step_change": table(change)} if part else {}
        step = config.training.steps * part // 4
        history.append({"step": step, "val_loss": 5.5 + (final - 5.5) * part / 4, "logits": logits})
    result = {"status": "finished", "reason": None, "step": config.training.steps, "val_loss": final}
    result["max_logit"] = top + 0.1  # as in the last row of the history
    return Entry(config, "finished", None, result, history, [5.5, final], seconds)


def seeds_of(config: Config, values: list[float], **more: Any) -> Iterator[Entry]:
    """A run for each value, with seeds 0, 1, ..."""
    for seed, value in enumerate(values):
        yield made(replace(config, training=replace(config.training, seed=seed)), value, **more)


def main(corpus: Path, out: Path) -> None:
    ledger = Ledger(out / "ledger.jsonl", details=True)
    state = sweep(missing(three(corpus), ledger.entries()), ledger, Local(jobs=2, threads=1), out / "runs")
    sys.exit(0 if state.stopped is None else 128 + state.stopped)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
