"""Rules that a user writes: the one of examples/own_rule.py, and one with a state."""

from __future__ import annotations

import copy
import io
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models import Separate, layers, train
from quacklr import QuacK, Rule, frobenius
from quacklr.core.rule import Step

EXAMPLE = Path(__file__).parents[2] / "examples/own_rule.py"
HEADS, SIZE = 4, 8


@pytest.mark.parametrize("share", [0.003, 0.03, 3.0])
def test_the_rates_of_the_rule_in_the_docs_are_what_it_says(share: float) -> None:
    """Judged by the step of the optimizer without QuacK, head by head, with torch's SVD."""
    torch.manual_seed(0)
    model = nn.MultiheadAttention(HEADS * SIZE, HEADS, bias=False, batch_first=True)
    plain, x = copy.deepcopy(model), torch.randn(4, 10, HEADS * SIZE)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, plain)]
    quack = QuacK(model, optimizers[0], rule=runpy.run_path(str(EXAMPLE))["RelativeLimit"](share))
    before = model.in_proj_weight.detach().unflatten(0, (3, HEADS, SIZE)).clone()
    for each, optimizer in zip((model, plain), optimizers, strict=True):
        each(x, x, x)[0].square().mean().backward()
        optimizer.step()
    steps = plain.in_proj_weight.detach().view_as(before) - before
    exact = (share * torch.linalg.matrix_norm(before) / torch.linalg.matrix_norm(steps, 2)).clamp(max=1)
    rates = torch.stack([quack.rates()["q"], quack.rates()["k"], torch.ones(HEADS)])  # values are on no path
    assert (rates[:2] <= exact[:2] * (1 + 1e-5)).all()
    assert (rates[:2] >= exact[:2] * 0.93).all(), "the singular value is bounded from above, within 7 % for 8 rows"
    assert (rates[:2] == 1).all() if share == 3 else (rates[:2] < 1).all()
    after = before + rates[..., None, None] * steps
    torch.testing.assert_close(model.in_proj_weight.view_as(before), after, rtol=0, atol=1e-7)


class Anchored(Rule):
    """rate = 0.5 * ||W at the start|| / ||W now||."""

    measures, has_state = True, True

    def start(self, *args: Any) -> None:
        super().start(*args)
        self.norms = self.paths.blocks.measure(frobenius)[1]

    def after(self, step: Step) -> Tensor:
        self.rates = 0.5 * self.norms / step.measure()[0]
        return self.rates

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "norms": self.paths.by_name(self.norms)}

    def load_state_dict(self, state_dict: Mapping[str, Any], partial: bool = False) -> None:  # noqa: ARG002
        self.norms = self.paths.flat(state_dict["norms"])


def run(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, QuacK]:
    torch.manual_seed(seed)
    model = layers(2, Separate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, QuacK(model, optimizer, rule=Anchored())


@pytest.mark.parametrize("loads", [True, False])
def test_a_rule_with_a_state_of_its_own_resumes_bitwise_and_only_with_its_state(loads: bool) -> None:
    model, optimizer, quack = run(seed=0)
    train(model, optimizer, steps=3, seed=1)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), quack.state_dict()], file)
    train(model, optimizer, steps=3, seed=2)

    resumed, resumed_optimizer, resumed_quack = run(seed=9)
    of_model, of_optimizer, of_quack = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    resumed.load_state_dict(of_model)
    resumed_optimizer.load_state_dict(of_optimizer)
    if loads:
        resumed_quack.load_state_dict(of_quack)
    train(resumed, resumed_optimizer, steps=3, seed=2)
    same = [torch.equal(one, other) for one, other in zip(resumed.parameters(), model.parameters(), strict=True)]
    assert all(same) if loads else not all(same)
