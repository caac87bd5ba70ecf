"""Regressions: problems that the first users reported."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from models import PerHead, Separate, assert_equal, layers, train
from quacklr import Paper, QuacK, logit_paths, mha, packed, spectral


@pytest.fixture
def default_dtype() -> Iterator[Callable[[torch.dtype], None]]:
    before = torch.get_default_dtype()
    yield torch.set_default_dtype
    torch.set_default_dtype(before)


def test_the_default_dtype_does_not_matter(default_dtype: Callable[[torch.dtype], None]) -> None:
    torch.manual_seed(0)
    model = layers(1, PerHead)
    plain = copy.deepcopy(model)
    default_dtype(torch.bfloat16)
    optimizer, plain_optimizer = (
        type("Mine", (torch.optim.SGD,), {})(m.parameters(), lr=0.1) for m in (model, plain)
    )  # a class that is tested on small parameters
    quack = QuacK(model, optimizer, tau=1.0)
    quack.load_state_dict(quack.state_dict())
    rate = quack.rate_of(model[0].qkv.weight)  # type: ignore[union-attr, arg-type]
    assert rate is not None
    assert rate.dtype == torch.float32
    assert rate.unique().tolist() == [1.0]
    for m, o in ((model, optimizer), (plain, plain_optimizer)):
        train(m, o, steps=1)
    assert_equal(list(model.state_dict().values()), list(plain.state_dict().values()))


def test_the_default_device_does_not_matter() -> None:
    model = layers(1, PerHead)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.device("meta"):
        quack = QuacK(model, optimizer, rule=Paper(norm=spectral))
        quack.load_state_dict(quack.state_dict())
    assert quack.rates()["0.q"].tolist() == [1.0] * 4


def test_a_copy_that_would_do_nothing_is_refused() -> None:
    model = layers(1, Separate)
    quack = QuacK(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for make in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="a QuacK cannot be copied or pickled; attach a new one"):
            make(quack)


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
    torch.testing.assert_close(q.detach(), old - 0.5 * torch.tensor([1, 1, 0.25, 1]).view(4, 1))


def test_setting_tau_between_two_optimizers_keeps_the_rates_of_the_iteration() -> None:
    model = layers(1, lambda: Separate(bias=True))
    first, second = (torch.optim.SGD([p for p in model.parameters() if p.ndim == n], lr=0.1) for n in (2, 1))
    quack = QuacK(model, [first, second], tau=1.0)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    first.step()
    rates = quack.rates(last=True)
    quack.rule.tau = 0.5  # type: ignore[attr-defined]
    second.step()
    assert_equal(quack.rates(last=True), rates)
    first.step()
    assert quack.rates(last=True)["0.q"].max() < 0.6


def test_parameters_that_change_dtype_are_followed() -> None:
    model = layers(1, Separate)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    quack = QuacK(model, optimizer)
    train(model, optimizer, steps=1)
    for param in model.parameters():
        param.grad, param.data = None, param.data.double()
    rates = quack.rates()
    train(model, optimizer, steps=1)
    assert not torch.equal(quack.rates()["0.q"], rates["0.q"])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, from its compiler
def test_names_are_the_same_for_a_compiled_model() -> None:
    model = layers(1, Separate)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert list(QuacK(torch.compile(model), optimizer, tau=1.0).rates()) == ["0.q", "0.k"]  # type: ignore[arg-type]
    part = nn.ModuleDict({"a": torch.compile(nn.MultiheadAttention(8, 2))})  # type: ignore[dict-item]
    assert [weight.name for path in logit_paths(part) for weight in path.weights] == ["a.q", "a.k"]
