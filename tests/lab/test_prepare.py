"""`quacklr prepare` on each kind of text and tokenizer. The judge is the text itself, read back out of the shards."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from tokenizers import ByteLevelBPETokenizer, Tokenizer, models, pre_tokenizers

from quacklr.lab.data import SPLITS, open_corpus
from quacklr.lab.data.command import main
from quacklr.lab.data.manifest import Split
from quacklr.lab.data.shards import write_set
from quacklr.lab.data.sources import Local, TextPosition, documents
from quacklr.lab.data.tokenizer import ByteTokenizer

TEXTS = [f"text {number}: {'so on, and so on. ' * (number % 7 + 1)}" for number in range(120)]
SHARES = ("--val", "0.1", "--probe", "0.1")


def prepare(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def jsonl(path: Path, texts: list[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({"number": number, key: text}) + "\n" for number, text in enumerate(texts)))
    return path


def parquet(path: Path, texts: list[str | None], column: str = "text", group: int = 7) -> Path:
    table = pa.table({"prompt": ["write"] * len(texts), column: texts})
    pq.write_table(table, path, row_group_size=group)
    return path


def ids(out: Path, split: str) -> list[int]:
    """Straight from the files."""
    raw = b"".join(path.read_bytes() for path in sorted(out.glob(f"{split}-*.bin")))
    return [int(token) for token in np.frombuffer(raw, "<u2")]


def read_back(out: Path, split: str) -> list[str]:
    """The documents of a split of bytes."""
    assert ids(out, split)[-1] == 0
    return bytes(ids(out, split)).decode().split("\0")[:-1]


def all_of(out: Path) -> Counter[str]:
    return Counter(text for split in SPLITS for text in read_back(out, split))


def test_jsonl_is_a_document_a_line(tmp_path: Path) -> None:
    lines = jsonl(tmp_path / "a.jsonl", TEXTS[:60], "body").read_text() + "\n\n"
    (tmp_path / "a.jsonl").write_text(lines + jsonl(tmp_path / "b.jsonl", TEXTS[60:], "body").read_text())
    (tmp_path / "b.jsonl").unlink()
    assert prepare(tmp_path, *SHARES, "--column", "body", "--out", tmp_path / "out") == 0
    assert all_of(tmp_path / "out") == Counter(TEXTS)


def test_a_parquet_without_rows_has_no_documents(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", [])
    parquet(tmp_path / "b.parquet", [*TEXTS])
    assert prepare(tmp_path, *SHARES, "--out", tmp_path / "out") == 0
    assert all_of(tmp_path / "out") == Counter(TEXTS)


def test_parquet_is_a_document_a_row(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", [*TEXTS, None, ""], "body")
    assert prepare(tmp_path / "a.parquet", *SHARES, "--column", "body", "--out", tmp_path / "out") == 0
    assert all_of(tmp_path / "out") == Counter(TEXTS)


def test_a_folder_may_mix_kinds_and_have_folders_and_other_files(tmp_path: Path) -> None:
    folder = tmp_path / "given"
    (folder / "deep" / "er").mkdir(parents=True)
    for number, text in enumerate(TEXTS[:40]):
        (folder / "deep" / f"{number:02d}.TXT").write_text(text)
    jsonl(folder / "deep" / "er" / "some.jsonl", TEXTS[40:80])
    parquet(folder / "more.parquet", list(TEXTS[80:100]))
    (folder / "picture.png").write_bytes(b"\x89PNG")
    last = jsonl(tmp_path / "last.jsonl", TEXTS[100:])
    assert prepare(folder, last, *SHARES, "--out", tmp_path / "out") == 0
    assert all_of(tmp_path / "out") == Counter(TEXTS)


def test_a_folder_may_have_the_name_of_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QUACKLR_CACHE", str(tmp_path / "cache"))
    jsonl(tmp_path / "a.jsonl", TEXTS)
    assert prepare("a.jsonl", *SHARES, "--out", "stdlib") == 0
    assert prepare("--verify", "stdlib") == 0
    assert all_of(tmp_path / "stdlib") == Counter(TEXTS)
    assert not (tmp_path / "cache").exists()


def test_reading_can_begin_at_any_place(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    jsonl(tmp_path / "b.jsonl", ["b1", "", "b3"])
    parquet(tmp_path / "c.parquet", [f"c{number}" if number % 5 else None for number in range(23)])
    (tmp_path / "d.txt").write_text("d")
    files = Local((tmp_path,)).files()
    everything = list(documents(files, TextPosition()))
    assert len(everything) == 1 + 3 + 23 + 1
    assert everything[-1][1].read == pytest.approx(sum(file.size for file in files))
    for number, (_, place) in enumerate(everything, 1):
        assert list(documents(files, place)) == everything[number:]


def test_reading_can_begin_in_the_middle_of_a_large_row_group(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", [f"{number}" for number in range(2500)], group=2500)
    files = Local((tmp_path,)).files()
    for skip in (999, 1000, 1001, 2400):
        assert [text for text, _ in documents(files, TextPosition(0, skip))] == [b"%d" % n for n in range(skip, 2500)]


def test_documents_keep_their_order_and_nuls_and_half_characters_are_mended(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", [*TEXTS, "a\0b", "\ud800c", "caf\u00e9", "", "\0"])
    assert prepare(tmp_path / "a.jsonl", *SHARES, "--out", tmp_path / "out") == 0
    train = read_back(tmp_path / "out", "train")
    assert train == [text for text in [*TEXTS, "ab", "?c", "caf\u00e9"] if text in set(train)]
    assert all_of(tmp_path / "out") == Counter([*TEXTS, "ab", "?c", "caf\u00e9"])


def test_a_document_and_its_copies_are_in_one_split_only(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", [*TEXTS, *reversed(TEXTS)])
    jsonl(tmp_path / "b.jsonl", [text.replace("t", "\0t") for text in TEXTS])
    assert prepare(tmp_path / "a.jsonl", tmp_path / "b.jsonl", *SHARES, "--out", tmp_path / "out") == 0
    train, val, probe = (set(read_back(tmp_path / "out", split)) for split in SPLITS)
    assert min(len(train), len(val), len(probe)) > 0
    assert not train & val
    assert not train & probe
    assert not val & probe
    assert all_of(tmp_path / "out") == Counter(TEXTS * 3)


def test_shares_are_those_asked_for(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", [f"{number}" for number in range(20000)])
    assert prepare(source, "--val", "0.3", "--probe", "0.1", "--out", tmp_path / "out") == 0
    splits = open_corpus(str(tmp_path / "out")).manifest.splits
    assert splits["val"].documents == pytest.approx(6000, abs=200)  # 3 standard deviations
    assert splits["probe"].documents == pytest.approx(2000, abs=130)


@pytest.mark.parametrize("shares", [("--val", "0.1", "--probe", "0.1"), ("--val", "0.6", "--probe", "0.1")])
def test_shards_end_with_the_document_that_fills_one_and_are_one_sequence(
    tmp_path: Path, shares: tuple[str, ...]
) -> None:
    source = jsonl(tmp_path / "a.jsonl", TEXTS)
    assert prepare(source, *shares, "--out", tmp_path / "one") == 0
    assert prepare(source, *shares, "--shard-tokens", 1000, "--out", tmp_path / "many") == 0
    longest = 1000 + max(map(len, TEXTS)) + 1
    shards = sorted((tmp_path / "many").glob("*.bin"))
    assert sum(shard.stat().st_size >= 2 * 1000 for shard in shards) >= 5
    for shard in shards:
        assert shard.stat().st_size < 2 * longest
        assert shard.read_bytes()[-2:] == b"\0\0"
    for split in SPLITS:
        tokens = open_corpus(str(tmp_path / "many")).tokens(split)
        assert tokens.window(0, len(tokens)).tolist() == ids(tmp_path / "one", split)


def test_a_shard_ends_with_the_document_that_fills_it_exactly(tmp_path: Path) -> None:
    pieces = iter([("train", b"four", np.zeros(5, np.uint16))] * 5)
    splits = {name: Split() for name in SPLITS}
    for shards in ([10], [10, 10], [10, 10, 5]):
        splits = write_set(tmp_path, splits, 10, pieces)
        assert [shard.tokens for shard in splits["train"].shards] == shards


def test_text_is_encoded_in_portions_of_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    portions: list[int] = []
    encode = ByteTokenizer.encode_documents

    def counted(self: ByteTokenizer, texts: Sequence[bytes]) -> Any:
        portions.append(sum(map(len, texts)))
        return encode(self, texts)

    monkeypatch.setattr(ByteTokenizer, "encode_documents", counted)
    monkeypatch.setattr("quacklr.lab.data.prepare.CHUNK", 1000)
    assert prepare(jsonl(tmp_path / "a.jsonl", TEXTS), *SHARES, "--out", tmp_path / "out") == 0
    assert sum(portions) == sum(map(len, TEXTS))
    assert max(portions) < 1000 + max(map(len, TEXTS))


def test_a_folder_with_other_files_of_the_same_size_is_another_source(tmp_path: Path) -> None:
    def described(**texts: str) -> dict[str, Any]:
        for name, text in texts.items():
            (tmp_path / f"{name}.txt").write_text(text)
        return Local((tmp_path,)).describe()

    first = described(a="one", b="three")
    assert described(a="two", b="seven") == first, "names and sizes are compared, and the text is not read"
    exchanged = described(a="three", b="one")
    assert exchanged != first
    assert {key for key in first if first[key] != exchanged[key]} == {"listing"}


def test_the_manifest_is_the_same_wherever_it_is_made(tmp_path: Path) -> None:
    for home in (tmp_path / "here", tmp_path / "there"):
        (home / "texts").mkdir(parents=True)
        jsonl(home / "texts" / "a.jsonl", TEXTS)
        assert prepare(home / "texts", *SHARES, "--tokenizer", "train:300", "--out", home / "out") == 0
    made = [(home / "out" / "manifest.json").read_text() for home in (tmp_path / "here", tmp_path / "there")]
    assert made[0] == made[1]
    assert str(tmp_path) not in made[0]


def test_a_trained_tokenizer_is_the_same_twice_and_gives_the_text_back(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", TEXTS)
    asked = [str(x) for x in (source, *SHARES, "--tokenizer", "train:300", "--out")]
    assert main([*asked, str(tmp_path / "one")]) == 0
    elsewhere = [sys.executable, "-m", "quacklr.lab.data.command", *asked, str(tmp_path / "two")]
    subprocess.run(elsewhere, check=True, capture_output=True)
    for name in [path.name for path in (tmp_path / "one").iterdir()]:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    corpus = open_corpus(str(tmp_path / "one"))
    end, vocab = corpus.manifest.tokenizer.end, corpus.vocab
    assert 257 <= vocab <= 300
    texts = [corpus.tokenizer.decode(ids(tmp_path / "one", split)) for split in SPLITS]
    assert Counter(text for joined in texts for text in joined.split("<|endoftext|>") if text) == Counter(TEXTS)
    assert all(ids(tmp_path / "one", split)[-1] == end for split in SPLITS)
    assert corpus.bytes_per_token("train") > 2
    odd = "never seen: \u00e9\u4e2d\U0001f986 <|endoftext|>\r\n"
    assert corpus.tokenizer.decode(corpus.tokenizer.encode(odd)) == odd
    assert end not in corpus.tokenizer.encode(odd)


def test_a_journal_that_a_process_killed_at_the_very_end_has_left_is_removed(tmp_path: Path) -> None:
    source, out = jsonl(tmp_path / "a.jsonl", TEXTS), tmp_path / "out"
    assert prepare(source, *SHARES, "--out", out) == 0
    before = sorted(path.name for path in out.iterdir())
    (out / "journal.json").write_text("{}")
    assert prepare(source, *SHARES, "--out", out) == 0
    assert sorted(path.name for path in out.iterdir()) == before


def test_the_table_has_the_numbers_of_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, bpe = jsonl(tmp_path / "a.jsonl", TEXTS * 20), tmp_path / "bpe"
    assert prepare(source, *SHARES, "--out", tmp_path / "bytes") == 0
    capsys.readouterr()
    assert prepare(source, *SHARES, "--tokenizer", "train:300", "--out", bpe) == 0
    told, *rows = [line.split() for line in capsys.readouterr().out.splitlines()[-4:]]
    assert told == ["split", "documents", "tokens", "MB", "tokens", "per", "byte"]
    for split, *row in rows:
        text, tokens = ids(tmp_path / "bytes", split), len(ids(bpe, split))
        share = tokens / len(text)
        assert row == [f"{text.count(0):,}", f"{tokens:,}", f"{len(text) / 1e6:.2f}", f"{share:.3f}"]
    assert [split for split, *_ in rows] == list(SPLITS)


def trained(texts: list[str]) -> dict[str, int]:
    """The library's own byte-level BPE."""
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=300, min_frequency=0, special_tokens=["<|endoftext|>"])
    return tokenizer.get_vocab()


def test_a_trained_tokenizer_has_not_seen_what_is_held_out(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", TEXTS)
    assert prepare(source, *SHARES, "--out", tmp_path / "bytes") == 0
    assert prepare(source, *SHARES, "--tokenizer", "train:300", "--out", tmp_path / "bpe") == 0
    vocab = Tokenizer.from_file(str(tmp_path / "bpe" / "tokenizer.json")).get_vocab()
    assert vocab == trained(read_back(tmp_path / "bytes", "train")) != trained(TEXTS)


def word_tokenizer(path: Path, vocab: dict[str, int]) -> Path:
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(path))
    return path


def test_any_tokenizer_json_will_do_and_texts_are_neither_cut_short_nor_padded(tmp_path: Path) -> None:
    words = word_tokenizer(tmp_path / "words.json", {"?": 0, "so": 1, "on,": 2, "</s>": 3, "text": 9})
    assert prepare(jsonl(tmp_path / "a.jsonl", TEXTS), *SHARES, "--tokenizer", words, "--out", tmp_path / "out") == 0
    corpus = open_corpus(str(tmp_path / "out"))
    assert (corpus.vocab, corpus.manifest.tokenizer.end) == (10, 3)
    expected = [[*({"so": 1, "on,": 2, "text": 9}.get(word, 0) for word in text.split()), 3] for text in TEXTS]
    written = [token for split in SPLITS for token in ids(tmp_path / "out", split)]
    assert Counter(written) == Counter(token for text in expected for token in text)
    assert any(written[: len(text)] == text for text in expected)


def test_an_end_token_can_be_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = word_tokenizer(tmp_path / "words.json", {"?": 0, "STOP": 4})
    asked = (jsonl(tmp_path / "a.jsonl", TEXTS), *SHARES, "--tokenizer", words, "--out", tmp_path / "out")
    assert prepare(*asked) == 2
    assert "words.json has none of <|endoftext|>, </s>, " in capsys.readouterr().err
    assert prepare(*asked, "--end-token", "END") == 2
    assert "words.json has no token END" in capsys.readouterr().err
    assert prepare(*asked, "--end-token", "STOP") == 0
    assert open_corpus(str(tmp_path / "out")).manifest.tokenizer.end == 4


def test_a_vocabulary_beyond_16_bits_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = word_tokenizer(tmp_path / "words.json", {"?": 0, "</s>": 65536})
    source = jsonl(tmp_path / "a.jsonl", TEXTS)
    assert prepare(source, "--tokenizer", words, "--out", tmp_path / "out") == 2
    assert "words.json has 65,537 ids, but a token is 16 bits: 65,536 at most" in capsys.readouterr().err
