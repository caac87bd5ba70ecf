"""The default, Limit(0.02), in the conditions of real training: right, as kit/limit_by_hand.py judges, or an error."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from io import BytesIO
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import GPT2Config, GPT2LMHeadModel

from limit_by_hand import (
    NATS,
    Judged,
    Make,
    alone,
    asked,
    blocks,
    change,
    judge,
    limited,
    made_by,
    same,
    weights,
)
from models import Separate, layers
from quacklr import QuacK, mha, packed

MAKE = {"SGD": made_by(SGD, lr=0.5, momentum=0.9), "AdamW": made_by(AdamW, lr=0.1, weight_decay=0.1)}
both_optimizers = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def attentions(count: int = 2, **options: Any) -> Any:
    return layers(count, lambda: Separate(**options))


def random_gradients(model: nn.Module, factor: float = 1.0) -> None:
    for param in model.parameters():
        param.grad = factor * torch.randn_like(param) if param.requires_grad else None


def loss_of(model: nn.Module, seed: int = 0) -> Tensor:
    x_BTD = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(seed)).to(next(model.parameters()))
    return torch.as_tensor(10 * model(x_BTD).float().square().mean())


def closure_of(model: nn.Module, losses: list[float]) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        model.zero_grad()
        loss = loss_of(model)
        loss.backward()
        losses.append(float(loss.detach()))
        return loss

    return closure


@both_optimizers
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(make: Make, dtype: torch.dtype) -> None:
    """Also around the step, whose squares are inf in float16."""
    run = Judged(attentions(1, bias=True), make)
    for seed in range(3):
        run.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss_of(run.model, seed).backward()
            assert limited(run.step())
    random_gradients(run.model, 1e4)
    with torch.autocast("cpu", dtype=dtype):
        assert limited(run.step())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lr", [0.5, 1e-4])
def test_rows_of_16_bit_weights_are_the_rounded_scaled_step(dtype: torch.dtype, lr: float) -> None:
    make = made_by(SGD, lr=lr)
    model = attentions(groups=2).to(dtype)
    optimizer = make(model)
    quack = QuacK(model, optimizer)
    for _ in range(3):
        random_gradients(model)
        old, own = weights(model), alone(model, optimizer, make)
        optimizer.step()
        new = weights(model)
        for layer in (0, 1):
            most = NATS / asked(old, own, layer)
            for part in "qk":
                rate = quack.rates()[f"{layer}.{part}"].double()
                limits = most.view(len(rate), -1).amin(1)
                assert (rate <= limits * 1.001).all()
                assert (rate >= limits.clamp(max=1) / 1.2).all()
                before, plain, after = (blocks(each, f"{layer}.{part}") for each in (old, own, new))
                exact = before + rate[:, None, None] * (plain - before)
                assert ((after - exact).abs() <= 0.505 * torch.finfo(dtype).eps * exact.abs() + 1e-7).all()
                if lr == 1e-4:
                    same(after, plain)
                else:
                    assert limited(rate)


class Sets(Optimizer):
    """Weights become their gradients."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0})

    @torch.no_grad()
    def step(self, _: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            param.copy_(param.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_step_that_is_not_limited_is_bitwise_the_optimizers_from_any_weight_to_any_other(dtype: torch.dtype) -> None:
    """(new - old) + old is not new, if old is so large that fp32 rounds the difference."""
    model = attentions(1).to(dtype)
    model[0].k.weight.data.mul_(1e-4)
    run = Judged(model, lambda copy: Sets(copy.parameters()))
    for factor in (20, 1e-5, 3, 1e-7):
        random_gradients(model, factor)
        model[0].k.weight.grad = model[0].k.weight.detach().clone()
        own = alone(model, run.optimizer, run.make)
        run.optimizer.step()
        same(weights(model), own)


def test_fp32_masters_that_the_optimizer_holds_are_refused_by_the_models_name_or_declared_and_right() -> None:
    model = attentions(1).bfloat16()
    held: Any = nn.ModuleDict({"0": deepcopy(model[0]).float()})  # fp32 copies, which the optimizer steps
    make = MAKE["AdamW"]
    optimizer = make(held)
    with pytest.raises(ValueError, match=r"0\.q: its parameter is in none of the optimizers given"):
        QuacK(model, optimizer)
    unknown = nn.Sequential(type("Unknown", (Separate,), {"logit_paths": None})()).bfloat16()
    quack = QuacK(unknown, SGD(held.parameters(), lr=0.1))  # its paths are not known before the first batch
    loss_of(unknown).backward()
    with pytest.raises((ValueError, RuntimeError), match=r"0.*(none of the optimizers|not .* in the optimizer)"):
        quack.optimizers[0].step()
    quack.remove()
    q, k = packed(held["0"].q.weight, ("0.q", 4, 4)), packed(held["0"].k.weight, ("0.k", 4, 4))
    quack = QuacK(mha(*q, *k), optimizer)
    for _ in range(3):
        random_gradients(model)
        for master, param in zip(held.parameters(), model.parameters(), strict=True):
            master.grad = torch.as_tensor(param.grad).float()
        old, own = weights(held), alone(held, optimizer, make)
        optimizer.step()
        assert limited(judge(quack, old, own, weights(held)))
        for master, param in zip(held.parameters(), model.parameters(), strict=True):
            param.data.copy_(master.data)


def said(quack: QuacK) -> Any:
    return quack.rates(), {name: (change.asked, change.given) for name, change in quack.changes().items()}


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_grad_scaler_skips_is_no_step(fused: bool) -> None:
    """With a fused optimizer the scaler calls optimizer.step, and hooks run, also after an overflow."""
    make = made_by(AdamW, lr=0.1, fused=fused)
    run = Judged(attentions(), make)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for overflow in (True, False, False, True, True, False):
        run.optimizer.zero_grad()
        scaler.scale(loss_of(run.model)).backward()
        if overflow:
            run.model[0].v.weight.grad[0, 0] = math.inf
        old, before = weights(run.model), said(run.quack)
        own = alone(run.model, run.optimizer, make, scale=scaler.get_scale())
        scaler.step(run.optimizer)
        scaler.update()
        if overflow:
            same((weights(run.model), said(run.quack)), (old, before))
        else:
            assert limited(judge(run.quack, old, own, weights(run.model)))


@both_optimizers
def test_accumulated_gradients_are_one_step(make: Make) -> None:
    run = Judged(attentions(), make)
    for update in range(3):
        run.optimizer.zero_grad()
        for micro in range(3):
            before = weights(run.model), said(run.quack)
            loss_of(run.model, 3 * update + micro).backward()
            same((weights(run.model), said(run.quack)), before)
        assert limited(run.step()[:8])


@pytest.mark.parametrize("name", ["SGD", "AdamW", "LBFGS"])
def test_a_closure_sees_the_optimizers_own_weights_however_often_it_is_called(name: str) -> None:
    make = {**MAKE, "LBFGS": made_by(LBFGS, lr=1.0, max_iter=5)}[name]
    run, losses, calls = Judged(attentions(), make), [], []
    for _ in range(3):
        seen: list[float] = []
        rates = run.step(closure=lambda model, seen=seen: closure_of(model, seen))
        half = len(seen) // 2  # first the copy without QuacK, then the model
        assert seen[:half] == seen[half:]
        calls.append(half)
        losses.append(float(rates.min()))
    assert min(losses) < 0.9
    assert max(calls) > 3 if name == "LBFGS" else calls == [1, 1, 1]


@pytest.mark.parametrize("lr", [1.0, 1e-5])
def test_several_optimizers_together_are_within_the_limit(lr: float) -> None:
    """In any order, and if only one of them steps."""
    model, plain = attentions(1), attentions(1)
    plain.load_state_dict(model.state_dict())

    def optimizers(a: Any) -> list[Optimizer]:
        return [AdamW([a[0].q.weight], lr=lr), SGD([a[0].k.weight, a[0].v.weight], lr=lr)]

    (first, second), others = optimizers(model), optimizers(plain)
    quack = QuacK(model, [first, second])
    for order in ((first, second), (first, second), (second, first), (first,), (second,)):
        random_gradients(model)
        for param, to in zip(model.parameters(), plain.parameters(), strict=True):
            to.grad = torch.as_tensor(param.grad).clone()
        old = weights(model)
        for optimizer in order:
            optimizer.step()
            others[optimizer is second].step()
        new = weights(model)
        if lr < 1:
            same(new, weights(plain))
            continue
        assert (change(old, new) <= NATS * 1.001).all()
        assert (asked(old, new) >= NATS / 1.2 * len(order) / 2).all()
        assert (quack.changes()["0"].given <= NATS * 1.001).all()


@both_optimizers
@pytest.mark.parametrize("frozen", ["q", "k"])
@pytest.mark.parametrize("held", [True, False])
def test_frozen_weights_stay_and_count_and_may_train_later(make: Make, frozen: str, held: bool) -> None:
    """Whether the optimizer holds them or not."""
    model = attentions(groups=2)
    param = model[0].get_parameter(f"{frozen}.weight").requires_grad_(False)
    run = Judged(model, make if held else lambda copy: SGD([p for p in copy.parameters() if p.requires_grad], lr=0.5))
    for trains in (False, False, held, held, False):
        param.requires_grad_(trains)
        before = param.detach().clone()
        random_gradients(run.model)
        rates = run.step()
        assert torch.equal(before, param) != trains
        assert f"0.{frozen}" in run.quack.rates() or not trains
        assert limited(rates[rates != 1])
        assert int((rates < 1).sum()) == 12 - (0 if trains else 4 if frozen == "q" else 2)


ZEROS = {"q": ["0.q.weight"], "k": ["0.k.weight"], "q, k": ["0.q.weight", "0.k.weight"]}


@pytest.mark.parametrize("zeros", ZEROS)
@pytest.mark.parametrize("lr", [0.5, 1e-4])
def test_weights_that_start_at_zero_move_within_the_limit(zeros: str, lr: float) -> None:
    make, model = made_by(SGD, lr=lr), attentions(1, groups=2)
    for name in ZEROS[zeros]:
        nn.init.zeros_(model.get_parameter(name))
    optimizer = make(model)
    quack = QuacK(model, optimizer)
    for step in range(3):
        random_gradients(model)
        old, own = weights(model), alone(model, optimizer, make)
        optimizer.step()
        new = weights(model)
        if lr == 1e-4:  # to all orders less than the limit
            assert (asked(old, own, orders=2) < NATS / 1.2).all()
            same(new, own)
            continue
        assert (change(old, new) <= NATS * 1.001).all()
        assert not any(torch.equal(old[name], new[name]) for name in old)
        rates = torch.cat(list(quack.rates().values()))
        assert ((rates > 1e-4) & (rates <= 1)).all()
        if zeros != "q, k":  # there the change is of second order, and the rate is smaller than the first order's
            assert limited(judge(quack, old, own, new)) or step > 0


@both_optimizers
def test_weights_that_are_all_equal(make: Make) -> None:
    run = Judged(attentions(groups=2), make)
    for param in run.model.parameters():
        nn.init.constant_(param, 0.1)
    for step in range(3):
        random_gradients(run.model)
        if step == 0:
            for param in run.model.parameters():
                param.grad = torch.ones_like(param)  # and so is their step
        assert limited(run.step())


@pytest.mark.parametrize("tiny", [0.0, -0.0, 1e-44, 1e-30, 1e-22])
def test_steps_of_exactly_zero_and_nearly_so_are_the_optimizers_own(tiny: float) -> None:
    """Of one head, then of all; weights of zero, so that no step is lost by rounding."""
    run = Judged(attentions(groups=2), made_by(SGD, lr=1.0))
    nn.init.zeros_(run.model[1].q.weight)
    random_gradients(run.model)
    for name in "qk":
        run.model[0].get_parameter(f"{name}.weight").grad[: 8 if name == "q" else 4].fill_(
            tiny
        )  # heads 0 and 1, and their key
    run.model[1].q.weight.grad.fill_(tiny)
    rates = run.step()
    assert (rates == 1).tolist()[:6] == [True, True, False, False, True, False]
    for param in run.model.parameters():
        param.grad = torch.full_like(param, tiny)
    old = weights(run.model)
    assert (run.step() == 1).all()
    assert tiny != 0 or not any((old[name] != new).any() for name, new in weights(run.model).items())
    assert all((each.asked <= 1e-20).all() and (each.given <= 1e-20).all() for each in run.quack.changes().values())


@both_optimizers
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_gradient_that_is_not_finite_is_the_optimizers_affair_and_of_its_head_only(
    make: Make, value: float, name: str
) -> None:
    run = Judged(attentions(groups=2), make)
    known = {"q": [0, 2, 3, 4, 5], "k": [0, 1, 4], "v": [0, 1, 2, 3, 4, 5]}[name]  # also the key that head 0 shares
    for step in range(3):
        random_gradients(run.model)
        if step == 1:
            run.model[0].get_parameter(f"{name}.weight").grad[5, 3] = value
        rates = run.step()
        assert limited(rates[known] if step else rates)
        assert limited(rates[6:])  # the layer after it
        assert all(rate.isfinite().all() for rate in run.quack.rates().values())
    assert not all(param.isfinite().all() for param in run.model.parameters())


def gpt2() -> Any:
    config = GPT2Config(vocab_size=50, n_positions=8, n_embd=32, n_layer=2, n_head=4)  # with dropout
    return GPT2LMHeadModel(config)  # type: ignore[no-untyped-call]


def encoder() -> Any:
    embedding = nn.Embedding(50, 32)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    return nn.Sequential(embedding, nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(32, 50))


@pytest.mark.parametrize("model_of", [gpt2, encoder])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fine_tuning_a_loaded_model_at_lr_1e_5_is_bitwise_as_without(model_of: Any, dtype: torch.dtype) -> None:
    """With warmup and decay; dropout has the same random numbers, though QuacK measures the model."""
    loaded, found = model_of().state_dict(), []
    for quacks in (False, True):
        model = model_of().to(dtype)
        model.load_state_dict(loaded)
        optimizer = AdamW(model.parameters(), lr=1e-5)
        schedule = LambdaLR(optimizer, lambda step: [0.0, 0.01, 0.5, 1.0, 0.5, 0.01][step])
        torch.manual_seed(1)
        with QuacK(model, optimizer) if quacks else nullcontext() as quack:
            for _ in range(5):
                tokens = torch.randint(50, (2, 8))
                out = model(tokens)
                logits = out if isinstance(out, Tensor) else out.logits
                nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                assert quack is None or all((rate == 1).all() for rate in quack.rates().values())
        found.append((weights(model), torch.get_rng_state()))
    assert quack is not None
    assert len(quack.rates()) >= 4
    assert not all(torch.equal(loaded[name], param.to(loaded[name])) for name, param in model.state_dict().items())
    same(*found)


@both_optimizers
@pytest.mark.parametrize("attach_first", [True, False])
def test_a_limited_run_resumes_bitwise_from_model_and_optimizer_alone(make: Make, attach_first: bool) -> None:
    """In the decay of a loop that sets lr by hand: the initial lr is known to nobody but QuacK."""

    def train(model: nn.Module, optimizer: Optimizer, factors: list[float]) -> None:
        for factor in factors:
            optimizer.param_groups[0]["lr"] = factor * peak
            model.zero_grad()
            loss_of(model, int(1000 * factor)).backward()
            optimizer.step()

    model = attentions()
    optimizer, file = make(model), BytesIO()
    peak = optimizer.param_groups[0]["lr"]
    with QuacK(model, optimizer) as quack:
        train(model, optimizer, [0.5, 1.0, 0.6])
        torch.save((model.state_dict(), optimizer.state_dict()), file)
        train(model, optimizer, [0.3, 0.1])
        assert limited(quack.rates()["0.q"])
    file.seek(0)
    states = torch.load(file, weights_only=True)
    other = attentions()
    resumed = make(other)
    early = QuacK(other, resumed) if attach_first else None
    other.load_state_dict(states[0])
    resumed.load_state_dict(states[1])
    with early or QuacK(other, resumed):
        train(other, resumed, [0.3, 0.1])
    same((weights(other), resumed.state_dict()), (weights(model), optimizer.state_dict()))


def test_a_group_that_is_added_later_is_limited_from_then_on() -> None:
    model = attentions()
    model[1].requires_grad_(False)
    run = Judged(model, lambda copy: SGD(copy[0].parameters(), lr=0.5))
    random_gradients(model)
    assert (run.step() < 0.9).tolist() == [True] * 8 + [False] * 8
    model[1].requires_grad_(True)
    run.optimizer.add_param_group({"params": list(model[1].parameters()), "lr": 0.3})
    run.make = lambda copy: SGD([{"params": layer.parameters()} for layer in copy], lr=0.5)
    for _ in range(2):
        random_gradients(model)
        assert limited(run.step())
    run.optimizer.param_groups[1]["lr"] = 0.0
    random_gradients(model)
    assert (run.step() < 0.9).tolist() == [True] * 8 + [False] * 8


@pytest.mark.parametrize("tensor", [False, True])
def test_the_limit_follows_an_lr_that_a_loop_sets_by_hand(tensor: bool) -> None:
    """The lr when QuacK was attached is the peak; groups have their own factor."""

    def make(model: Any) -> Optimizer:
        (q, k, v), lr = model.parameters(), torch.tensor(0.5) if tensor else 0.5
        return SGD([{"params": [q]}, {"params": [k, v]}], lr=lr, foreach=False)

    run = Judged(attentions(1), make)
    for factors in ((0.1, 0.1), (0.5, 0.25), (1.0, 0.5), (1.0, 1.0), (0.02, 0.5)):
        for group, factor in zip(run.optimizer.param_groups, factors, strict=True):
            group["lr"] = torch.tensor(0.5 * factor) if tensor else 0.5 * factor
        random_gradients(run.model, 20)
        assert limited(run.step(factors))


@pytest.mark.parametrize("kind", [SGD, AdamW])
@pytest.mark.parametrize("scheduler", [True, False])
def test_lr_0_first(kind: Any, scheduler: bool) -> None:
    """A scheduler knows the peak. Without it every step is allowed the whole limit, and a warning says so."""
    make, model = made_by(kind, lr=0.5 if scheduler else 0.0), attentions()
    optimizer = make(model)
    schedule = LambdaLR(optimizer, lambda step: [0.0, 0.0, 0.1, 0.5, 1.0, 0.0][step]) if scheduler else None
    quack = QuacK(model, optimizer)
    for factor in (0.0, 0.0, 0.1, 0.5, 1.0):
        if schedule is None:
            optimizer.param_groups[0]["lr"] = 0.5 * factor
        random_gradients(model, 20)
        old, own = weights(model), alone(model, optimizer, make)
        with pytest.warns(UserWarning, match="did not follow") if not scheduler and factor == 0.1 else nullcontext():
            optimizer.step()
        if factor == 0:
            same(weights(model), old)
        else:
            share = factor if scheduler else 1.0
            assert limited(judge(quack, old, own, weights(model), (share, share)))
        if schedule is not None:
            schedule.step()
