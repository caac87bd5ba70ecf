"""Cosmopedia-V2 and hub tokenizers, by the hub's own client, offline, on a cache of the hub's own layout."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from tokenizers import ByteLevelBPETokenizer, Tokenizer

from quacklr.lab.data import SPLITS, open_corpus


def cached(home: Path, kind: str, repo: str, name: str) -> Path:
    """Where the hub's client keeps a file of this repository that it has fetched."""
    commit = hashlib.sha1(repo.encode()).hexdigest()
    folder = home / "hub" / f"{kind}s--{repo.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / "main").write_text(commit)
    path = folder / "snapshots" / commit / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def cosmopedia(path: Path, texts: list[str]) -> None:
    """The six columns of Cosmopedia-V2."""
    count = len(texts)
    table = {
        "prompt": ["Write a story"] * count,
        "text": texts,
        "token_length": [len(text) // 4 for text in texts],
        "audience": ["young_children"] * count,
        "format": ["story"] * count,
        "seed_data": ["wikihow"] * count,
    }
    pq.write_table(pa.table(table), path, row_group_size=16)


def prepare(home: Path, *commands: Sequence[object]) -> subprocess.CompletedProcess[str]:
    """Commands in one process of their own, since the hub's client reads its settings when it is imported."""
    runs = [[str(argument) for argument in command] for command in commands]
    code = f"from quacklr.lab.data.command import main\nexit(max(main(run) for run in {runs}))"
    environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


TEXTS = [f"Once upon a time, {number} ducks went out to see." * 3 for number in range(150)]
ASKED = ("cosmopedia-v2", "--files", "2,5", "--tokenizer", "cosmo2", "--val", "0.1", "--probe", "0.1")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hub's cache with two files and a tokenizer, and beside it what was prepared of them."""
    home = tmp_path_factory.mktemp("home")
    for number, part in ((2, TEXTS[:90]), (5, TEXTS[90:])):
        name = f"cosmopedia-v2/train-{number:05d}-of-00104.parquet"
        cosmopedia(cached(home, "dataset", "HuggingFaceTB/smollm-corpus", name), part)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(TEXTS, vocab_size=300, special_tokens=["<|endoftext|>"])
    tokenizer.save(str(cached(home, "model", "HuggingFaceTB/cosmo2-tokenizer", "tokenizer.json")))
    done = prepare(home, [*ASKED, "--out", home / "out"])
    assert done.returncode == 0, done.stderr
    return home


def test_cosmopedia_is_read_by_file_with_its_own_tokenizer(home: Path) -> None:
    corpus = open_corpus(str(home / "out"))
    assert corpus.manifest.request["source"] == {"kind": "cosmopedia-v2", "files": [2, 5]}
    assert corpus.manifest.tokenizer.name == "cosmo2"
    tokenizer = Tokenizer.from_file(str(next(home.glob("hub/models--*/snapshots/*/tokenizer.json"))))
    read: Counter[str] = Counter()
    for path in [path for split in SPLITS for path in sorted((home / "out").glob(f"{split}-*.bin"))]:
        ids = np.frombuffer(path.read_bytes(), "<u2").tolist()
        read.update(tokenizer.decode(ids, skip_special_tokens=False).split("<|endoftext|>")[:-1])
    assert read == Counter(TEXTS)


def test_without_the_hub_a_finished_folder_is_enough_and_what_is_missing_is_named(home: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    finished = [*ASKED, "--out", home / "out"]
    text = ["cosmopedia-v2", "--files", "7", "--out", tmp_path / "out"]
    tokenizer = [tmp_path / "a.txt", "--tokenizer", "cosmo2", "--out", tmp_path / "out"]
    done = prepare(tmp_path, finished, text, tokenizer)
    assert "was finished before; nothing to do" in done.stdout
    assert done.returncode == 2
    first, second = done.stderr.splitlines()
    assert "cannot fetch cosmopedia-v2/train-00007-of-00104.parquet of HuggingFaceTB/smollm-corpus from the " in first
    assert first.endswith("; fetch it elsewhere and prepare it as a local file")
    assert "cannot fetch tokenizer.json of HuggingFaceTB/cosmo2-tokenizer from the hub (" in second
    assert second.endswith("; give a local one: --tokenizer PATH")
