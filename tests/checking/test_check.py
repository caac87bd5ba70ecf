"""`check` passes where heads are correct, in every kind of model, and changes nothing."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from check_runs import X_BTD, checked, of_each, q_and_k, stack
from models import Separate, assert_equal
from quacklr import LogitPath, QuacK, check, logit_paths, mha, packed
from quacklr.checking.command import OPTIMIZERS as BY_NAME
from quacklr.find import discover
from quacklr.find.finding import Finding
from quacklr.lab.model import build
from quacklr.lab.model.spec import MHA, MLA, Shape
from tiny_models import CAUSAL, TORCH
from tiny_models import build as tiny

MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "lab MHA": lambda: decoder(MHA(4, 4, 8)),
    "lab GQA": lambda: decoder(MHA(4, 2, 8)),
    "lab MLA": lambda: decoder(MLA(4, 8, 8, 8, 16, 8)),
    "lab MLA, normed latents": lambda: decoder(MLA(4, 8, 8, 8, 16, 8, latent_norm=True)),
    "nn.TransformerEncoder": lambda: tiny("nn.TransformerEncoder", TORCH),
    **{name: partial(tiny, name, CAUSAL) for name in ("llama", "gpt2", "gpt_neox", "deepseek_v3")},
}
OPTIMIZERS = dict(zip(MODELS, ["adamw", "sgd", "muon"] * 3, strict=True))


def decoder(spec: MHA | MLA) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    tokens_BT = torch.randint(50, (2, 13), generator=torch.Generator().manual_seed(0))
    shape = Shape(d_model=32, layers=2, d_ff=32, context=12, vocab=50)
    return build(shape, spec, seed=0), (tokens_BT[:, :-1], tokens_BT[:, 1:])


@pytest.mark.parametrize("name", MODELS)
def test_correct_rows_pass(name: str) -> None:
    model, batch = MODELS[name]()
    report = check(model, BY_NAME[OPTIMIZERS[name]](model, 1e-2), batch, steps=2)
    assert report.ok, report
    assert [(layer.heads, layer.unobserved) for layer in report.layers] == [(4, "")] * 2
    for layer in report.layers:
        for change in (layer.start, layer.plain, layer.quack):
            assert (change.measured > 0).all()
            assert (change.measured < change.bound).all()
    assert "correct: 2 layers, 8 heads;" in str(report)


def test_grown_weights_move_logits_no_further_with_quack_and_several_times_further_without() -> None:
    model, batch = decoder(MHA(4, 4, 8))
    report = check(model, AdamW(model.parameters(), lr=1e-3, weight_decay=0.0), batch, growth=8.0)
    for layer in report.layers:
        assert (layer.quack.measured < 2 * layer.start.measured).all()
        assert (layer.plain.measured > 4 * layer.start.measured).all()
        torch.testing.assert_close(layer.quack.bound, layer.start.bound, rtol=0.2, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions_are_tested_too(dtype: torch.dtype) -> None:
    model = stack(Separate).to(dtype)
    wrong = of_each(model, lambda one: q_and_k(one, torch.arange(16) % 4))
    for paths, ok in ((None, True), (wrong, False)):
        assert check(model, AdamW(model.parameters(), lr=1e-2), X_BTD.to(dtype), paths=paths).ok == ok


def test_under_autocast_too_whose_cache_does_not_notice_that_weights_change() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        report = checked(stack(Separate), steps=1)
    assert report.ok
    assert all((layer.start.measured > 0).all() for layer in report.layers)


def test_weights_that_start_at_zero_hide_nothing() -> None:
    model = stack(Separate)
    nn.init.zeros_(model.get_parameter("0.q.weight"))
    wrong = of_each(model, lambda one: q_and_k(one, torch.arange(16) % 4))
    before = copy.deepcopy(model.state_dict())
    assert checked(model, floor=0.1).ok
    assert_equal(model.state_dict(), before)
    assert [bool(layer.wrong.any()) for layer in checked(model, wrong, floor=0.1).layers] == [True, True]


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


def test_a_module_that_is_put_in_place_by_the_first_forward_is_held_fixed_too() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention: nn.Module = Separate()

        def forward(self, x_BTD: Tensor) -> Tensor:
            if type(self.attention) is Separate:
                self.attention = Again(self.attention)
            return self.attention(x_BTD)

    class Again(Separate):
        def __init__(self, first: Separate) -> None:
            super().__init__()
            self.q, self.k, self.v = first.q, first.k, first.v

    assert checked(stack(Late), steps=1).ok


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
    assert (torch.stack([layer.start.measured for layer in report.layers]) > 0).all()


class Unruled(nn.Module):
    """No rule knows these names, and nothing is declared."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16, bias=False), nn.Linear(16, 32, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        parts = self.first(x_BTD), *self.second(x_BTD).chunk(2, 2)
        heads = (part.unflatten(2, (4, 4)).transpose(1, 2) for part in parts)
        return nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)


def test_paths_that_are_not_given_are_measured_on_the_batch() -> None:
    report = checked(stack(Unruled), steps=1)
    assert report.ok, report
    assert [layer.heads for layer in report.layers] == [4, 4]
    assert "measured" not in str(report)


class Misread(nn.Module):
    """What a rule makes of these names is wrong: a head's rows are not consecutive."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(16, 16, bias=False) for _ in range(3))

    def forward(self, x_BTD: Tensor) -> Tensor:
        projected = (of(x_BTD) for of in (self.q_proj, self.k_proj, self.v_proj))
        heads = (part.unflatten(2, (4, 4)).permute(0, 3, 1, 2) for part in projected)
        shares = nn.functional.scaled_dot_product_attention(*heads)
        return shares.permute(0, 2, 1, 3).flatten(2)


def test_a_rule_that_is_contradicted_is_not_ok_and_what_was_measured_can_be_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rule is replaced by one that finds consecutive rows."""

    def by_rule(one: Any) -> Finding | None:
        if not isinstance(one, Misread):
            return None
        return Finding(mha(*packed(one.q_proj, ("q", 4, 4)), *packed(one.k_proj, ("k", 4, 4))))

    monkeypatch.setattr(discover, "by_rule", by_rule)
    model = stack(Misread)
    report = checked(model, steps=1)
    assert not report.ok
    assert "0: the rule for Misread is wrong here; it says that a head reads" in str(report)
    assert all(layer.wrong.all() for layer in report.layers)
    assert checked(model, logit_paths(model, X_BTD, rules=False), steps=1).ok


def test_what_is_right_by_perturbations_and_contradicted_by_measurement_is_not_ok(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the two ways to look at a model do not agree, one of them is wrong."""
    monkeypatch.setattr(discover, "differences", lambda *_: "it says one thing, but the measurement says another")
    monkeypatch.setattr(discover, "by_rule", lambda one: Finding(one.paths()) if isinstance(one, Plain) else None)
    report = checked(stack(Plain), steps=1)
    assert not any(layer.faults for layer in report.layers)
    assert not report.ok
    assert str(report).endswith("; but other paths were measured")


class Plain(Separate):
    """Right, and not declared."""

    logit_paths = None  # type: ignore[assignment]

    def paths(self) -> list[LogitPath]:
        return Separate.logit_paths(self)


def test_a_model_that_cannot_be_measured_is_checked_by_its_rules_and_the_report_says_so() -> None:
    class Fussy(Separate):
        """Runs without gradients in eval mode only."""

        def forward(self, x_BTD: Tensor) -> Tensor:
            assert self.training or not torch.is_grad_enabled()
            return super().forward(x_BTD)

    report = checked(stack(Fussy), steps=1)
    assert report.ok
    assert "paths are those of the rules, and could not be measured: Sequential failed on the sample" in str(report)


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


def test_layers_that_do_not_run_are_not_said_to_be_right() -> None:
    class First(nn.Sequential):
        def forward(self, x_BTD: Tensor) -> Tensor:
            return self[0](x_BTD)

    model = First(*stack(Separate))
    report = checked(model)
    assert not report.ok  # what was not shown is not proved
    assert [layer.unobserved for layer in report.layers] == ["", "not seen"]
    assert "correct, as far as shown: 1 layer, 4 heads;" in str(report)
    assert str(report).endswith("; 1 more could not be tested on this batch")


def test_another_softmax_in_the_module_with_other_heads_is_not_its_attention() -> None:
    class Routed(Separate):
        def forward(self, x_BTD: Tensor) -> Tensor:
            gate_B2TD = torch.stack([x_BTD, -x_BTD], 1).softmax(3)
            return super().forward(x_BTD) * gate_B2TD.sum(1)

    assert checked(stack(Routed), steps=1).ok


class Flat(Separate):
    """Batch and heads in one dimension, as older models of transformers have it."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (of(x_BTD).unflatten(2, (4, 4)).transpose(1, 2).flatten(0, 1) for of in (self.q, self.k, self.v))
        mixed = torch.bmm((torch.bmm(q, k.mT) / 2).softmax(2), v)
        return mixed.unflatten(0, (-1, 4)).transpose(1, 2).flatten(2)


def test_heads_in_one_dimension_with_the_batch_are_not_tested() -> None:
    report = checked(stack(Flat), steps=1)
    assert all("heads and batch in one axis" in layer.unobserved for layer in report.layers)
    assert not report.ok


def test_logits_that_differ_by_themselves_are_not_tested() -> None:
    class Fickle(Separate):
        def qk(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
            return super().qk(x_BTD * random.uniform(0.5, 2))

    report = checked(stack(Fickle), steps=1)
    assert [layer.unobserved for layer in report.layers] == ["not the same twice"] * 2
    assert not report.ok
    assert "not shown: the batch runs none of these layers" in str(report)


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
    with pytest.raises(ValueError, match="'nowhere' is no module of the model; name a weight after the module"):
        checked(model, mha(*(replace(w, name=f"nowhere.{w.name}") for w in q_and_k(model[0], torch.arange(16) // 4))))
    with pytest.raises(ValueError, match="gives nothing with a gradient; pass loss="):
        checked(stack(lambda: Mute()))
    vars(model[0])["handle"] = (None for _ in ())  # a generator cannot be copied
    with pytest.raises(ValueError, match="Sequential cannot be copied, and only a copy is ever stepped"):
        checked(model)


class Mute(Separate):
    def forward(self, x_BTD: Tensor) -> Tensor:
        return super().forward(x_BTD).detach()
