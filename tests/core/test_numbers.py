"""Numbers near the limits of float32, and parameters of unusual dtypes: correct results, or a clear error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from models import Latent, Separate, assert_equal, layers, train
from quacklr import ConstantTau, LogitPath, Paper, QuacK, Weight, mha, packed, sensitivity, spectral


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def scaled(model: nn.Module, factor: float) -> nn.Module:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(factor)
    return model


def test_finite_weights_whose_norm_a_float32_cannot_hold_are_refused() -> None:
    model = scaled(layers(1, Separate), 1e21)
    with pytest.raises(ValueError, match="^0.q: holds NaN or inf, or its norm is more than float32 can hold"):
        QuacK(model, sgd(model))


def test_in_double_precision_large_weights_are_measured() -> None:
    model = scaled(layers(1, Separate).double(), 1e21)
    quack = QuacK(model, sgd(model))
    scaled(model, 10)
    torch.testing.assert_close(quack.rates()["0.q"], torch.full((4,), 0.1))


@pytest.mark.parametrize(("factor", "word"), [(1e14, "above"), (1e-18, "below")])
def test_a_path_whose_product_a_float32_cannot_hold_is_refused(factor: float, word: str) -> None:
    """Each norm is an ordinary float32; three of them together are not."""
    model = scaled(Latent(), factor)
    with pytest.raises(ValueError, match=rf"^\w+: the product of its partners' norms is {word} what float32 can hold"):
        QuacK(model, sgd(model))


def test_a_constant_rate_needs_no_product() -> None:
    model = scaled(Latent(), 1e14)
    assert QuacK(model, sgd(model), rule=ConstantTau(1.0)).rates()["uq"].tolist() == [1.0] * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tau": 1e308}, r"tau=1e\+308: .* float32"),
        ({"tau": 1e-60}, r"tau=1e-60: .* float32"),
        ({"floor": 1e308}, r"floor=1e\+308: .* float32"),
        ({"tau": 10**400}, "tau=1000.*: .* float32"),
        ({"tau": True}, "tau=True: .* float32"),
        ({"floor": True}, "floor=True"),
        ({"tau": 1e38}, "tau=1e.38: with these weights"),
    ],
)
def test_settings_that_a_float32_cannot_hold_are_refused(options: dict[str, Any], message: str) -> None:
    model = scaled(layers(1, Separate), 1e3)
    with pytest.raises(ValueError, match=message):
        QuacK(model, sgd(model), rule=Paper(**options))


def test_setting_tau_later_is_refused_in_the_same_words() -> None:
    model = layers(1, Separate)
    quack = QuacK(model, sgd(model))
    for tau in (1e308, -1.0, float("nan"), "1"):
        with pytest.raises(ValueError, match="tau"):
            quack.rule.tau = tau  # type: ignore[attr-defined]
    assert isinstance(quack.rule, Paper)
    assert quack.rule.tau == 1.0
    assert quack.rates()["0.q"].tolist() == [1.0] * 4


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn, torch.int8, torch.bool])
@pytest.mark.parametrize("use", [lambda paths, _: sensitivity(paths), lambda paths, params: QuacK(paths, params)])
def test_parameters_that_are_not_real_numbers_of_16_bits_or_more_are_refused(
    dtype: torch.dtype, use: Callable[..., object]
) -> None:
    params = [nn.Parameter(torch.ones(2, 3).to(dtype), requires_grad=dtype.is_complex) for _ in range(2)]
    with pytest.raises(ValueError, match=rf"^q: its parameter is {dtype}; .* float16, bfloat16, float32 or float64"):
        use(mha(Weight("q", params[0], torch.arange(2)), Weight("k", params[1], torch.arange(2))), params)


def test_a_bias_on_the_meta_device_is_refused() -> None:
    model = nn.Sequential(Separate(bias=True))
    model[0].q.bias = nn.Parameter(torch.empty(16, device="meta"))  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"^0.q.bias: its parameter is on the meta device"):
        QuacK(model, sgd(model))


@pytest.mark.parametrize(
    ("of_weight", "of_bias"),
    [
        (torch.float64, torch.float32),
        (torch.float32, torch.float64),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
    ],
)
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


def test_spectral_norms_follow_a_model_that_becomes_double() -> None:
    model = layers(1, Separate)
    optimizer = sgd(model)
    quack = QuacK(model, optimizer, rule=Paper(norm=spectral))
    train(model, optimizer)
    rates = quack.rates()
    for param in model.parameters():
        param.grad, param.data = None, param.data.double()
    torch.testing.assert_close(quack.rates(), rates)
    train(model, optimizer)
    quack.load_state_dict(quack.state_dict())
    train(model, optimizer)


@pytest.mark.parametrize("shape", [(4, 0), (0, 4)])
def test_a_weight_without_entries_is_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"^q: its parameter has no entries"):
        Weight("q", nn.Parameter(torch.empty(shape)), torch.zeros(shape[0], dtype=torch.long))


def test_packed_on_a_parametrised_module_says_what_to_pass() -> None:
    linear = parametrizations.weight_norm(nn.Linear(3, 4))
    with pytest.raises(
        ValueError, match=r"^q k: ParametrizedLinear's weight is parametrised; pass the parameter .*original1"
    ):
        packed(linear, ("q", 1, 2), ("k", 1, 2))
    with pytest.raises(ValueError, match=r"^q: ReLU has no parameter called weight"):
        packed(nn.ReLU(), ("q", 1, 2))


@pytest.mark.parametrize(
    "read", [[0.7, 1.9], torch.tensor([0.0, 1.0]), [True, False], [0, 2], [0, -1], [0], [[0, 1]], "ab"]
)
def test_block_of_head_must_be_whole_numbers_of_blocks(read: Any) -> None:
    q, k = (Weight(name, nn.Parameter(torch.ones(2, 3)), torch.arange(2)) for name in "qk")
    with pytest.raises(ValueError, match="^q: block_of_head must"):
        LogitPath((q, k), 2, [read, None])


@pytest.mark.parametrize("heads", [2.0, True, 0, -2, "2"])
def test_the_number_of_heads_must_be_a_positive_whole_number(heads: Any) -> None:
    q, k = (Weight(name, nn.Parameter(torch.ones(2, 3)), torch.arange(2)) for name in "qk")
    with pytest.raises(ValueError, match="heads"):
        LogitPath((q, k), heads)


@pytest.mark.parametrize("rows", [[0.0, 1.0], [True, False], "ab", [[0], [1]], [0, 1, 1], None])
def test_block_of_row_must_be_whole_numbers(rows: Any) -> None:
    with pytest.raises(ValueError, match="^q: "):
        Weight("q", nn.Parameter(torch.ones(2, 3)), rows)


def test_a_weight_takes_lists_and_small_integers() -> None:
    param = nn.Parameter(torch.ones(2, 3))
    for rows in ([0, 1], torch.tensor([0, 1], dtype=torch.uint8), range(2)):
        assert_equal(Weight("q", param, rows).block_of_row, torch.tensor([0, 1]))  # type: ignore[arg-type]


def test_a_param_that_is_no_tensor_is_refused() -> None:
    given: Any = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="^q: its parameter is a Linear, not a tensor"):
        Weight("q", given, torch.arange(2))


def test_rates_are_numbers_when_a_partner_becomes_infinite() -> None:
    model = layers(1, Separate)
    quack = QuacK(model, sgd(model))
    with torch.no_grad():
        weight: Tensor = model[0].k.weight  # type: ignore[assignment, union-attr]
        weight.fill_(torch.inf)
    assert all(bool(rates.isfinite().all()) for rates in quack.rates().values())
