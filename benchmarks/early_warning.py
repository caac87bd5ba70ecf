"""Measures how early `quack.changes()` warns of attention that breaks a run, beside the largest logit.

    python benchmarks/early_warning.py                                 half an hour on one core; runs are kept, and
                                                                       after Ctrl-C the same command goes on
    python benchmarks/early_warning.py --out results/early_warning.md  also writes the table

Each cell (attention, optimizer, learning rate; the `cpu` preset of the lab) is trained without any method, and watched
by Limit(inf), which changes nothing. The ledger has the same run with Limit(0.02). Fixed before the runs:

the loss suffers   at the first of the steps 25, 50, ... from which on the validation loss of the watched run is at
                   least 0.05 above that of the limited run, at this and at every later evaluation
alarm              at the first step at which a signal is above its threshold. The signals are the largest change of
                   all heads that a step asks for, at every step, and the largest logit on a probe, every 5 steps
threshold          1.5 times the largest value of the signal in the runs of seed 1 whose loss does not suffer
judged             on seed 2: the steps from the alarm to the step at which the loss suffers; and alarms in runs whose
                   loss does not suffer
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded

import quacklr
from quacklr.lab.config import Config, fingerprint
from quacklr.lab.data import evaluation_batch, open_corpus
from quacklr.lab.ledger import Ledger
from quacklr.lab.methods import Default, Limit
from quacklr.lab.studies.scale import ADAMW_RELATIVE_RATE, Size, scale_of
from quacklr.lab.train.session import Session

CALIBRATED, JUDGED = 1, 2
WORSE, MARGIN = 0.05, 1.5
SIGNALS = {"change": 1, "logit": 5}  # each is measured every so many steps
EVALUATED = 25
RATES = [(0.1, False), (0.03, False), (0.01, False), *((lr / ADAMW_RELATIVE_RATE, True) for lr in (0.03, 0.003, 0.001))]


def cells() -> Iterator[tuple[str, Config, Config]]:
    """The label of each cell and seed, the watched run and the limited one."""
    scale = scale_of(Size())
    for seed in (CALIBRATED, JUDGED):
        for lr, adamw in RATES:
            for attention in ("mha", "mla"):
                cell = scale.cell(attention, lr, adamw=adamw)
                yield f"{cell}, seed {seed}", cell.run(Default(), seed), cell.run(Limit(), seed)


def watched_run(config: Config) -> dict[str, list[float]]:
    """The validation losses at the steps 25, 50, ..., and the signals."""
    config = replace(config, watch=replace(config.watch, probe_every=10**9))
    corpus = open_corpus(config.training.corpus)
    session = Session(config, corpus)
    probe_BT = evaluation_batch(corpus.tokens("probe"), config.watch.probe_sequences, config.shape.context)
    quack = quacklr.QuacK(session.model, session.optimizers, rule=quacklr.Limit(math.inf))
    monitor = quacklr.LogitMonitor(session.model, probe_BT[:, :-1])
    found: dict[str, list[float]] = {"loss": [], "change": [], "logit": []}
    for row in session.rows():
        if row["step"] == 0:
            continue
        found["change"].append(max(float(each.asked.max()) for each in quack.changes().values()))
        if row["step"] % SIGNALS["logit"] == 0:
            found["logit"].append(max(float(each.max.max()) for each in monitor.measure().values()))
        if row["step"] % EVALUATED == 0:
            found["loss"].append(row["val_loss"])
    return found


def suffers(watched: list[float], limited: list[float]) -> int | None:
    """The step from which on the loss of the watched run is worse; None if it ends well. A diverged run has fewer."""
    worse = [index >= len(watched) or watched[index] >= each + WORSE for index, each in enumerate(limited)]
    fine = [index for index, is_worse in enumerate(worse) if not is_worse]
    first = fine[-1] + 1 if fine else 0
    return EVALUATED * (first + 1) if first < len(worse) else None


def alarm(values: list[float], threshold: float, every: int) -> int | None:
    """The first step at which a signal is above its threshold, or not finite."""
    return next((every * (i + 1) for i, value in enumerate(values) if not value <= threshold), None)


def table(results: dict[str, dict[str, Any]]) -> list[str]:
    """The thresholds, the table of the judged runs, and the verdict."""
    when = {label: suffers(each["watched"]["loss"], each["limited"]) for label, each in results.items()}
    fine = [each for label, each in results.items() if label.endswith(f"seed {CALIBRATED}") and when[label] is None]
    thresholds = {signal: MARGIN * max(max(each["watched"][signal]) for each in fine) for signal in SIGNALS}
    head = (
        f"| cell | the loss suffers | change above {thresholds['change']:.2g} | logit above {thresholds['logit']:.3g} |"
    )
    lines, early = [head, "|---|---|---|---|"], {signal: list[int]() for signal in SIGNALS}
    missed, false = dict.fromkeys(SIGNALS, 0), dict.fromkeys(SIGNALS, 0)
    for label, each in results.items():
        if not label.endswith(f"seed {JUDGED}"):
            continue
        steps = {name: alarm(each["watched"][name], thresholds[name], every) for name, every in SIGNALS.items()}
        for name, step in steps.items():
            hurt = when[label]
            if hurt is None:
                false[name] += step is not None
            elif step is None:
                missed[name] += 1
            else:
                early[name].append(hurt - step)
        texts = ["-" if step is None else f"step {step}" for step in (when[label], *steps.values())]
        lines.append(f"| {label.removesuffix(f', seed {JUDGED}')} | {' | '.join(texts)} |")
    lines.append("")
    for name, ahead in early.items():
        steps_ahead = ", ".join(map(str, ahead)) or "none"
        lines.append(
            f"- *{name}*: steps from the alarm to the loss: {steps_ahead}; missed {missed[name]}; "
            f"alarms in runs that were fine {false[name]}"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/early_warning"), help="folder of the finished runs")
    parser.add_argument("--ledger", type=Path, default=Path("results/ledger.jsonl"), help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    given = parser.parse_args()
    given.runs.mkdir(parents=True, exist_ok=True)
    ledger = Ledger(given.ledger).entries()
    results = {}
    for label, watched, limited in cells():
        path = given.runs / f"{label}.json"
        if not path.exists():
            path.with_suffix(".part").write_text(json.dumps(watched_run(watched)))
            path.with_suffix(".part").rename(path)
        entry = ledger.get(fingerprint(limited))
        print(label, "" if entry else "(its run with a limit is not in the ledger: quacklr sweep harmless)", flush=True)
        if entry:
            losses = [loss for step, loss in entry.curve("val_loss") if step > 0]
            results[label] = {"watched": json.loads(path.read_text()), "limited": losses}
    lines = table(results)
    print("\n".join(lines))
    if given.out is not None:
        title = "# How early a change of logits warns, beside the largest logit"
        about = "`python benchmarks/early_warning.py`; its docstring has the rules, which were fixed before the runs."
        given.out.write_text("\n".join([title, "", about, "", *lines, ""]))


if __name__ == "__main__":
    main()
