"""Reports on runs that diverged: all or some of them, with or without measurements."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quacklr.lab import demo
from quacklr.lab.ledger import Entry
from quacklr.lab.report import command
from quacklr.lab.studies.questions import GRIDS
from quacklr.lab.studies.results import Results
from quacklr.lab.studies.scale import Size, scale_of, seeded
from swept_runs import made

SCALE = scale_of(Size())
NOTHING = [[None] * 4] * 4


def runs(seeds: int = 1) -> list[Entry]:
    """The runs of the demo, which have both kinds of attention."""
    return [made(config, 3.0 + config.training.seed / 100) for config in seeded(GRIDS["demo"](SCALE), seeds)]


def lost(entry: Entry, history: list[dict[str, Any]]) -> Entry:
    result = {"status": "diverged", "step": 7, "tokens": 7168, "val_loss": None, "val_bpb": None, "max_logit": None}
    return replace(entry, status="diverged", reason="the loss is nan at step 7", result=result, history=history)


LOSSES: dict[str, Callable[[Entry], Entry]] = {
    "after the first measurement": lambda run: lost(run, run.history[:1]),
    "after half of the steps": lambda run: lost(run, run.history[:3]),
    "at the start": lambda run: lost(run, [run.history[0] | {"val_loss": None}]),
    "with nothing measured": lambda run: lost(run, []),
    "with logits that are no numbers": lambda run: lost(
        run, [row | {"logits": {"max": NOTHING}} for row in run.history]
    ),
    "with logits of 0": lambda run: lost(run, [row | {"logits": {"max": [[0.0] * 4] * 4}} for row in run.history]),
    "with negative logits": lambda run: replace(
        run, history=[row | {"logits": {"max": [[-1.0] * 4] * 4}} for row in run.history]
    ),
    "never, but nothing was measured": lambda run: replace(run, history=[]),
    "never, and all is well": lambda run: run,
}


def reported(folder: Path, entries: list[Entry], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(command, "drawn", lambda figure, _: figure.draw_without_rendering() or b"<svg/>")
    monkeypatch.setattr(command, "FORMATS", ("svg",))
    monkeypatch.setattr("quacklr.lab.report.page.get_plotlyjs", lambda: "")
    (folder / "ledger.jsonl").write_text("".join(json.dumps(entry.to_json()) + "\n" for entry in entries))
    return command.main([str(folder)])


@pytest.mark.parametrize("how", LOSSES)
def test_a_ledger_whose_runs_all_diverged_has_a_report(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = [LOSSES[how](run) for run in runs()]
    assert reported(tmp_path, entries, monkeypatch) == 0
    out, err = capsys.readouterr()
    assert err == ""
    about = "10 runs at the scale cpu" + (", all of them diverged" if entries[0].status == "diverged" else "")
    assert out.splitlines()[-1].startswith(f"{about}: ")
    claims, methods = ((tmp_path / name).read_text() for name in ("claims.md", "methods.md"))
    assert f"\n{about}. All 10 runs of the ledger, " in claims
    assert "by version of the code that trained them: not recorded 10." in claims
    assert f"\n{about}.\n" in methods
    assert (tmp_path / "report.html").read_text().count('data-status="diverged"') == 10 * ("diverged" in about)


def test_the_number_of_diverged_runs_is_shown_with_the_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "FIGURES", {})
    entries = [lost(run, run.history[:1]) if run.config.training.seed > 1 else run for run in runs(4)]
    assert reported(tmp_path, entries, monkeypatch) == 0
    assert "40 runs at the scale cpu, 20 of them diverged: " in capsys.readouterr().out
    assert (tmp_path / "methods.md").read_text().count(", n 3, 2 diverged)") == 6, (
        "default, limit and QK norm, which have no setting to select; seed 0 is not judged"
    )


def test_a_single_run_has_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, change in LOSSES.items():
        if "half" in name or "nothing" in name:
            assert reported(tmp_path, [change(run) for run in runs()[:1]], monkeypatch) == 0


def test_a_ledger_whose_runs_all_crashed_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = [Entry(run.config, "crashed", "out of memory") for run in runs()]
    assert reported(tmp_path, entries, monkeypatch) == 2
    assert "has no runs that ended: 10 of the scale cpu have crashed" in capsys.readouterr().err
    monkeypatch.setattr(command, "FIGURES", {})
    assert reported(tmp_path, [*entries[:-1], runs()[-1]], monkeypatch) == 0
    assert "1 runs at the scale cpu, 9 others crashed: " in capsys.readouterr().out


@pytest.mark.parametrize("how", [how for how in LOSSES if "never, but" not in how])
def test_a_demo_whose_runs_all_diverged_prints_its_table(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "draw", lambda figures, results, _: [figure(results) for figure in figures.values()][:0])
    monkeypatch.setattr("quacklr.lab.report.page.get_plotlyjs", lambda: "")
    demo.show_results(Results([LOSSES[how](run) for run in runs()], SCALE, [0]), tmp_path)
    out = capsys.readouterr().out
    assert out.count("diverged") >= (10 if "never" not in how and "negative" not in how else 0)
    assert "With MLA the default" in out
