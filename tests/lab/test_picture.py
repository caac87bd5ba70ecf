"""Every run ends with a picture of its logits, made from its rows alone."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from lab_runs import make_corpus, read_rows
from quacklr.lab.errors import UserError
from quacklr.lab.train import picture
from quacklr.lab.train.command import main
from quacklr.lab.train.picture import draw_logits
from quacklr.lab.train.rows import Row
from quacklr.lab.train.session import Session


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    corpus = make_corpus(tmp_path_factory.mktemp("corpus"))
    shape = "--d-model 16 --layers 2 --d-ff 24 --context 16 --heads 2 --kv-heads 2 --head-dim 8"
    length = "--batch-tokens 128 --steps 12 --probe-every 5 --eval-every 6 --threads 1 --warmup 2"
    return f"--corpus {corpus} {shape} {length}".split()


def refused(folder: Path) -> str:
    with pytest.raises(UserError) as error:
        draw_logits(folder)
    return str(error.value)


def test_a_run_ends_with_a_picture_and_says_where_it_is(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*options, "--out", str(tmp_path / "run")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith("Done: ")
    assert lines[-1] == f"The logits of every head, step by step: {tmp_path / 'run/logits.png'}"
    with Image.open(tmp_path / "run/logits.png") as image:
        image.load()
        assert image.width > 1000


def test_its_numbers_are_those_of_the_rows(options: list[str], tmp_path: Path) -> None:
    main([*options, "--out", str(tmp_path / "run")])
    probed = [row["logits"] for row in read_rows(tmp_path / "run") if "logits" in row]
    numbers = picture.numbers_of(probed)
    assert tuple(numbers) == picture.SHOWN
    for name in ("max", "entropy", "sink"):
        expected = torch.tensor([[value for heads in each[name] for value in heads] for each in probed]).T
        torch.testing.assert_close(numbers[name], expected, rtol=0, atol=0)
    assert numbers["step_change"][:, 0].isnan().all(), "nothing has stepped yet"


def test_a_run_that_diverged_has_one_too(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main([*options, "--lr", "1e30", "--rest-lr", "1e30", "--grad-clip", "0", "--out", str(tmp_path / "run")]) == 0
    )
    assert capsys.readouterr().out.splitlines()[-2].startswith("The run diverged")
    assert (tmp_path / "run/logits.png").exists()


def test_one_that_was_stopped_and_resumed_has_all_of_its_steps(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = Session.rows

    def interrupted(session: Session) -> Iterator[Row]:
        for row in rows(session):
            if row["step"] == 7:
                signal.raise_signal(signal.SIGTERM)
            yield row

    monkeypatch.setattr(Session, "rows", interrupted)
    assert main([*options, "--out", str(tmp_path / "run")]) == 143
    assert not (tmp_path / "run/logits.png").exists(), "it has not ended"
    monkeypatch.undo()
    assert main(["--resume", str(tmp_path / "run")]) == 0
    assert main([*options, "--out", str(tmp_path / "whole")]) == 0
    assert (tmp_path / "run/logits.png").read_bytes() == (tmp_path / "whole/logits.png").read_bytes()


def test_without_matplotlib_a_run_ends_as_ever(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(picture, "find_spec", lambda _: None)
    assert main([*options, "--out", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("Done: ")
    assert not (tmp_path / "run/logits.png").exists()


def write_rows(folder: Path, *rows: dict[str, Any]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_run_of_an_older_version_is_drawn_as_far_as_it_goes(tmp_path: Path) -> None:
    write_rows(tmp_path, {"step": 0, "logits": {"max": [[1.0]], "entropy": [[2.0]], "change": [[None]]}}, {"step": 1})
    assert draw_logits(tmp_path) == tmp_path / "logits.png"


def test_a_run_without_measurements_has_no_picture(tmp_path: Path) -> None:
    write_rows(tmp_path, {"step": 1, "loss": 2.0})
    assert draw_logits(tmp_path) is None
    assert not (tmp_path / "logits.png").exists()


def test_a_picture_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    write_rows(tmp_path, {"step": 0, "logits": {"max": [[1.0]]}})
    (tmp_path / "logits.png").mkdir()
    assert refused(tmp_path) == f"cannot write {tmp_path / 'logits.png'}: Is a directory"
