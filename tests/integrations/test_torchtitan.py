"""QuacK in torchtitan: its real models, parallelisms and optimizers in two processes, without its Trainer.

Judge: the whole model in one process, with the same optimizers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint

import engine_runs as runs
import torchtitan_runs as tt
from crew import Crew
from engine_runs import TAU
from quacklr.integrations.torchtitan import QuacKBuildFn, with_quack

dcp: Any = checkpoint


@pytest.fixture(scope="module")
def ranks() -> Iterator[Crew]:
    """Two ranks of their own: torchtitan is told that their device is the CPU."""
    crew = Crew(2)
    yield crew
    crew.stop()


def made(name: str) -> tuple[Any, Any, Any]:
    """The model, its optimizers, and the build function with QuacK attached."""
    spec = with_quack(tt.spec_of(name), tau=TAU)
    model, dims = tt.parallel_model(spec)
    optimizers = tt.optimizers_of(model)
    spec.post_optimizer_build_fn(optimizers, [model], dims)
    return model, optimizers, spec.post_optimizer_build_fn


def trained(_: int, name: str) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Rates of three steps, and those of the whole model in one process."""
    model, optimizers, build = made(name)
    whole = tt.whole_model(tt.spec_of(name))
    alone, build_alone = tt.optimizers_of(whole), QuacKBuildFn(tau=TAU, verify=False)
    build_alone(alone, [whole], None)
    found, wanted = [], []
    for number in range(3):
        tt.train_step(model, optimizers, number)
        tt.train_step(whole, alone, number)
        found.append(build.quack.rates())
        wanted.append(build_alone.quack.rates())
    build.quack.remove()
    build_alone.quack.remove()
    return found, wanted


@pytest.mark.parametrize("name", ["llama3", "deepseek_v3"])
def test_rates_are_those_of_one_process(name: str, ranks: Crew) -> None:
    """torchtitan's AdamW has eps 1e-8, which makes steps of rounding errors: 2e-5 instead of 2e-6."""
    for found, wanted in ranks(trained, name):
        assert runs.moved(wanted[-1]) > 0.02
        for here, there in zip(found, wanted, strict=True):
            assert runs.difference(here, there) <= 2e-5


def resumed(_: int, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    """Rates after four steps, and after two steps, a checkpoint, and two more in a new model."""
    model, optimizers, build = made("llama3")
    for number in range(4):
        if number == 2:
            dcp.save({"model": model.state_dict(), "optimizer": optimizers}, checkpoint_id=folder)
        tt.train_step(model, optimizers, number)
    wanted = build.quack.rates()
    build.quack.remove()
    model, optimizers, build = made("llama3")
    started = runs.moved(build.quack.rates())
    loaded = {"model": model.state_dict(), "optimizer": optimizers}
    dcp.load(loaded, checkpoint_id=folder)
    model.load_state_dict(loaded["model"])
    for number in (2, 3):
        tt.train_step(model, optimizers, number)
    found = build.quack.rates()
    build.quack.remove()
    return wanted, found, started


def test_a_checkpoint_has_the_state_of_quack_with_the_optimizers(ranks: Crew, tmp_path: Path) -> None:
    for wanted, found, started in ranks(resumed, tmp_path):
        assert started == 0
        assert runs.moved(wanted) > 0.02
        assert runs.difference(wanted, found) == 0


def weights_loaded(_: int) -> tuple[float, float]:
    """How far rates were from tau after weights were loaded, and in the first step."""
    model, optimizers, build = made("llama3")
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.5)
    loaded = runs.moved(build.quack.rates())
    tt.train_step(model, optimizers, 0)
    first = runs.moved(build.quack.rates(last=True))
    build.quack.remove()
    return loaded, first


def test_rates_are_relative_to_weights_that_are_loaded_after_building(ranks: Crew) -> None:
    for loaded, first in ranks(weights_loaded):
        assert loaded > 0.3
        assert first < 1e-6


def test_the_function_that_is_there_is_called_first_and_several_parts_are_refused() -> None:
    called: list[Any] = []
    build = QuacKBuildFn(lambda *args: called.append(args))
    parts: list[nn.Module] = [nn.Linear(2, 2), nn.Linear(2, 2)]
    with pytest.raises(ValueError, match="has 2 parts of the model, as with an interleaved pipeline of torchtitan"):
        build(SimpleNamespace(), parts, None)
    assert len(called) == 1
