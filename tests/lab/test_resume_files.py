"""What a resumed run finds in its folder: rows and checkpoints that were edited, copied or forged are not taken."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lab_runs import ATTENTIONS, comparable, complaint, files, read_rows, small
from quacklr.lab.methods import Quack
from quacklr.lab.train.checkpoint import Checkpoints, checkpoints
from quacklr.lab.train.command import main
from quacklr.lab.train.folder import Folder
from quacklr.lab.train.runner import run
from quacklr.lab.train.tensors import named_tensors
from saved_runs import NAME, REST, resummed, steps_in, trained

Lines = list[str]


@pytest.fixture(scope="module")
def finished(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    run(small(corpus, Quack(), ATTENTIONS["mha"], steps=12), out)
    return out


@pytest.fixture
def half(finished: Path, tmp_path: Path) -> Path:
    """A run as a kill leaves it: checkpoints after steps 6 and 12, no result."""
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run/result.json").unlink()
    return tmp_path / "run"


def row_of(line: str, **changes: Any) -> str:
    return json.dumps(json.loads(line) | changes) + "\n"


EDITS: dict[str, Callable[[Lines], Lines]] = {
    "the first row is missing": lambda lines: lines[1:],
    "a row is missing": lambda lines: [*lines[:4], *lines[5:]],
    "the last row before the checkpoint is missing": lambda lines: lines[:-1],
    "all but one are missing": lambda lines: lines[:1],
    "a row is there twice": lambda lines: [*lines[:5], *lines[4:]],
    "two rows are exchanged": lambda lines: [*lines[:3], lines[4], lines[3], *lines[5:]],
    "the rows are reversed": lambda lines: lines[::-1],
    "the first rows are those of step 1 and following": lambda lines: [*lines[1:], row_of(lines[-1], step=13)],
    "a row has no step": lambda lines: [*lines[:3], '{"loss": 3.0}\n', *lines[4:]],
    "a step is text": lambda lines: [*lines[:3], row_of(lines[3], step="3"), *lines[4:]],
    "a step is true": lambda lines: [lines[0], row_of(lines[1], step=True), *lines[2:]],
    "a step is a fraction": lambda lines: [*lines[:3], row_of(lines[3], step=3.0), *lines[4:]],
    "a loss is text": lambda lines: [*lines[:3], row_of(lines[3], loss="low"), *lines[4:]],
    "logits are no table": lambda lines: [row_of(lines[0], logits=[1, 2]), *lines[1:]],
    "a row is a list": lambda lines: [*lines[:3], "[1, 2]\n", *lines[4:]],
    "a row is a number": lambda lines: [*lines[:3], "7\n", *lines[4:]],
    "a row is nested deeply": lambda lines: [*lines[:3], "[" * 100_000 + "\n", *lines[4:]],
    "a row is blank": lambda lines: [*lines[:3], "\n", *lines[4:]],
    "a row is cut": lambda lines: [*lines[:3], lines[3][:20] + "\n", *lines[4:]],
    "the last row before the checkpoint is cut": lambda lines: [*lines[:-1], lines[-1][:20]],
    "the file is empty": lambda _: [],
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("ended", [False, True], ids=["killed", "ended"])
def test_rows_that_are_not_those_of_every_step_up_to_the_checkpoint_are_refused(
    half: Path, finished: Path, edit: str, ended: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    path = half / "metrics.jsonl"
    path.write_text("".join(EDITS[edit](path.read_text().splitlines(keepends=True))))
    if ended:
        shutil.copy(finished / "result.json", half)
    before = files(half)
    said = complaint(capsys, "--resume", str(half))
    assert str(path) in said
    assert "restore the file from a copy, or train anew in another --out" in said
    assert files(half) == before


@pytest.mark.parametrize("ended", [False, True], ids=["killed", "ended"])
def test_rows_that_were_removed_are_refused(
    half: Path, finished: Path, ended: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    (half / "metrics.jsonl").unlink()
    if ended:
        shutil.copy(finished / "result.json", half)
    before = files(half)
    assert f"{half / 'metrics.jsonl'} is missing, but the run has reached step 12" in complaint(
        capsys, "--resume", str(half)
    )
    assert files(half) == before


def test_rows_after_the_end_are_refused(half: Path, finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(finished / "result.json", half)
    path = half / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines, row_of(lines[-1], step=13)]))
    assert "has rows after step 12, where the run has ended" in complaint(capsys, "--resume", str(half))


@pytest.mark.parametrize("after", ['{"step": 7, "lo', "\0" * 3000, "\xff\xfe{]\n\0\0\n", '{"step": 8}\n{"step": 8}\n'])
def test_whatever_follows_the_checkpoint_is_dropped_and_made_again(half: Path, finished: Path, after: str) -> None:
    """A killed process leaves a part of a line there, and a power cut may leave anything."""
    shutil.rmtree(half / "checkpoints/step-0000012")
    path = half / "metrics.jsonl"
    kept = path.read_text().splitlines(keepends=True)[:7]
    path.write_bytes("".join(kept).encode() + after.encode("latin-1"))
    assert main(["--resume", str(half)]) == 0
    assert path.read_text().splitlines(keepends=True)[:7] == kept
    assert read_rows(half) == read_rows(finished)


@pytest.mark.parametrize("later", [False, True], ids=["sync", "async"])
def test_all_rows_are_on_the_disk_before_a_checkpoint_has_its_name(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: bool
) -> None:
    """Judged by what was flushed: a power cut leaves of a file what it had at its last flush, or no file at all."""
    flushed: dict[str, Any] = {}
    found: list[tuple[int, list[int]]] = []
    rename = Path.rename

    def flush(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").resolve()
        flushed[str(path)] = [each.name for each in path.iterdir()] if path.is_dir() else path.read_bytes()

    def naming(path: Path, target: Path) -> Path:
        if path.name.endswith(".saving"):
            rows = flushed[str(out / "metrics.jsonl")].decode().splitlines()
            found.append((int(target.name.removeprefix("step-")), [json.loads(row)["step"] for row in rows]))
            assert "metrics.jsonl" in flushed[str(out)]
            assert "checkpoints" in flushed[str(out)]
            assert {"runs", "run"} <= {*flushed[str(tmp_path)], *flushed[str(out.parent)]}
        return rename(path, target)

    out = tmp_path / "runs/run"
    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(Path, "rename", naming)
    config = small(corpus, Quack(), ATTENTIONS["mha"], steps=13)
    run(replace(config, watch=replace(config.watch, async_save=later)), out)
    assert [step for step, _ in found] == [6, 12, 13]
    for step, rows in found:
        assert rows[: step + 1] == list(range(step + 1))
    assert json.loads(flushed[str(out / ".result.json.part")])["step"] == 13


STRANGERS = [
    "step-best",
    "step-0000006.best",
    "step-0000006.bak",
    "step-0000099 (copy)",
    "step-99",
    "step-00000099",
    "step--000099",
    "step-+000099",
    "step-0000_99",
    "step-\u0660\u0660\u0660\u0660\u0660\u0669\u0669",
    "step-1e7",
    "step-",
    "my-step-0000099",
    ".step-best",
    ".step-best.saving",
    ".step-0000006.saving.mine",
    ".step-0000006.best",
    ".step-6.removed",
]


def test_only_what_a_save_has_named_is_a_checkpoint_and_nothing_else_is_removed(half: Path) -> None:
    folder = half / "checkpoints"
    for name in STRANGERS:
        shutil.copytree(folder / "step-0000006", folder / name)
    (folder / "step-0000098").write_text("a file of the user's")
    (folder / "step-0000097.pt").write_text("another")
    assert [path.name for path in checkpoints(folder)] == ["step-0000006", "step-0000012"]
    kept = {name: files(folder / name) for name in STRANGERS}
    assert main(["--resume", str(half), "--steps", "20"]) == 0
    assert [path.name for path in checkpoints(folder)] == ["step-0000018", "step-0000020"]
    assert {name: files(folder / name) for name in STRANGERS} == kept
    assert steps_in(folder) == sorted([*STRANGERS, "step-0000018", "step-0000020", "step-0000098", "step-0000097.pt"])
    assert [row["step"] for row in read_rows(half)] == list(range(21))


def test_checkpoints_are_ordered_by_number_where_names_become_longer(tmp_path: Path) -> None:
    model = trained(seed=0, steps=0)
    saves = Checkpoints(tmp_path, NAME, keep=2)
    for step in (9_999_998, 9_999_999, 10_000_000, 10_000_001, 123_456_789_012):
        saves.save(step, named_tensors(*model), REST)
        assert checkpoints(tmp_path)[-1].name == f"step-{step:07}"
    assert steps_in(tmp_path) == ["step-10000001", "step-123456789012"]


def test_a_file_where_a_checkpoint_goes_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "step-0000001").write_text("of the user's")
    saves = Checkpoints(tmp_path, NAME, keep=2)
    with pytest.raises(Exception, match=f"cannot write {tmp_path / 'step-0000001'}: Not a directory"):
        saves.save(1, named_tensors(*trained(seed=0, steps=0)), REST)
    assert (tmp_path / "step-0000001").read_text() == "of the user's"


def test_a_checkpoint_that_is_a_link_is_used_and_what_it_points_to_is_never_removed(half: Path) -> None:
    """As of a user who has moved it to another disk."""
    moved = half.parent / "elsewhere"
    (half / "checkpoints/step-0000012").rename(moved)
    (half / "checkpoints/step-0000012").symlink_to(moved)
    before = files(moved)
    assert main(["--resume", str(half), "--steps", "30"]) == 0
    assert steps_in(half / "checkpoints") == ["step-0000024", "step-0000030"]
    assert files(moved) == before


def test_what_a_killed_save_has_left_is_removed(half: Path) -> None:
    folder = half / "checkpoints"
    for name in (".step-0000013.saving", ".step-0000001.removed", ".step-12345678.saving"):
        shutil.copytree(folder / "step-0000006", folder / name)
    assert main(["--resume", str(half), "--steps", "14"]) == 0
    assert steps_in(folder) == ["step-0000012", "step-0000014"]


def test_a_run_whose_checkpoints_were_renamed_does_not_begin_again(
    half: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its rows show that it has had some, and they would be dropped."""
    config = json.loads((half / "config.json").read_text())
    config["watch"]["checkpoint_every"] = 5
    (half / "config.json").write_text(json.dumps(config))
    for path in checkpoints(half / "checkpoints"):
        path.rename(path.with_name(f"{path.name}.best"))
    before = files(half)
    assert "has no checkpoint left to go on from" in complaint(capsys, "--resume", str(half))
    assert files(half) == before


def test_a_run_killed_before_its_first_checkpoint_was_whole_begins_again(
    half: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A save in the background may take as long as the steps up to the next one."""
    shutil.rmtree(half / "checkpoints")
    assert main(["--resume", str(half)]) == 0
    assert f"{half} has no checkpoint yet, so the run begins again" in capsys.readouterr().err
    assert read_rows(half) == read_rows(finished)


FORGED: dict[str, Any] = {
    "step": [-5, 13, "12", None, 12.0],
    "first_val_loss": [None, "low"],
    "method": [None, {"sensitivity": 3}],
    "probe": [{}, {"monitor": [], "kept_at": "x"}],
    "rng": [None, torch.zeros(5, dtype=torch.uint8)],
}


@pytest.mark.parametrize("key", FORGED)
def test_a_forged_checkpoint_is_told_before_a_row_is_dropped(
    half: Path, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = half / "checkpoints/step-0000012"
    whole = (path / "rest.pt").read_bytes()
    for value in (*FORGED[key], "missing"):
        content = torch.load(path / "rest.pt", weights_only=True)
        content["state"] |= {key: value}
        if value == "missing":
            del content["state"][key]
        torch.save(content, path / "rest.pt")
        resummed(path)
        before = files(half)
        said = complaint(capsys, "--resume", str(half))
        assert f"{path} is not a checkpoint of quacklr: " in said, value
        assert files(half) == before
        (path / "rest.pt").write_bytes(whole)
    resummed(path)
    assert main(["--resume", str(half)]) == 0


def test_a_tracker_that_refuses_does_so_before_anything_is_touched(
    half: Path, finished: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quacklr.lab.train.trackers.find_spec", lambda _: None)
    shutil.copy(finished / "result.json", half)
    before = files(half)
    said = complaint(capsys, "--resume", str(half), "--steps", "20", "--wandb", "project")
    assert "--wandb needs the package wandb" in said
    assert files(half) == before


def test_a_tracker_that_fails_does_not_end_the_run(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Failing:
        def __init__(self, *_: object) -> None:
            self.rows = 0

        def write(self, row: dict[str, Any]) -> None:
            self.rows += 1
            if row["step"] == 3:
                raise ConnectionResetError("the server is gone")

        def close(self) -> None:
            raise AssertionError("it was dropped")

    monkeypatch.setattr("quacklr.lab.train.runner.trackers", lambda *_: [Failing()])
    run(small(corpus, Quack(), ATTENTIONS["mha"], steps=6), tmp_path / "run")
    assert [row["step"] for row in read_rows(tmp_path / "run")] == list(range(7))
    assert "Failing fails (ConnectionResetError: the server is gone)" in capsys.readouterr().err


def test_rows_read_again_are_those_that_were_written(finished: Path) -> None:
    rows = Folder(finished).rows()
    assert [comparable(row) for row in rows] == read_rows(finished)
