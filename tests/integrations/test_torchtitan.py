"""QuacK in torchtitan: its real models, parallelisms, optimizers and checkpointer in four processes, not its Trainer.

Judge: the whole model in one process, with the same optimizers. `control` is torchtitan without QuacK.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode

import engine_runs as runs
import torchtitan_runs as tt
from crew import Crew
from engine_runs import TAU, Result
from quacklr import Paper
from quacklr.integrations.torchtitan import QuacKBuildFn, with_quack


@pytest.fixture(scope="module")
def ranks() -> Iterator[Crew]:
    """Four ranks of their own: torchtitan is told that their device is the CPU."""
    crew = Crew(4)
    yield crew
    crew.stop()


def made(name: str, tensor_parallel: int = 1) -> tuple[Any, Any, Any]:
    """The model, its optimizers, and the build function with QuacK attached."""
    spec = with_quack(tt.spec_of(name), rule=Paper(TAU))
    model, dims = tt.parallel_model(spec, tensor_parallel)
    optimizers = tt.optimizers_of(model)
    spec.post_optimizer_build_fn(optimizers, [model], dims)
    return model, optimizers, spec.post_optimizer_build_fn


def made_whole(name: str) -> tuple[Any, Any, Any]:
    """The same in one process."""
    model = tt.whole_model(tt.spec_of(name))
    optimizers, build = tt.optimizers_of(model), QuacKBuildFn(tau=TAU, verify=False)
    build(optimizers, [model], None)
    return model, optimizers, build


def trained(model: Any, optimizers: Any, build: Any, with_quack: bool) -> Result:
    found = Result()
    if not with_quack:
        build.remove()
    for number in range(3):
        tt.backward(model, number)
        with CommDebugMode() as comm:
            optimizers.step()
        optimizers.zero_grad()
        found.counts.append(comm.get_total_counts())
        if with_quack:
            found.rates.append(build.quack.rates())
    build.remove()
    found.weights = {name: weight for name, weight in tt.whole_weights(model).items() if ".attention." in name}
    return found  # experts are balanced by the number of tokens, which more ranks have more of


def compared(_: int, name: str, tensor_parallel: int) -> tuple[Result, Result, Result, Result]:
    """By torchtitan with QuacK and without, and in one process with QuacK and without."""
    parallel = [trained(*made(name, tensor_parallel), with_quack) for with_quack in (True, False)]
    whole = [trained(*made_whole(name), with_quack) for with_quack in (True, False)]
    return parallel[0], parallel[1], whole[0], whole[1]


@pytest.mark.parametrize("tensor_parallel", [1, 2])
@pytest.mark.parametrize("name", ["llama3", "deepseek_v3"])
def test_fsdp2_and_tensor_parallelism_step_as_one_process_does(name: str, tensor_parallel: int, ranks: Crew) -> None:
    for found, control, wanted, plain in ranks(compared, name, tensor_parallel):
        assert runs.moved(wanted.rates[-1]) > 0.02
        assert runs.difference(wanted.weights, plain.weights) > 1e-3
        assert runs.rates_difference(found, wanted) <= 2e-6
        noise = runs.difference(control.weights, plain.weights)
        assert runs.difference(found.weights, wanted.weights) <= 3 * noise + 3e-6
        extra = [here - there for here, there in zip(found.counts, control.counts, strict=True)]
        assert extra[1:] == [1, 1], "one for all mesh dimensions"


def resumed(_: int, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    """Rates after four steps, and after two steps, a checkpoint, and two more in a new model."""
    model, optimizers, build = made("deepseek_v3", 2)
    checkpointer = tt.checkpointer_of(model, optimizers, folder)
    for number in range(4):
        tt.train_step(model, optimizers, number)
        checkpointer.save(number + 1) if number < 3 else None
    wanted = build.quack.rates()
    build.remove()
    checkpointer.close()
    model, optimizers, build = made("deepseek_v3", 2)
    started = runs.moved(build.quack.rates())
    checkpointer = tt.checkpointer_of(model, optimizers, folder)
    assert checkpointer.load()
    for number in (2, 3):
        tt.train_step(model, optimizers, number)
    found = build.quack.rates()
    build.remove()
    checkpointer.close()
    return wanted, found, started


def test_torchtitans_checkpointer_saves_and_loads_the_state_of_quack(ranks: Crew, tmp_path: Path) -> None:
    for wanted, found, started in ranks(resumed, tmp_path):
        assert started == 0
        assert runs.moved(wanted) > 0.02
        assert runs.difference(wanted, found) == 0


def loaded_first(_: int, folder: Path) -> tuple[float, float, float]:
    """How far rates are from tau after `initial_load_path` was loaded, in the first step, and after it."""
    model, optimizers, build = made("llama3", 2)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.5)
    checkpointer = tt.checkpointer_of(model, optimizers, folder)
    checkpointer.save(2)
    checkpointer.close()
    build.remove()
    model, optimizers, build = made("llama3", 2)
    checkpointer = tt.checkpointer_of(model, optimizers, folder / "new", initial_load_path=str(folder / "saved/step-2"))
    assert checkpointer.load()
    loaded = runs.moved(build.quack.rates())
    tt.train_step(model, optimizers, 0)
    first, after = runs.moved(build.quack.rates(last=True)), runs.moved(build.quack.rates())
    build.remove()
    checkpointer.close()
    return loaded, first, after


def test_after_initial_load_path_rates_are_relative_to_the_loaded_weights(ranks: Crew, tmp_path: Path) -> None:
    for loaded, first, after in ranks(loaded_first, tmp_path):
        assert loaded > 0.3
        assert first < 1e-6
        assert 1e-3 < after < 0.2


def test_the_function_that_is_there_is_called_first_and_several_parts_are_refused() -> None:
    called: list[Any] = []
    build = QuacKBuildFn(lambda *args: called.append(args))
    parts: list[nn.Module] = [nn.Linear(2, 2), nn.Linear(2, 2)]
    with pytest.raises(ValueError, match="has 2 parts of the model, as with an interleaved pipeline of torchtitan"):
        build(SimpleNamespace(), parts, None)
    assert len(called) == 1
