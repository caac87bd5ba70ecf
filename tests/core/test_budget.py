"""A budget: what it bounds, for which inputs, and the rates that it gives, judged by plain loops and by real logits."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from models import Latent, PerHead, Separate, assert_equal, layers, train
from quacklr import Budget, LogitPath, Paper, QuacK, Rule, Weight, mha, packed
from quacklr.core.changes import HeadChange

BUDGET = 0.05


def head_rows(weight: Weight, block: int, of: dict[Tensor, Tensor]) -> Tensor:
    """The rows of a block, with its bias as a column, from copies of the parameters."""
    parts = []
    for part in weight.parts:
        rows = of[part.param].movedim(part.dim if isinstance(part.dim, int) else 0, 0)
        parts.append(rows[part.block_of_row == block].reshape(int((part.block_of_row == block).sum()), -1))
    return torch.cat(parts, 1).double()


def rms_matrix(paths: Iterable[LogitPath], head: int, of: dict[Tensor, Tensor]) -> Tensor:
    """M with logit = x' M y * sqrt(head size), if all paths read the same x and y: of MHA, and of MLA's two paths."""
    total: Any = 0
    for path in paths:
        chain = [head_rows(w, int(read[head]), of) for w, read in zip(path.weights, path.reads, strict=True)]
        meet = next(i for i, w in enumerate(path.weights) if w.name.rpartition(".")[2] in ("q", "uq", "qr"))
        query, key = chain[0], chain[-1]
        for each in chain[1 : meet + 1]:
            query = each @ query
        for each in reversed(chain[meet + 1 : -1]):
            key = each @ key
        total = total + query.mT @ key
    return torch.as_tensor(total)


def asked_by_loops(paths: list[LogitPath], old: dict[Tensor, Tensor], new: dict[Tensor, Tensor]) -> list[float]:
    """The formula of docs/theory.md for one attention, one head, one path, one weight after another."""
    changes = []
    for head in range(paths[0].heads):
        meets = [
            next(i for i, w in enumerate(p.weights) if w.name.rpartition(".")[2] in ("q", "uq", "qr")) for p in paths
        ]
        read = [[int(each[head]) for each in path.reads] for path in paths]
        sizes = [int((p.weights[i].block_of_row == r[i]).sum()) for p, i, r in zip(paths, meets, read, strict=True)]
        change = 0.0
        for path, meet, blocks in zip(paths, meets, read, strict=True):
            rows = [head_rows(w, b, old) for w, b in zip(path.weights, blocks, strict=True)]
            steps = [head_rows(w, b, new) - o for w, b, o in zip(path.weights, blocks, rows, strict=True)]
            inner = math.prod(len(each) for i, each in enumerate(rows) if i != meet)
            for i, step in enumerate(steps):
                others = math.prod(float(each.norm()) for j, each in enumerate(rows) if j != i)
                largest = float(torch.linalg.matrix_norm(step, 2))
                change += largest * math.sqrt(len(step)) * others / math.sqrt(inner * sum(sizes))
        changes.append(change)
    return changes


class Recorder:
    """Copies of the parameters before a step, after the optimizer's own step, and after QuacK scaled it."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.params = list(model.parameters())
        self.old: dict[Tensor, Tensor] = {}
        self.plain: dict[Tensor, Tensor] = {}
        optimizer.register_step_pre_hook(lambda *_: self.old.update(self.now()))
        handle = optimizer.register_step_post_hook(lambda *_: self.plain.update(self.now()))
        vars(optimizer)["_optimizer_step_post_hooks"].move_to_end(handle.id, last=False)

    def now(self) -> dict[Tensor, Tensor]:
        return {param: param.detach().clone() for param in self.params}


def random_gradients(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = torch.randn_like(param)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "MHA": Separate,
    "GQA": lambda: Separate(groups=2),
    "MQA": lambda: Separate(groups=1),
    "biases": lambda: Separate(bias=True),
    "per head": PerHead,
    "MLA": Latent,
}


@pytest.mark.parametrize("kind", [SGD, AdamW])
@pytest.mark.parametrize("name", MODELS)
def test_changes_and_rates_are_those_of_plain_loops(name: str, kind: type[Any]) -> None:
    torch.manual_seed(1)
    model = layers(2, MODELS[name])
    if name == "MLA":
        model = nn.Sequential(MODELS[name]())
    optimizer = kind(model.parameters(), lr=1e-3)
    with QuacK(model, optimizer, rule=Budget(1e-6)) as quack:  # so small that first order is all there is
        recorder = Recorder(model, optimizer)
        for _ in range(3):
            train(model, optimizer, steps=1)
            attentions: list[Any] = list(model.children())
            for i, attention in enumerate(attentions):
                paths: list[LogitPath] = attention.logit_paths()
                wanted = torch.tensor(asked_by_loops(paths, recorder.old, recorder.plain))
                torch.testing.assert_close(quack.changes()[str(i)].asked, wanted, rtol=0.04, atol=0)
                for path in paths:
                    for weight, read in zip(path.weights, path.reads, strict=True):
                        rates = quack.rates()[f"{i}.{weight.name}"]
                        limits = torch.full((weight.blocks,), torch.inf).scatter_reduce(0, read, 1e-6 / wanted, "amin")
                        torch.testing.assert_close(rates, limits, rtol=0.04, atol=0)


@given(
    seed=st.integers(0, 2**32 - 1), decades=st.floats(-3, 3), rank=st.integers(1, 4), groups=st.sampled_from([1, 2, 4])
)
def test_the_root_mean_square_of_the_change_is_within_the_budget(
    seed: int, decades: float, rank: int, groups: int
) -> None:
    """For independent inputs of unit variance it is the Frobenius norm of the change of M: no sampling is needed."""
    torch.manual_seed(seed)
    model: Any = nn.Sequential(Separate(groups=groups))
    optimizer = SGD(model.parameters(), lr=10**decades)
    attention: Any = model[0]
    with QuacK(model, optimizer, rule=Budget(BUDGET)) as quack:
        recorder = Recorder(model, optimizer)
        for param in model.parameters():
            param.grad = torch.randn(len(param), rank) @ torch.randn(rank, param.shape[1])
        optimizer.step()
        given_H = quack.changes()["0"].given
        for head in range(4):
            paths = attention.logit_paths()
            change = rms_matrix(paths, head, recorder.now()) - rms_matrix(paths, head, recorder.old)
            rms = float(change.norm()) / math.sqrt(attention.size)
            assert rms <= given_H[head] * (1 + 1e-4) <= BUDGET * (1 + 1e-3)
        if decades > 0 and groups == 4 and rank == 1:
            assert given_H.min() > 0.5 * BUDGET  # and the budget is used


def test_a_large_step_from_small_weights_is_within_the_budget_too() -> None:
    """Then the change is mostly of second order: of the step of the query times that of the key."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(Separate())
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1e-4)
    optimizer = SGD(model.parameters(), lr=1.0)
    attention: Any = model[0]
    with QuacK(model, optimizer, rule=Budget(BUDGET)) as quack:
        recorder = Recorder(model, optimizer)
        random_gradients(model)
        optimizer.step()
        paths = attention.logit_paths()
        for head in range(4):
            change = rms_matrix(paths, head, recorder.now()) - rms_matrix(paths, head, recorder.old)
            assert float(change.norm()) / 2 <= BUDGET
        assert quack.rates()["0.q"].max() < 0.3  # first order alone would allow far more
        first_order = BUDGET / quack.changes()["0"].asked
        assert (quack.rates()["0.q"] < 0.1 * first_order).all()


def test_in_mla_the_estimate_is_near_the_root_mean_square_of_random_weights() -> None:
    """Of longer chains it is no bound, but an estimate: exact in the mean for weights in random directions."""
    ratios = []
    for seed in range(20):
        torch.manual_seed(seed)
        model = nn.Sequential(Latent(width=64, latent=32, nope=16, rope=16))
        optimizer = SGD(model.parameters(), lr=1.0)
        attention: Any = model[0]
        with QuacK(model, optimizer, rule=Budget(1e-4)) as quack:
            recorder = Recorder(model, optimizer)
            for param in model.parameters():
                step = torch.linalg.qr(torch.randn(max(param.shape), min(param.shape))).Q  # as a step of Muon
                param.grad = step if step.shape == param.shape else step.mT
            optimizer.step()
            paths = attention.logit_paths()
            for head in range(4):
                change = rms_matrix(paths, head, recorder.now()) - rms_matrix(paths, head, recorder.old)
                ratios.append(float(change.norm()) / math.sqrt(32) / float(quack.changes()["0"].given[head]))
    assert 0.3 < sum(ratios) / len(ratios) < 1.0


@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_the_step_is_that_of_lr_times_the_rate(kind: type[Any]) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(PerHead())
    optimizer = kind(model.parameters(), lr=0.1)
    with QuacK(model, optimizer, rule=Budget(BUDGET)) as quack:
        recorder = Recorder(model, optimizer)
        train(model, optimizer, steps=1)
        for param in model.parameters():
            rate = quack.rate_of(param)
            assert rate is not None
            assert (rate != 1).any()
            assert (rate == 1).any()  # the rows of values
            wanted = recorder.old[param] + rate * (recorder.plain[param] - recorder.old[param])
            torch.testing.assert_close(param.detach(), wanted, rtol=1e-6, atol=1e-7)


def test_there_are_no_rates_before_a_step() -> None:
    model: Any = nn.Sequential(Separate())
    with QuacK(model, SGD(model.parameters(), lr=0.1), rule=Budget(BUDGET)) as quack:
        assert quack.rates() == quack.rates(last=True) == {}
        assert quack.rate_of(model[0].q.weight) is None
        assert quack.changes()["0"].asked.tolist() == [0, 0, 0, 0]
        assert "Budget(0.05)" in str(quack)
        assert "frozen" not in str(quack)


@pytest.mark.parametrize(("rule", "whose"), [(Budget(BUDGET), "last rates"), (Paper(0.5), "rates now")])
def test_the_printed_rates_are_of_the_last_step_with_a_budget_and_of_the_next_without(rule: Rule, whose: str) -> None:
    model = nn.Sequential(Separate())
    with QuacK(model, SGD(model.parameters(), lr=0.1), rule=rule) as quack:
        assert whose in str(quack)


def changes_with(lr: Callable[[Optimizer], Any], steps: int = 4) -> list[float]:
    """The change given in each step, with a schedule."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(Separate())
    optimizer = AdamW(model.parameters(), lr=0.1)
    scheduler = lr(optimizer)
    found = []
    with QuacK(model, optimizer, rule=Budget(BUDGET)) as quack:
        for _ in range(steps):
            train(model, optimizer, steps=1)
            found.append(float(quack.changes()["0"].given.max()) / BUDGET)
            if scheduler is not None:
                scheduler.step()
    return found


def test_the_budget_follows_the_schedule_of_lr() -> None:
    factors = [0.25, 0.5, 1.0, 0.1]
    found = changes_with(lambda optimizer: LambdaLR(optimizer, lambda step: [*factors, 0.0][step]))
    assert found == pytest.approx(factors, rel=1e-2)
    assert changes_with(lambda _: None) == pytest.approx([1, 1, 1, 1], rel=1e-2)


def test_with_a_cyclic_schedule_the_budget_is_that_of_the_largest_lr() -> None:
    found = changes_with(lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=10, pct_start=0.3), steps=4)
    assert max(found) == pytest.approx(1, rel=1e-2)
    assert found[0] == pytest.approx(1 / 25, rel=1e-2)


def test_an_lr_above_its_start_is_warned_of_once() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(Separate())
    optimizer = SGD(model.parameters(), lr=1e-6)
    with QuacK(model, optimizer, rule=Budget(BUDGET)):
        train(model, optimizer, steps=1)
        optimizer.param_groups[0]["lr"] = 1e-3
        with pytest.warns(UserWarning, match="1e\\+03 times its lr when QuacK was attached") as caught:
            train(model, optimizer, steps=2)
    assert len(caught) == 1
    assert caught[0].filename.endswith("models.py")  # the line that called optimizer.step


def test_groups_follow_their_own_lr() -> None:
    torch.manual_seed(0)
    model = layers(2, Separate)
    optimizer = SGD([{"params": model[0].parameters()}, {"params": model[1].parameters()}], lr=0.1)
    with QuacK(model, optimizer, rule=Budget(BUDGET)) as quack:
        optimizer.param_groups[1]["lr"] = 0.05
        train(model, optimizer, steps=1)
        given = [float(quack.changes()[str(i)].given.max()) for i in range(2)]
    assert given == pytest.approx([BUDGET, BUDGET / 2], rel=1e-2)


def test_an_lr_of_0_is_an_error_when_attaching_and_no_change_later() -> None:
    model: Any = nn.Sequential(Separate())
    optimizer = SGD(model.parameters(), lr=0.0)
    with pytest.raises(ValueError, match="the lr of a param group of SGD is 0. A budget follows lr"):
        QuacK(model, optimizer, rule=Budget(BUDGET))
    optimizer = SGD(model.parameters(), lr=0.1)
    with QuacK(model, optimizer, rule=Budget(BUDGET)):
        optimizer.param_groups[0]["lr"] = 0.0
        before = {name: value.clone() for name, value in model.state_dict().items()}
        train(model, optimizer, steps=2)
        assert_equal(dict(model.state_dict()), before)


def test_an_lr_of_0_of_other_weights_does_not_matter() -> None:
    model: Any = nn.Sequential(Separate())
    others: dict[str, Any] = {"params": [model[0].v.weight], "lr": 0.0}
    optimizer = SGD([{"params": [model[0].q.weight, model[0].k.weight]}, others], lr=0.1)
    with QuacK(model, optimizer, rule=Budget(BUDGET)) as quack:
        train(model, optimizer, steps=1)
        assert quack.changes()["0"].given.tolist() == pytest.approx([BUDGET] * 4, rel=1e-2)


def test_an_lr_that_is_a_tensor_is_the_same() -> None:
    both = []
    for lr in (0.1, torch.tensor(0.1)):
        torch.manual_seed(0)
        model: Any = nn.Sequential(Separate())
        optimizer = AdamW(model.parameters(), lr=lr, foreach=False)
        with QuacK(model, optimizer, rule=Budget(BUDGET)) as quack:
            train(model, optimizer, steps=1)
            optimizer.param_groups[0]["lr"] *= 0.5
            train(model, optimizer, steps=2)
            both.append(quack.rates()["0.q"])
    torch.testing.assert_close(*both, rtol=1e-5, atol=0)


@pytest.mark.parametrize("attach_first", [True, False])
def test_it_does_not_matter_whether_weights_are_loaded_before_or_after_attaching(attach_first: bool) -> None:
    torch.manual_seed(3)
    trained = nn.Sequential(Separate())
    alone = nn.Sequential(Separate())
    alone.load_state_dict(trained.state_dict())
    optimizer = AdamW(alone.parameters(), lr=0.1)
    with QuacK(alone, optimizer, rule=Budget(BUDGET)):
        train(alone, optimizer, steps=3)
    model: Any = nn.Sequential(Separate())
    if not attach_first:
        model.load_state_dict(trained.state_dict())
    optimizer = AdamW(model.parameters(), lr=0.1)
    with QuacK(model, optimizer, rule=Budget(BUDGET)) as quack:
        if attach_first:
            model.load_state_dict(trained.state_dict())
        assert quack.state_dict() == {"version": 3, "rule": "Budget"}
        train(model, optimizer, steps=3)
    assert_equal(dict(model.state_dict()), dict(alone.state_dict()))


def test_a_run_resumes_bitwise_without_a_state() -> None:
    torch.manual_seed(3)
    model: Any = nn.Sequential(Separate())
    optimizer = AdamW(model.parameters(), lr=0.1)
    with QuacK(model, optimizer, rule=Budget(BUDGET)):
        train(model, optimizer, steps=2)
        saved = deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        torch.manual_seed(5)
        other = nn.Sequential(Separate())
        copy = AdamW(other.parameters(), lr=0.1)
        other.load_state_dict(saved["model"])
        copy.load_state_dict(saved["optimizer"])
        train(model, optimizer, steps=2)
    with warnings.catch_warnings(action="error"), QuacK(other, copy, rule=Budget(BUDGET)):
        train(other, copy, steps=2)
    assert_equal(dict(other.state_dict()), dict(model.state_dict()))


def test_states_with_and_without_a_budget() -> None:
    model: Any = nn.Sequential(Separate())
    with QuacK(model, SGD(model.parameters(), lr=0.1)) as relative:
        state = relative.state_dict()
        with pytest.raises(ValueError, match="the state is that of rule Budget"):
            relative.load_state_dict({"version": 3, "rule": "Budget"})
    with QuacK(model, SGD(model.parameters(), lr=0.1), rule=Budget(BUDGET)) as quack:
        quack.load_state_dict(state)
        quack.load_state_dict(quack.state_dict())
        with pytest.raises(ValueError, match="this is not the state of a QuacK"):
            quack.load_state_dict({"step": 3})


def test_settings_that_have_no_meaning_are_refused() -> None:
    model: Any = nn.Sequential(Separate())
    with pytest.raises(ValueError, match=r"tau=0.1 is short for .* and rule=Budget\(0.02\) .* choose one"):
        QuacK(model, SGD(model.parameters(), lr=0.1), tau=0.1, rule=Budget(0.02))
    with pytest.raises(ValueError, match="rule=0.02: a rule is"):
        QuacK(model, SGD(model.parameters(), lr=0.1), rule=0.02)  # type: ignore[arg-type]
    for nats in (0, -1.0, math.inf, math.nan, True, "0.02", 1e-50):
        with pytest.raises(ValueError, match="nats="):
            Budget(nats)  # type: ignore[arg-type]
    rule = Budget(BUDGET)
    with QuacK(model, SGD(model.parameters(), lr=0.1), rule=rule):
        rule.nats = 0.1
        assert rule.nats == 0.1
        with pytest.raises(ValueError, match="nats="):
            rule.nats = -1
        with pytest.raises(ValueError, match="belongs to another QuacK"):
            QuacK(nn.Sequential(Separate()), SGD(model.parameters(), lr=0.1), rule=rule)


@pytest.mark.parametrize("zeros", ["q", "k", "qk"])
def test_partners_of_zeros_move(zeros: str) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(Separate())
    with torch.no_grad():
        for name in zeros:
            model.get_parameter(f"0.{name}.weight").zero_()
    optimizer = SGD(model.parameters(), lr=0.1)
    with QuacK(model, optimizer, rule=Budget(BUDGET)) as quack:
        before = {name: value.clone() for name, value in model.state_dict().items()}
        for _ in range(3):
            random_gradients(model)
            optimizer.step()
            for rates in quack.rates().values():
                assert rates.isfinite().all()
                assert (rates > 0).all()
        for name in ("q", "k"):
            assert (model.state_dict()[f"0.{name}.weight"] != before[f"0.{name}.weight"]).all()


def test_a_head_without_a_gradient_stays_and_others_are_as_without_it() -> None:
    both = []
    for idle in (True, False):
        torch.manual_seed(0)
        model: Any = nn.Sequential(Separate())
        optimizer = SGD(model.parameters(), lr=0.1)
        with QuacK(model, optimizer, rule=Budget(BUDGET)) as quack:
            random_gradients(model)
            for param in model.parameters() if idle else ():
                param.grad[:4] = 0
            before = model[0].q.weight.detach().clone()
            optimizer.step()
            both.append(quack.rates()["0.q"])
            assert torch.equal(before[:4], model[0].q.weight[:4]) == idle
    assert both[0][0] == 1
    assert_equal(both[0][1:], both[1][1:])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_step_that_is_not_finite_stays_what_the_optimizer_made_it(value: float) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(Separate())
    optimizer = SGD(model.parameters(), lr=0.1)
    with QuacK(model, optimizer, rule=Budget(BUDGET)) as quack:
        random_gradients(model)
        grad = model[0].q.weight.grad
        assert grad is not None
        grad[5, 3] = value
        recorder = Recorder(model, optimizer)
        optimizer.step()
        rates = quack.rates()
        assert rates["0.q"].isfinite().all()
        assert rates["0.k"].isfinite().all()
        assert rates["0.q"][1] == 1
        assert (rates["0.q"][[0, 2, 3]] != 1).all()
        found, wanted = model[0].q.weight.detach()[4:8], recorder.plain[model[0].q.weight][4:8]
        assert_equal(found.isfinite(), wanted.isfinite())
        assert_equal(found[wanted.isfinite()], wanted[wanted.isfinite()])


def test_two_optimizers_share_the_budget_of_a_head() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(Separate())
    parts: list[list[nn.Parameter]] = [[model[0].q.weight], [model[0].k.weight, model[0].v.weight]]
    optimizers = [SGD(part, lr=0.1) for part in parts]
    with QuacK(model, optimizers, rule=Budget(BUDGET)) as quack:
        train(model, *optimizers, steps=3)
        assert quack.changes()["0"].given.tolist() == pytest.approx([BUDGET] * 4, rel=1e-2)
        assert set(quack.rates()) == {"0.q", "0.k"}


def test_biases_in_another_optimizer_take_little_of_the_budget() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(Separate(width=64, bias=True))
    matrices = [param for param in model.parameters() if param.ndim == 2]
    vectors = [param for param in model.parameters() if param.ndim == 1]
    optimizers = [SGD(matrices, lr=0.1), AdamW(vectors, lr=0.1)]
    with QuacK(model, optimizers, rule=Budget(BUDGET)) as quack:
        random_gradients(model)
        optimizers[0].step()
        of_matrices = quack.changes()["0"].given.clone()
        optimizers[1].step()
        total = quack.changes()["0"].given
    assert (of_matrices > 0.8 * BUDGET).all()
    assert (of_matrices < 0.95 * BUDGET).all()
    assert (total <= BUDGET * 1.001).all()


def true_change(attention: Any, head: int, old: dict[Tensor, Tensor], new: dict[Tensor, Tensor]) -> float:
    """The root mean square of the change of a head's logits, from the whole matrices."""
    paths = attention.logit_paths()
    return float((rms_matrix(paths, head, new) - rms_matrix(paths, head, old)).norm()) / math.sqrt(4)


@pytest.mark.parametrize("optimizers", [1, 2])
def test_weights_that_are_trained_later_have_the_budget(optimizers: int) -> None:
    """Frozen in the first steps, then not; and frozen again."""
    torch.manual_seed(0)
    model: Any = layers(2, Separate)
    attention = model[0]
    q, k = attention.q.weight, attention.k.weight
    others = [param for param in model.parameters() if param is not k]
    together = [SGD(model.parameters(), lr=0.1)] if optimizers == 1 else [SGD(others, lr=0.1), SGD([k], lr=0.1)]
    with QuacK(model, together, rule=Budget(BUDGET)) as quack:
        for frozen, changed in (((q, k), 0), ((k,), 1), ((), 1), ((q, k), 0), ((q,), 1), ((), 1)):
            old = {param: param.detach().clone() for param in model.parameters()}
            for param in (q, k):
                param.requires_grad_(all(param is not each for each in frozen))
            for param in model.parameters():
                param.grad = torch.randn_like(param) if param.requires_grad else None
            for optimizer in together:
                optimizer.step()
            new = {param: param.detach().clone() for param in model.parameters()}
            given = quack.changes()["0"].given
            assert given.max() <= BUDGET * 1.001
            if changed:
                assert given.min() > BUDGET * 0.9
                assert all(0.2 * BUDGET < true_change(attention, head, old, new) < BUDGET for head in range(4))


def test_a_step_under_autocast_is_measured_in_full_precision() -> None:
    both = []
    for enabled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(Separate(width=128, heads=2, groups=2))
        optimizer = AdamW(model.parameters(), lr=1e-5)
        with QuacK(model, optimizer, rule=Budget(BUDGET)) as quack:
            random_gradients(model)
            with torch.autocast("cpu", dtype=torch.float16, enabled=enabled):
                optimizer.step()
            both.append((quack.rates(), quack.changes()["0"].given))
    assert_equal(*both)
    assert float(both[0][1].min()) > 0.1 * BUDGET


def test_large_rates_of_16_bit_weights_are_warned_of() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Separate()).bfloat16()
    optimizer = AdamW(model.parameters(), lr=1e-5)
    quack = QuacK(model, optimizer, rule=Budget(BUDGET))
    with pytest.warns(UserWarning, match="0.q is bfloat16, and the first step was scaled by up to") as caught:
        train(model, optimizer, steps=2)
    quack.remove()
    assert len(caught) == 1
    assert caught[0].filename.endswith("models.py")  # the line that called optimizer.step
    for lr, dtype in ((0.1, torch.bfloat16), (1e-5, torch.float32)):
        other = nn.Sequential(Separate()).to(dtype)
        optimizer = AdamW(other.parameters(), lr=lr)
        with warnings.catch_warnings(action="error"), QuacK(other, optimizer, rule=Budget(BUDGET)):
            train(other, optimizer, steps=1)


def test_paths_over_the_same_features_have_the_scale_of_one_head() -> None:
    """Two keys that meet the same query: the features of a head are counted once."""
    torch.manual_seed(0)
    q, k, other = (nn.Parameter(torch.randn(16, 32)) for _ in range(3))
    weights = [packed(param, (name, 2, 8))[0] for name, param in zip("qkj", (q, k, other), strict=True)]
    with torch.no_grad():
        other.mul_(1e-4)
    optimizer = SGD([q], lr=0.1)
    paths = [LogitPath((weights[0], weights[1]), 2), LogitPath((weights[0], weights[2]), 2)]
    for param in (k, other):
        param.requires_grad_(False)
    q.grad = torch.cat([torch.linalg.qr(torch.randn(32, 8))[0].mT for _ in range(2)])  # singular values are all equal
    old = q.detach().clone()
    with QuacK(paths, optimizer, rule=Budget(BUDGET)):
        optimizer.step()
    for head in (slice(8), slice(8, 16)):
        change = (q.detach() - old)[head].mT @ k[head]
        assert 0.8 * BUDGET < float(change.norm()) / math.sqrt(8) <= BUDGET


@pytest.mark.parametrize("state", [{"version": 99}, {}, None, {"norm": "frobenius", "version": 99}])
def test_a_state_of_something_else_is_refused(state: Any) -> None:
    model = nn.Sequential(Separate())
    with (
        QuacK(model, SGD(model.parameters(), lr=0.1), rule=Budget(BUDGET)) as quack,
        pytest.raises(ValueError, match="state"),
    ):
        quack.load_state_dict(state)


@pytest.mark.parametrize("setting", ["float64", "bfloat16", "meta"])
def test_torchs_defaults_do_not_matter(setting: str) -> None:
    """Neither the default dtype nor the default device is that of the weights."""
    both = []
    for changed in (False, True):
        torch.manual_seed(0)
        model: Any = nn.Sequential(Separate(bias=True))
        optimizer = SGD(model.parameters(), lr=0.1)
        random_gradients(model)
        if changed and setting != "meta":
            torch.set_default_dtype(getattr(torch, setting))
        try:
            device = torch.device("meta") if changed and setting == "meta" else nullcontext()
            with device, QuacK(model, optimizer, rule=Budget(BUDGET)) as quack:
                optimizer.step()
                both.append((quack.rates(), {name: change.given for name, change in quack.changes().items()}))
        finally:
            torch.set_default_dtype(torch.float32)
    assert_equal(*both)


@pytest.mark.parametrize("scale", [0, math.nan, math.inf, "1"])
def test_a_scale_and_a_gain_must_be_numbers_other_than_0(scale: Any) -> None:
    (path,) = Separate().logit_paths()
    with pytest.raises(ValueError, match="the factor between product and logit"):
        LogitPath(path.weights, 4, scale=scale)
    with pytest.raises(ValueError, match="a constant factor is a number other than 0"):
        Weight("q", torch.randn(4, 4), torch.arange(4), gain=scale)


def test_a_scale_of_the_logit_is_part_of_the_change() -> None:
    found = []
    for scale in (None, 0.5, 1.0):
        torch.manual_seed(0)
        model = Separate()
        (path,) = mha(*packed(model.q, ("q", 4, 4)), *packed(model.k, ("k", 4, 4)))
        optimizer = SGD(model.parameters(), lr=0.1)
        with QuacK([LogitPath(path.weights, 4, scale=scale)], optimizer, rule=Budget(BUDGET)) as quack:
            train(model, optimizer, steps=1)
            (change,) = quack.changes().values()
            assert isinstance(change, HeadChange)
            found.append(change.asked)
    assert_equal(found[0], found[1])  # 1 / sqrt(4)
    torch.testing.assert_close(found[2], 2 * found[0])


def test_frozen_keys_leave_the_budget_to_the_queries() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(Separate())
    model[0].k.weight.requires_grad_(False)
    optimizer = SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    with QuacK(model, optimizer, rule=Budget(BUDGET)) as quack:
        train(model, optimizer, steps=2)
        assert set(quack.rates()) == {"0.q"}
        assert quack.changes()["0"].given.tolist() == pytest.approx([BUDGET] * 4, rel=1e-2)
        assert "k: frozen" in str(quack)


def test_paths_without_a_module_are_one_logit_if_they_share_a_weight() -> None:
    torch.manual_seed(0)
    shared, apart = Latent(), Separate()
    paths = [*shared.logit_paths(), *apart.logit_paths()]
    params = [*shared.parameters(), *apart.parameters()]
    with QuacK(paths, SGD(params, lr=0.1), rule=Budget(BUDGET)) as quack:
        assert {name: len(change.given) for name, change in quack.changes().items()} == {"dq": 4, "q": 4}


def test_bf16_weights() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(Separate()).bfloat16()
    optimizer = SGD(model.parameters(), lr=0.1)
    with QuacK(model, optimizer, rule=Budget(BUDGET)) as quack:
        train(model, optimizer, steps=2)
        assert quack.rates()["0.q"].dtype == torch.float32
        assert quack.changes()["0"].given.tolist() == pytest.approx([BUDGET] * 4, rel=2e-2)
