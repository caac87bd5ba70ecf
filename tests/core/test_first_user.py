"""Regressions: problems that the first users reported."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from models import PerHead, Separate, assert_equal, layers, train
from quacklr import LogitPath, Paper, QuacK, Weight, frobenius, logit_paths, mha, mla, packed, spectral


@pytest.fixture
def default_dtype() -> Iterator[Callable[[torch.dtype], None]]:
    before = torch.get_default_dtype()
    yield torch.set_default_dtype
    torch.set_default_dtype(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_does_not_matter(default_dtype: Callable[[torch.dtype], None], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = layers(1, PerHead)
    plain = copy.deepcopy(model)
    default_dtype(dtype)
    optimizer, plain_optimizer = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain))
    quack = QuacK(model, optimizer)
    quack.load_state_dict(quack.state_dict())
    rate = quack.rate_of(model[0].qkv.weight)  # type: ignore[union-attr, arg-type]
    assert rate is not None
    assert rate.dtype == torch.float32
    assert rate.unique().tolist() == [1.0]
    for m, o in ((model, optimizer), (plain, plain_optimizer)):
        train(m, o, steps=1)
    assert_equal(list(model.state_dict().values()), list(plain.state_dict().values()))


@pytest.mark.parametrize("norm", [frobenius, spectral])
def test_the_default_device_does_not_matter(norm: Any) -> None:
    model = layers(1, PerHead)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.device("meta"):
        quack = QuacK(model, optimizer, rule=Paper(norm=norm))
        quack.load_state_dict(quack.state_dict())
    assert quack.rates()["0.q"].tolist() == [1.0] * 4


def test_a_copy_that_would_do_nothing_is_refused() -> None:
    model = layers(1, Separate)
    quack = QuacK(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for make in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="a QuacK cannot be copied or pickled; attach a new one"):
            make(quack)


def test_the_learned_key_of_multihead_attention_is_on_a_path() -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, add_bias_kv=True)
    assert module.bias_k is not None
    quack = QuacK(module, torch.optim.SGD(module.parameters(), lr=0.1))
    q = torch.cat([module.in_proj_weight, module.in_proj_bias.unsqueeze(1)], 1)[:8].view(2, -1).norm(dim=1)
    with torch.no_grad():
        module.bias_k.mul_(1e4)
        module.in_proj_weight[:8].mul_(3)
        module.in_proj_bias[:8].mul_(3)
    assert quack.rates()["q"].max() < 1e-3
    torch.testing.assert_close(quack.rates()["bias_k"], torch.full((2,), 1 / 3))
    start = quack.state_dict()["sensitivity"]["bias_k"]
    torch.testing.assert_close(start, q.detach())


def test_weights_of_shape_width_heads_size_are_measured_and_moved() -> None:
    """The layout of einsum("btd,dhk->bthk"): a head is a slice that is not contiguous. Judge: its slices by hand."""
    torch.manual_seed(0)
    q, k = (nn.Parameter(torch.randn(6, 4, 3)) for _ in range(2))
    optimizer = torch.optim.SGD([q, k], lr=1.0)
    QuacK(mha(*packed(q, ("q", 4, 1), dim=1), *packed(k, ("k", 4, 1), dim=1)), optimizer, tau=0.5)
    with torch.no_grad():
        k[:, 2] *= 4
    old = q.detach().clone()
    q.grad, k.grad = torch.ones_like(q), torch.zeros_like(k)
    optimizer.step()
    expected = old - 0.5 * torch.tensor([1, 1, 0.25, 1]).view(4, 1)
    torch.testing.assert_close(q.detach(), expected)


def test_setting_tau_between_two_optimizers_keeps_the_rates_of_the_iteration() -> None:
    model = layers(1, lambda: Separate(bias=True))
    matrices, biases = ([p for p in model.parameters() if p.ndim == n] for n in (2, 1))
    first, second = torch.optim.SGD(matrices, lr=0.1), torch.optim.SGD(biases, lr=0.1)
    quack = QuacK(model, [first, second])
    with torch.no_grad():
        model[0].k.weight.mul_(10)  # type: ignore[union-attr, operator]
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    first.step()
    rates = quack.rule.rates.clone()
    quack.rule.tau = 0.5  # type: ignore[attr-defined]
    second.step()
    assert_equal(quack.rule.rates, rates)
    first.step()
    assert quack.rule.rates.max() < 0.6


def test_a_state_of_another_width_or_with_nan_is_refused() -> None:
    wide, narrow = (nn.Sequential(Separate(width)) for width in (32, 16))
    quack = QuacK(narrow, torch.optim.SGD(narrow.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"0.k has shape \[32, 32\] in the state, \[16, 16\]"):
        quack.load_state_dict(QuacK(wide, torch.optim.SGD(wide.parameters(), lr=0.1)).state_dict())
    broken = quack.state_dict()
    broken["sensitivity"]["0.q"][0] = torch.nan
    with pytest.raises(ValueError, match="0.q: its sensitivity in the state must be 4 finite numbers"):
        quack.load_state_dict(broken)


def test_parameters_that_change_dtype_are_followed() -> None:
    model = layers(1, Separate)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    quack = QuacK(model, optimizer)
    train(model, optimizer, steps=1)
    for param in model.parameters():
        param.grad, param.data = None, param.data.double()
    rates = quack.rates()
    train(model, optimizer, steps=1)
    assert model[0].q.weight.dtype == torch.float64  # type: ignore[union-attr]
    assert not torch.equal(quack.rates()["0.q"], rates["0.q"])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, from its compiler
def test_names_are_the_same_for_a_compiled_model() -> None:
    model = layers(1, Separate)
    compiled = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert list(QuacK(compiled, optimizer).rates()) == ["0.q", "0.k"]  # type: ignore[arg-type]
    part = nn.ModuleDict({"a": nn.MultiheadAttention(8, 2)})
    part["a"] = torch.compile(part["a"])  # type: ignore[assignment]
    assert [weight.name for path in logit_paths(part) for weight in path.weights] == ["a.q", "a.k"]


def row(name: str, rows: int, blocks: int = 1, bias: bool = False) -> Weight:
    b = nn.Parameter(torch.ones(rows)) if bias else None
    return Weight(name, nn.Parameter(torch.ones(rows, 2)), torch.arange(rows) // (rows // blocks), bias=b)


def test_a_bias_in_the_middle_of_a_chain_is_refused_since_it_begins_a_path_of_its_own() -> None:
    dq, uq, k = row("dq", 2), row("uq", 4, bias=True), row("k", 4)
    with pytest.raises(ValueError, match="^uq: its bias adds a term that the weights before it are not on"):
        LogitPath((dq, uq, k), 1)
    LogitPath((uq, k), 1)  # at an end of the chain it reads the input, like any other


MODEL = nn.Sequential(Separate())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda o: QuacK(MODEL, o, o), r"several optimizers are given as a list: QuacK\(model, \[first, second\]\)"),
        (lambda o: QuacK("gpt", o), "the model must be an nn.Module or a list of LogitPath, not str"),  # type: ignore[arg-type]
        (
            lambda o: QuacK(MODEL.parameters(), o),  # type: ignore[arg-type]
            "the model must be an nn.Module or a list of LogitPath, not Parameter",
        ),
        (lambda o: QuacK(o, MODEL), "the model must be an nn.Module or a list of LogitPath, not SGD"),  # type: ignore[arg-type]
        (lambda _: QuacK(MODEL, None), "NoneType is not a torch.optim.Optimizer"),  # type: ignore[arg-type]
        (lambda _: Paper(norm="spectral"), "norm='spectral': a norm is a function"),  # type: ignore[arg-type]
        (lambda o: QuacK(MODEL, o, tau="1"), "tau='1': .* must be a positive number"),  # type: ignore[arg-type]
        (lambda o: QuacK(MODEL, o, rule=Paper(floor=None)), "floor=None: .* must be 0 or a positive number"),  # type: ignore[arg-type]
        (lambda _: packed(nn.Linear(2, 4), "q", 2, 2), "q: a segment is .name, blocks, rows of a block."),  # type: ignore[arg-type]
        (lambda _: packed(nn.Linear(2, 4), ("q", 2, 4 / 2)), "a segment is .name, blocks, rows of a block."),  # type: ignore[arg-type]
        (lambda _: packed(nn.Linear(2, 4), ("q", -2, -2)), "two positive whole numbers"),
        (lambda _: mha(row("q", 8, 4), row("k", 8, 2)), r"q has \[2\] rows a block and k has \[4\]"),
        (
            lambda _: mla(row("uq", 2), row("uk", 2), row("qr", 2), row("kr", 1)),
            r"qr has \[2\] rows a block and kr has",
        ),
    ],
)
def test_a_wrong_call_says_what_is_wrong(make: Callable[[Any], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(torch.optim.SGD(MODEL.parameters(), lr=0.1))


def test_a_wrong_declaration_names_its_module() -> None:
    class Wrong(Separate):
        def logit_paths(self) -> Any:
            return None

    model = nn.ModuleDict({"attention": Wrong()})
    with pytest.raises(ValueError, match=r"logit_paths\(\) of attention must return a list of LogitPath, not NoneType"):
        QuacK(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_model_that_is_all_frozen_is_refused() -> None:
    model = layers(1, Separate).requires_grad_(False)
    with pytest.raises(ValueError, match="0.q and all others on a path are frozen, so there is nothing to control"):
        QuacK(model, torch.optim.SGD(model.parameters(), lr=0.1))
