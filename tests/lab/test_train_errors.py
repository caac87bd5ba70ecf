"""What can go wrong with a run's files: one clear sentence, exit code 2, and nothing lost."""

from __future__ import annotations

import hashlib
import json
import resource
import shutil
from pathlib import Path

import pytest
import torch

from lab_runs import ATTENTIONS, OPTIONS, complaint, environment, files, quacklr, read_rows, small
from quacklr.lab.files import locked
from quacklr.lab.methods import Quack
from quacklr.lab.train.command import main
from quacklr.lab.train.picture import draw_logits
from quacklr.lab.train.runner import run


@pytest.fixture(scope="module")
def finished(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    run(small(corpus, Quack(), ATTENTIONS["mha"], steps=12), out)
    draw_logits(out)
    return out


@pytest.fixture
def half(finished: Path, tmp_path: Path) -> Path:
    """A run as a kill would leave it: two checkpoints, no result."""
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run/result.json").unlink()
    return tmp_path / "run"


def test_a_folder_that_holds_a_run_is_not_overwritten(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(finished)
    said = complaint(capsys, "--out", str(finished))
    assert f"{finished} already holds a run; go on with it by `quacklr train --resume {finished}`" in said
    assert files(finished) == before


def test_a_finished_run_is_not_trained_again_but_can_go_on_for_longer(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(finished, tmp_path / "run")
    before = read_rows(tmp_path / "run")
    assert main(["--resume", str(tmp_path / "run")]) == 0
    assert "Done: validation loss" in capsys.readouterr().out
    assert read_rows(tmp_path / "run") == before
    assert main(["--resume", str(tmp_path / "run"), "--steps", "15"]) == 0
    after = read_rows(tmp_path / "run")
    assert [row["step"] for row in after] == list(range(16))
    assert after[:12] == before[:12]


def test_a_damaged_checkpoint_is_told_and_the_one_before_it_named(
    half: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = half / "checkpoints/step-0000012"
    content = bytearray((path / "__0_0.distcp").read_bytes())
    content[len(content) // 2] ^= 1
    (path / "__0_0.distcp").write_bytes(content)
    before = files(half)
    said = complaint(capsys, "--resume", str(half))
    assert f"the checkpoint {path} is damaged" in said
    assert "remove it to go on from step-0000006" in said
    assert files(half) == before
    shutil.rmtree(path)
    assert main(["--resume", str(half)]) == 0
    assert [row["step"] for row in read_rows(half)] == list(range(13))


def test_a_checkpoint_of_another_run_is_told(half: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(small(corpus, Quack(tau=0.1), ATTENTIONS["mha"], steps=12), half.parent / "other")
    shutil.rmtree(half / "checkpoints/step-0000012")
    shutil.copytree(half.parent / "other/checkpoints/step-0000012", half / "checkpoints/step-0000012")
    assert "is of another run" in complaint(capsys, "--resume", str(half))


def test_a_checkpoint_of_an_older_version_is_told(half: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(half / "checkpoints")
    (half / "checkpoints").mkdir()
    torch.save({"format": 1}, half / "checkpoints/step-0000012.pt")
    said = complaint(capsys, "--resume", str(half))
    assert "step-0000012.pt was made by an older quacklr; start the run anew in another --out" in said


def test_other_options_than_the_runs_own_are_told(half: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (half / "result.json").write_text(json.dumps({"status": "finished", "step": 12}))  # even if there is nothing to do
    said = complaint(capsys, "--resume", str(half), "--lr", "0.07")
    assert f"{half} holds another run: it differs in --lr (0.05 there, 0.07 here)" in said


def test_a_missing_shard_is_told(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(corpus, tmp_path / "corpus")
    (tmp_path / "corpus/train-00000.bin").unlink()
    said = complaint(capsys, *OPTIONS, "--corpus", str(tmp_path / "corpus"), "--out", str(tmp_path / "new"))
    assert f"{tmp_path / 'corpus/train-00000.bin'} is missing" in said
    assert not (tmp_path / "new").exists()


def test_another_text_than_the_runs_own_is_told(half: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder has the same name, but its content has changed since the checkpoint."""
    corpus = Path(json.loads((half / "config.json").read_text())["training"]["corpus"])
    shutil.copytree(corpus, tmp_path / "corpus")
    manifest = json.loads((tmp_path / "corpus/manifest.json").read_text())
    shard = manifest["splits"]["train"]["shards"][0]
    text = (tmp_path / "corpus" / shard["name"]).read_bytes()
    (tmp_path / "corpus" / shard["name"]).write_bytes(text[2:] + text[:2])
    shard["sha256"] = hashlib.sha256(text[2:] + text[:2]).hexdigest()
    (tmp_path / "corpus/manifest.json").write_text(json.dumps(manifest))
    kept = json.loads((half / "config.json").read_text())
    kept["training"]["corpus"] = str(tmp_path / "corpus")
    (half / "config.json").write_text(json.dumps(kept))
    assert "was trained on other text" in complaint(capsys, "--resume", str(half))


def test_a_corpus_that_was_moved_is_the_same_corpus(half: Path, tmp_path: Path) -> None:
    corpus = Path(json.loads((half / "config.json").read_text())["training"]["corpus"])
    shutil.copytree(corpus, tmp_path / "moved")
    assert main(["--resume", str(half), "--corpus", str(tmp_path / "moved"), "--steps", "14"]) == 0
    assert [row["step"] for row in read_rows(half)] == list(range(15))


def test_a_finished_run_without_checkpoints_keeps_its_rows(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints")
    before = files(tmp_path / "run")
    assert main(["--resume", str(tmp_path / "run")]) == 0
    assert "no checkpoint left" in complaint(capsys, "--resume", str(tmp_path / "run"), "--steps", "20")
    assert files(tmp_path / "run") == before


def test_what_the_library_refuses_is_a_sentence_too(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*OPTIONS, "--corpus", str(corpus), "--out", str(tmp_path / "run"), "--method", "quack"]
    assert "is all zeros, so its rate has no bound" in complaint(capsys, *options, "--init-std", "1e-30")
    assert "with a context of 16 does not fit into the memory of cpu" in complaint(
        capsys, *options, "--vocab", "99999999999"
    )


def test_a_damaged_config_is_told(half: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (half / "config.json").write_text("{")
    assert f"{half / 'config.json'} is damaged" in complaint(capsys, "--resume", str(half))


def test_a_damaged_row_is_told_and_an_unfinished_last_one_is_not_a_row(
    half: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (half / "metrics.jsonl").read_text().splitlines(keepends=True)
    (half / "metrics.jsonl").write_text("".join([*lines[:3], "{oops\n", *lines[4:]]))
    assert "line 4, is damaged" in complaint(capsys, "--resume", str(half))
    (half / "metrics.jsonl").write_text("".join(lines) + '{"step": 13, "lo')
    assert main(["--resume", str(half), "--steps", "14"]) == 0
    assert [row["step"] for row in read_rows(half)] == list(range(15))


def test_a_diverged_run_stays_diverged(half: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Resuming it says so, and trains no further."""
    (half / "result.json").write_text(json.dumps({"status": "diverged", "reason": "the loss is nan", "step": 12}))
    before = files(half)
    assert main(["--resume", str(half), "--steps", "20"]) == 0
    assert "The run diverged: the loss is nan" in capsys.readouterr().out
    assert files(half) == before


def test_two_processes_do_not_train_in_one_folder(half: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with locked(half):
        assert f"another quacklr is at work in {half}" in complaint(capsys, "--resume", str(half))


def test_a_folder_that_cannot_be_written_is_told(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    said = complaint(capsys, *OPTIONS, "--corpus", str(corpus), "--out", str(tmp_path / "file/run"))
    assert f"cannot write to {tmp_path / 'file/run'}" in said


def small_files_only() -> None:
    """No file may grow beyond 60 kB: what a full disk does, to a process that is told of it in the same way."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))


def test_a_full_disk_ends_the_run_with_a_sentence_and_all_that_was_whole_stays(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = [*OPTIONS, "--corpus", str(corpus), "--steps", "40", "--checkpoint-every", "5", "--out", str(out)]
    full = quacklr("train", *options, env=environment(), preexec_fn=small_files_only)
    assert full.returncode == 2
    assert f"quacklr train: cannot write {out}" in full.stderr
    assert "Traceback" not in full.stderr
    assert list((out / "checkpoints").glob("*")) == []
    resumed = quacklr("train", "--resume", out, env=environment())
    assert resumed.returncode == 0, resumed.stderr
    assert [row["step"] for row in read_rows(out)] == list(range(41))
