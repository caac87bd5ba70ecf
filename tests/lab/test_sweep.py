"""Sweeps on one machine: every run once, nothing lost however they end. Real processes, really killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lab_runs import ATTENTIONS, environment, heed_ctrl_c, read_rows, small
from paused import decode_step, is_at_pause, pause, wait_for, wait_until_paused
from quacklr.lab.config import Config, fingerprint
from quacklr.lab.errors import UserError
from quacklr.lab.ledger import Entry, Ledger, entry_of
from quacklr.lab.methods import Default, Quack
from quacklr.lab.sweep import local
from quacklr.lab.sweep.executor import cores
from quacklr.lab.sweep.local import Local
from quacklr.lab.sweep.sweep import ATTEMPTS, State, missing, sweep
from quacklr.lab.train.checkpoint import checkpoints
from quacklr.lab.train.folder import Folder
from quacklr.lab.train.runner import run
from swept_runs import made, three


def numbers(entry: Entry) -> dict[str, object]:
    """All of an entry but what differs from one run to the next: times."""
    saved = entry.to_json()
    return {name: value for name, value in saved.items() if name not in ("step_seconds", "environment")}


def done(configs: list[Config], out: Path, jobs: int = 2, retry: bool = False) -> State:
    ledger = Ledger(out / "ledger.jsonl", details=True)
    return sweep(missing(configs, ledger.entries(), retry), ledger, Local(jobs, threads=1), out / "runs")


def test_every_run_is_done_once_and_is_what_training_it_alone_gives(corpus: Path, tmp_path: Path) -> None:
    configs = three(corpus)
    done([*configs, configs[0]], tmp_path)
    before = (tmp_path / "ledger.jsonl").read_bytes()
    assert not done(configs, tmp_path).ended
    assert (tmp_path / "ledger.jsonl").read_bytes() == before
    entries = Ledger(tmp_path / "ledger.jsonl").entries()
    assert len(before.splitlines()) == len(configs), "a line for each run, also for the one that was asked for twice"
    assert set(entries) == {fingerprint(config) for config in configs}
    for config in configs:
        run(config, tmp_path / "alone" / fingerprint(config))
        alone = entry_of(config, tmp_path / "alone" / fingerprint(config))
        assert numbers(entries[fingerprint(config)]) == numbers(alone)
        assert len(alone.losses) == 36
        assert [step for step, _ in alone.curve("val_loss")] == [0, 12, 24, 36]


def test_only_what_is_missing_is_run(corpus: Path, tmp_path: Path) -> None:
    configs = three(corpus)
    assert len(done(configs[:1], tmp_path).ended) == 1
    assert {entry.key for entry in done(configs, tmp_path).ended} == {fingerprint(config) for config in configs[1:]}


def test_runs_that_are_known_later_are_run_too_and_none_twice(corpus: Path, tmp_path: Path) -> None:
    first, second, third = three(corpus)
    ledger, asked = Ledger(tmp_path / "ledger.jsonl"), list[int]()

    def plan(ended: Sequence[Entry]) -> list[Config]:
        """As a study that selects settings: all its runs as far as they are known."""
        asked.append(len(ended))
        return [[first], [first, second], [first, second, third], [first, second, third]][asked[-1]]

    state = sweep([first], ledger, Local(2, threads=1), tmp_path / "runs", plan=plan)
    assert [entry.key for entry in state.ended] == [fingerprint(config) for config in (first, second, third)]
    assert asked == [1, 2, 3]
    assert len((tmp_path / "ledger.jsonl").read_bytes().splitlines()) == 3


def test_cores_are_shared_out() -> None:
    assert Local().slots * Local().threads <= cores()
    assert Local(jobs=1).threads == cores()
    assert Local(jobs=100).threads == 1
    assert Local(jobs=2, threads=3).threads == 3


def test_a_run_gets_the_gpu_with_the_fewest_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Job:
        def __init__(self, _config: object, _path: object, gpu: str) -> None:
            self.gpu, self.process, self.alive = gpu, self, True

        def is_alive(self) -> bool:
            return self.alive

    monkeypatch.setattr(local, "LocalJob", Job)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    place: Any = Local(threads=1)
    config = small(Path("nowhere"), Default(), ATTENTIONS["mha"])
    first, second = place.start(config, Path("a")), place.start(config, Path("b"))
    assert (place.slots, first.gpu, second.gpu) == (2, "2", "3")
    second.alive = False
    assert place.start(config, Path("c")).gpu == "3"


def test_a_run_that_diverges_is_a_line_with_its_reason(corpus: Path, tmp_path: Path) -> None:
    config = small(corpus, Default(), ATTENTIONS["mha"])
    wild = replace(config, optimizer=replace(config.optimizer, lr=1e30))
    (entry,) = done([wild], tmp_path).ended
    assert entry.status == "diverged"
    assert "validation loss" in (entry.reason or "") or "loss is" in (entry.reason or "")
    assert not done([wild], tmp_path, retry=True).ended, "to run it again would end the same way"


def test_a_run_that_crashes_is_a_line_with_its_reason_and_is_run_again_when_asked(corpus: Path, tmp_path: Path) -> None:
    config = small(corpus, Default(), ATTENTIONS["mha"])
    folder = tmp_path / "runs" / fingerprint(config)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("nonsense")
    (entry,) = done([config], tmp_path).ended
    assert entry.status == "crashed"
    assert "config.json is damaged" in (entry.reason or "")
    assert "Traceback" in (folder / "log.txt").read_text()
    (folder / "config.json").unlink()
    assert not done([config], tmp_path).ended
    assert done([config], tmp_path, retry=True).ended[0].status == "finished"
    assert Ledger(tmp_path / "ledger.jsonl").entries()[entry.key].status == "finished"


def holder(folder: Path) -> int | None:
    """The process that has the lock of a run's folder: the one that trains it."""
    if not (folder / ".lock").exists():
        return None
    inode = str((folder / ".lock").stat().st_ino)
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.split()
        if fields[1] == "FLOCK" and fields[5].split(":")[-1] == inode:
            return int(fields[4])
    return None


def test_a_run_whose_process_is_killed_goes_on_from_its_checkpoint(corpus: Path, tmp_path: Path) -> None:
    config = small(corpus, Quack(), ATTENTIONS["mla"])
    folder = tmp_path / "killed" / fingerprint(config)
    pause(folder, 20)
    killed: list[int] = []

    def kill_once(_: State) -> None:
        if not killed and is_at_pause(folder) and (process := holder(folder)):
            killed.append(process)
            os.kill(process, signal.SIGKILL)
            decode_step(folder)

    ledger = Ledger(tmp_path / "ledger.jsonl")
    state = sweep([config], ledger, Local(1, 1), tmp_path / "killed", kill_once)
    assert killed
    assert (folder / "log.txt").read_text().count("from step 18 on") == 1, "the second process went on"
    run(config, tmp_path / "whole")
    assert numbers(state.ended[0]) == numbers(entry_of(config, tmp_path / "whole"))


def test_a_run_whose_process_is_killed_every_time_is_given_up(corpus: Path, tmp_path: Path) -> None:
    config = small(corpus, Quack(), ATTENTIONS["mla"])
    folder = tmp_path / fingerprint(config)
    pause(folder, 0)
    killed: set[int] = set()

    def kill_always(_: State) -> None:
        if process := holder(folder):
            killed.add(process)
            os.kill(process, signal.SIGKILL)

    state = sweep([config], Ledger(tmp_path / "ledger.jsonl"), Local(1, 1), tmp_path, kill_always)
    assert state.ended[0].status == "crashed"
    assert state.ended[0].reason == f"its process was killed by SIGKILL, {ATTEMPTS} times"
    assert len(killed) == ATTEMPTS


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT], ids=lambda signum: signum.name)
def test_a_sweep_that_is_killed_or_stopped_resumes_its_runs(corpus: Path, tmp_path: Path, signum: int) -> None:
    script = [sys.executable, str(Path(__file__).parents[1] / "kit/swept_runs.py"), str(corpus), str(tmp_path)]
    folders = [tmp_path / "runs" / fingerprint(config) for config in three(corpus)[:2]]
    for folder in folders:
        pause(folder, 20)
    settings: Any = {"env": environment(), "stderr": subprocess.PIPE, "preexec_fn": heed_ctrl_c}
    with subprocess.Popen(script, **settings) as process:
        for folder in folders:
            wait_until_paused(folder, process.poll)
        process.send_signal(signum)
        assert process.stderr is not None
        assert process.wait() == (-signum if signum == signal.SIGKILL else 128 + signum), process.stderr.read()
    for folder in folders:
        wait_until_free(folder)
        assert read_rows(folder)[-1]["step"] == 20
        assert checkpoints(folder / "checkpoints")[-1].name == "step-0000020", "it was saved where it stopped"
        decode_step(folder)
    again = subprocess.run(script, env=environment(), capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    entries = Ledger(tmp_path / "ledger.jsonl", details=True).entries()
    for folder in folders:
        assert "from step 20 on" in (folder / "log.txt").read_text()
    run(three(corpus)[1], tmp_path / "whole")
    whole = entry_of(three(corpus)[1], tmp_path / "whole")
    assert numbers(entries[whole.key]) == numbers(whole)
    assert len(entries) == 3


def wait_until_free(folder: Path) -> None:
    wait_for(lambda: holder(folder) is None, f"somebody still trains in {folder}")


def test_a_line_that_a_killed_process_left_unfinished_is_not_read_and_makes_room(corpus: Path, tmp_path: Path) -> None:
    one, two = (made(config, 2.0) for config in three(corpus)[:2])
    ledger = Ledger(tmp_path / "ledger.jsonl", details=True)
    ledger.append(one)
    whole = ledger.path.read_bytes()
    ledger.path.write_bytes(whole + whole[:100])
    assert list(ledger.entries()) == [one.key]
    ledger.append(two)
    assert ledger.path.read_bytes().startswith(whole)
    assert {key: numbers(entry) for key, entry in ledger.entries().items()} == {
        entry.key: numbers(entry) for entry in (one, two)
    }


def test_a_ledger_that_is_damaged_says_where(corpus: Path, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.append(made(three(corpus)[0], 2.0))
    with ledger.path.open("a") as file:
        file.write("nonsense\n")
    with pytest.raises(UserError, match=r"ledger.jsonl, line 2, is not what quacklr writes"):
        ledger.entries()


def test_a_run_is_known_again_when_configurations_have_got_a_new_field(corpus: Path, tmp_path: Path) -> None:
    entry = made(three(corpus)[1], 2.0)
    line = entry.to_json()
    del line["config"]["method"]["literal"]
    (tmp_path / "ledger.jsonl").write_text(json.dumps(line) + "\n")
    assert list(Ledger(tmp_path / "ledger.jsonl").entries()) == [entry.key]


def test_an_entry_has_four_digits_of_validation_losses_and_three_of_other_measurements(
    corpus: Path, tmp_path: Path
) -> None:
    config = small(corpus, Quack(), ATTENTIONS["mla"])
    run(config, tmp_path / "run")
    rows, entry = Folder(tmp_path / "run").rows(), entry_of(config, tmp_path / "run")
    last = rows[-1]
    assert entry.history[-1]["step"] == last["step"]
    assert entry.history[-1]["val_loss"] == float(f"{last['val_loss']:.4g}") != float(f"{last['val_loss']:.3g}")
    for name in ("max", "step_change"):
        assert entry.history[-1]["logits"][name] == [
            [float(f"{value:.3g}") for value in heads] for heads in last["logits"][name]
        ]
    assert entry.losses == [float(f"{row['loss']:.3g}") for row in rows if "loss" in row]
    assert entry.result["val_loss"] == last["val_loss"], "claims use all digits"


def test_a_ledger_keeps_what_claims_and_figures_use_and_with_details_all(corpus: Path, tmp_path: Path) -> None:
    config = small(corpus, Quack(), ATTENTIONS["mla"])
    run(config, tmp_path / "run")
    whole = entry_of(config, tmp_path / "run")
    assert {"norm", "rate"} <= whole.history[-1].keys()
    assert {"entropy", "sink"} <= whole.history[-1]["logits"].keys()
    kept = {}
    for details in (False, True):
        records = Ledger(tmp_path / f"{details}.jsonl", details)
        records.append(whole)
        (kept[details],) = records.entries().values()
    assert kept[True] == whole
    short, last = kept[False], kept[False].history[-1]
    assert last.keys() <= {"step", "val_loss", "logits", "change_steps"}
    assert last["logits"].keys() == {"max", "step_change"}
    assert (short.result, short.losses, short.key) == (whole.result, whole.losses, whole.key)
    for names in (("val_loss",), ("logits", "max"), ("logits", "step_change")):
        assert list(short.curve(*names)) == list(whole.curve(*names))
