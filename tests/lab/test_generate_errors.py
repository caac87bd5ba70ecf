"""What `quacklr generate` cannot do: one sentence on stderr, exit code 2, nothing on stdout, and no traceback."""

from __future__ import annotations

import io
import json
import shutil
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lab_runs import ATTENTIONS, environment, make_corpus, quacklr, small
from paused import pause, wait_until_paused
from quacklr.lab.data.command import main as prepare
from quacklr.lab.inference.command import main
from quacklr.lab.methods import Default
from quacklr.lab.optim import MuonRecipe
from quacklr.lab.train.folder import Folder
from quacklr.lab.train.runner import run

Complaint = Callable[..., str]


@pytest.fixture(scope="module")
def finished(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    run(small(corpus, Default(), ATTENTIONS["mha"], steps=12), out)
    return out


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    """A copy of a run, to be damaged."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture
def complaint(capsys: pytest.CaptureFixture[str]) -> Complaint:
    def call(folder: Path, *options: str, prompt: str = "the") -> str:
        capsys.readouterr()
        assert main([str(folder), "--prompt", prompt, *options]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n"), err.startswith("quacklr generate: ")) == ("", 1, True)
        return err

    return call


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--tokens", "0"], "--tokens must be a positive number, not 0"),
        (["--tokens", "-3"], "--tokens must be a positive number, not -3"),
        (["--tokens", "14"], "--tokens 14 after a prompt of 3 is more than the context of 16; there is room for 13"),
        (["--temperature", "-1"], "--temperature must be 0 or a positive number, not -1"),
        (["--temperature", "nan"], "--temperature must be 0 or a positive number, not nan"),
        (["--temperature", "inf"], "--temperature must be 0 or a positive number, not inf"),
        (["--top-p", "0"], "--top-p must be above 0 and at most 1, not 0"),
        (["--top-p", "1.5"], "--top-p must be above 0 and at most 1, not 1.5"),
        (["--top-p", "nan"], "--top-p must be above 0 and at most 1, not nan"),
        (["--seed", "-1"], "--seed must be from 0 to 2^63 - 1, not -1"),
        (["--step", "5"], "has no checkpoint of step 5; --step 6 or 12"),
        (["--step", "-6"], "has no checkpoint of step -6"),
        (["--device", "toaster"], "--device toaster cannot be used"),
    ],
)
def test_options_out_of_range_are_reported(
    finished: Path, complaint: Complaint, options: list[str], sentence: str
) -> None:
    assert sentence in complaint(finished, *options)


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ("", "--prompt is empty"),
        ("x" * 16, "--prompt has 16 tokens, and the context of this model is 16"),
        ("x" * 16, "no room for another; leave at least 1 out"),
        ("\u00fc" * 10, "--prompt has 20 tokens, and the context of this model is 16"),
        ("\u00fc" * 10, "no room for another; leave at least 5 out"),
    ],
)
def test_prompts_with_nothing_in_them_or_too_much_are_reported(
    finished: Path, complaint: Complaint, prompt: str, sentence: str
) -> None:
    assert sentence in complaint(finished, prompt=prompt)


@pytest.mark.parametrize(("given", "sentence"), [("", "--prompt is empty"), ("\0", "no token that this model knows")])
def test_a_stdin_with_nothing_in_it_is_reported(
    finished: Path, complaint: Complaint, monkeypatch: pytest.MonkeyPatch, given: str, sentence: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given.encode())))
    assert sentence in complaint(finished, prompt="-")


def test_a_real_process_says_the_same(finished: Path) -> None:
    done = quacklr("generate", finished, "--prompt", "-", input="", env=environment())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "quacklr generate: --prompt is empty; give at least one character to continue\n"


def test_folders_that_are_no_run_are_reported(tmp_path: Path, complaint: Complaint) -> None:
    (tmp_path / "file").write_text("")
    for name in (".", "file"):
        assert f"{tmp_path / name} is not the folder of a run" in complaint(tmp_path / name)
    assert f"{tmp_path / 'nowhere'} does not exist" in complaint(tmp_path / "nowhere")


def started(corpus: Path, out: Path) -> subprocess.Popen[bytes]:
    """A real run, under way: it waits at step 5."""
    sizes = "--d-model 16 --layers 1 --d-ff 24 --context 16 --heads 2 --kv-heads 2 --head-dim 8 --batch-tokens 128"
    line = [sys.executable, "-m", "quacklr", "train", *sizes.split(), "--threads", "1", "--steps", "9000"]
    pause(out, 5)
    process = subprocess.Popen(
        [*line, "--corpus", str(corpus), "--out", str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    wait_until_paused(out, process.poll)
    return process


def test_a_run_that_was_killed_is_reported(corpus: Path, tmp_path: Path, complaint: Complaint) -> None:
    process = started(corpus, tmp_path / "run")
    process.kill()
    process.wait()
    said = complaint(tmp_path / "run")
    assert f"the run in {tmp_path / 'run'} has not finished: it is at step 5 of 9000;" in said
    assert f"`quacklr train --resume {tmp_path / 'run'}`" in said
    assert "--step" not in said


def test_a_run_that_was_stopped_is_reported_and_goes_on_from_a_step_if_asked(
    corpus: Path, tmp_path: Path, complaint: Complaint
) -> None:
    process = started(corpus, tmp_path / "run")
    process.send_signal(signal.SIGTERM)
    process.wait()
    step = 5
    said = complaint(tmp_path / "run")
    assert f"has not finished: it is at step {step} of 9000" in said
    assert f"--step {step} loads" in said
    assert main([str(tmp_path / "run"), "--prompt", "the", "--step", str(step)]) == 0


def test_a_run_that_diverged_is_reported(corpus: Path, tmp_path: Path, complaint: Complaint) -> None:
    config = small(corpus, Default(), ATTENTIONS["mha"], steps=12)
    assert run(replace(config, optimizer=MuonRecipe(lr=1e30, rest_lr=1e30)), tmp_path / "run")["status"] == "diverged"
    assert f"the run in {tmp_path / 'run'} has diverged" in complaint(tmp_path / "run")


def test_a_checkpoint_of_another_run_is_reported(copy: Path, corpus: Path, complaint: Complaint) -> None:
    run(small(corpus, Default(), ATTENTIONS["mla"], steps=12), copy.parent / "other")
    shutil.rmtree(copy / "checkpoints")
    shutil.copytree(copy.parent / "other/checkpoints", copy / "checkpoints")
    assert "is of another run: its configuration is not that of this folder" in complaint(copy)


def test_a_checkpoint_of_another_shape_is_reported_though_it_says_it_is_this_runs(
    copy: Path, corpus: Path, complaint: Complaint
) -> None:
    config = small(corpus, Default(), ATTENTIONS["mha"], steps=12)
    run(replace(config, shape=replace(config.shape, d_ff=40)), copy.parent / "other")
    ours, other = (folder / "checkpoints/step-0000012" for folder in (copy, copy.parent / "other"))
    rest = torch.load(other / "rest.pt", weights_only=True)
    rest["config"] = torch.load(ours / "rest.pt", weights_only=True)["config"]
    shutil.rmtree(ours)
    shutil.copytree(other, ours)
    torch.save(rest, ours / "rest.pt")
    content = (ours / "rest.pt").read_bytes()
    lines = json.loads((ours / "checksums.json").read_text())
    (line,) = (line for line in lines if line["file"] == "rest.pt")
    line |= {"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}
    (ours / "checksums.json").write_text(json.dumps(lines))
    said = complaint(copy)
    assert "feed_forward" in said
    assert "[40, 16] of float32 in the checkpoint, but [24, 16]" in said


def test_a_damaged_checkpoint_is_reported(copy: Path, complaint: Complaint) -> None:
    path = next((copy / "checkpoints/step-0000012").glob("*.distcp"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert f"the checkpoint {path.parent} is damaged (the checksum of {path.name} is wrong)" in complaint(copy)
    assert main([str(copy), "--prompt", "the", "--step", "6"]) == 0


def test_a_missing_vocabulary_is_reported(copy: Path, complaint: Complaint) -> None:
    (copy / "vocabulary.json").unlink()
    said = complaint(copy)
    assert f"{copy} has no vocabulary.json" in said
    assert f"`quacklr train --resume {copy}` with more --steps adds it" in said
    run(replace(Folder(copy).config(), training=replace(Folder(copy).config().training, steps=13)), copy, resume=True)
    assert main([str(copy), "--prompt", "the"]) == 0


def test_a_run_without_checkpoints_is_reported(copy: Path, complaint: Complaint) -> None:
    shutil.rmtree(copy / "checkpoints/step-0000012")
    assert "has no checkpoint of step 12; --step 6 loads" in complaint(copy)
    shutil.rmtree(copy / "checkpoints")
    assert "has no checkpoint of step 12, nor any other" in complaint(copy)


def test_a_tokenizer_that_was_changed_is_reported(tmp_path: Path, complaint: Complaint) -> None:
    make_corpus(tmp_path)
    options = ["--out", str(tmp_path / "words"), "--tokenizer", "train:300", "--val", "0.1", "--probe", "0.1"]
    assert prepare([str(tmp_path / "source.jsonl"), *options]) == 0
    run(small(tmp_path / "words", Default(), ATTENTIONS["mha"], steps=6), tmp_path / "run")
    assert main([str(tmp_path / "run"), "--prompt", "the cat"]) == 0
    path = tmp_path / "run/tokenizer.json"
    path.write_text(path.read_text() + " ")
    assert str(path) in complaint(tmp_path / "run")
    path.unlink()
    assert f"{path} is missing; the corpus of the run has a copy of it" in complaint(tmp_path / "run")


def test_a_tokenizer_with_more_tokens_than_the_model_is_of_another_run(copy: Path, complaint: Complaint) -> None:
    config = json.loads((copy / "config.json").read_text())
    config["shape"]["vocab"] = 255
    (copy / "config.json").write_text(json.dumps(config))
    assert "the tokenizer in" in complaint(copy)
    assert "is of another run: it has 256 tokens, the model 255" in complaint(copy)


def test_a_disk_that_is_full_is_reported(finished: Path) -> None:
    with Path("/dev/full").open("w") as full:
        line = [sys.executable, "-m", "quacklr", "generate", str(finished), "--prompt", "the"]
        done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=environment())
    assert done.stderr == "quacklr generate: cannot write the text: No space left on device\n"
    assert done.returncode == 2


SPOILT: dict[str, Any] = {"result.json": "{}", "environment.json": "[]", "config.json": "[]", "vocabulary.json": "{"}


@pytest.mark.parametrize("name", SPOILT)
def test_files_that_are_not_what_quacklr_writes_are_reported(copy: Path, complaint: Complaint, name: str) -> None:
    (copy / name).write_text(SPOILT[name])
    complaint(copy)


def test_a_copy_of_a_checkpoint_beside_the_others_does_no_harm(copy: Path) -> None:
    shutil.copytree(copy / "checkpoints/step-0000006", copy / "checkpoints/step-0000006.bak")
    assert main([str(copy), "--prompt", "the"]) == 0
