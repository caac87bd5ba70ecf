"""The training loop and its folder: rows, validation, divergence, signals, trackers."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from lab_runs import ATTENTIONS, METHODS, comparable, environment, heed_ctrl_c, make_corpus, quacklr, read_rows, small
from paused import MINUTES, pause, wait_until_paused
from quacklr import LogitMonitor
from quacklr.lab.config import Config
from quacklr.lab.data import Corpus, batch, open_corpus
from quacklr.lab.methods import Quack
from quacklr.lab.optim import AdamWRecipe, MuonRecipe
from quacklr.lab.train.folder import Folder
from quacklr.lab.train.runner import result_of, run
from quacklr.lab.train.session import Session
from quacklr.lab.train.trackers import TensorBoard, scalars


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return open_corpus(str(make_corpus(tmp_path_factory.mktemp("corpus"))))


@pytest.fixture
def config(corpus: Corpus) -> Config:
    return small(corpus.folder, Quack(tau=0.5), ATTENTIONS["mla"])


def test_the_loop_is_a_generator_of_rows_and_writes_no_file(config: Config, corpus: Corpus, tmp_path: Path) -> None:
    rows = list(islice(Session(config, corpus).rows(), 3))
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[0].keys() >= {"val_loss", "val_bpb", "logits", "norm", "rate"}
    assert rows[2].keys() >= {"loss", "lr", "grad_norm", "tokens", "tokens_per_second", "memory_gb"}
    assert rows[2]["tokens"] == 2 * 128
    assert list(tmp_path.iterdir()) == []


def test_the_same_configuration_gives_the_same_rows(config: Config, corpus: Corpus) -> None:
    one, other = ([comparable(row) for row in Session(config, corpus).rows()] for _ in range(2))
    assert one == other


def test_the_first_step_is_the_one_made_by_hand(corpus: Corpus) -> None:
    """AdamW for everything, one micro-batch: a plain torch loop on the same batch."""
    base = small(corpus.folder, METHODS["default"], ATTENTIONS["mha"], micro_batch=8)
    config = replace(base, optimizer=AdamWRecipe(lr=0.01))
    session, twin = Session(config, corpus), Session(config, corpus).model
    row = list(islice(session.rows(), 2))[1]
    tokens = batch(corpus.tokens("train"), 0, 0, 8, 16)
    loss = torch.nn.functional.cross_entropy(twin(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
    torch.optim.AdamW(twin.parameters(), lr=0.01 / 4, betas=(0.9, 0.95), weight_decay=0.0).step()
    assert row["loss"] == pytest.approx(float(loss.detach()), rel=1e-6)
    assert row["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    assert row["lr"] == pytest.approx(0.01 / 4)
    for ours, theirs in zip(session.model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


GOLDEN = {1: 5.5536, 12: 3.4479, 24: 2.4214, 36: 2.1733}


def test_losses_are_what_they_were(config: Config, corpus: Corpus) -> None:
    rows = {row["step"]: row for row in Session(config, corpus).rows()}
    assert {step: rows[step]["loss"] for step in GOLDEN} == pytest.approx(GOLDEN, rel=2e-3)


def test_bits_a_byte_are_the_loss_over_the_bytes_of_the_text(config: Config, corpus: Corpus) -> None:
    row = next(Session(config, corpus).rows())
    assert corpus.bytes_per_token("val") == 1
    assert row["val_bpb"] == pytest.approx(row["val_loss"] / math.log(2))
    assert row["val_loss"] == pytest.approx(math.log(256), abs=0.3)


def test_logit_statistics_have_a_number_for_every_layer_and_head(config: Config, corpus: Corpus) -> None:
    rows = {row["step"]: row for row in Session(config, corpus).rows()}
    probed = [step for step, row in rows.items() if "logits" in row]
    assert probed == [0, 5, 10, 15, 20, 25, 30, 35, 36]
    for key in ("max", "entropy", "sink", "change", "step_change"):
        table = rows[10]["logits"][key]
        assert [len(heads) for heads in table] == [2, 2]
        assert all(value is not None and (value > 0 or key == "max") for heads in table for value in heads)
    assert rows[10]["change_steps"] == 5
    assert rows[0]["logits"]["change"] == [[None, None], [None, None]]
    assert set(rows[10]["norm"]) == set(rows[10]["rate"]) == {"dq", "uq", "qr", "dkv", "uk", "kr"}
    assert [len(heads) for heads in rows[10]["rate"]["uq"]] == [2, 2]
    assert [len(heads) for heads in rows[10]["rate"]["kr"]] == [1, 1]


def test_the_change_of_a_step_is_that_of_the_logits_around_it(config: Config, corpus: Corpus) -> None:
    """Measured by a second session, at every step, against the first one's probe at step 5."""
    close = Session(replace(config, watch=replace(config.watch, probe_every=1)), corpus)
    every = list(islice(close.rows(), 6))
    fifth = list(islice(Session(config, corpus).rows(), 6))[5]
    assert fifth["logits"]["step_change"] == every[5]["logits"]["step_change"]
    assert fifth["logits"]["max"] == every[5]["logits"]["max"]
    assert fifth["logits"]["change"] != fifth["logits"]["step_change"]


def test_the_change_is_that_since_the_measurement_before_and_the_rest_is_after_the_step(
    config: Config, corpus: Corpus
) -> None:
    """Around step 10 it is between the weights after 4 and after 9 steps; a monitor of our own looks at both."""
    session = Session(config, corpus)
    rows, monitor = session.rows(), LogitMonitor(session.model, session.probe.monitor.probe)
    list(islice(rows, 5))
    monitor.measure()
    list(islice(rows, 5))
    changed = monitor.measure().values()
    tenth, after = next(rows)["logits"], monitor.measure().values()
    for heads, stats in zip(tenth["change"], changed, strict=True):
        assert heads == pytest.approx(stats.mean_change.tolist(), rel=1e-5)
    for name in ("max", "entropy", "sink", "step_change"):  # these are after the step
        for heads, stats in zip(tenth[name], after, strict=True):
            assert heads == pytest.approx(getattr(stats, name.replace("step", "mean")).tolist(), rel=1e-5)


def test_trackers_get_the_largest_logit_of_a_layer_and_means_of_the_rest() -> None:
    row: dict[str, Any] = {"step": 3, "loss": 2.5, "tokens": 384, "val_loss": 2.0, "val_bpb": 3.0, "diverged": "no"}
    row["logits"] = {"max": [[1.0, 5.0], [None, -2.0]], "entropy": [[1.0, 3.0], [None, None]]}
    assert dict(scalars(row)) == {
        "train/loss": 2.5,
        "validation/loss": 2.0,
        "validation/bpb": 3.0,
        "logits_max/layers.0": 5.0,
        "logits_max/layers.1": -2.0,
        "logits_entropy/layers.0": 2.0,
    }


@pytest.mark.parametrize("method", ["quack", "sigma-reparam"])
def test_a_run_that_is_measured_often_is_the_same_run(corpus: Corpus, method: str) -> None:
    config = small(corpus.folder, METHODS[method], ATTENTIONS["mha"])
    rare = replace(config, watch=replace(config.watch, probe_every=1000))
    often = replace(config, watch=replace(config.watch, probe_every=1))
    losses = [[row["loss"] for row in islice(Session(each, corpus).rows(), 1, 6)] for each in (rare, often)]
    assert losses[0] == losses[1]


def test_a_session_stopped_before_its_first_step_does_not_start_twice(config: Config, corpus: Corpus) -> None:
    stopped, resumed = Session(config, corpus), Session(config, corpus)
    next(stopped.rows())
    resumed.load_extra_state(stopped.extra_state())
    assert next(resumed.rows())["step"] == 1


def diverging(corpus: Corpus) -> Config:
    config = small(corpus.folder, METHODS["default"], ATTENTIONS["mha"], grad_clip=0.0)
    return replace(config, optimizer=MuonRecipe(lr=1e30, rest_lr=1e30))


def test_a_loss_that_is_no_number_ends_the_run_and_is_recorded(corpus: Corpus, tmp_path: Path) -> None:
    result = run(diverging(corpus), tmp_path / "run")
    assert result["status"] == "diverged"
    assert result["reason"].startswith("the loss is nan at step")
    assert result["step"] < 36
    saved = json.loads((tmp_path / "run/result.json").read_text())
    assert saved == result
    last = read_rows(tmp_path / "run")[-1]
    assert last["loss"] is None
    assert "diverged" in last


def test_a_validation_loss_that_is_no_number_is_a_divergence_even_in_the_warmup(config: Config, corpus: Corpus) -> None:
    verdict = Session(config, corpus)._divergence({"loss": 2.0, "val_loss": math.nan})
    assert verdict == {"diverged": "the validation loss is nan at step 0"}
    rows: list[dict[str, Any]] = [
        {"step": 0, "val_loss": 5.5, "val_bpb": 8.0},
        {"step": 1, "val_loss": None, "val_bpb": None},
    ]
    ended = result_of([rows[0], rows[1] | verdict])
    assert (ended["status"], ended["val_loss"], ended["best_val_loss"]) == ("diverged", None, 5.5)


def test_a_loss_above_its_start_is_a_divergence_too(corpus: Corpus) -> None:
    config = small(corpus.folder, METHODS["default"], ATTENTIONS["mha"])
    rows = list(Session(replace(config, optimizer=MuonRecipe(lr=30.0, rest_lr=3.0)), corpus).rows())
    assert "above its start" in rows[-1]["diverged"]
    assert math.isfinite(rows[-1]["loss"])
    assert rows[-1]["val_loss"] > rows[0]["val_loss"]
    assert rows[-1]["step"] == 12


def test_a_validation_loss_above_its_start_is_no_divergence_in_the_warmup(config: Config, corpus: Corpus) -> None:
    session = Session(config, corpus)
    session.first_val_loss = 2.0
    row = {"loss": 1.0, "val_loss": 2.5}
    session.step = config.schedule.warmup
    assert session._divergence(row) == {}
    session.step += 1
    assert session._divergence(row) == {"diverged": "the validation loss is 2.500 at step 5, above its start 2.000"}
    assert session._divergence(row | {"val_loss": 2.0}) == {}


def test_a_result_has_the_last_validation_loss_and_the_best() -> None:
    rows = [{"step": step, "val_loss": loss, "val_bpb": 2 * loss} for step, loss in enumerate([3.0, 1.5, 2.0])]
    ended = result_of([*rows, {"step": 3, "tokens": 384}])
    assert (ended["status"], ended["step"], ended["tokens"]) == ("finished", 3, 384)
    assert (ended["val_loss"], ended["val_bpb"], ended["best_val_loss"]) == (2.0, 4.0, 1.5)


def test_a_run_folder_says_all_about_the_run(config: Config, tmp_path: Path) -> None:
    result = run(config, tmp_path / "run")
    folder = Folder(tmp_path / "run")
    assert replace(folder.config(), shape=replace(folder.config().shape, vocab=None)) == config
    assert folder.config().shape.vocab == 256
    about = json.loads((tmp_path / "run/environment.json").read_text())
    assert about["packages"]["torch"] == torch.__version__
    assert (about["device"], about["threads"]) == ("cpu", 1)
    assert result == folder.result == result_of(folder.rows())
    assert result["val_loss"] == folder.rows()[-1]["val_loss"]
    assert [row["step"] for row in folder.rows()] == list(range(37))
    kept = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert kept == ["step-0000030", "step-0000036"]


def test_a_run_leaves_torch_the_threads_that_it_had(config: Config, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run(replace(config, training=replace(config.training, steps=5)), tmp_path / "run")
        assert json.loads((tmp_path / "run/environment.json").read_text())["threads"] == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_tensorboard_shows_the_numbers_of_the_rows(config: Config, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
        EventAccumulator,
    )

    run(config, tmp_path / "run")
    shown = EventAccumulator(str(tmp_path / "run/tensorboard"))
    shown.Reload()
    wanted: dict[str, list[tuple[int, float]]] = {}
    for row in read_rows(tmp_path / "run"):
        for name, value in scalars(row):
            wanted.setdefault(name, []).append((row["step"], value))
    assert {"train/loss", "validation/loss", "logits_max/layers.1"} <= wanted.keys() <= set(shown.Tags()["scalars"])
    for name in ("train/loss", "validation/bpb", "logits_max/layers.1"):
        got = [(event.step, event.value) for event in shown.Scalars(name)]
        assert [step for step, _ in got] == [step for step, _ in wanted[name]]
        assert [value for _, value in got] == pytest.approx([value for _, value in wanted[name]], rel=1e-6)


def test_tensorboard_drops_what_a_resumed_run_writes_again(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first_step, losses in ((0, {1: 4.0, 2: 3.0, 3: 2.0}), (1, {2: 3.5})):
        tracker = TensorBoard(tmp_path, first_step)
        for step, loss in losses.items():
            tracker.write({"step": step, "loss": loss})
        tracker.close()
    shown = EventAccumulator(str(tmp_path))
    shown.Reload()
    assert [(event.step, event.value) for event in shown.Scalars("train/loss")] == [(1, 4.0), (2, 3.5)]


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"])
def test_a_stopped_run_saves_its_last_step_and_says_how_to_go_on(
    corpus: Corpus, tmp_path: Path, signum: signal.Signals, code: int
) -> None:
    options = f"--corpus {corpus.folder} --d-model 16 --layers 1 --d-ff 24 --context 16 --batch-tokens 128 --threads 1"
    options += f" --steps 20 --warmup 4 --heads 2 --kv-heads 2 --head-dim 8 --out {tmp_path / 'run'}"
    command = [sys.executable, "-m", "quacklr", "train", *options.split()]
    pause(tmp_path / "run", 12)
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, **pipes, env=environment(), preexec_fn=heed_ctrl_c)
    wait_until_paused(tmp_path / "run", process.poll)
    process.send_signal(signum)
    _, err = process.communicate(timeout=60 * MINUTES)
    assert process.returncode == code
    steps = read_rows(tmp_path / "run")[-1]["step"]
    assert steps == 12
    assert f"Stopped at step {steps}; go on with: quacklr train --resume {tmp_path / 'run'}" in err
    assert (tmp_path / f"run/checkpoints/step-{steps:07}").exists()
    assert not (tmp_path / "run/result.json").exists()
    assert "Traceback" not in err


def test_wandb_gets_the_run_when_asked(corpus: Corpus, tmp_path: Path) -> None:
    """In its offline mode: the real client, which writes what it would upload."""
    options = f"--corpus {corpus.folder} --d-model 16 --layers 1 --d-ff 24 --context 16 --batch-tokens 128 --steps 3"
    options += " --warmup 1 --heads 2 --kv-heads 2 --head-dim 8 --threads 1 --wandb ducks"
    quiet = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "PYTHONWARNINGS": "default", "HOME": str(tmp_path)}
    done = quacklr("train", *options.split(), "--out", tmp_path / "run", env=environment(**quiet))
    assert done.returncode == 0, done.stderr
    (logged,) = (tmp_path / "run/wandb").glob("offline-run-*/run-run.wandb")
    assert b"validation/loss" in logged.read_bytes()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_both_precisions_train(config: Config, corpus: Corpus, precision: Any) -> None:
    session = Session(replace(config, machine=replace(config.machine, precision=precision)), corpus)
    rows = list(session.rows())
    assert rows[-1]["val_loss"] < rows[0]["val_loss"] - 1.5
    assert {param.dtype for param in session.model.parameters()} == {torch.float32}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's own
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, from its compiler
def test_a_compiled_run_is_the_same_run(config: Config, corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced and differentiated ahead of time for real; without the code generator, which would take a minute."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    compiled = Session(replace(config, machine=replace(config.machine, compile=True)), corpus)
    losses = [[row["loss"] for row in islice(each.rows(), 1, 4)] for each in (compiled, Session(config, corpus))]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert compiled.forward is not compiled.model


def test_a_tokenizer_with_more_tokens_makes_a_larger_model(tmp_path: Path) -> None:
    from quacklr.lab.data.command import main as prepare

    make_corpus(tmp_path)
    words = [str(tmp_path / "source.jsonl"), "--out", str(tmp_path / "words"), "--tokenizer", "train:300"]
    assert prepare([*words, "--val", "0.1", "--probe", "0.1"]) == 0
    corpus = open_corpus(str(tmp_path / "words"))
    session = Session(small(corpus.folder, Quack(), ATTENTIONS["mha"]), corpus)
    assert session.model.embedding.num_embeddings == corpus.vocab > 256
    row = next(session.rows())
    assert row["val_bpb"] == pytest.approx(row["val_loss"] / math.log(2) / corpus.bytes_per_token("val"))
    assert corpus.bytes_per_token("val") > 1.5
