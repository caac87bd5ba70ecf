"""What `quacklr prepare` refuses: one sentence that names the thing and the way out, exit code 2, nothing lost."""

from __future__ import annotations

import json
import re
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from tokenizers import Tokenizer, models

from quacklr.lab.data import SPLITS, open_corpus
from quacklr.lab.data.command import main
from quacklr.lab.data.extra import fetch
from quacklr.lab.data.journal import validate_same_request
from quacklr.lab.data.manifest import Split
from quacklr.lab.data.shards import write_set
from quacklr.lab.data.vocabularies import describe
from quacklr.lab.errors import UserError
from quacklr.lab.files import locked

Complaint = Callable[..., str]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    lines = [json.dumps({"text": f"text {number} " * 9}) + "\n" for number in range(80)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    return tmp_path / "a.jsonl"


@pytest.fixture
def complaint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Complaint:
    """Run the command, which must refuse in one line; that line."""

    def run(*arguments: object, out: Path | None = None) -> str:
        capsys.readouterr()
        assert main([*map(str, arguments), "--out", str(out or tmp_path / "out")]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        lines = [line for line in said.err.splitlines() if not line.startswith(("preparing:", "training"))]
        assert len(lines) == 1
        assert lines[0].startswith("quacklr prepare: ")
        return lines[0].removeprefix("quacklr prepare: ")

    return run


def test_a_broken_line_is_named(tmp_path: Path, source: Path, complaint: Complaint) -> None:
    with source.open("a") as file:
        file.write('{"text": "cut\n')
    assert complaint(source).startswith(f"{source}, line 81 is not JSON: ")
    source.write_text('{"text": "a"}\n{"body": "b", "id": 3}\n')
    assert complaint(source) == f"{source}, line 2 has no text, only body, id: choose one with --column"
    assert complaint(source, "--column", "id") == f"{source}, line 1 has no id, only text: choose one with --column"
    source.write_text('{"text": 5}\n')
    assert complaint(source) == f"{source}, line 1, text holds int, not text"
    source.write_text("[1]\n")
    assert complaint(source) == f"{source}, line 1 has no text, only list: choose one with --column"
    assert not list((tmp_path / "out").glob("*.bin"))


def test_an_unreadable_parquet_and_a_missing_column_are_named(tmp_path: Path, complaint: Complaint) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": ["a"], "length": [3]}), path)
    assert complaint(path) == f"{path} has no column text, only prompt, length: choose one with --column"
    assert complaint(path, "--column", "length") == f"{path}, column length holds int, not text"
    path.write_bytes(path.read_bytes()[:-9])
    assert complaint(path).startswith(f"cannot read {path}: ")


def test_text_in_another_encoding_is_named(tmp_path: Path, complaint: Complaint) -> None:
    (tmp_path / "latin.txt").write_bytes("caf\u00e9".encode("latin-1"))
    assert complaint(tmp_path) == f"{tmp_path}/latin.txt is not UTF-8 text (byte 3); convert it or leave it out"


def test_nothing_to_read_says_what_is_accepted(tmp_path: Path, complaint: Complaint) -> None:
    (tmp_path / "a.csv").write_text("a")
    assert complaint(tmp_path).endswith("; accepted are .txt, .jsonl, .parquet")
    assert complaint("gone.txt") == "gone.txt does not exist; give files or folders, stdlib, or cosmopedia-v2"
    assert complaint() == "no source; give files or folders, stdlib, or cosmopedia-v2"
    assert not (tmp_path / "out").exists()


def test_a_source_too_small_for_three_splits_says_so_and_leaves_the_folder_free(
    tmp_path: Path, source: Path, complaint: Complaint
) -> None:
    assert complaint(source, "--val", "1e-9", "--probe", "1e-9") == (
        "none of 80 documents fell to val and probe; raise --val to 0.06 and --probe to 0.06 or so"
    )
    assert complaint(source, "--val", "0.5", "--probe", "0.499999") == (
        "none of 80 documents fell to train; lower --val and --probe"
    )
    assert not list((tmp_path / "out").glob("*.bin"))
    assert main([str(source), "--val", "0.2", "--probe", "0.1", "--out", str(tmp_path / "out")]) == 0
    (tmp_path / "one.txt").write_text("all in one")
    assert complaint(tmp_path / "one.txt", out=tmp_path / "two").startswith(
        "too few documents (1): train, val and probe"
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["stdlib", "a.txt"], "stdlib cannot be mixed with other sources"),
        (["stdlib", "--files", "0"], "--files is for cosmopedia-v2 only"),
        (["stdlib", "--column", "text"], "--column is for local files"),
        (["stdlib", "--end-token", "x"], "--end-token contradicts --tokenizer bytes"),
        (["stdlib", "--val", "0"], "--val 0.0 and --probe 0.02 are shares"),
        (["stdlib", "--val", "0.7", "--probe", "0.3"], "together below 1"),
        (["stdlib", "--val", "nan"], "--val nan"),
        (["stdlib", "--shard-tokens", "0"], "--shard-tokens must be at least 1, not 0"),
        (["stdlib", "--tokenizer", "train:256"], "SIZE must be a whole number from 257 to 65,536"),
        (["stdlib", "--tokenizer", "train:many"], "SIZE must be a whole number"),
        (["stdlib", "--tokenizer", "gpt5"], "cannot read the tokenizer gpt5 (No such file or directory); use bytes, "),
        (["cosmopedia-v2"], "say which files of cosmopedia-v2: --files 0-3"),
        (["cosmopedia-v2", "--files", "0-x"], "--files 0-x is not numbers and ranges"),
        (["cosmopedia-v2", "--files", "100-104"], "each file once, from 0 to 103"),
        (["cosmopedia-v2", "--files", "1,0-2"], "each file once"),
        (["cosmopedia-v2", "--files", "3-1"], "each file once"),
        (["--verify", "x"], "--verify DIR looks at a finished folder, and takes no other option"),
    ],
    ids=" ".join,
)
def test_options_that_contradict_each_other_are_refused_before_anything_is_made(
    tmp_path: Path, complaint: Complaint, arguments: list[str], sentence: str
) -> None:
    assert sentence in complaint(*arguments)
    assert not (tmp_path / "out").exists()


def test_a_missing_out_and_an_unknown_option_are_mistakes_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stdlib"]) == 2
    assert capsys.readouterr().err.startswith("quacklr prepare: --out DIR is missing")
    assert main(["stdlib", "--outt", "x"]) == 2
    assert main(["--help"]) == 0
    assert "quacklr prepare cosmopedia-v2 --files 0-3" in capsys.readouterr().out


def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path, source: Path, complaint: Complaint) -> None:
    assert "the tokenizer a.jsonl is no tokenizer.json: " in complaint(source, "--tokenizer", source)
    assert not (tmp_path / "out" / "tokenizer.json").exists()


def test_other_options_on_a_finished_folder_are_refused_and_the_same_are_not(
    tmp_path: Path, source: Path, complaint: Complaint, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [str(source), "--val", "0.2", "--probe", "0.1"]
    assert main([*asked, "--out", str(tmp_path / "out")]) == 0
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    refusal = complaint(*asked, "--tokenizer", "train:300")
    assert "out was begun with another tokenizer (bytes, now train:300); choose another --out" in refusal
    assert "another shard tokens (100000000, now 5)" in complaint(*asked, "--shard-tokens", "5")
    assert "another held out (val 0.2, probe 0.1, now val 0.3" in complaint(source, "--val", "0.3", "--probe", "0.1")
    assert main([*asked, "--out", str(tmp_path / "out")]) == 0
    assert "was finished before; nothing to do" in capsys.readouterr().out
    source.write_text(source.read_text() + '{"text": "more"}\n')
    assert "another source" in complaint(*asked)
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_a_package_that_is_not_installed_is_named_with_its_extra(
    tmp_path: Path, source: Path, complaint: Complaint, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "a.parquet")
    for name in ("pyarrow.parquet", "tokenizers", "huggingface_hub"):
        monkeypatch.setitem(sys.modules, name, None)  # what Python itself takes for "not installed"
    way_out = "pip install 'quacklr[data]'"
    assert complaint(tmp_path / "a.parquet") == f"reading parquet needs the package pyarrow: {way_out}"
    assert complaint(source, "--tokenizer", "train:300").endswith(f"needs the package tokenizers: {way_out}")
    assert complaint("cosmopedia-v2", "--files", "0") == f"the hub needs the package huggingface_hub: {way_out}"


def test_a_trained_tokenizer_has_room_for_all_bytes_and_the_end_and_fits_16_bits() -> None:
    assert [describe(f"train:{size}") for size in ("257", "65536")] == ["train:257", "train:65536"]
    for size in ("256", "65537", "-300", ""):
        with pytest.raises(
            UserError, match=f"^--tokenizer train:{size}: SIZE must be a whole number from 257 to 65,536"
        ):
            describe(f"train:{size}")


def test_long_options_are_shortened_where_they_differ(tmp_path: Path) -> None:
    before, now = {"end_token": "x" * 60}, {"end_token": "y" * 61}
    with pytest.raises(UserError, match=re.escape(f"another end token ({'x' * 60}, now {'y' * 57}...); choose")):
        validate_same_request(tmp_path, now, before)


def test_the_reason_why_the_hub_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> str:  # as huggingface_hub raises it
        raise FileNotFoundError("An error happened, please check your connection.") from OSError("No route to host")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    with pytest.raises(UserError, match=r"^cannot fetch a.json of an/id from the hub \(No route to host\); copy it$"):
        fetch("an/id", "a.json", "model", "copy it")


def test_another_tokenizer_in_a_file_of_the_same_name_is_another(
    tmp_path: Path, source: Path, complaint: Complaint
) -> None:
    words = tmp_path / "words.json"
    asked = [str(source), "--val", "0.2", "--probe", "0.1", "--tokenizer", str(words)]
    Tokenizer(models.WordLevel({"?": 0, "</s>": 1}, unk_token="?")).save(str(words))
    assert main([*asked, "--out", str(tmp_path / "out")]) == 0
    Tokenizer(models.WordLevel({"?": 1, "</s>": 0}, unk_token="?")).save(str(words))
    assert "was begun with another tokenizer (words.json" in complaint(*asked)


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path, source: Path, complaint: Complaint) -> None:
    assert "holds other files; choose another --out" in complaint(source, out=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name[0] != ".") == ["a.jsonl"]


def test_two_at_once_in_one_folder_are_refused(tmp_path: Path, source: Path, complaint: Complaint) -> None:
    with locked(tmp_path / "out", wait=False):
        assert "another quacklr is at work in" in complaint(source)


def test_an_unwritable_folder_is_named(source: Path, complaint: Complaint) -> None:
    below = source / "out"  # below a regular file nothing can be made, even by root
    assert complaint(source, out=below) == f"cannot write to {below}: Not a directory"


def test_an_unwritable_cache_names_the_variable(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUACKLR_CACHE", str(source))
    with pytest.raises(Exception, match=r"Not a directory \(QUACKLR_CACHE names another place for it\)"):
        open_corpus("stdlib")


@contextmanager
def little_disk(size: int) -> Iterator[None]:
    """No file can be larger: the system's own refusal, "File too large"."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def test_a_full_disk_is_told_and_costs_only_the_shard_that_did_not_fit(
    tmp_path: Path, source: Path, complaint: Complaint
) -> None:
    lines = [json.dumps({"text": f"long {number} " * 9999}) + "\n" for number in range(30)]
    source.write_text(source.read_text() + "".join(lines))
    asked = [str(source), "--val", "0.2", "--probe", "0.1", "--shard-tokens", "3000"]
    with little_disk(60_000):
        said = complaint(*asked)
    out = tmp_path / "out"
    assert said.startswith(f"cannot write {out}/")
    assert said.endswith(".bin: File too large")
    whole = {path: path.stat().st_mtime_ns for path in out.glob("*.bin")}
    assert whole
    assert not list(out.glob(".*.part"))
    assert main([*asked, "--out", str(out)]) == 0
    assert {path: path.stat().st_mtime_ns for path in whole} == whole
    open_corpus(str(out)).verify(lambda _: None)


def test_of_files_open_side_by_side_the_one_that_did_not_fit_is_named(tmp_path: Path) -> None:
    small, large = np.zeros(9, "<u2"), np.zeros(99_999, "<u2")
    pieces = [("train", b"", small), ("val", b"", small), ("probe", b"", small), ("train", b"", large)]
    with (
        little_disk(60_000),
        pytest.raises(UserError, match=f"cannot write {tmp_path}/train-00000.bin: File too large"),
    ):
        write_set(tmp_path, {name: Split() for name in SPLITS}, 10**9, pieces)
    assert not list(tmp_path.iterdir())


def test_a_file_that_was_named_and_cannot_be_read_is_not_left_out(source: Path, tmp_path: Path, capfd: Any) -> None:
    (tmp_path / "notes.md").write_text("hello")
    assert main([str(source), str(tmp_path / "notes.md"), "--out", str(tmp_path / "out")]) == 2
    assert f"no file to read in {tmp_path / 'notes.md'}; accepted are " in capfd.readouterr().err
