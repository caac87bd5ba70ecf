"""The commands around a study, from its grid to its page, on models small enough for a test."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import time
from collections import deque
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lab_runs import ATTENTIONS, environment, make_corpus, small
from quacklr.cli import main
from quacklr.lab import presets
from quacklr.lab.config import fingerprint
from quacklr.lab.demo import sentence
from quacklr.lab.ledger import Ledger
from quacklr.lab.methods import Default, Limit, Quack
from quacklr.lab.progress import duration
from quacklr.lab.studies import questions
from quacklr.lab.studies.cell import with_seed
from quacklr.lab.studies.results import Results
from quacklr.lab.studies.run_cost import RunCost
from quacklr.lab.studies.scale import Size, scale_of
from quacklr.lab.sweep.display import TimeEstimate, _table, summary
from quacklr.lab.sweep.sweep import State, Task
from swept_runs import made, tiny_scale


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The scale `cpu` stands for models of a few thousand parameters, in an empty folder."""
    base = small(make_corpus(tmp_path), Default(), ATTENTIONS["mha"], steps=12)
    monkeypatch.setitem(presets.PRESETS, "cpu", base)
    monkeypatch.setitem(presets.ATTENTIONS, "cpu", ATTENTIONS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_demo_shows_a_table_a_picture_a_page_and_a_sentence(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--steps", "12"]) == 0
    first = capsys.readouterr()
    rows = re.findall(
        r"^(default|QK clip|QuacK limit|QuacK|QK norm) +([\d.]+) +([\d.,]+) +([\d.]+) +([\d.,]+)$",
        first.out,
        re.MULTILINE,
    )
    assert [row[0] for row in rows] == ["default", "QK clip", "QuacK limit", "QuacK", "QK norm"]
    entries = Ledger(tiny / "runs/demo/ledger.jsonl").entries().values()
    of = {type(e.config.method): e for e in entries if e.config.attention == ATTENTIONS["mla"]}
    assert f"{of[Quack].result['val_loss']:.3f}" == rows[3][1]
    assert len(entries) == 10
    assert first.out.count("With M") == 2
    assert "quack = QuacK(model, optimizer)" in first.out
    assert (tiny / "runs/demo/demo.png").read_bytes().startswith(b"\x89PNG")
    page = (tiny / "runs/demo/demo.html").read_text()
    body = page[page.index("<body") : page.index("<script", page.index("<body"))]
    assert "quacklr demo" in body
    assert "laim" not in body, "the demo says nothing about claims"
    assert "10 of 10 runs done" in first.err
    assert main(["demo", "--steps", "12"]) == 0
    assert capsys.readouterr().out == first.out, "what is there is not run again"


def test_the_demos_sentence_is_honest_whichever_way_it_went() -> None:
    scale = tiny_scale(Path("nowhere"))

    def told(default: tuple[float, float], quack: tuple[float, float]) -> str:
        entries = []
        for attention in scale.attentions:
            for method, (loss, top) in ((Default(), default), (Limit(), quack)):
                entries.append(made(scale.run(attention, method, scale.high), loss, top))
        return sentence(Results(entries, scale, [0]))

    assert "With MLA the default broke and QuacK stayed stable" in told((3.0, 9000.0), (2.0, 40.0))
    assert "largest logit 9,000 against 40.1, validation loss 3.000 against 2.000" in told((3.0, 8999.9), (2.0, 40.0))
    assert "the default did not break" in told((2.0, 40.0), (2.0, 40.0))
    assert "QuacK did not fix it" in told((3.0, 9000.0), (3.0, 40.0))
    assert "QuacK did not fix it" in told((3.0, 9000.0), (2.0, 400.0))


def test_a_sweep_and_its_report(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "critical", "--seeds", "2", "--dry-run"]) == 0
    assert capsys.readouterr().out.count("to do") == 8
    assert main(["sweep", "critical", "--seeds", "2"]) == 0
    told = capsys.readouterr()
    assert told.out == "8 runs; the ledger is results/ledger.jsonl\n"
    assert told.err.count("validation loss") == 8
    assert "critical: 8 of 8 runs done, 0 running, finished" in told.err
    assert main(["sweep", "critical", "--seeds", "2", "--dry-run"]) == 0
    assert "to do" not in capsys.readouterr().out
    assert main(["report"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^ *(holds|fails|the same|undecided)  a: Lowering", out, re.MULTILINE)
    assert "not run  b: At the lowest learning rate" in out
    assert "8 runs at the scale cpu" in out
    for name in ("claims.md", "methods.md", "report.html", "figures/figure-1-critical-rate.pdf"):
        assert (tiny / "results" / name).stat().st_size > 400, name
    claims = (tiny / "results/claims.md").read_text()
    assert "| a | Lowering the learning rates of query and key weights alone" in claims
    assert main(["report", "--steps", "77"]) == 2
    assert "has no runs of the scale cpu, 77 steps" in capsys.readouterr().err


def test_timed_runs_are_interleaved(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(questions, "TIMED_STEPS", 8)
    assert main(["sweep", "speed", "--seeds", "2", "--threads", "1"]) == 0
    entries = list(Ledger(tiny / "results/ledger.jsonl").entries().values())
    assert len(entries) == 16
    assert all(entry.environment["turns"] and entry.step_seconds for entry in entries)
    assert main(["sweep", "speed", "--seeds", "2"]) == 0
    assert "0 runs;" in capsys.readouterr().out


def test_a_ledger_of_another_version_of_the_corpus_is_refused(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = next(iter(scale_of(Size()).run("mha", method, 0.1) for method in (Default(),)))
    entry = replace(made(config, 2.0), environment={"corpus": "deadbeef"})
    Ledger(tiny / "results/ledger.jsonl").append(entry)
    assert main(["sweep", "critical", "--seeds", "1"]) == 2
    assert "on another version of the corpus" in capsys.readouterr().err


def test_two_sweeps_in_one_folder_keep_out_of_each_others_way(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from quacklr.lab.files import locked

    with locked(tiny / "runs/sweep"):
        assert main(["sweep", "critical"]) == 2
    assert "another quacklr is at work in runs/sweep" in capsys.readouterr().err


def state() -> State:
    scale = tiny_scale(Path("nowhere"))
    config = scale.run("mha", Quack(), 0.1)
    crashed = replace(made(config, 2.0), status="crashed", reason="no memory")
    return State(deque([Task(config, Path("x"))]), [Task(config, Path("y"), attempts=2)], [made(config, 2.0), crashed])


def test_the_table_shows_what_runs_what_ended_and_how_much_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    out = StringIO()
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    meter = TimeEstimate()
    meter.began = 90.0
    Console(file=out, width=160).print(_table("a study", state(), 3, meter))
    text = out.getvalue()
    for part in ("a study", "validation loss 2.0000", "crashed: no memory", "0/36 steps, attempt 2"):
        assert part in text, part
    # 2 runs of 36 steps took 10 s, and two are left
    assert "5 of 7 runs done, 1 running, 1 diverged or crashed, 0:00:10 left" in text
    stopping = replace(state(), stopped=2)
    assert "stopping: every run saves a checkpoint" in summary(stopping, 0, meter)


def test_time_left_counts_runs_that_wait_and_no_steps_from_before_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    meter = TimeEstimate()
    meter.began = 90.0
    # 2 runs of 36 steps took 10 s, and four are left
    config = state().waiting[0].config
    waiting = deque(Task(with_seed(config, seed), Path("x")) for seed in range(3))
    assert meter.left(replace(state(), waiting=waiting)) == "0:00:20 left"
    folder = tmp_path / fingerprint(config)
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 29}\n{"step": 30}\n{"st')
    assert meter.left(State(deque(), [Task(config, folder)])) == "time left unknown yet"
    # the steps 31 to 36 took 10 s, and 36 are left
    assert meter.left(State(deque([Task(config, Path("x"))]), [], [made(config, 2.0)])) == "0:01:00 left"


def test_time_left_knows_that_the_steps_of_larger_models_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    small = state().waiting[0].config
    large = replace(small, shape=replace(small.shape, d_model=4 * small.shape.d_model))
    meter = TimeEstimate(lambda config: config.shape.d_model / small.shape.d_model)
    meter.began = 90.0
    left = f"{duration(40)} left"  # one run of the small model took 10 s
    assert meter.left(State(deque([Task(large, Path("x"))]), [], [made(small, 2.0)])) == left


def test_time_left_of_a_resumed_run_that_crashed_and_of_runs_that_are_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    config = state().waiting[0].config
    other = with_seed(config, 1)
    folder = tmp_path / fingerprint(config)
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 30}\n')
    meter = TimeEstimate()
    meter.began = 90.0
    meter.observe(State(deque(), [Task(config, folder)]))
    crashed = replace(made(config, 2.0), status="crashed", reason="no memory", result={})
    assert meter.left(State(deque([Task(other, Path("x"))]), [], [crashed])) == "time left unknown yet"
    (folder / "metrics.jsonl").write_text('{"step": 33}\n')
    # 3 steps took 10 s; 3 are left of this run, and 36 of another
    running = State(deque([Task(other, Path("x"))]), [Task(config, folder)])
    assert meter.left(running) == "0:02:10 left"
    assert "0 of 2 runs done, 1 running" in summary(running, 0, meter)


def test_the_cost_of_a_run_is_that_of_runs_of_its_kind_or_grows_with_the_size() -> None:
    config = state().waiting[0].config
    wide = replace(config, shape=replace(config.shape, d_model=2 * config.shape.d_model))
    entries = [replace(made(config, 2.0), step_seconds=seconds) for seconds in (1.0, 2.0, 30.0)]
    cost = RunCost(entries)
    assert cost.step_seconds(config) == 2.0
    assert cost.step_seconds(wide) == pytest.approx(8.0)
    assert cost.seconds(wide) == pytest.approx(8.0 * config.training.steps)
    assert RunCost([*entries, replace(made(wide, 2.0), step_seconds=5.0)]).step_seconds(wide) == 5.0
    assert RunCost().step_seconds(wide) == pytest.approx(4 * RunCost().step_seconds(config))
    assert RunCost().total([wide]) is None, "no time is known"
    assert cost.total([wide, config]) == pytest.approx(10.0 * config.training.steps)
    assert RunCost([replace(entries[0], step_seconds=None)]).total([wide]) is None


def test_on_a_terminal_the_table_is_drawn() -> None:
    master, slave = pty.openpty()
    script = "from test_demo import *; shown()"
    settings: dict[str, Any] = {"env": environment(TERM="xterm", COLUMNS="120", PYTHONPATH=os.pathsep.join(sys.path))}
    with subprocess.Popen([sys.executable, "-c", script], stderr=slave, **settings) as process:
        os.close(slave)
        text = b""
        while True:
            try:
                part = os.read(master, 4096)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            text += part
    os.close(master)
    assert process.returncode == 0, text
    assert "a study" in text.decode()
    assert "attempt 2" in text.decode()


def shown() -> None:
    from quacklr.lab.sweep.display import display

    with display("a study", 3) as show:
        show(state())
