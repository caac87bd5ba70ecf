"""The ranks of the suite: a rank that dies is reported, and the next task has new ranks."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from crew import Crew, RankDiedError


def crashed_once(rank: int, mark: Path) -> int:
    """Rank 1 crashes, unless it did before."""
    if rank == 1 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGABRT)
    return rank


def left(rank: int) -> int:
    """Rank 0 ends itself."""
    if rank == 0:
        os.write(2, b"goodbye")
        os._exit(3)
    return rank


def test_a_task_whose_rank_crashed_is_done_once_more_and_one_that_ended_itself_fails(two: Crew, tmp_path: Path) -> None:
    assert two(crashed_once, tmp_path / "mark") == [0, 1]
    with pytest.raises(RankDiedError, match="rank 0 died with exit code 3\ngoodbye"):
        two(left)
    assert two(crashed_once, tmp_path / "mark") == [0, 1]
