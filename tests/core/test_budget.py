"""A budget: what it bounds, for which inputs, and the rates that it gives, judged by plain loops and by real logits."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from models import Latent, PerHead, Separate, assert_equal, layers, train
from quacklr import Budget, Limit, LogitPath, Paper, QuacK, Rule, Weight, mha, packed

BUDGET = 0.05
FULL = pytest.approx([BUDGET] * 4, rel=1e-2)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def attention(**options: Any) -> Any:
    """A model of one attention."""
    return nn.Sequential(Separate(**options))


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


def random_step(model: nn.Module, *optimizers: Optimizer) -> None:
    for param in model.parameters():
        param.grad = torch.randn_like(param) if param.requires_grad else None
    for optimizer in optimizers:
        optimizer.step()


def rms_of_changes(attention: Any, old: dict[Tensor, Tensor], new: dict[Tensor, Tensor]) -> list[float]:
    """By head, the root mean square of the change of its logits for independent inputs of unit variance."""
    paths = attention.logit_paths()
    size = sum(int(path.weights[path.meeting].rows_of_block[0]) for path in paths)
    changes = [rms_matrix(paths, head, new) - rms_matrix(paths, head, old) for head in range(attention.heads)]
    return [float(change.norm()) / math.sqrt(size) for change in changes]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "MHA": Separate,
    "GQA": lambda: Separate(groups=2),
    "MQA, biases": lambda: Separate(groups=1, bias=True),
    "per head": PerHead,
    "MLA": Latent,
}


@pytest.mark.parametrize("name", MODELS)
def test_changes_and_rates_are_those_of_plain_loops(name: str) -> None:
    model = layers(1 if name == "MLA" else 2, MODELS[name])
    optimizer = AdamW(model.parameters(), lr=1e-3)
    with QuacK(model, optimizer, rule=Budget(1e-6)) as quack:  # so small that first order is all there is
        recorder = Recorder(model, optimizer)
        for _ in range(2):
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
    seed=st.integers(0, 2**32 - 1),
    decades=st.floats(-3, 3),
    rank=st.integers(1, 4),
    groups=st.sampled_from([1, 2, 4]),
    scale=st.sampled_from([1.0, 1e-4]),  # from small weights the change is mostly of second order
)
def test_the_root_mean_square_of_the_change_is_within_the_budget(
    seed: int, decades: float, rank: int, groups: int, scale: float
) -> None:
    """For independent inputs of unit variance it is the Frobenius norm of the change of M: no sampling is needed."""
    torch.manual_seed(seed)
    model = attention(groups=groups)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(scale)
    optimizer = SGD(model.parameters(), lr=10**decades)
    with QuacK(model, optimizer, rule=Budget(BUDGET)) as quack:
        recorder = Recorder(model, optimizer)
        for param in model.parameters():
            param.grad = torch.randn(len(param), rank) @ torch.randn(rank, param.shape[1])
        optimizer.step()
        given_H = quack.changes()["0"].given
        for rms, bound in zip(rms_of_changes(model[0], recorder.old, recorder.now()), given_H, strict=True):
            assert rms <= bound * (1 + 1e-4) <= BUDGET * (1 + 1e-3)
        if decades > 0 and groups == 4 and rank == 1 and scale == 1:
            assert given_H.min() > 0.5 * BUDGET  # and the budget is used


def test_in_mla_the_estimate_is_near_the_root_mean_square_of_random_weights() -> None:
    """Of longer chains it is no bound, but an estimate: exact in the mean for weights in random directions."""
    ratios: list[float] = []
    for seed in range(10):
        torch.manual_seed(seed)
        model: Any = nn.Sequential(Latent(width=64, latent=32, nope=16, rope=16))
        optimizer = SGD(model.parameters(), lr=1.0)
        with QuacK(model, optimizer, rule=Budget(1e-4)) as quack:
            recorder = Recorder(model, optimizer)
            for param in model.parameters():
                step = torch.linalg.qr(torch.randn(max(param.shape), min(param.shape))).Q  # as a step of Muon
                param.grad = step if step.shape == param.shape else step.mT
            optimizer.step()
            found = rms_of_changes(model[0], recorder.old, recorder.now())
            ratios += (torch.tensor(found) / quack.changes()["0"].given).tolist()
    assert 0.3 < sum(ratios) / len(ratios) < 1.0


def test_a_limit_scales_a_step_down_and_never_up() -> None:
    """Judge: the budget of the same number. Where nothing is limited, the plain step, bitwise."""
    steps: dict[object, tuple[dict[str, Tensor], Tensor]] = {}
    rules: list[Rule | None] = [None, Budget(BUDGET), Limit(BUDGET), Limit(math.inf)]
    for rule in rules:
        torch.manual_seed(0)
        model = attention()
        optimizer = SGD([{"params": [p], "lr": lr} for p, lr in zip(model.parameters(), (0.4, 0.4, 1), strict=True)])
        with QuacK(model, optimizer, rule=rule) if rule is not None else nullcontext() as quack:
            for i, param in enumerate(model.parameters()):
                param.grad = torch.randn_like(param) if i == 2 else torch.randn_like(param) * torch.logspace(-6, 0, 16)
            for param in model.parameters():
                assert param.grad is not None
                param.grad[:8] *= 1e-3  # the step of two heads is small
            optimizer.step()
            rates = quack.rates() if quack is not None else {}
        steps[str(rule)] = rates, model[0].q.weight.detach()
    budget, limit = steps["Budget(0.05)"][0]["0.q"], steps["Limit(0.05)"][0]["0.q"]
    assert (budget > 1).tolist() == [True, True, False, False]
    assert_equal(limit, budget.clamp(max=1))
    assert_equal(steps["Limit(0.05)"][1][:8], steps["None"][1][:8])
    assert_equal(steps["Limit(inf)"][1], steps["None"][1])


@pytest.mark.parametrize(("rule", "whose"), [(Budget(BUDGET), "last rates"), (Paper(0.5), "rates now")])
def test_before_a_step_a_budget_has_no_rates(rule: Rule, whose: str) -> None:
    model = attention()
    with QuacK(model, SGD(model.parameters(), lr=0.1), rule=rule) as quack:
        assert str(rule) in str(quack)
        assert whose in str(quack)
        assert "frozen" not in str(quack)
        if isinstance(rule, Budget):
            assert quack.rates() == quack.rates(last=True) == {}
            assert quack.rate_of(model[0].q.weight) is None
            assert quack.changes()["0"].asked.tolist() == [0, 0, 0, 0]


def test_a_run_resumes_bitwise_without_a_state_of_quack() -> None:
    model = attention()
    optimizer = AdamW(model.parameters(), lr=0.1)
    with QuacK(model, optimizer, rule=Budget(BUDGET)) as quack:
        assert quack.state_dict() == {"version": 3, "rule": "Budget"}
        train(model, optimizer, steps=2)
        saved = deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        train(model, optimizer, steps=2)
    for attach_first in (True, False):
        other = attention()
        copy = AdamW(other.parameters(), lr=0.1)
        early = QuacK(other, copy, rule=Budget(BUDGET)) if attach_first else None
        other.load_state_dict(saved["model"])
        copy.load_state_dict(deepcopy(saved["optimizer"]))
        with warnings.catch_warnings(action="error"), early or QuacK(other, copy, rule=Budget(BUDGET)):
            train(other, copy, steps=2)
        assert_equal(dict(other.state_dict()), dict(model.state_dict()))


def test_states_with_and_without_a_budget() -> None:
    model = attention()
    with QuacK(model, SGD(model.parameters(), lr=0.1), tau=1.0) as relative:
        state = relative.state_dict()
        with pytest.raises(ValueError, match="the state is that of rule Budget"):
            relative.load_state_dict({"version": 3, "rule": "Budget"})
    with QuacK(model, SGD(model.parameters(), lr=0.1), rule=Budget(BUDGET)) as quack:
        quack.load_state_dict(state)
        quack.load_state_dict(quack.state_dict())
        broken: Any
        for broken in ({"step": 3}, {}, None, {"rule": "Budget", "version": 99}):
            with pytest.raises(ValueError, match="state"):
                quack.load_state_dict(broken)


def test_settings_that_have_no_meaning_are_refused() -> None:
    model = attention()
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


@pytest.mark.parametrize("zeros", ["k", "qk"])
def test_partners_of_zeros_move(zeros: str) -> None:
    model = attention()
    for name in zeros:
        nn.init.zeros_(model.get_parameter(f"0.{name}.weight"))
    optimizer = SGD(model.parameters(), lr=0.1)
    with QuacK(model, optimizer, rule=Budget(BUDGET)) as quack:
        before = {name: value.clone() for name, value in model.state_dict().items()}
        for _ in range(3):
            random_step(model, optimizer)
            for rates in quack.rates().values():
                assert rates.isfinite().all()
                assert (rates > 0).all()
        for name in ("q", "k"):
            assert (model.state_dict()[f"0.{name}.weight"] != before[f"0.{name}.weight"]).all()


def test_a_head_without_a_gradient_stays_and_others_are_as_without_it() -> None:
    both = []
    for idle in (True, False):
        torch.manual_seed(0)
        model = attention()
        optimizer = SGD(model.parameters(), lr=0.1)
        with QuacK(model, optimizer, rule=Budget(BUDGET)) as quack:
            for param in model.parameters():
                param.grad = torch.randn_like(param)
                param.grad[:4] *= not idle
            before = model[0].q.weight.detach().clone()
            optimizer.step()
            both.append(quack.rates()["0.q"])
            assert torch.equal(before[:4], model[0].q.weight[:4]) == idle
    assert both[0][0] == 1
    assert_equal(both[0][1:], both[1][1:])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_step_that_is_not_finite_stays_what_the_optimizer_made_it(value: float) -> None:
    model = attention()
    optimizer = SGD(model.parameters(), lr=0.1)
    with QuacK(model, optimizer, rule=Budget(BUDGET)) as quack:
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        model[0].q.weight.grad[5, 3] = value
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
    model = attention()
    q, k, v = (model[0].get_parameter(f"{name}.weight") for name in "qkv")
    optimizers = [SGD([q], lr=0.1), SGD([k, v], lr=0.1)]
    with QuacK(model, optimizers, rule=Budget(BUDGET)) as quack:
        train(model, *optimizers, steps=3)
        assert quack.changes()["0"].given.tolist() == FULL
        assert set(quack.rates()) == {"0.q", "0.k"}


def test_biases_in_another_optimizer_take_little_of_the_budget() -> None:
    model = attention(width=64, bias=True)
    matrices = [param for param in model.parameters() if param.ndim == 2]
    vectors = [param for param in model.parameters() if param.ndim == 1]
    optimizers = [SGD(matrices, lr=0.1), AdamW(vectors, lr=0.1)]
    with QuacK(model, optimizers, rule=Budget(BUDGET)) as quack:
        random_step(model, optimizers[0])
        of_matrices = quack.changes()["0"].given.clone()
        optimizers[1].step()
        total = quack.changes()["0"].given
    assert (of_matrices > 0.8 * BUDGET).all()
    assert (of_matrices < 0.95 * BUDGET).all()
    assert (total <= BUDGET * 1.001).all()


@pytest.mark.parametrize("optimizers", [1, 2])
def test_weights_that_are_trained_later_have_the_budget(optimizers: int) -> None:
    """Frozen in the first steps, then not; and frozen again."""
    model: Any = layers(2, Separate)
    q, k = model[0].q.weight, model[0].k.weight
    others = [param for param in model.parameters() if param is not k]
    together = [SGD(model.parameters(), lr=0.1)] if optimizers == 1 else [SGD(others, lr=0.1), SGD([k], lr=0.1)]
    with QuacK(model, together, rule=Budget(BUDGET)) as quack:
        for frozen, changed in (((q, k), 0), ((k,), 1), ((), 1), ((q, k), 0), ((q,), 1), ((), 1)):
            old = {param: param.detach().clone() for param in model.parameters()}
            for param in (q, k):
                param.requires_grad_(all(param is not each for each in frozen))
            random_step(model, *together)
            given = quack.changes()["0"].given
            assert given.max() <= BUDGET * 1.001
            assert ("0.q" in quack.rates(), "0.k" in quack.rates()) == (q.requires_grad, k.requires_grad)
            if changed:
                assert given.min() > BUDGET * 0.9
                new = {param: param.detach().clone() for param in model.parameters()}
                assert all(0.2 * BUDGET < change < BUDGET for change in rms_of_changes(model[0], old, new))


def test_a_step_under_autocast_is_measured_in_full_precision() -> None:
    both = []
    for enabled in (False, True):
        torch.manual_seed(0)
        model = attention(width=128, heads=2, groups=2)
        optimizer = AdamW(model.parameters(), lr=1e-5)
        with QuacK(model, optimizer, rule=Budget(BUDGET)) as quack:
            with torch.autocast("cpu", dtype=torch.float16, enabled=enabled):
                random_step(model, optimizer)
            both.append((quack.rates(), quack.changes()["0"].given))
    assert_equal(*both)
    assert float(both[0][1].min()) > 0.1 * BUDGET


def test_large_rates_of_16_bit_weights_are_warned_of() -> None:
    model = attention().bfloat16()
    optimizer = AdamW(model.parameters(), lr=1e-5)
    quack = QuacK(model, optimizer, rule=Budget(BUDGET))
    with pytest.warns(UserWarning, match="0.q is bfloat16, and the first step was scaled by up to") as caught:
        train(model, optimizer, steps=2)
    quack.remove()
    assert len(caught) == 1
    assert caught[0].filename.endswith("models.py")  # the line that called optimizer.step
    for lr, dtype in ((0.1, torch.bfloat16), (1e-5, torch.float32)):
        other = attention().to(dtype)
        optimizer = AdamW(other.parameters(), lr=lr)
        with warnings.catch_warnings(action="error"), QuacK(other, optimizer, rule=Budget(BUDGET)) as quack:
            train(other, optimizer, steps=2)
            assert quack.rates()["0.q"].dtype == torch.float32
            if lr == 0.1:
                assert quack.changes()["0"].given.tolist() == pytest.approx([BUDGET] * 4, rel=2e-2)


def test_paths_over_the_same_features_have_the_scale_of_one_head() -> None:
    """Two keys that meet the same query: the features of a head are counted once."""
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


@pytest.mark.parametrize("rule", [partial(Budget, BUDGET), Paper])
@pytest.mark.parametrize("setting", ["bfloat16", "meta"])
def test_torchs_defaults_do_not_matter(setting: str, rule: Callable[[], Rule]) -> None:
    """Neither the default dtype nor the default device is that of the weights."""
    both = []
    for changed in (False, True):
        torch.manual_seed(0)
        model = attention(bias=True)
        optimizer = SGD(model.parameters(), lr=0.1)
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        if changed and setting == "bfloat16":
            torch.set_default_dtype(torch.bfloat16)
        try:
            device = torch.device("meta") if changed and setting == "meta" else nullcontext()
            with device, QuacK(model, optimizer, rule=rule()) as quack:
                quack.load_state_dict(quack.state_dict())
                optimizer.step()
                both.append((quack.rates(), {name: change.given for name, change in quack.changes().items()}))
        finally:
            torch.set_default_dtype(torch.float32)
    assert_equal(*both)


@pytest.mark.parametrize("factor", [0, math.nan, math.inf, "1"])
def test_a_scale_and_a_gain_must_be_numbers_other_than_0(factor: Any) -> None:
    (path,) = Separate().logit_paths()
    with pytest.raises(ValueError, match=r"^q . k: scale=.*; a constant factor is a number other than 0"):
        LogitPath(path.weights, 4, scale=factor)
    with pytest.raises(ValueError, match="^q: gain=.*; a constant factor is a number other than 0"):
        Weight("q", torch.randn(4, 4), torch.arange(4), gain=factor)


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
            found.append(change.asked)
    assert_equal(found[0], found[1])  # 1 / sqrt(4)
    torch.testing.assert_close(found[2], 2 * found[0])


def test_paths_without_a_module_are_one_logit_if_they_share_a_weight() -> None:
    shared, apart = Latent(), Separate()
    paths = [*shared.logit_paths(), *apart.logit_paths()]
    params = [*shared.parameters(), *apart.parameters()]
    with QuacK(iter(paths), SGD(params, lr=0.1), rule=Budget(BUDGET)) as quack:
        assert {name: len(change.given) for name, change in quack.changes().items()} == {"dq": 4, "q": 4}
    q, k, j = (Weight(name, nn.Parameter(torch.randn(2, 3)), torch.arange(2)) for name in "qkj")
    with QuacK([*mha(q, k), *mha(j, k)], SGD([q.param, k.param, j.param], lr=0.1), rule=Budget(BUDGET)) as quack:
        assert list(quack.changes()) == ["q"]
