"""Checkpoints are atomic under kills and full disks; damaged and foreign checkpoints are rejected."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from lab_runs import ATTENTIONS, METHODS, make_corpus, read_rows, small
from quacklr.lab.config import fingerprint, from_json
from quacklr.lab.errors import UserError
from quacklr.lab.methods import Budget, Quack
from quacklr.lab.optim import AdamWRecipe, optimizers
from quacklr.lab.presets import PRESETS
from quacklr.lab.train.checkpoint import Checkpoints, checkpoints, pack
from quacklr.lab.train.folder import Folder
from quacklr.lab.train.runner import Stopped, run
from quacklr.lab.train.storage import CheckpointWriter
from quacklr.lab.train.tensors import named_tensors, tensors_to_load
from saved_runs import NAME, REST, complaint, content, load_untrained, resummed, steps_in, trained

LEDGER = Path(__file__).parents[2] / "results/ledger.jsonl"


@pytest.fixture(params=["sync", "async"])
def later(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "async")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Two checkpoints of a run."""
    run, saves = trained(seed=0, steps=1), Checkpoints(tmp_path / "saved", NAME, keep=2)
    for step in (1, 2):
        saves.save(step, named_tensors(*run), REST)
    return tmp_path / "saved"


def save_now(saves: Checkpoints, step: int, later: bool, tensors: dict[str, Tensor] | None = None) -> None:
    saves.save(step, tensors or named_tensors(*trained(seed=0, steps=1)), REST, later)
    saves.wait()


def test_killed_at_any_moment_of_a_save_the_older_or_the_newer_checkpoint_is_there(tmp_path: Path) -> None:
    script = [sys.executable, "-W", "error", str(Path(__file__).parents[1] / "kit/killed_saves.py"), str(tmp_path)]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for line in done.stdout.splitlines():
        older, newer, left_behind = map(int, line.split())
        assert older > 30
        assert newer > 5
        assert left_behind > 30


def test_a_run_stopped_while_a_save_is_under_way_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(make_corpus(tmp_path), METHODS["quack"], ATTENTIONS["mha"], steps=14)
    finish, save, slow, stopping = CheckpointWriter.finish, Checkpoints.save, list[bool](), threading.Event()
    later = replace(config, watch=replace(config.watch, async_save=True))

    def interrupted(*args: Any, **more: Any) -> None:
        if not slow:
            os.kill(os.getpid(), signal.SIGINT)
            assert stopping.wait(600), "the run has not stopped"
        slow.append(threading.current_thread() is not threading.main_thread())
        finish(*args, **more)

    def saved(saves: Checkpoints, step: int, *args: Any, **more: Any) -> None:
        if step > 6:  # the first save, of step 6, is under way
            stopping.set()
        save(saves, step, *args, **more)

    monkeypatch.setattr(CheckpointWriter, "finish", interrupted)
    monkeypatch.setattr(Checkpoints, "save", saved)
    with pytest.raises(Stopped) as stopped:
        run(later, tmp_path / "later")
    assert checkpoints(tmp_path / "later/checkpoints")[-1].name == f"step-{stopped.value.step:07}"
    assert slow == [True, True]
    assert (tmp_path / "later/checkpoints/step-0000006").exists()
    assert run(later, tmp_path / "later", resume=True) == run(config, tmp_path / "whole")
    assert read_rows(tmp_path / "later") == read_rows(tmp_path / "whole")
    folders = [tmp_path / way / "checkpoints" for way in ("later", "whole")]
    assert steps_in(folders[0]) == steps_in(folders[1]) == ["step-0000012", "step-0000014"]
    assert content(folders[0] / "step-0000014") == content(folders[1] / "step-0000014")


@pytest.mark.parametrize("stop", [False, True], ids=["end", "Ctrl-C"])
def test_a_last_save_that_fails_in_the_background_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: bool
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def stopping(*args: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        plain(*args)

    plain = Folder.append
    config = small(make_corpus(tmp_path), METHODS["default"], ATTENTIONS["mha"], steps=5)
    monkeypatch.setattr(CheckpointWriter, "finish", full)
    monkeypatch.setattr(Folder, "append", stopping if stop else plain)
    with pytest.raises(UserError, match=f"step-000000{0 if stop else 5}: No space left on device"):
        run(replace(config, watch=replace(config.watch, async_save=True)), tmp_path / "run")
    assert steps_in(tmp_path / "run/checkpoints") == []
    assert not (tmp_path / "run/result.json").exists()


def test_every_byte_is_on_the_disk_before_a_checkpoint_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last flush of each file comes after its last byte, that of each folder after its last file."""
    flushed: list[tuple[str, int]] = []

    def flush(file: int) -> None:
        path = Path(f"/proc/self/fd/{file}").resolve()
        flushed.append((path.name, len(list(path.iterdir())) if path.is_dir() else path.stat().st_size))

    monkeypatch.setattr(os, "fsync", flush)
    save_now(Checkpoints(tmp_path, NAME, keep=2), 1, later=False)
    files = {name: len(each) for name, each in content(tmp_path / "step-0000001").items()}
    files[".metadata.tmp"] = files.pop(".metadata")
    assert dict(flushed) == files | {".step-0000001.saving": len(files), tmp_path.name: 1}


def test_damage_of_any_file_is_told_and_the_older_checkpoint_named(saved: Path) -> None:
    path = saved / "step-0000002"
    for file, whole in content(path).items():
        every = 1 if file == "checksums.json" else len(whole) // 7
        flipped = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(0, len(whole), every)]
        for wrong in (*flipped, whole[:-1], b"", whole + b"x", None):
            (path / file).unlink() if wrong is None else (path / file).write_bytes(wrong)
            said = complaint(saved)
            assert said.startswith(f"the checkpoint {path} is damaged (")
            assert said.endswith("remove it to go on from step-0000001")
            if file != "checksums.json":
                assert file in said
            (path / file).write_bytes(whole)
    load_untrained(0, saved)
    shutil.rmtree(saved / "step-0000001")
    (path / "rest.pt").unlink()
    assert "there is no older one, so start the run anew" in complaint(saved)


@contextmanager
def small_files_only() -> Iterator[None]:
    """No file may grow beyond 9 kB: what a full disk does, to a process that is told of it in the same way."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [10, 100_000], ids=["many", "large"])
def test_a_full_disk_is_told_and_what_was_whole_stays(saved: Path, later: bool, size: int) -> None:
    """A write fails in another place when it is larger than a buffer."""
    saves, before = Checkpoints(saved, NAME, keep=2), steps_in(saved)
    with small_files_only(), pytest.raises(UserError) as told:
        save_now(saves, 3, later, {f"model.{name}": torch.ones(size) for name in range(50)})
    assert str(told.value) == f"cannot write {saved / 'step-0000003'}: File too large"
    assert steps_in(saved) == before
    save_now(saves, 3, later)
    load_untrained(0, saved)


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path, later: bool) -> None:
    (tmp_path / "file").touch()
    saves = Checkpoints(tmp_path / "file/checkpoints", NAME, keep=2)
    with pytest.raises(UserError, match=r"^cannot write .*file/checkpoints/step-0000001: Not a directory$"):
        save_now(saves, 1, later)
    saves.wait()  # what has been told is not told again


def test_the_last_few_are_kept(tmp_path: Path, later: bool) -> None:
    run = trained(seed=0, steps=0)
    with Checkpoints(tmp_path, NAME, keep=3) as saves:
        for step in (1, 2, 3, 4, 5, 5):
            saves.save(step, named_tensors(*run), REST, later)
    assert steps_in(tmp_path) == ["step-0000003", "step-0000004", "step-0000005"]


def test_a_checkpoint_that_does_not_fit_the_model_is_told_by_tensor(saved: Path) -> None:
    def refusal(change: Callable[[Any], None], steps: int = 0) -> str:
        run = trained(seed=1, steps=steps)
        change(run[0])
        return complaint(saved, run=(run[0], optimizers(AdamWRecipe(), run[0]) if not steps else run[1]))

    weight = "blocks.0.attention.q.weight"
    assert "the checkpoint has no model.wing" in refusal(lambda model: model.register_buffer("wing", torch.ones(2)))
    assert "the checkpoint has model.norm.weight, which the" in refusal(lambda model: delattr(model.norm, "weight"))
    wide = nn.Linear(16, 20, bias=False)
    said = refusal(lambda model: setattr(model.blocks[0].attention, "q", wide))
    assert f"model.{weight} is [16, 16] of float32 in the checkpoint, but [20, 16] of float32 in the run" in said
    said = refusal(lambda model: model.blocks[0].attention.q.bfloat16())
    assert f"model.{weight} is [16, 16] of float32 in the checkpoint, but [16, 16] of bfloat16 in the run" in said


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("evil",)


@pytest.mark.parametrize(("capturable", "device"), [(False, "cpu"), (True, "meta")])
def test_the_step_count_is_made_on_the_device_where_its_optimizer_keeps_it(capturable: bool, device: str) -> None:
    model = nn.Linear(3, 2, bias=False, device="meta")
    optimizer = torch.optim.AdamW(model.named_parameters(), capturable=capturable)
    weight = torch.Size([2, 3]), torch.float32
    saved = {"model.weight": weight, "optimizer.0.weight.exp_avg": weight, "optimizer.0.weight.exp_avg_sq": weight}
    found = tensors_to_load(saved | {"optimizer.0.weight.step": (torch.Size([]), torch.float32)}, model, [optimizer])
    assert {found[name].device.type for name in saved} == {"meta"}
    assert found["optimizer.0.weight.step"].device.type == device


def test_what_is_no_checkpoint_of_this_run_is_told(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, whole = saved / "step-0000002", content(saved / "step-0000002")
    resummed(path)
    assert content(path) == whole
    assert "is of another run" in complaint(saved, name="other-corpus")
    assert "was trained on other text" in complaint(saved, name="configuration-other")
    (path / "rest.pt").write_bytes(pack({"format": 3, "config": NAME, "state": {}}))
    resummed(path)
    assert "was made by another quacklr" in complaint(saved)
    monkeypatch.chdir(saved)
    for file, each in {"rest.pt": pack({"weights": torch.ones(3)}), ".metadata": pickle.dumps(Evil())}.items():
        (path / file).write_bytes(each)
        resummed(path)
        assert f"{path} is not a checkpoint of quacklr: " in complaint(saved)
        (path / "rest.pt").write_bytes(whole["rest.pt"])
    assert not (saved / "evil").exists()


def test_an_entry_that_is_no_tensor_is_not_unpickled(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would read an entry of bytes with weights_only=False, also where the run has a tensor."""
    path, evil = saved / "step-0000002", io.BytesIO()
    torch.save(Evil(), evil)
    index = pickle.loads((path / ".metadata").read_bytes())
    (entry,) = (each for each in index.storage_data if each.fqn == "model.norm.weight")
    place = replace(index.storage_data.pop(entry), offset=0, length=len(evil.getvalue()), relative_path="evil.distcp")
    index.storage_data[MetadataIndex("model.norm.weight")] = place
    index.state_dict_metadata["model.norm.weight"] = BytesStorageMetadata()
    (path / ".metadata").write_bytes(pickle.dumps(index))
    (path / "evil.distcp").write_bytes(evil.getvalue())
    resummed(path)
    monkeypatch.chdir(saved)
    assert "the checkpoint has no model.norm.weight, which the run has" in complaint(saved)
    assert not (saved / "evil").exists()


def test_runs_of_before_have_the_fingerprints_that_they_had() -> None:
    entries = [json.loads(line) for line in LEDGER.read_text().splitlines()]
    for entry in entries:
        config = from_json(entry["config"])
        background = replace(config, watch=replace(config.watch, async_save=True))
        assert fingerprint(config) == fingerprint(background) == entry["key"]


def test_a_newer_option_changes_the_fingerprint_where_it_is_used() -> None:
    config = PRESETS["cpu"]
    for usual, other in ((Quack(), Quack(products="all")), (Quack(), Quack(together="qk-norm"))):
        assert fingerprint(replace(config, method=usual)) != fingerprint(replace(config, method=other))
    assert fingerprint(replace(config, method=Budget())) != fingerprint(replace(config, method=Budget(threshold=3.0)))
