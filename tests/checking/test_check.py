"""`check` compares rows with a measurement, takes real steps and measures logits; it changes nothing.

Shapes: B batch, T tokens, D width, H heads, I query, J key.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from models import PerHead, Separate, assert_equal, layers
from quacklr import LogitPath, QuacK, Weight, check, logit_paths, mha, packed
from quacklr.checking.check import CheckReport, default_loss
from quacklr.core.blocks import Blocks
from quacklr.lab.model import build
from quacklr.lab.model.spec import MHA, MLA, Shape
from tiny_models import CAUSAL, TORCH
from tiny_models import build as tiny

X_BTD = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))


def stack(attention: Callable[[], nn.Module], count: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return layers(count, attention)


def checked(model: nn.Module, paths: list[LogitPath] | None = None, **options: Any) -> CheckReport:
    return check(model, AdamW(model.parameters(), lr=1e-2), X_BTD, paths=paths, **{"steps": 1, **options})


def adamw(model: nn.Module) -> list[Optimizer]:
    return [AdamW(model.parameters(), 1e-2)]


def muon(model: nn.Module) -> list[Optimizer]:
    matrices = {id(p): p for name, p in model.named_parameters() if p.ndim == 2 and "emb" not in name}
    others = [p for p in model.parameters() if id(p) not in matrices]
    return [torch.optim.Muon(matrices.values(), 1e-2), SGD(others, 1e-2)]


def decoder(spec: MHA | MLA) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    tokens_BT = torch.randint(50, (2, 13), generator=torch.Generator().manual_seed(0))
    shape = Shape(d_model=32, layers=2, d_ff=32, context=12, vocab=50)
    return build(shape, spec, seed=0), (tokens_BT[:, :-1], tokens_BT[:, 1:])


@pytest.mark.parametrize(
    ("made", "optimizers"),
    [
        (partial(decoder, MHA(4, 2, 8)), adamw),
        (partial(decoder, MLA(4, 8, 8, 8, 16, 8)), muon),
        (partial(tiny, "nn.TransformerEncoder", TORCH), adamw),
        (partial(tiny, "gpt2", CAUSAL), muon),
        (partial(tiny, "deepseek_v3", CAUSAL), adamw),
    ],
    ids=["lab GQA", "lab MLA", "nn.TransformerEncoder", "gpt2", "deepseek_v3"],
)
def test_correct_rows_pass(
    made: Callable[[], tuple[nn.Module, Any]], optimizers: Callable[[nn.Module], list[Optimizer]]
) -> None:
    model, batch = made()
    report = check(model, optimizers(model), batch, steps=2)
    assert report.ok, report
    assert [len(layer.measured) for layer in report.layers] == [4, 4]
    for layer in report.layers:
        assert (layer.measured > 0).all()
        assert (layer.given > 0).all()
    assert str(report).endswith("correct: 2 of 2 layers")


def test_grown_weights_move_logits_no_further_with_quack() -> None:
    model, batch = decoder(MHA(4, 4, 8))
    optimizer = AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    start, grown = (check(model, optimizer, batch, growth=growth, tau=1.0) for growth in (1.0, 8.0))
    for before, after in zip(start.layers, grown.layers, strict=True):
        assert (after.measured < 2 * before.measured).all()
        assert (after.asked > 4 * before.asked).all()
        torch.testing.assert_close(after.given, before.given, rtol=0.2, atol=0)


class WronglyDeclared(PerHead):
    def logit_paths(self) -> list[LogitPath]:
        return mha(*packed(self.qkv, ("q", 4, 4), ("k", 4, 4), (None, 4, 4)))


def paths_of(model: nn.Sequential, weights: Callable[[Any], list[Weight]], read: Tensor | None = None) -> Any:
    """One path per layer, of weights q and k; `read` (heads,) is the block of k that each head reads."""
    pairs = [[replace(w, name=f"{number}.{w.name}") for w in weights(layer)] for number, layer in enumerate(model)]
    return [LogitPath(tuple(pair), 4, None if read is None else (None, read)) for pair in pairs]


def q_and_k(layer: Any) -> list[Weight]:
    blocks = torch.arange(16) // 4
    return [Weight("q", layer.q.weight, blocks), Weight("k", layer.k.weight, blocks)]


def wrong_paths() -> Iterator[tuple[str, nn.Module, list[LogitPath] | None]]:
    yield "declared", stack(WronglyDeclared), None
    model = stack(Separate)
    yield "swapped heads", model, paths_of(model, q_and_k, torch.tensor([0, 2, 1, 3]))
    (q0, k0), (q1, k1) = (path.weights for path in paths_of(model, q_and_k))
    yield "another layer", model, [LogitPath((q0, k1), 4), LogitPath((q1, k0), 4)]


@pytest.mark.parametrize(("model", "paths"), [pytest.param(*each[1:], id=each[0]) for each in wrong_paths()])
def test_rows_that_are_not_the_measured_ones_are_the_error_of_logit_paths(model: nn.Module, paths: Any) -> None:
    wrong = "^0: what is declared for .* is wrong here; it says that a head reads .*, but the measurement says that"
    with pytest.raises(ValueError, match=f"{wrong} a head reads .*logit_paths\\(model, batch, rules=False\\)"):
        checked(model, paths)


class Own(SGD):
    """An optimizer with an attribute of its own, which deepcopy of an optimizer forgets."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.boost = 2.0

    def step(self, closure: Any = None) -> Any:
        assert self.boost == 2.0
        super().step(closure)


def test_paths_several_optimizers_and_a_loss_can_be_given_and_an_optimizer_of_ones_own_is_copied_whole() -> None:
    model = stack(Separate)
    optimizers = [Own(model[0].parameters(), lr=0.1), AdamW(model[1].parameters(), lr=0.01)]
    report = check(model, optimizers, X_BTD, paths=logit_paths(model), loss=lambda model, x: model(x).square().mean())
    assert report.ok, report
    assert (torch.stack([layer.measured for layer in report.layers]) > 0).all()


def test_a_compiled_model_is_checked_uncompiled_under_autocast_too() -> None:
    """Whose cache does not notice that weights change."""
    model: Any = torch.compile(stack(Separate), backend="eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        report = checked(model)
    assert report.ok, report
    assert [layer.module for layer in report.layers] == ["0", "1"]
    assert all((layer.measured > 0).all() for layer in report.layers)


def everything(model: nn.Module, optimizer: Optimizer) -> Iterator[object]:
    yield from (model.state_dict(), optimizer.state_dict(), torch.get_rng_state(), random.getstate())
    yield from (dict(module._buffers) for module in model.modules())
    yield [param.grad for param in model.parameters()]
    yield [(module.training, len(module._forward_pre_hooks)) for module in model.modules()]


def test_nothing_of_the_original_is_touched() -> None:
    model, batch = tiny("llama", CAUSAL)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    quack = QuacK(model, optimizer)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.5)
    model(**batch).logits.square().mean().backward()
    optimizer.step()
    model.train()
    model.get_submodule("model.layers.0").eval()
    before, rates = copy.deepcopy(list(everything(model, optimizer))), quack.rates()
    assert check(model, optimizer, batch, steps=1).ok
    assert_equal(list(everything(model, optimizer)), before)
    assert_equal(quack.rates(), rates)


class Attention(nn.Module):
    """Two heads of size 3, with q and k in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.qk, self.out = nn.Linear(16, 12), nn.Linear(16, 16)

    def logits(self, x_BTD: Tensor) -> Tensor:
        """By hand, one head at a time."""
        heads = []
        for first in (0, 3):
            q_BID, k_BJD = (
                x_BTD @ self.qk.weight[start : start + 3].T + self.qk.bias[start : start + 3]
                for start in (first, first + 6)
            )
            heads.append(q_BID @ k_BJD.mT / 3**0.5)
        return torch.stack(heads, 1)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k = (each.unflatten(2, (2, 3)).transpose(1, 2) for each in self.qk(x_BTD).chunk(2, 2))
        return x_BTD + self.out(F.scaled_dot_product_attention(q, k, x_BTD.unsqueeze(1).expand(-1, 2, -1, -1)).sum(1))

    def logit_paths(self) -> list[LogitPath]:
        return mha(*packed(self.qk, ("q", 2, 3), ("k", 2, 3)))


def loss(model: nn.Module, x_BTD: Tensor) -> Tensor:
    return (model(x_BTD) - 1).square().sum()


def test_the_measured_change_is_that_by_hand_of_the_layers_own_rows_for_the_inputs_before_the_step() -> None:
    model: Any = stack(Attention)
    report = check(model, SGD(model.parameters(), lr=0.01), X_BTD, loss=loss, steps=1, growth=1.0, tau=1.0)
    stepped, x_BTD = copy.deepcopy(model), X_BTD
    rows = [parameter for name, parameter in stepped.named_parameters() if ".out." not in name]
    loss(stepped, X_BTD).backward()
    SGD(rows, lr=0.01).step()
    for layer, before, after in zip(report.layers, model, stepped, strict=True):
        change_BHIJ = after.logits(x_BTD) - before.logits(x_BTD)
        rms_H = change_BHIJ.detach().square().mean((0, 2, 3)).sqrt()
        torch.testing.assert_close(layer.measured, rms_H, rtol=1e-3, atol=0)
        x_BTD = before(x_BTD)


def test_rows_that_do_not_step_by_their_rates_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the hooks were lost on the way: the weights are grown, so the rates are not 1, but nothing is scaled."""
    model = stack(Separate)
    monkeypatch.setattr(Blocks, "scale_step", lambda *_: None)
    with pytest.raises(ValueError, match=r"^0\.q: QuacK's rates are not applied to its step"):
        checked(model)


class Hidden(Separate):
    """Its first head looks at nothing."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k = (each.transpose(1, 2) for each in self.qk(x_BTD))
        first = torch.arange(4).view(4, 1, 1) == 0
        shares = (q @ k.mT / 2).masked_fill(first, -1e9).softmax(-1)
        return (shares @ self.v(x_BTD).unflatten(2, (4, 4)).transpose(1, 2)).transpose(1, 2).flatten(2)


def test_a_head_without_logits_shows_nothing() -> None:
    report = checked(stack(Hidden, 1))
    assert not report.ok
    assert str(report).endswith("no logits to compare\n\ncorrect: 0 of 1 layers")
    assert report.layers[0].measured.isnan().tolist() == [True, False, False, False]


def of_first_layer(model: Any, x_BTD: Tensor) -> Tensor:
    loss: Tensor = model[0](x_BTD).mean()
    return loss


def test_rows_that_take_no_step_though_they_train_are_not_shown_to_be_right() -> None:
    model: Any = stack(Separate)
    idle = SGD([{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.0}], lr=0.1)
    without_gradient = check(model, SGD(model.parameters(), 0.1), X_BTD, loss=of_first_layer)
    for report in (check(model, idle, X_BTD), without_gradient):
        assert not report.ok
        assert [layer.problem for layer in report.layers] == ["", "its rows took no step: no gradient, or lr is 0"]
        assert not report.layers[1].measured.any()


def test_frozen_rows_are_compared_with_the_measurement_and_are_ok() -> None:
    model = stack(PerHead)
    model[1].requires_grad_(False)
    report = checked(model)
    assert report.ok, report
    assert "ok, but its rows took no step: they are frozen" in str(report)


class Cut(nn.Module):
    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.detach()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"steps": 0}, "steps=0: at least one step must be taken"),
        ({"growth": 0.0}, "growth=0.0: the factor of the weights must be a positive number"),
        ({"tau": -1.0}, "tau=-1.0: the rate relative to lr must be a positive number"),
        ({"paths": []}, "no path"),
        ({"loss": lambda *of: loss(*of) * torch.inf}, "weights are NaN or inf after a step"),
        ({"loss": lambda model, x: default_loss(nn.Sequential(model, Cut()), x)}, "with a gradient; pass loss="),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        checked(stack(Separate), **options)


def test_what_cannot_be_checked_is_refused_in_a_sentence() -> None:
    model = stack(Separate)
    with pytest.raises(ValueError, match="is in none of the optimizers given"):
        check(model, SGD(model[0].parameters(), lr=0.1), X_BTD)
    vars(model[0])["handle"] = (None for _ in ())  # a generator cannot be copied
    with pytest.raises(ValueError, match="Sequential cannot be copied, and only a copy is ever stepped"):
        checked(model)
