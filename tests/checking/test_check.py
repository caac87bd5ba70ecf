"""`check` compares rows with a measurement, takes real steps and measures logits; it changes nothing.

Shapes: B batch, T tokens, D width.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from check_runs import X_BTD, checked, named, of_each, q_and_k, stack
from models import PerHead, Separate, assert_equal
from quacklr import LogitPath, QuacK, check, logit_paths, mha, packed
from quacklr.checking.steps import default_loss
from quacklr.find import discover
from quacklr.find.finding import Finding
from quacklr.lab.model import build
from quacklr.lab.model.spec import MHA, MLA, Shape
from tiny_models import CAUSAL, TORCH
from tiny_models import build as tiny

MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "lab GQA": lambda: decoder(MHA(4, 2, 8)),
    "lab MLA": lambda: decoder(MLA(4, 8, 8, 8, 16, 8)),
    "nn.TransformerEncoder": lambda: tiny("nn.TransformerEncoder", TORCH),
    **{name: partial(tiny, name, CAUSAL) for name in ("gpt2", "gpt_neox", "deepseek_v3")},
}
OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = dict(
    zip(MODELS, [lambda model: AdamW(model.parameters(), 1e-2), lambda model: muon(model)] * 3, strict=True)
)
WRONG_ROWS = (
    "(the table|what is declared) for .* is wrong here; it says that a head reads .*, "
    "but the measurement says that a head reads"
)


def muon(model: nn.Module) -> list[Optimizer]:
    matrices = {id(p): p for name, p in model.named_parameters() if p.ndim == 2 and "emb" not in name}
    others = [p for p in model.parameters() if id(p) not in matrices]
    return [torch.optim.Muon(matrices.values(), 1e-2), SGD(others, 1e-2)]


def decoder(spec: MHA | MLA) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    tokens_BT = torch.randint(50, (2, 13), generator=torch.Generator().manual_seed(0))
    shape = Shape(d_model=32, layers=2, d_ff=32, context=12, vocab=50)
    return build(shape, spec, seed=0), (tokens_BT[:, :-1], tokens_BT[:, 1:])


@pytest.mark.parametrize("name", MODELS)
def test_correct_rows_pass(name: str) -> None:
    model, batch = MODELS[name]()
    report = check(model, OPTIMIZERS[name](model), batch, steps=2)
    assert report.ok, report
    assert [layer.heads for layer in report.layers] == [4, 4]
    for layer in report.layers:
        assert (layer.measured > 0).all()
        assert (layer.given > 0).all()
    assert "correct: 2 layers, 8 heads;" in str(report)


def test_grown_weights_move_logits_no_further_with_quack() -> None:
    model, batch = decoder(MHA(4, 4, 8))
    optimizer = AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    start, grown = (check(model, optimizer, batch, growth=growth) for growth in (1.0, 8.0))
    for before, after in zip(start.layers, grown.layers, strict=True):
        assert (after.measured < 2 * before.measured).all()
        assert (after.asked > 4 * before.asked).all()
        torch.testing.assert_close(after.given, before.given, rtol=0.2, atol=0)


def wrong_paths() -> Iterator[tuple[str, nn.Sequential, list[LogitPath]]]:
    model = stack(PerHead)
    yield "layout", model, of_each(model, lambda one: packed(one.qkv, ("q", 4, 4), ("k", 4, 4), (None, 4, 4)))
    segments = ("q", 1, 2), (None, 1, 2), ("k", 1, 2), (None, 1, 6)
    yield "half of the rows", model, of_each(model, lambda one: packed(one.qkv, *segments, repeat=4))
    values = ("q", 1, 4), (None, 1, 4), ("k", 1, 4)
    yield "values as keys", model, of_each(model, lambda one: packed(one.qkv, *values, repeat=4))
    model = stack(Separate)
    yield "interleaved", model, of_each(model, lambda one: q_and_k(one, torch.arange(16) % 4))
    blocks = torch.arange(16) // 4
    yield "swapped heads", model, of_each(model, lambda one: q_and_k(one, blocks), torch.tensor([0, 2, 1, 3]))
    (q0, k0), (q1, k1) = (named(number, *q_and_k(one, blocks)) for number, one in enumerate(model))
    yield "another layer", model, [LogitPath((q0, k1), 4), LogitPath((q1, k0), 4)]
    model = stack(lambda: Separate(heads=2, groups=2))
    yield "too many heads", model, of_each(model, lambda one: q_and_k(one, blocks))


WRONG = {name: (model, paths) for name, model, paths in wrong_paths()}


@pytest.mark.parametrize("mistake", WRONG)
def test_rows_that_are_not_the_measured_ones_are_the_error_of_logit_paths(mistake: str) -> None:
    with pytest.raises(ValueError, match=f"^0: {WRONG_ROWS}.*logit_paths\\(model, batch, rules=False\\)"):
        checked(*WRONG[mistake])


def test_wrong_rows_that_a_module_declares_are_an_error() -> None:
    class Wrong(PerHead):
        def logit_paths(self) -> list[LogitPath]:
            return mha(*packed(self.qkv, ("q", 4, 4), ("k", 4, 4), (None, 4, 4)))

    with pytest.raises(ValueError, match=f"^0: {WRONG_ROWS}"):
        checked(stack(Wrong))


class Unruled(nn.Module):
    """No rule knows these names, and nothing is declared."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16, bias=False), nn.Linear(16, 32, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        parts = self.first(x_BTD), *self.second(x_BTD).chunk(2, 2)
        heads = (part.unflatten(2, (4, 4)).transpose(1, 2) for part in parts)
        return nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)


def test_a_model_that_no_rule_knows_is_measured() -> None:
    report = checked(stack(Unruled), steps=1)
    assert report.ok, report
    assert [layer.heads for layer in report.layers] == [4, 4]


def test_a_rule_that_is_contradicted_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_table(one: Any) -> Finding | None:
        if not isinstance(one, Unruled):
            return None
        return Finding(mha(*packed(one.first, ("q", 4, 4)), *packed(one.second, (None, 4, 4), ("k", 4, 4))))

    monkeypatch.setattr(discover, "by_table", by_table)
    model = stack(Unruled)
    with pytest.raises(ValueError, match=f"^0: {WRONG_ROWS}"):
        checked(model)
    assert checked(model, logit_paths(model, X_BTD, rules=False), steps=1).ok


class Own(SGD):
    """An optimizer with an attribute of its own, which deepcopy of an optimizer forgets."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.boost = 2.0

    def step(self, closure: Any = None) -> Any:
        assert self.boost == 2.0
        super().step(closure)


def test_an_optimizer_of_ones_own_is_copied_whole() -> None:
    model = stack(Separate)
    assert check(model, Own(model.parameters(), lr=0.1), X_BTD, steps=1).ok


def test_a_compiled_model_is_checked_uncompiled() -> None:
    model: Any = torch.compile(stack(Separate), backend="eager")
    assert [layer.module for layer in checked(model, steps=1).layers] == ["0", "1"]


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[object]:
    yield from (model.state_dict(), optimizer.state_dict(), torch.get_rng_state())
    yield from (dict(module._buffers) for module in model.modules())
    yield [param.grad for param in model.parameters()]
    yield random.getstate()


def test_nothing_of_the_original_is_touched() -> None:
    model, batch = tiny("llama", CAUSAL)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    quack = QuacK(model, optimizer)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.5)
    model(**batch).logits.square().mean().backward()
    optimizer.step()
    model.train()
    model.get_submodule("model.layers.0").eval()
    modes = [module.training for module in model.modules()]
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    before = copy.deepcopy(list(everything(model, optimizer)))
    rates = quack.rates()
    assert check(model, optimizer, batch, steps=1).ok
    assert_equal(list(everything(model, optimizer)), before)
    assert [module.training for module in model.modules()] == modes
    assert [len(module._forward_pre_hooks) for module in model.modules()] == hooks
    assert_equal(quack.rates(), rates)


def test_paths_and_several_optimizers_can_be_given() -> None:
    model = stack(Separate)
    optimizers = [SGD(model[0].parameters(), lr=0.1), AdamW(model[1].parameters(), lr=0.01)]
    report = check(model, optimizers, X_BTD, paths=logit_paths(model), loss=lambda model, x: model(x).square().mean())
    assert report.ok
    assert (torch.stack([layer.measured for layer in report.layers]) > 0).all()


def test_a_weight_that_two_layers_share_moves_both_and_that_is_right() -> None:
    class Shared(Separate):
        """Its key may be another's, and it declares it first."""

        def logit_paths(self) -> list[LogitPath]:
            return [LogitPath(tuple(reversed(super().logit_paths()[0].weights)), 4)]

    model = nn.Sequential(stack(Separate), stack(Shared))
    model.get_submodule("1.0").k = model.get_submodule("0.1.k")
    report = checked(model)
    assert report.ok, report
    assert len(report.layers) == 4


def test_under_autocast_too_whose_cache_does_not_notice_that_weights_change() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        report = checked(stack(Separate), steps=1)
    assert report.ok
    assert all((layer.measured > 0).all() for layer in report.layers)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"steps": 0}, "steps=0: at least one step must be taken"),
        ({"growth": 0.0}, "growth=0.0: the factor of the weights must be a positive number"),
        ({"tau": -1.0}, "tau=-1.0: the rate relative to lr must be a positive number"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        checked(stack(Separate), **options)


def test_what_cannot_be_checked_is_refused_in_a_sentence() -> None:
    model = stack(Separate)
    with pytest.raises(ValueError, match="every learning rate is 0"):
        check(model, SGD(model.parameters(), lr=0.0), X_BTD)
    with pytest.raises(ValueError, match="is in none of the optimizers given"):
        check(model, SGD(model[0].parameters(), lr=0.1), X_BTD)
    with pytest.raises(ValueError, match="no path"):
        checked(model, [])
    with pytest.raises(ValueError, match="gives nothing with a gradient; pass loss="):
        checked(model, loss=lambda model, x: default_loss(nn.Sequential(model, Cut()), x))
    vars(model[0])["handle"] = (None for _ in ())  # a generator cannot be copied
    with pytest.raises(ValueError, match="Sequential cannot be copied, and only a copy is ever stepped"):
        checked(model)


class Cut(nn.Module):
    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.detach()
