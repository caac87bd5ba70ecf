"""Numbers near the limits of float32, and parameters of unusual dtypes: correct results, or a clear error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from models import Latent, Separate, assert_equal, layers, train
from quacklr import ConstantTau, Paper, QuacK, Weight, frobenius, mha, packed, spectral
from quacklr.core.norms import Norm


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def scaled(model: nn.Module, factor: float) -> nn.Module:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(factor)
    return model


def test_a_norm_that_a_float32_cannot_hold_is_refused_and_measured_in_double_precision() -> None:
    model = scaled(layers(1, Separate), 1e21)
    with pytest.raises(ValueError, match="^0.q: holds NaN or inf, or its norm is more than float32 can hold"):
        QuacK(model, sgd(model), tau=1.0)
    model = model.double()
    quack = QuacK(model, sgd(model), tau=1.0)
    scaled(model, 10)
    torch.testing.assert_close(quack.rates()["0.q"], torch.full((4,), 0.1))


@pytest.mark.parametrize(("factor", "word"), [(1e14, "above"), (1e-18, "below")])
def test_a_path_whose_product_a_float32_cannot_hold_is_refused_unless_the_rate_is_constant(
    factor: float, word: str
) -> None:
    """Each norm is an ordinary float32; three of them together are not."""
    model = scaled(Latent(), factor)
    with pytest.raises(ValueError, match=rf"^\w+: the product of its partners' norms is {word} what float32 can hold"):
        QuacK(model, sgd(model), tau=1.0)
    assert QuacK(model, sgd(model), rule=ConstantTau(1.0)).rates()["uq"].tolist() == [1.0] * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tau": 1e308}, r"tau=1e\+308: .* float32"),
        ({"tau": 1e-60}, r"tau=1e-60: .* float32"),
        ({"tau": 10**400}, "tau=1000.*: .* float32"),
        ({"tau": True}, "tau=True: .* float32"),
        ({"floor": 1e308}, r"floor=1e\+308: .* float32"),
        ({"tau": 1e38}, "tau=1e.38: with these weights"),
    ],
)
def test_settings_that_a_float32_cannot_hold_are_refused_also_later(options: dict[str, Any], message: str) -> None:
    model = scaled(layers(1, Separate), 1e3)
    with pytest.raises(ValueError, match=message):
        QuacK(model, sgd(model), rule=Paper(**options))
    if "tau" in options:
        with QuacK(model, sgd(model), rule=(rule := Paper())) as quack:
            with pytest.raises(ValueError, match=message):
                rule.tau = options["tau"]
            assert quack.rates()["0.q"].tolist() == [1.0] * 4


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn, torch.int8])
def test_parameters_that_are_not_real_numbers_of_16_bits_or_more_are_refused(dtype: torch.dtype) -> None:
    param = nn.Parameter(torch.ones(2, 3).to(dtype), requires_grad=dtype.is_complex)
    with pytest.raises(ValueError, match=rf"^q: its parameter is {dtype}; .* float16, bfloat16, float32 or float64"):
        Weight("q", param, torch.arange(2))


@pytest.mark.parametrize("of_bias", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("of_weight", [torch.float32, torch.bfloat16])
def test_a_bias_of_another_dtype_is_measured_and_moved(of_weight: torch.dtype, of_bias: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, bias = nn.Parameter(torch.randn(2, 3, dtype=of_weight)), nn.Parameter(torch.randn(2, dtype=of_bias))
    k = nn.Parameter(torch.randn(2, 4))
    optimizer = torch.optim.SGD([weight, bias, k], lr=0.1)
    q = Weight("q", weight, torch.arange(2), bias=bias)
    quack = QuacK(mha(q, Weight("k", k, torch.arange(2))), optimizer, tau=0.5)
    norm = (weight.detach().double().square().sum(1) + bias.detach().double().square()).sqrt()
    torch.testing.assert_close(quack.state_dict()["sensitivity"]["k"], norm.float())
    before = [param.detach().clone() for param in (weight, bias)]
    for param in (weight, bias, k):
        param.grad = torch.ones_like(param)
    for _ in range(2):
        optimizer.step()
    for param, old in zip((weight, bias), before, strict=True):
        assert param.dtype == old.dtype
        fell = old.double() - param.detach().double()
        assert (fell > 0.04).all()
        assert (fell < 0.15).all()


@pytest.mark.parametrize("norm", [frobenius, spectral])
def test_norms_follow_a_model_that_becomes_double(norm: Norm) -> None:
    model = layers(1, Separate)
    optimizer = sgd(model)
    quack = QuacK(model, optimizer, rule=Paper(norm=norm))
    train(model, optimizer)
    for param in model.parameters():
        param.grad, param.data = None, param.data.double()
    scaled(model, 1e30)  # a copy in float32 would have no norm
    large = quack.rates()
    scaled(model, 1e-30)
    torch.testing.assert_close({name: 1e30 * rates for name, rates in large.items()}, quack.rates())
    train(model, optimizer)
    quack.load_state_dict(quack.state_dict())
    train(model, optimizer)


def row_weight(name: str, rows: Any = (0, 1)) -> Weight:
    return Weight(name, nn.Parameter(torch.ones(2, 3)), rows)


def test_a_weight_takes_lists_and_small_integers() -> None:
    for rows in ([0, 1], torch.tensor([0, 1], dtype=torch.uint8), range(2)):
        assert_equal(row_weight("q", rows).block_of_row, torch.tensor([0, 1]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Weight("q", nn.Linear(2, 2), [0, 1]), "^q: its parameter is a Linear; .* a tensor"),  # type: ignore[arg-type]
        (lambda: Weight("q", torch.empty(4, 0), torch.arange(4)), "^q: its parameter has no entries"),
        (
            lambda: packed(parametrizations.weight_norm(nn.Linear(3, 4)), ("q", 1, 2), ("k", 1, 2)),
            r"^q k: ParametrizedLinear's weight is parametrised; pass the parameter .*original1",
        ),
        (lambda: packed(nn.ReLU(), ("q", 1, 2)), "^q: ReLU has no parameter called weight"),
    ],
)
def test_what_is_no_parameter_with_rows_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_bias_on_the_meta_device_is_refused() -> None:
    model: Any = nn.Sequential(Separate(bias=True))
    model[0].q.bias = nn.Parameter(torch.empty(16, device="meta"))
    with pytest.raises(ValueError, match=r"^0.q.bias: its parameter is on the meta device"):
        QuacK(model, sgd(model), tau=1.0)
