"""Which optimizer trains which parameter, and with what settings."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
import tyro
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim import AdamW, Optimizer

from quacklr.lab.errors import UserError
from quacklr.lab.optim import WSD, AdamWRecipe, Constant, Cosine, Muon, MuonRecipe, Recipe, optimizers


class Half(nn.Module):
    """A parametrization with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, weight: Tensor) -> Tensor:
        return self.gain * weight


class Model(nn.Module):
    """Everything the recipe knows: tied and parametrized layers, norms, biases, a scalar, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 12, bias=False)  # before the embedding, so that it comes first in every list
        self.embedding = nn.Embedding(12, 8)
        self.head.weight = self.embedding.weight
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)
        self.norm, self.frozen = nn.RMSNorm(8), nn.Linear(8, 8, bias=False).requires_grad_(False)
        self.temperature = nn.Parameter(torch.tensor(1.0))
        parametrize.register_parametrization(self.down, "weight", Half())

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embedding(tokens_BT)
        x_BTD = x_BTD + self.frozen(self.down(self.up(self.norm(x_BTD)).relu()))
        return self.head(x_BTD) * self.temperature


MATRICES = ["up.weight", "down.parametrizations.weight.original"]
TABLES = ["head.weight"]  # the name under which torch lists it
VECTORS = ["temperature", "up.bias", "down.parametrizations.weight.0.gain", "norm.weight"]


def names(optimizer: Optimizer) -> list[list[str]]:
    return [group["param_names"] for group in optimizer.param_groups]


def test_muon_takes_the_weights_of_linear_layers_and_adamw_the_rest() -> None:
    muon, adamw = optimizers(MuonRecipe(), Model())
    assert isinstance(muon, Muon)
    assert isinstance(adamw, AdamW)
    assert names(muon) == [MATRICES]
    assert names(adamw) == [TABLES, VECTORS]


@pytest.mark.parametrize("recipe", [MuonRecipe(), AdamWRecipe()], ids=str)
def test_every_parameter_that_trains_is_in_exactly_one_group(recipe: Recipe) -> None:
    model = Model()
    groups = [group for optimizer in optimizers(recipe, model) for group in optimizer.param_groups]
    stepped = [id(param) for group in groups for param in group["params"]]
    assert sorted(stepped) == sorted(id(param) for param in model.parameters() if param.requires_grad)


def test_a_model_without_vectors_or_without_matrices_has_one_optimizer() -> None:
    (muon,) = optimizers(MuonRecipe(), nn.Linear(4, 4, bias=False))
    assert isinstance(muon, Muon)
    (adamw,) = optimizers(MuonRecipe(), nn.Sequential(nn.Embedding(4, 4), nn.LayerNorm(4)))
    assert isinstance(adamw, AdamW)


def test_settings_reach_the_optimizers() -> None:
    recipe = MuonRecipe(
        0.2, 0.01, momentum=0.8, nesterov=False, weight_decay=0.3, scale="rms", betas=(0.5, 0.6), eps=1e-6
    )
    muon, adamw = optimizers(recipe, Model())
    for key, value in {"momentum": 0.8, "nesterov": False, "weight_decay": 0.3, "scale": "rms", "blocks": 1}.items():
        assert muon.param_groups[0][key] == value
    for group in adamw.param_groups:
        assert (group["betas"], group["eps"], group["fused"]) == ((0.5, 0.6), 1e-6, True)


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (MuonRecipe(lr=0.2), [0.2, 0.2, 0.2]),
        (MuonRecipe(lr=0.2, rest_lr=0.01), [0.2, 0.01, 0.01]),
        (AdamWRecipe(lr=0.3), [0.3, 0.3]),
    ],
    ids=str,
)
def test_every_group_has_its_lr_and_remembers_it_as_its_peak(recipe: Recipe, expected: list[float]) -> None:
    groups = [group for optimizer in optimizers(recipe, Model()) for group in optimizer.param_groups]
    assert [group["lr"] for group in groups] == expected
    assert [group["peak_lr"] for group in groups] == expected


@pytest.mark.parametrize("recipe", [MuonRecipe(weight_decay=0.1), AdamWRecipe(weight_decay=0.1)], ids=str)
def test_vectors_and_scalars_do_not_decay_and_the_rest_does(recipe: Recipe) -> None:
    decay = {
        name: group["weight_decay"]
        for optimizer in optimizers(recipe, Model())
        for group in optimizer.param_groups
        for name in group["param_names"]
    }
    assert decay == {**dict.fromkeys(MATRICES + TABLES, 0.1), **dict.fromkeys(VECTORS, 0.0)}


UNKNOWN: list[tuple[nn.Module, str]] = [
    (nn.Conv1d(2, 3, 1), r"0\.weight of shape \(3, 2, 1\) in a Conv1d"),
    (nn.MultiheadAttention(4, 2), r"0\.in_proj_weight of shape \(12, 4\) in a MultiheadAttention"),
    (parametrizations.weight_norm(nn.Linear(3, 2)), r"weight\.original0 of shape \(2, 1\) in a ParametrizationList"),
]


@pytest.mark.parametrize(("module", "message"), UNKNOWN, ids=["conv", "attention", "weight_norm"])
def test_a_parameter_that_no_rule_matches_is_an_error_that_names_it(module: nn.Module, message: str) -> None:
    model = nn.Sequential(module)
    with pytest.raises(UserError, match=message + " is neither the weight of an nn.Linear or nn.Embedding"):
        optimizers(MuonRecipe(), model)
    optimizers(MuonRecipe(), nn.Sequential(model.requires_grad_(False), nn.Linear(2, 2)))
    assert len(optimizers(AdamWRecipe(), model.requires_grad_(True))) == 1


def test_a_frozen_model_is_refused() -> None:
    with pytest.raises(UserError, match="nothing to train"):
        optimizers(MuonRecipe(), nn.Linear(2, 2).requires_grad_(False))


def test_a_device_without_a_fused_adamw_gets_the_plain_one() -> None:
    (adamw,) = optimizers(AdamWRecipe(), nn.Linear(2, 2, device="meta"))
    assert not adamw.param_groups[0]["fused"]


@pytest.mark.parametrize("recipe", [MuonRecipe(0.02), AdamWRecipe(0.02)], ids=str)
def test_a_model_learns_by_the_recipe(recipe: Recipe) -> None:
    torch.manual_seed(0)
    model, tokens_BT = Model(), torch.arange(24).view(2, 12) % 12
    made, losses = optimizers(recipe, model), []
    for _ in range(40):
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens_BT[:, :-1]).flatten(0, 1), tokens_BT[:, 1:].flatten())
        loss.backward()
        losses.append(loss.item())
        for optimizer in made:
            optimizer.step()
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "--lr must be a positive number, not -1"),
        ({"lr": 0.0}, "--lr must be a positive number, not 0"),
        ({"lr": float("nan")}, "--lr must be a positive number, not nan"),
        ({"lr": float("inf")}, "--lr must be a positive number, not inf"),
        ({"eps": 0.0}, "--eps must be a positive number, not 0"),
        ({"weight_decay": -0.1}, "--weight-decay must be 0 or a positive number, not -0.1"),
        ({"weight_decay": float("inf")}, "--weight-decay must be 0 or a positive number, not inf"),
        ({"betas": (0.9, 1.0)}, "--betas must be at least 0 and below 1, not 1"),
        ({"rest_lr": -2.0}, "--rest-lr must be a positive number, not -2"),
        ({"momentum": 1.0}, "--momentum must be at least 0 and below 1, not 1"),
        ({"momentum": -0.5}, "--momentum must be at least 0 and below 1, not -0.5"),
        ({"scale": "adam"}, "--scale must be one of jordan, rms, ratio, not adam"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_in_a_sentence(settings: dict[str, Any], message: str) -> None:
    for recipe in (MuonRecipe, AdamWRecipe):
        if set(settings) <= {field.name for field in dataclasses.fields(recipe)}:
            with pytest.raises(UserError, match=f"^{message}$"):
                recipe(**settings)


@pytest.mark.parametrize("config", [MuonRecipe, AdamWRecipe, Constant, Cosine, WSD])
def test_every_option_is_explained_on_the_command_line(config: type, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tyro.cli(config, args=["--help"])
    shown = " ".join(capsys.readouterr().out.replace("\u2502", " ").split())
    assert len(re.findall(r"\. \((?:default|required)", shown)) == len(dataclasses.fields(config))


def test_the_command_line_makes_a_recipe() -> None:
    recipe: Recipe = tyro.cli(MuonRecipe, args=["--lr", "0.2", "--no-nesterov", "--scale", "rms", "--rest-lr", "0.1"])
    assert recipe == MuonRecipe(lr=0.2, nesterov=False, scale="rms", rest_lr=0.1)
