"""A prepared corpus as training reads it. Judges: numpy's own concatenation, hand computation, the files themselves."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quacklr.lab.data import SPLITS, Tokens, batch, evaluation_batch, open_corpus
from quacklr.lab.data.command import main
from quacklr.lab.errors import UserError


def shards(folder: Path, *sizes: int) -> Tokens:
    """The numbers 0, 1, 2, ... over files of these sizes."""
    parts = np.split(np.arange(sum(sizes), dtype="<u2"), np.cumsum(sizes)[:-1])
    paths = [folder / f"{number}.bin" for number in range(len(sizes))]
    for path, part in zip(paths, parts, strict=True):
        path.write_bytes(part.tobytes())
    return Tokens("the train split of numbers", paths, vocab=2**16)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A small one made by the real command."""
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": f"text {n} " * 20}) + "\n" for n in range(60)))
    out = tmp_path / "corpus"
    assert main([str(tmp_path / "texts.jsonl"), "--val", "0.2", "--probe", "0.1", "--out", str(out)]) == 0
    return out


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.data())
def test_a_window_is_the_same_as_if_the_shards_were_one_array(sizes: list[int], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tokens = shards(Path(folder), *sizes)
        start = data.draw(st.integers(0, sum(sizes) - 1))
        length = data.draw(st.integers(1, sum(sizes) - start))
        assert len(tokens) == sum(sizes)
        assert tokens.window(start, length).tolist() == list(range(start, start + length))


def test_a_window_beyond_the_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IndexError, match="tokens 3 to 8 of the train split of numbers, which has 7"):
        shards(tmp_path, 4, 3).window(3, 5)


def test_every_epoch_visits_every_window_once_across_shard_ends(tmp_path: Path) -> None:
    tokens = shards(tmp_path, 33, 7, 61)  # 101 tokens: 20 windows of 5 and the last target
    rows = torch.cat([batch(tokens, seed=0, step=step, sequences=8, length=5) for step in range(10)])
    assert rows.dtype == torch.int64
    assert torch.equal(rows - rows[:, :1], torch.arange(6).expand(80, 6))
    epochs = rows[:, 0].view(4, 20).tolist()  # 8 does not divide 20, so steps 2 and 7 straddle
    assert all(sorted(epoch) == list(range(0, 100, 5)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert epochs[0][:3] != [0, 5, 10]


def test_a_batch_may_be_larger_than_the_split(tmp_path: Path) -> None:
    rows = batch(shards(tmp_path, 16), seed=3, step=1, sequences=12, length=5)
    assert sorted(rows[:, 0].tolist()) == sorted([0, 5, 10] * 4)


def test_a_batch_depends_on_seed_and_step_alone(tmp_path: Path) -> None:
    tokens = shards(tmp_path, 300, 201)
    first = batch(tokens, 0, 3, 4, 10)
    batch(tokens, 1, 0, 4, 10)
    assert torch.equal(first, batch(tokens, 0, 3, 4, 10))
    assert not torch.equal(first, batch(tokens, 1, 3, 4, 10))
    assert not torch.equal(first, batch(tokens, 0, 4, 4, 10))


def test_the_same_sequences_come_in_whatever_portions(tmp_path: Path) -> None:
    tokens = shards(tmp_path, 300, 201)
    whole = batch(tokens, 0, 5, 8, 10)
    assert torch.equal(whole, torch.cat([batch(tokens, 0, 5 * 8 + rank, 1, 10) for rank in range(8)]))
    assert torch.equal(whole, torch.cat([batch(tokens, 0, 10, 4, 10), batch(tokens, 0, 11, 4, 10)]))


def test_the_order_is_the_one_that_saved_runs_were_trained_with(tmp_path: Path) -> None:
    tokens = shards(tmp_path, 9)
    orders = [batch(tokens, seed, 0, 16, 1)[:, 0].tolist() for seed in (0, 1)]
    assert orders[0] == [3, 2, 1, 6, 0, 7, 4, 5, 7, 4, 5, 1, 6, 2, 0, 3]
    assert orders[1] == [2, 4, 7, 5, 0, 6, 3, 1, 5, 6, 3, 0, 7, 2, 1, 4]


def test_fixed_windows_are_evenly_spaced_and_never_more_than_there_are(tmp_path: Path) -> None:
    tokens = shards(tmp_path, 50, 51)
    assert evaluation_batch(tokens, 4, 10)[:, 0].tolist() == [0, 20, 50, 70]
    assert torch.equal(evaluation_batch(tokens, 4, 10)[1], torch.arange(20, 31))
    assert evaluation_batch(tokens, 99, 10)[:, 0].tolist() == list(range(0, 100, 10))


def test_too_few_tokens_for_a_window_are_refused_by_name(tmp_path: Path) -> None:
    tokens = shards(tmp_path, 7)
    with pytest.raises(UserError, match="the train split of numbers has 7 tokens, fewer than one window of 7"):
        batch(tokens, 0, 0, 1, 7)
    with pytest.raises(UserError, match="the train split of numbers has 7 tokens, fewer than one window of 7"):
        evaluation_batch(tokens, 1, 7)


def test_a_corpus_says_what_it_is(corpus: Path) -> None:
    opened = open_corpus(str(corpus))
    assert opened.folder == corpus
    assert opened.vocab == 256
    assert opened.bytes_per_token("val") == 1.0
    assert opened.fingerprint == hashlib.sha256((corpus / "manifest.json").read_bytes()).hexdigest()[:8]
    assert opened.tokenizer.decode(opened.tokens("train").window(0, 7).tolist()) == "text 0 "
    for split in SPLITS:
        raw = b"".join(path.read_bytes() for path in sorted(corpus.glob(f"{split}-*.bin")))
        stated = opened.manifest.splits[split]
        assert len(opened.tokens(split)) == stated.tokens == len(raw) // 2
        assert [shard.sha256 for shard in stated.shards] == [hashlib.sha256(raw).hexdigest()]
        assert stated.documents == raw.count(b"\0\0")


def test_the_bytes_of_any_text_come_back(corpus: Path) -> None:
    tokenizer = open_corpus(str(corpus)).tokenizer
    assert tokenizer.encode("a\u00e9\n") == [97, 195, 169, 10]
    assert tokenizer.decode([97, 195, 169, 10]) == "a\u00e9\n"
    assert tokenizer.encode("a\0b") == [97, 98]
    assert tokenizer.decode([97, 195]) == "a\ufffd"


def test_what_is_no_corpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere does not exist: quacklr prepare SOURCE --out nowhere"):
        open_corpus("nowhere")
    with pytest.raises(UserError, match="is not finished or was not made by quacklr prepare"):
        open_corpus(str(tmp_path))


def test_a_missing_and_a_truncated_shard_are_refused_by_name(corpus: Path) -> None:
    shard = corpus / "train-00000.bin"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-2])
    with pytest.raises(UserError, match=f"train-00000.bin has {len(whole) - 2:,} bytes instead of {len(whole):,}"):
        open_corpus(str(corpus))
    shard.unlink()
    with pytest.raises(UserError, match="train-00000.bin is missing; remove the folder and prepare it again"):
        open_corpus(str(corpus))


def test_verify_finds_one_changed_byte_that_opening_does_not(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--verify", str(corpus)]) == 0
    assert "all hashes are those of its manifest" in capsys.readouterr().out
    shard = corpus / "val-00000.bin"
    shard.write_bytes(b"x" + shard.read_bytes()[1:])
    open_corpus(str(corpus))
    assert main(["--verify", str(corpus)]) == 2
    assert "val-00000.bin is not what was written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda text: text[:-20], "manifest.json is damaged"),
        (lambda text: text.replace('"vocab"', '"words"'), "manifest.json is damaged"),
        (lambda text: text.replace('"format": 1', '"format": 2'), "has format 2, and this quacklr reads 1"),
    ],
    ids=["cut off", "another key", "another format"],
)
def test_a_damaged_or_foreign_manifest_is_refused(corpus: Path, change: object, complaint: str) -> None:
    assert callable(change)
    (corpus / "manifest.json").write_text(change((corpus / "manifest.json").read_text()))
    with pytest.raises(UserError, match=complaint):
        open_corpus(str(corpus))


def test_a_manifest_of_a_split_or_a_shard_without_tokens_is_refused(corpus: Path) -> None:
    manifest = json.loads((corpus / "manifest.json").read_text())
    val = manifest["splits"]["val"]
    more = {"name": "val-00001.bin", "sha256": "0" * 64, "tokens": 0}
    for changed in (val | {"tokens": 0, "shards": []}, val | {"shards": [*val["shards"], more]}):
        splits = manifest["splits"] | {"val": changed}
        (corpus / "manifest.json").write_text(json.dumps(manifest | {"splits": splits}))
        with pytest.raises(UserError, match="manifest.json is damaged; remove the folder and prepare it again"):
            open_corpus(str(corpus))


def test_the_standard_library_is_made_on_first_use_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUACKLR_CACHE", str(tmp_path))
    corpus = open_corpus("stdlib")
    assert corpus.folder.parent == tmp_path
    splits = corpus.manifest.splits
    assert splits["val"].bytes >= 200_000
    assert splits["probe"].bytes >= 50_000
    assert min(split.documents for split in splits.values()) > 1
    made = {path: path.stat().st_mtime_ns for path in corpus.folder.iterdir()}
    assert open_corpus("stdlib").folder == corpus.folder
    assert {path: path.stat().st_mtime_ns for path in corpus.folder.iterdir()} == made
    source = Path(json.__file__).read_bytes()
    everything = [np.concatenate([corpus.tokens(s).window(0, len(corpus.tokens(s)))]) for s in SPLITS]
    assert sum(source + b"\0" in array.astype(np.uint8).tobytes() for array in everything) == 1


RACE = """
import os, sys
from quacklr.lab.data import open_corpus
print({"pyarrow", "tokenizers", "huggingface_hub", "rich"} & set(sys.modules), flush=True)
racers = []
for _ in range(3):
    racers.append(os.fork())
    if racers[-1] == 0:
        corpus = open_corpus("stdlib")
        corpus.verify(lambda tokens: None)
        os._exit(0)
sys.exit(sum(os.waitpid(racer, 0)[1] for racer in racers))
"""


@pytest.fixture(scope="module")
def race(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "QUACKLR_CACHE": str(tmp_path_factory.mktemp("cache"))}
    return subprocess.run([sys.executable, "-c", RACE], env=environment, capture_output=True, text=True)


def test_processes_that_make_the_standard_library_at_once_do_not_hurt_each_other(
    race: subprocess.CompletedProcess[str],
) -> None:
    assert race.returncode == 0, race.stderr
    assert race.stderr.count("preparing the standard library") == 1


def test_opening_a_corpus_imports_none_of_the_heavy_packages(race: subprocess.CompletedProcess[str]) -> None:
    assert race.stdout == "set()\n"
