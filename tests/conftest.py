"""Settings for all tests: hypothesis draws the same examples every time, and a slow machine is not a failure."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from crew import Crew

settings.register_profile(
    "suite", deadline=None, derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start: threads that wait for a busy core spin
PAUSING = str(Path(__file__).parent / "kit/pausing")  # see paused.py
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [PAUSING, os.environ.get("PYTHONPATH")]))


@pytest.fixture(scope="session")
def stdlib(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of the standard library's tokens for the tests, made once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUACKLR_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small corpus of bytes for the tests of the lab, which only read it."""
    from lab_runs import make_corpus

    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site."""
    out = tmp_path_factory.mktemp("site") / "site"
    command = [sys.executable, "-m", "website.build", str(out)]
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"open {out / 'index.html'}" in done.stdout
    return out


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A real browser; the test is skipped where there is none."""
    from browsers import launched

    with launched() as started:
        yield started


@pytest.fixture(scope="session")
def two() -> Iterator[Crew]:
    """Two ranks that stay for all tests."""
    crew = Crew(2)
    yield crew
    crew.stop()


@pytest.fixture(scope="session")
def four() -> Iterator[Crew]:
    """Four ranks that stay for all tests."""
    crew = Crew(4)
    yield crew
    crew.stop()


SLOWEST = (
    *("test_torchrun", "test_sweep_clusters", "test_resume", "test_parallel", "test_options", "test_sharded"),
    *("test_sharded_callbacks", "test_checkpoints", "test_prepare_killed", "test_models"),
    *("test_torchtitan", "test_deepspeed", "test_fsdp1", "test_megatron", "test_in_a_browser", "test_notebook"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On several cores the slowest files come first, so that no core waits for the last one."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    order = {name: place for place, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))
