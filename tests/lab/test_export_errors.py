"""Errors of `quacklr export`: one sentence, exit code 2, and no partial folder."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from exported_runs import LATENT, NEAR, ODD, PLAIN, ROUND, assert_same_logits, config_of
from quacklr.lab.export import command
from quacklr.lab.methods import AbsorbedQKNorm, Default, Method, QKNorm, Quack, SoftCap
from quacklr.lab.model import MHA, MLA, Shape
from quacklr.lab.optim import MuonRecipe
from quacklr.lab.train.folder import Folder
from quacklr.lab.train.runner import run


@pytest.fixture(scope="module")
def finished(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    run(config_of(corpus, ODD, ROUND, Quack()), out)
    return out


def complaint(capsys: pytest.CaptureFixture[str], *options: str | Path) -> str:
    capsys.readouterr()
    assert command.main([str(option) for option in options]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


@pytest.mark.parametrize(
    ("shape", "attention", "method", "why"),
    [
        (
            NEAR,
            PLAIN,
            Quack(),
            "DeepSeek-V3 norms the latents of MLA, and this model does not; train with --latent-norm",
        ),
        (NEAR, LATENT, QKNorm(), "none has MLA with a norm on queries and keys; train with another --method"),
        (NEAR, LATENT, AbsorbedQKNorm(), "none has MLA with a norm on queries and keys; train with another --method"),
        (ODD, LATENT, Default(), "DeepSeek-V3 norms latents with an eps of 1e-6; train with --norm-eps 1e-6, not 0.01"),
        (ODD, ROUND, SoftCap(), "Gemma 2, which does, has other blocks; train with another --method"),
        (NEAR, LATENT, SoftCap(), "Llama and DeepSeek-V3 do not cap their logits"),
        (
            ODD,
            MHA(heads=3, kv_heads=1, head_dim=8),
            Default(),
            "its Llama needs --heads to divide --d-model; train with others than 3 and 16",
        ),
    ],
)
def test_a_run_without_a_transformers_architecture_is_refused_before_its_checkpoint_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shape: Shape, attention: MHA | MLA, method: Method, why: str
) -> None:
    Folder(tmp_path / "run").write_config(config_of(tmp_path, shape, attention, method), {})
    said = complaint(capsys, tmp_path / "run", "--out", tmp_path / "out")
    assert said.startswith("quacklr export: no model of transformers computes what this run has trained: ")
    assert why in said
    assert said.endswith("; or use it from Python, by quacklr.lab.train.trained.open_run\n")
    assert not (tmp_path / "out").exists()


def test_a_run_that_has_not_finished_is_refused_unless_a_step_is_named(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run/result.json").unlink()
    out = ["--out", str(tmp_path / "out")]
    assert "has not finished: it is at step 12 of 12" in complaint(capsys, tmp_path / "run", *out)
    assert "no checkpoint of step 7; --step 6 or 12" in complaint(capsys, tmp_path / "run", *out, "--step", "7")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert command.main([str(tmp_path / "run"), *out, "--step", "6"]) == 0
    assert_same_logits(tmp_path / "out", tmp_path / "run", step=6)


def test_a_diverged_run_has_nothing_to_export(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(corpus, ODD, ROUND, Default(), grad_clip=0.0)
    ended = run(replace(config, optimizer=MuonRecipe(lr=1e30, rest_lr=1e30)), tmp_path / "run")
    out = ["--out", str(tmp_path / "out")]
    assert "has diverged" in complaint(capsys, tmp_path / "run", *out)
    assert "logits are NaN or inf" in complaint(capsys, tmp_path / "run", *out, "--step", str(ended["step"]))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_checkpoint_of_another_shape_is_refused(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(finished, tmp_path / "run")
    wider = (tmp_path / "run/config.json").read_text().replace('"d_ff": 24', '"d_ff": 32')
    (tmp_path / "run/config.json").write_text(wider)
    assert "is of another run" in complaint(capsys, tmp_path / "run", "--out", tmp_path / "out")
    assert "does not exist" in complaint(capsys, tmp_path / "none", "--out", tmp_path / "out")


def test_nothing_is_overwritten_and_nothing_half_is_left(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path, tmp_path / "file"):
        assert f"--out {out} exists already" in complaint(capsys, finished, "--out", out)
    assert "Not a directory" in complaint(capsys, finished, "--out", tmp_path / "file/out")
    (tmp_path / "out").mkdir()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
    try:
        assert f"cannot write {tmp_path / 'out'}: " in complaint(capsys, finished, "--out", tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with monkeypatch.context() as patch:
        patch.setattr(command, "agreement", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            command.main([str(finished), "--out", str(tmp_path / "out")])
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "out"]


def test_what_a_killed_export_has_left_is_removed_by_the_next(finished: Path, tmp_path: Path) -> None:
    (tmp_path / ".out.exporting").mkdir()
    (tmp_path / ".out.exporting/half.safetensors").write_text("half")
    assert command.main([str(finished), "--out", str(tmp_path / "out")]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert not (tmp_path / "out/half.safetensors").exists()


@pytest.mark.parametrize("missing", ["transformers", "safetensors"])
def test_only_an_export_itself_needs_transformers(finished: Path, tmp_path: Path, missing: str) -> None:
    script = f"import sys; sys.modules['{missing}'] = None; import quacklr.cli; sys.exit(quacklr.cli.main())"
    options = ["export", str(finished), "--out", str(tmp_path / "out")]
    done = subprocess.run([sys.executable, "-c", script, *options], capture_output=True, text=True, check=False)
    wanted = f"quacklr export: an export needs the package {missing}: pip install 'quacklr[hf]'\n"
    assert (done.returncode, done.stderr) == (2, wanted)


def test_an_export_leaves_the_messages_of_transformers_as_they_were() -> None:
    from transformers.utils import logging as of_transformers

    logging: Any = of_transformers
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    try:
        logging.set_verbosity_info()
        logging.enable_progress_bar()
        with command.quiet_transformers():
            assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (logging.ERROR, False)
        assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (logging.INFO, True)
    finally:
        logging.set_verbosity(verbosity)
        (logging.enable_progress_bar if bars else logging.disable_progress_bar)()
