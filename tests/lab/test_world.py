"""The identity of a torchrun call, by which a restarted process knows the folder of its own run."""

from __future__ import annotations

import os

import pytest

from quacklr.lab.train.world import torchrun_id


def test_a_call_of_torchrun_is_known_by_its_name_or_else_by_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def ids(name: str) -> list[str | None]:
        """For processes of two calls."""
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", name)
        found = []
        for parent in (41, 42):
            monkeypatch.setattr(os, "getppid", lambda parent=parent: parent)
            found.append(torchrun_id())
        return found

    for unnamed in ("", "none"):  # what torchrun sets without --rdzv-id
        assert len({*ids(unnamed)}) == 2
    assert len({*ids("job-7")}) == 1
    assert ids("job-7")[0] != ids("job-8")[0]
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert torchrun_id() is None
