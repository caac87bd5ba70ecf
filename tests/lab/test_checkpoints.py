"""Checkpoints are the same on any number of ranks, in the background or not: real processes, FSDP2, torch as judge."""

from __future__ import annotations

import resource
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_saver import save as save_as_torch_does

from crew import Crew
from models import assert_equal
from quacklr.lab.errors import UserError
from quacklr.lab.train.checkpoint import Checkpoints, checkpoints
from quacklr.lab.train.storage import CheckpointWriter
from quacklr.lab.train.tensors import named_tensors
from saved_runs import NAME, REST, complaint, content, load_untrained, save_trained, steps_in, trained, whole_tensors


def one(task: Callable[..., Any], *args: Any) -> list[Any]:
    with warnings.catch_warnings():
        return [task(0, *args)]


@pytest.mark.parametrize("later", [False, True], ids=["sync", "async"])
def test_what_any_number_of_ranks_saved_is_loaded_by_any_other(
    two: Crew, four: Crew, tmp_path: Path, later: bool
) -> None:
    crews: list[Callable[..., list[Any]]] = [one, two, four]
    for number, save in enumerate(crews):
        folder = tmp_path / str(number)
        wanted = save(save_trained, folder, later)[0]
        assert {name.partition(".")[0] for name in wanted} == {"model", "optimizer"}
        dcp_to_torch_save(folder / "step-0000002", tmp_path / "torchs_own.pt")
        assert_equal(torch.load(tmp_path / "torchs_own.pt", weights_only=True), wanted)
        for load in crews:
            for loaded in load(load_untrained, folder):
                assert list(loaded) == list(wanted)
                assert_equal(loaded, wanted)
    assert len(list((tmp_path / "2/step-0000002").glob("*.distcp"))) == 4


def test_in_the_background_or_not_the_bytes_are_the_same(two: Crew, tmp_path: Path) -> None:
    crews: list[tuple[Callable[..., list[Any]], int]] = [(one, 1), (two, 2)]
    for crew, ranks in crews:
        for later in (False, True):
            crew(save_trained, tmp_path / f"{ranks}-{later}", later)
        found = [content(tmp_path / f"{ranks}-{later}/step-0000002") for later in (False, True)]
        assert found[0] == found[1]
        assert len(found[0]) == 3 + ranks


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_finish, finish = threading.Event(), CheckpointWriter.finish
    monkeypatch.setattr(
        CheckpointWriter, "finish", lambda *args, **more: (may_finish.wait(600), finish(*args, **more))[1]
    )
    run, saves = trained(seed=0, steps=1), Checkpoints(tmp_path, NAME, keep=2)
    wanted, rest = whole_tensors(run), {"kept": torch.zeros(3)}
    saves.save(1, named_tensors(*run), rest, later=True)
    for each in (*named_tensors(*run).values(), rest["kept"]):
        each.add_(1)
    assert not checkpoints(tmp_path)
    may_finish.set()
    saves.wait()
    assert steps_in(tmp_path) == ["step-0000001"]
    other = trained(seed=1, steps=0)
    assert_equal(saves.load(tmp_path / "step-0000001", *other), {"kept": torch.zeros(3)})
    assert_equal(whole_tensors(other), wanted)


@pytest.mark.parametrize("later", [False, True], ids=["sync", "async"])
def test_saving_and_loading_leave_the_filters_of_warnings_as_they_were(tmp_path: Path, later: bool) -> None:
    warnings.simplefilter("error")  # as they do
    before = list(warnings.filters)
    save_trained(0, tmp_path, later)
    load_untrained(0, tmp_path)
    assert list(warnings.filters) == before
    with pytest.warns(UserWarning, match="torch.distributed is disabled, unavailable or uninitialized"):
        save_as_torch_does({"x": torch.ones(2)}, checkpoint_id=tmp_path / "another's", no_dist=True)


def damaged_on_ranks(_: int, folder: Path) -> str:
    return complaint(folder)


def test_ranks_share_the_search_for_damage_and_all_are_told(two: Crew, tmp_path: Path) -> None:
    two(save_trained, tmp_path)
    for file in ("__0_0.distcp", "__1_0.distcp", ".metadata", "rest.pt"):
        path = tmp_path / "step-0000002" / file
        path.write_bytes(path.read_bytes()[:-1])
        said = two(damaged_on_ranks, tmp_path)
        assert said[0] == said[1]
        assert f"is damaged ({file} has" in said[0]
        path.write_bytes(path.read_bytes() + b"?")
        assert f"the checksum of {file} is wrong" in two(damaged_on_ranks, tmp_path)[1]
        two(save_trained, tmp_path)  # over the damaged one, which is of the same step


def full_on_rank_1(rank: int, folder: Path) -> str:
    tensors, saves = {str(name): torch.ones(9_000) for name in range(4)}, Checkpoints(folder, NAME, keep=2)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (900, resource.RLIM_INFINITY))
    with pytest.raises(UserError) as told:
        saves.save(2, tensors, REST)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return str(told.value)


def test_when_one_rank_cannot_write_all_are_told(two: Crew, tmp_path: Path) -> None:
    assert two(full_on_rank_1, tmp_path) == [f"cannot write {tmp_path / 'step-0000002'}: File too large"] * 2
    assert steps_in(tmp_path) == []
