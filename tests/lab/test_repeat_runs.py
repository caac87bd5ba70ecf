"""Runs of a ledger that are trained again have its losses; a loss that was changed is noticed. Real runs."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from lab_runs import environment
from quacklr.lab.ledger import Ledger
from quacklr.lab.sweep.local import Local
from quacklr.lab.sweep.sweep import sweep
from swept_runs import three

SCRIPT = Path(__file__).parents[2] / "benchmarks/repeat_runs.py"


def repeated(ledger: Path, out: Path, count: int = 3) -> tuple[int, list[str]]:
    command = [sys.executable, str(SCRIPT), "--ledger", str(ledger), "--out", str(out), "--count", str(count)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    return done.returncode, done.stdout.splitlines()


def test_runs_have_the_losses_of_the_ledger_and_a_changed_loss_is_noticed(corpus: Path, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    state = sweep(three(corpus), ledger, Local(2, threads=1), tmp_path / "runs")
    code, lines = repeated(tmp_path, tmp_path / "again")
    assert code == 0
    assert len(lines) == 4
    assert all(line.endswith("the same in all digits") for line in lines[:3])
    assert lines[3] == "3 of 3 runs have the loss of the ledger, up to 1e-06"
    changed = state.ended[0]
    loss = changed.result["val_loss"]
    ledger.append(replace(changed, result=changed.result | {"val_loss": loss + 0.01}))
    code, lines = repeated(tmp_path, tmp_path / "again")  # what was trained again is kept
    assert code == 1
    assert sum(line.endswith("now, -0.01") for line in lines) == 1
    assert lines[3] == "2 of 3 runs have the loss of the ledger, up to 1e-06"
