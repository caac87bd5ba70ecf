"""examples/quack_in_one_file.py takes the same steps as the library, bitwise, and is small enough to be copied."""

from __future__ import annotations

import ast
import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import quack_in_one_file as one_file
import torch
from quack_in_one_file import Rows
from torch import Tensor, nn

from models import Latent, PerHead, Separate, assert_equal, layers, train
from quacklr import Limit, Paper, QuacK

FILE = Path(one_file.__file__)
Optimizers = Callable[[nn.Module], torch.optim.Optimizer]


class Fused(nn.Module):
    """[q | k | v], with a bias, as in nanoGPT."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.qkv = heads, nn.Linear(width, 3 * width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (each.unflatten(2, (self.heads, -1)).transpose(1, 2) for each in self.qkv(x_BTD).chunk(3, 2))
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def of_fused(module: Any) -> Any:
    rows, linear = torch.arange(16).view(4, 4), module.qkv
    return [([Rows(linear.weight, rows, linear.bias)], [Rows(linear.weight, 16 + rows, linear.bias)])]


def of_per_head(module: Any) -> Any:
    rows = torch.arange(48).view(4, 3, 4)
    return [([Rows(module.qkv.weight, rows[:, 0])], [Rows(module.qkv.weight, rows[:, 1])])]


def of_grouped(module: Any) -> Any:
    q, k = (Rows(each.weight, torch.arange(each.out_features).view(-1, 4)) for each in (module.q, module.k))
    return [([q], [k])]


def of_latent(module: Any) -> Any:
    heads = {"dq": 1, "dkv": 1, "kr": 1, "uq": 4, "uk": 4, "qr": 4}
    weights = {name: module.get_submodule(name).weight for name in heads}
    dq, dkv, kr, uq, uk, qr = (
        Rows(weight, torch.arange(len(weight)).view(heads[name], -1)) for name, weight in weights.items()
    )
    return [([dq, uq], [dkv, uk]), ([dq, qr], [kr])]


def muon(model: nn.Module) -> torch.optim.Optimizer:
    """It takes matrices only, so biases do not train."""
    for param in model.parameters():
        param.requires_grad_(param.ndim == 2)
    return torch.optim.Muon([param for param in model.parameters() if param.ndim == 2], lr=0.1)


MODELS = [
    pytest.param(Fused, of_fused, id="fused"),
    pytest.param(PerHead, of_per_head, id="per head"),
    pytest.param(Separate, of_grouped, id="separate"),
    pytest.param(lambda: Separate(groups=2), of_grouped, id="GQA"),
    pytest.param(Latent, of_latent, id="MLA"),
]
OPTIMIZERS = [lambda model: torch.optim.AdamW(model.parameters(), lr=0.03), muon]


def pair(make: Callable[[], nn.Module]) -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(0)
    model = layers(1 if make is Latent else 2, make)  # the MLA gives logits
    return model, copy.deepcopy(model)


@pytest.mark.parametrize("tau", [None, 0.5])
@pytest.mark.parametrize("optimizer_of", OPTIMIZERS, ids=["AdamW", "Muon"])
@pytest.mark.parametrize(("make", "logits_of"), MODELS)
def test_50_steps_are_bitwise_those_of_the_library(
    make: Callable[[], nn.Module], logits_of: Callable[[Any], Any], optimizer_of: Optimizers, tau: float | None
) -> None:
    ours, theirs = pair(make)
    optimizers = [optimizer_of(model) for model in (ours, theirs)]
    quack = QuacK(ours, optimizers[0], rule=Limit() if tau is None else Paper(tau))
    one_file.Quack(optimizers[1], [logits_of(layer) for layer in theirs], tau)
    schedules = [torch.optim.lr_scheduler.LinearLR(each, 0.1, 1.0, 20) for each in optimizers]
    scaled = False
    for step in range(50):
        for model, optimizer, schedule in zip((ours, theirs), optimizers, schedules, strict=True):
            train(model, optimizer, steps=1, seed=step)
            schedule.step()
        scaled |= any((rates < 1).any().item() for rates in quack.rates().values())
    assert scaled
    assert_equal(ours.state_dict(), theirs.state_dict())


def test_a_run_with_tau_resumes_from_its_state() -> None:
    resumed, whole = pair(lambda: Separate(groups=2))
    runs = []
    for model in (resumed, whole):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        runs.append((optimizer, one_file.Quack(optimizer, [of_grouped(layer) for layer in model], tau=0.5)))
        train(model, optimizer, steps=3)
    state = runs[0][1].state_dict()
    optimizer = torch.optim.SGD(resumed.parameters(), lr=0.1)
    one_file.Quack(optimizer, [of_grouped(layer) for layer in resumed], tau=0.5).load_state_dict(state)
    for model, each in ((resumed, optimizer), (whole, runs[1][0])):
        train(model, each, steps=3, seed=1)
    assert_equal(resumed.state_dict(), whole.state_dict())


def test_it_has_at_most_120_lines_and_imports_torch_only() -> None:
    text = FILE.read_text()
    assert len(text.splitlines()) <= 120
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {each.name for node in imports if isinstance(node, ast.Import) for each in node.names}
    names |= {str(node.module) for node in imports if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} - sys.stdlib_module_names == {"torch"}
