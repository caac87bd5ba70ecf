"""A budget on sharded parameters: rates and steps equal those of one process, with two collectives per step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode

from crew import Crew
from quacklr import Budget, QuacK
from sharding import LAYOUTS, assert_same_rates, gradient, like, parameters, spread, whole

Steps = list[tuple[dict[str, Tensor], dict[str, Tensor], int]]


def steps(_: int, name: str, kind: str, sharded: bool) -> Steps:
    """After each of three steps: the rates, the whole parameters, and the number of collectives."""
    layout = LAYOUTS[name]
    params = parameters(layout, sharded)
    optimizer = getattr(torch.optim, kind)([param for param in params.values() if param.requires_grad], lr=0.5)
    found: Steps = []
    with QuacK(layout.paths(params), optimizer, rule=Budget(0.3)) as quack:
        for step in range(3):
            for index, param in enumerate(params.values()):
                if param.requires_grad:
                    param.grad = like(gradient(param, step, index), param)
            with CommDebugMode() as communication:
                optimizer.step()
            values = {name: whole(param) for name, param in params.items()}
            found.append((quack.rates(), values, communication.get_total_counts()))
    return found


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_rates_and_steps_are_those_of_one_process(name: str, kind: str, four: Crew) -> None:
    alone = steps(0, name, kind, False)
    assert max(spread(rates) for rates, _, _ in alone) > 0.01
    for rank in four(steps, name, kind, True):
        for i, ((rates, params, count), (wanted, values, _)) in enumerate(zip(rank, alone, strict=True)):
            assert_same_rates(rates, wanted, rtol=1e-5)
            for param, value in values.items():
                torch.testing.assert_close(params[param], value, rtol=1e-5, atol=1e-5)
            least = 0 if name == "replicas only" else 1
            assert least <= count <= 2 or i == 0  # the first step also makes the plan
