"""Tokens that were changed after they were prepared are not trained on."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab_runs import ATTENTIONS, OPTIONS, complaint, files, read_rows, small
from quacklr.lab.config import to_json
from quacklr.lab.data import batch, open_corpus
from quacklr.lab.data import corpus as corpora
from quacklr.lab.data.command import main as prepare
from quacklr.lab.data.manifest import check_hash
from quacklr.lab.errors import UserError
from quacklr.lab.methods import Default
from quacklr.lab.sweep.interleaved import Interleaved
from quacklr.lab.train.command import main
from quacklr.lab.train.runner import run

SPLITS = ("train", "val", "probe")


@pytest.fixture
def copy(corpus: Path, tmp_path: Path) -> Path:
    """A corpus to be spoilt."""
    return Path(shutil.copytree(corpus, tmp_path / "corpus"))


def edit(path: Path, token: int = ord("x")) -> None:
    """Write another token into the middle of a shard; its size stays."""
    content = np.fromfile(path, "<u2")
    content[len(content) // 2] = token
    path.write_bytes(content.tobytes())


def restated(folder: Path, **changes: Any) -> None:
    """A manifest by hand whose hashes fit the files."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for split in manifest["splits"].values():
        for shard in split["shards"]:
            shard["sha256"] = hashlib.sha256((folder / shard["name"]).read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest | changes))


@pytest.mark.parametrize("split", SPLITS)
def test_a_token_that_was_edited_is_found_before_a_run_begins(
    copy: Path, tmp_path: Path, split: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = copy / f"{split}-00000.bin"
    edit(path)
    said = complaint(capsys, *OPTIONS, "--corpus", str(copy), "--out", str(tmp_path / "run"))
    assert f"{path} is not what was written: its hash is another; remove the folder and prepare it again" in said
    assert not (tmp_path / "run").exists()


def test_a_token_that_was_edited_is_found_by_runs_that_take_turns(copy: Path, tmp_path: Path) -> None:
    edit(copy / "train-00000.bin")
    job = Interleaved(1, 1).start(small(copy, Default(), ATTENTIONS["mha"], steps=4), tmp_path / "run")
    with pytest.raises(UserError, match="is not what was written"):
        job.outcome()


def with_old_time(path: Path) -> None:
    """As old as the corpus, whatever was written to it since."""
    os.utime(path, ns=(0, 0))


def test_of_a_large_corpus_only_what_is_newer_than_its_manifest_is_hashed_at_the_start_and_all_at_resume(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(corpora, "ALWAYS_HASHED_BYTES", 1000)
    hashed: list[str] = []

    def noted(path: Path, sha256: str) -> Path:
        hashed.append(path.name)
        return check_hash(path, sha256)

    monkeypatch.setattr(corpora, "check_hash", noted)
    for name in SPLITS:
        with_old_time(copy / f"{name}-00000.bin")
    options = [*OPTIONS, "--corpus", str(copy), "--steps", "8", "--warmup", "2", "--checkpoint-every", "4"]
    assert main([*options, "--out", str(tmp_path / "run")]) == 0
    assert hashed == []
    edit(copy / "val-00000.bin")
    assert "val-00000.bin is not what was written" in complaint(capsys, *options, "--out", str(tmp_path / "other"))
    assert hashed == ["val-00000.bin"]
    with_old_time(copy / "val-00000.bin")  # what no start can see
    before = files(tmp_path / "run")
    said = complaint(capsys, "--resume", str(tmp_path / "run"), "--steps", "12")
    assert "val-00000.bin is not what was written" in said
    assert files(tmp_path / "run") == before


@pytest.mark.parametrize("split", SPLITS)
def test_a_token_that_the_tokenizer_does_not_have_is_a_sentence(
    copy: Path, tmp_path: Path, split: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The hashes fit: somebody has made the folder by hand."""
    path = copy / f"{split}-00000.bin"
    tokens = np.fromfile(path, "<u2")
    tokens[:] = 256
    path.write_bytes(tokens.tobytes())
    restated(copy)
    said = complaint(capsys, *OPTIONS, "--corpus", str(copy), "--out", str(tmp_path / "run"))
    assert f"the {split} split of {copy} has the token 256, but its tokenizer has 256 tokens, from 0 to 255" in said


def test_a_token_that_the_tokenizer_does_not_have_ends_a_run_at_the_step_that_reads_it(
    copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = copy / "train-00000.bin"
    tokens = np.fromfile(path, "<u2")
    step_3 = batch(open_corpus(str(copy)).tokens("train"), seed=0, step=3, sequences=8, length=16)[0].numpy()
    (place,) = (at for at in range(0, len(tokens) - 16, 16) if (tokens[at : at + 17] == step_3).all())
    tokens[place + 3] = 300
    path.write_bytes(tokens.tobytes())
    restated(copy)
    options = [*OPTIONS, "--corpus", str(copy), "--steps", "30"]
    said = complaint(capsys, *options, "--out", str(tmp_path / "run"))
    assert "has the token 300, but its tokenizer has 256 tokens" in said
    assert [row["step"] for row in read_rows(tmp_path / "run")] == [0, 1, 2, 3]


BROKEN: dict[str, Any] = {
    "a list": [],
    "a number": 3,
    "no splits": {"splits": {}},
    "splits that are a list": {"splits": []},
    "a tokenizer without a size": {"tokenizer": {"name": "bytes"}},
    "a tokenizer of a size that is text": {"vocab": "256"},
    "a tokenizer that is null": {"tokenizer": None},
    "a request that is a number": {"request": 3},
    "another format": {"format": 7},
    "a shard elsewhere": {"name": "../../elsewhere.bin"},
    "a shard of a negative size": {"tokens": -3},
    "a shard of a size that is text": {"tokens": "many"},
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_manifest_of_another_shape_is_a_sentence(
    copy: Path, tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    broken = BROKEN[how]
    if how.startswith("a shard"):
        manifest["splits"]["val"]["shards"][0] |= broken
    elif "vocab" in str(broken):
        manifest["tokenizer"] |= broken
    else:
        manifest = manifest | broken if isinstance(broken, dict) else broken
    (copy / "manifest.json").write_text(json.dumps(manifest))
    said = complaint(capsys, *OPTIONS, "--corpus", str(copy), "--out", str(tmp_path / "run"))
    assert str(copy) in said
    assert not (tmp_path / "run").exists()


def test_a_journal_of_another_shape_is_a_sentence_and_nothing_outside_of_its_folder_is_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "few.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    (tmp_path / "precious.bin").write_text("of the user's")
    (tmp_path / "out").mkdir()
    shard = {"name": "../precious.bin", "tokens": 3, "sha256": ""}
    split = {"documents": 1, "tokens": 3, "bytes": 4, "shards": [shard]}
    journals: list[Any] = [[], {"format": 1}, {"format": 1, "request": {}, "tokenizer": None, "place": 3, "splits": {}}]
    journals.append(
        {"format": 1, "request": {}, "tokenizer": None, "place": {}, "splits": dict.fromkeys(SPLITS, split)}
    )
    for journal in journals:
        (tmp_path / "out/journal.json").write_text(json.dumps(journal))
        assert prepare([str(tmp_path / "few.jsonl"), "--out", str(tmp_path / "out")]) == 2
        assert f"{tmp_path / 'out/journal.json'} is damaged" in capsys.readouterr().err
    assert (tmp_path / "precious.bin").read_text() == "of the user's"


def test_an_empty_name_of_the_cache_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUACKLR_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert corpora._cache_folder() == tmp_path / "quacklr"


def test_a_corpus_that_was_copied_is_the_same(copy: Path, tmp_path: Path) -> None:
    """A copy has other times."""
    result = run(small(copy, Default(), ATTENTIONS["mha"], steps=4), tmp_path / "run")
    assert result["status"] == "finished"
    assert open_corpus(str(copy)).shards_to_verify(every=False) == open_corpus(str(copy)).shards
    assert to_json(small(copy, Default(), ATTENTIONS["mha"]))["training"]["corpus"] == str(copy)
