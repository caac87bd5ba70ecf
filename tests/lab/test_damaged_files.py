"""Files that a user or another program has changed: JSON of another shape is a sentence, never a traceback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lab_runs import ATTENTIONS, files, small
from quacklr.cli import main
from quacklr.lab.config import Config, from_json, to_json
from quacklr.lab.errors import UserError
from quacklr.lab.ledger import Entry, Ledger
from quacklr.lab.methods import Default, Quack
from quacklr.lab.studies.scale import Size, scale_of
from quacklr.lab.sweep.display import last_step
from quacklr.lab.sweep.interleaved import Interleaved
from quacklr.lab.train.picture import draw_logits
from quacklr.lab.train.runner import run
from quacklr.lab.typed import fits
from swept_runs import made

DEEP = "[" * 100_000
OTHERS = ["[]", "3", "null", '"text"', "{}", "{", "", DEEP, "NaN", "\x00", '{"step": {}}', "9" * 5000]


def sentence(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """What a command says, which must be one line with exit code 2."""
    capsys.readouterr()
    assert main([str(each) for each in argv]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith(f"quacklr {argv[0]}: ")
    return said


@pytest.fixture(scope="module")
def finished(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    run(small(corpus, Default(), ATTENTIONS["mha"], steps=6), out)
    return out


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.mark.parametrize("name", ["config.json", "environment.json", "result.json", "vocabulary.json", "metrics.jsonl"])
def test_a_file_of_a_run_in_another_shape_is_a_sentence_wherever_it_is_read(
    copy: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for content in OTHERS:
        (copy / name).write_text(f"{content}\n" * 2)
        before = files(copy)
        if name not in ("vocabulary.json", "environment.json"):  # which a resumed run writes anew
            sentence(capsys, "train", "--resume", copy, "--steps", 6 if name != "result.json" else 9)
        if name != "metrics.jsonl":  # which a finished run is not asked for
            sentence(capsys, "generate", copy, "--prompt", "the")
            sentence(capsys, "export", copy, "--out", copy.parent / "out")
        if name == "metrics.jsonl":
            last_step(copy)
            with pytest.raises(UserError):
                draw_logits(copy)
        assert files(copy) == before


RESULTS: list[Any] = [
    {"status": "finished", "step": 6},
    {"status": "finished", "step": 6, "val_loss": None, "val_bpb": None},
    {"status": "finished", "step": "6", "val_loss": 3.0, "val_bpb": 3.0},
    {"status": "finished", "step": True, "val_loss": 3.0, "val_bpb": 3.0},
    {"status": "flying", "step": 6, "val_loss": 3.0, "val_bpb": 3.0},
    {"status": ["finished"], "step": 6, "val_loss": 3.0, "val_bpb": 3.0},
    {"status": "finished", "step": 6, "val_loss": "low", "val_bpb": 3.0},
    {"status": "diverged", "step": 6},
]


def test_a_result_of_another_shape_is_a_sentence(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for result in RESULTS:
        (copy / "result.json").write_text(json.dumps(result))
        for argv in (["train", "--resume", copy], ["generate", copy, "--prompt", "the"]):
            assert f"{copy / 'result.json'} is damaged" in sentence(capsys, *argv)


def test_a_value_of_another_type_in_a_configuration_is_refused() -> None:
    config = to_json(small(Path("corpus"), Quack(), ATTENTIONS["mla"]))
    assert from_json(json.loads(json.dumps(config))) == from_json(config)
    for part, values in config.items():
        for name, value in values.items():
            text = 3 if isinstance(value, str) else "x"
            for other in (["x"], {"a": 1}, text, 1.5 if isinstance(value, int) else ()):
                with pytest.raises(UserError):
                    from_json(config | {part: values | {name: other}})


def entry(**changes: Any) -> dict[str, Any]:
    return made(scale_of(Size()).run("mha", Default(), 0.1), 3.0).to_json() | changes


def with_config(part: str, **changes: Any) -> dict[str, Any]:
    config = entry()["config"]
    return entry(config=config | {part: config[part] | changes})


LINES: dict[str, Any] = {
    "no status": {name: value for name, value in entry().items() if name != "status"},
    "another status": entry(status="flying"),
    "no configuration": entry(config=None),
    "a configuration of other parts": entry(config={"shape": {}}),
    "a learning rate that is text": with_config("optimizer", lr="high"),
    "a learning rate of 1e99": with_config("optimizer", lr=1e99),
    "a number of steps that is a fraction": with_config("training", steps=300.5),
    "another kind": with_config("method", kind="magic"),
    "a kind that is a list": with_config("method", kind=["quack"]),
    "a result that is a list": entry(result=[]),
    "a finished run without a loss": entry(result={"step": 300, "max_logit": 3.0}),
    "a loss that is text": entry(result=entry()["result"] | {"val_loss": "low"}),
    "a step that is text": entry(result=entry()["result"] | {"step": "last"}),
    "a history that is a number": entry(history=3),
    "a history of numbers": entry(history=[1, 2]),
    "a history without steps": entry(history=[{"val_loss": 3.0}]),
    "logits that are numbers": entry(history=[{"step": 0, "logits": {"max": 3.0}}]),
    "logits of fewer heads": entry(history=[{"step": 0, "logits": {"max": [[1.0]]}}]),
    "logits of text": entry(history=[{"step": 0, "logits": {"max": [["a"] * 4] * 4}}]),
    "losses of text": entry(losses=["low"]),
    "a time that is text": entry(step_seconds="long"),
    "an environment that is a list": entry(environment=[]),
    "a reason that is a number": entry(reason=3),
    "something more": entry(wings=2),
}


@pytest.mark.parametrize("how", [*LINES, *OTHERS], ids=lambda how: how[:30])
def test_a_line_of_another_shape_in_a_ledger_is_a_sentence(
    tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ledger.jsonl"
    line = json.dumps(LINES[how]) if how in LINES else how
    path.write_text(f"{json.dumps(entry())}\n{line}\n")
    before = path.read_text()
    for argv in (["report", tmp_path], ["sweep", "demo", "--out", tmp_path, "--dry-run"], ["demo", "--out", tmp_path]):
        said = sentence(capsys, *argv)
        assert f"{path}, line 2, is not what quacklr writes: " in said
        assert "restore the file from a copy, or remove the line" in said
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_no_number_is_not_taken_for_one() -> None:
    for text in ("NaN", "Infinity", "-Infinity", "1e400", "9" * 400, "true", '"3"'):
        assert not fits(json.loads(text), float), text
        assert not fits(json.loads(text), int), text
    assert fits(3, float)
    assert not fits(3.0, int)


@pytest.fixture
def two() -> list[Entry]:
    config = scale_of(Size()).run("mha", Default(), 0.1)
    return [made(replace(config, training=replace(config.training, seed=seed)), 3.0) for seed in (0, 1)]


@pytest.mark.parametrize("end", ["\n", "", '\n{"key": "abc', '\n{"key": "abc"', "\n\0\0\0"])
def test_a_ledger_keeps_every_whole_line_and_loses_only_a_part_of_one(
    tmp_path: Path, two: list[Entry], end: str
) -> None:
    """The last line may have no end: an editor has removed it, or a process was killed at just that moment."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.append(two[0])
    text = ledger.path.read_text()
    ledger.path.write_text(text.removesuffix("\n") + end)
    assert list(ledger.entries()) == [two[0].key]
    ledger.append(two[1])
    assert list(ledger.entries()) == [two[0].key, two[1].key]
    assert ledger.path.read_text().startswith(text)
    assert ledger.path.read_text().count("\n") == 2


def test_a_ledger_that_cannot_be_written_is_told_before_a_run_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quacklr.lab.sweep.command.validate_corpora", lambda *_: None)
    monkeypatch.setattr("quacklr.lab.sweep.command.sweep", lambda *_: pytest.fail("a run was made"))
    monkeypatch.setattr("quacklr.lab.demo.sweep", lambda *_: pytest.fail("a run was made"))
    (tmp_path / "file").touch()
    (tmp_path / "demo/ledger.jsonl").mkdir(parents=True)
    for out in (tmp_path / "file/results", tmp_path / "demo"):
        assert "ledger.jsonl" in sentence(capsys, "sweep", "demo", "--out", out, "--runs", tmp_path / "runs")
    assert "ledger.jsonl" in sentence(capsys, "demo", "--out", tmp_path / "demo")


def test_runs_that_take_turns_remove_no_folder_but_their_own(corpus: Path, tmp_path: Path, copy: Path) -> None:
    config: Config = small(corpus, Default(), ATTENTIONS["mha"], steps=4)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/precious.txt").write_text("of the user's")
    for folder in (copy, tmp_path / "notes"):
        before = files(folder)
        with pytest.raises(UserError, match=f"{folder} holds something other than an interleaved run"):
            Interleaved(1, 1).start(config, folder).outcome()
        assert files(folder) == before
    for _ in range(2):
        job = Interleaved(1, 1).start(config, tmp_path / "new")
        while job.outcome() is None:
            pass


DOCUMENTS: dict[str, Callable[[str], str]] = {
    "nested deeply": lambda _: DEEP,
    "nested deeply within": lambda text: f'{{"text": "{text}", "more": {DEEP}',
    "of too many digits": lambda _: "9" * 5000,
    "NaN": lambda _: "NaN",
}


@pytest.mark.parametrize("how", DOCUMENTS)
def test_a_document_of_another_shape_is_a_sentence(
    tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source.jsonl"
    source.write_text(f'{{"text": "one"}}\n{DOCUMENTS[how]("two")}\n')
    assert f"{source}, line 2 " in sentence(capsys, "prepare", source, "--out", tmp_path / "out")


@pytest.mark.parametrize("files_", ["0-99999999999999999999", "9" * 5000, "3-1", "104", "0,0"])
def test_which_files_of_cosmopedia_is_bounded(files_: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sentence(capsys, "prepare", "cosmopedia-v2", "--files", files_, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_size_of_a_vocabulary_is_bounded(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for size in ("9" * 5000, "65537", "-1", "1e9", ""):
        source = corpus.parent / "source.jsonl"
        sentence(capsys, "prepare", source, "--tokenizer", f"train:{size}", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
