"""The rule, judged by the paper's algorithms written out in plain Python."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import reference
from models import Latent, Separate, layers
from quacklr import LogitPath, QuacK, Weight, mha, mla, packed, sensitivity, spectral
from reference import Layer

sizes = st.integers(1, 5)
scales = st.floats(0.01, 100)


def split(param: Tensor, heads: int) -> list[list[list[float]]]:
    return [head.tolist() for head in param.detach().double().chunk(heads)]


def mha_layers(model: nn.Sequential) -> list[Layer]:
    return [{"q": split(m.q.weight, m.heads), "k": split(m.k.weight, m.heads)} for m in model]  # type: ignore[union-attr, arg-type]


def mla_layers(model: nn.Sequential) -> list[Layer]:
    return [
        {role: split(m.get_parameter(f"{role}.weight"), m.heads) for role in ("uq", "uk", "qr")}  # type: ignore[arg-type]
        | {role: m.get_parameter(f"{role}.weight").tolist() for role in ("dq", "dkv", "kr")}
        for m in model
    ]


def grow(model: nn.Module, seed: int) -> None:
    """Change every weight by an amount and a scale of its own."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(10 ** (4 * torch.rand(len(param), 1, generator=random) - 2))
            param.add_(torch.randn(param.shape, generator=random))


def assert_rates(rates: dict[str, Tensor], lrs: list[Layer], eta: float) -> None:
    for i, layer in enumerate(lrs):
        for role, lr in layer.items():
            expected = torch.tensor(lr if isinstance(lr, list) else [lr]) / eta
            torch.testing.assert_close(rates[f"{i}.{role}"], expected, rtol=2e-6, atol=0)
    assert len(rates) == sum(map(len, lrs))


@given(heads=sizes, size=sizes, depth=st.integers(1, 3), tau=scales, seed=st.integers(0, 99))
def test_mha_rates_are_algorithm_1(heads: int, size: int, depth: int, tau: float, seed: int) -> None:
    torch.manual_seed(seed)
    model = layers(depth, lambda: Separate(heads * size, heads, heads))
    init = reference.mha_init_norms(mha_layers(model))
    with QuacK(model, torch.optim.SGD(model.parameters(), lr=0.1), tau=tau) as quack:
        grow(model, seed)
        assert_rates(quack.rates(), reference.mha_lrs(mha_layers(model), init, tau, eta=0.3), eta=0.3)


@given(heads=sizes, latent=sizes, nope=sizes, rope=sizes, depth=st.integers(1, 3), tau=scales, seed=st.integers(0, 99))
def test_mla_rates_are_algorithm_2(
    heads: int, latent: int, nope: int, rope: int, depth: int, tau: float, seed: int
) -> None:
    torch.manual_seed(seed)
    model = layers(depth, lambda: Latent(7, heads, latent, nope, rope))
    init = reference.mla_factors(mla_layers(model))
    with QuacK(model, torch.optim.SGD(model.parameters(), lr=0.1), tau=tau) as quack:
        grow(model, seed)
        assert_rates(quack.rates(), reference.mla_lrs(mla_layers(model), init, tau, eta=0.3), eta=0.3)


def weight(name: str, *norms: float) -> Weight:
    """A weight of one row a block, with these norms."""
    return Weight(name, nn.Parameter(torch.tensor(norms, dtype=torch.float32).unsqueeze(1)), torch.arange(len(norms)))


def by_name(paths: list[LogitPath]) -> dict[str, list[float]]:
    return {w.name: s.tolist() for w, s in sensitivity(paths).items()}


def test_a_grouped_key_is_as_sensitive_as_the_loudest_of_its_queries() -> None:
    found = by_name(mha(weight("q", 1, 5, 3, 2), weight("k", 7, 11)))
    assert found == {"q": [7, 7, 11, 11], "k": [5, 3]}
    assert by_name(mha(weight("q", 1, 5, 3), weight("k", 7))) == {"q": [7, 7, 7], "k": [5]}


def test_heads_can_read_blocks_in_any_order() -> None:
    interleaved = LogitPath((weight("q", 1, 5, 3, 2), weight("k", 7, 11)), 4, (None, torch.tensor([0, 1, 0, 1])))
    assert by_name([interleaved]) == {"q": [7, 11, 7, 11], "k": [3, 5]}


def test_a_weight_on_several_paths_takes_the_most_sensitive() -> None:
    shared = weight("a", 2)
    assert by_name([LogitPath((shared, weight("b", 3)), 1), LogitPath((shared, weight("c", 5), weight("d", 7)), 1)])[
        "a"
    ] == [35]


def test_a_norm_on_a_latent_takes_its_projection_off_the_paths() -> None:
    """DeepSeek's MLA: dq and dkv are left out, and the rest is as sensitive as if they were not there."""
    found = by_name(mla(weight("uq", 2, 3), weight("uk", 5, 7), weight("qr", 11, 13), weight("kr", 17)))
    assert found == {"uq": [5, 7], "uk": [2, 3], "qr": [17, 17], "kr": [13]}


def test_a_weight_that_is_its_own_partner_is_sensitive_to_itself() -> None:
    tied = weight("qk", 2, 3)
    assert by_name(mha(tied, tied)) == {"qk": [2, 3]}


def test_a_path_of_one_weight_is_linear_and_has_sensitivity_one() -> None:
    assert by_name([LogitPath((weight("a", 2, 3),), 2)]) == {"a": [1, 1]}


def test_the_norm_is_a_choice() -> None:
    torch.manual_seed(0)
    (q,), (k,) = packed(nn.Linear(8, 6, bias=False), ("q", 2, 3)), packed(nn.Linear(8, 6, bias=False), ("k", 2, 3))
    found = sensitivity(mha(q, k), norm=spectral)
    exact = torch.linalg.matrix_norm(k.param.detach().view(2, 3, 8), 2)
    torch.testing.assert_close(found[q], exact, rtol=1e-3, atol=0)


def test_scaling_one_key_slows_its_own_query_and_no_other() -> None:
    torch.manual_seed(0)
    model = Separate()
    with QuacK(nn.Sequential(model), torch.optim.SGD(model.parameters(), lr=0.1), tau=1.0) as quack:
        with torch.no_grad():
            model.k.weight[4:8] *= 8
        rates = quack.rates()
    torch.testing.assert_close(rates["0.q"], torch.tensor([1, 1 / 8, 1, 1]), rtol=1e-6, atol=0)
    assert rates["0.k"].tolist() == [1, 1, 1, 1]


def test_a_block_that_no_head_reads_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="k: block 1 is read by no head"):
        sensitivity([LogitPath((weight("q", 1, 2), weight("k", 1, 2)), 2, (None, torch.tensor([0, 0])))])
    with pytest.raises(ValueError, match="no paths given"):
        sensitivity([])


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_rates_stay_finite_whatever_becomes_of_a_partner(value: float) -> None:
    model = Separate()
    with QuacK(nn.Sequential(model), torch.optim.SGD(model.parameters(), lr=0.1), tau=0.5) as quack:
        with torch.no_grad():
            model.k.weight[0:4] = value
        rates = quack.rates()
    assert all(rate.isfinite().all() for rate in rates.values())
    assert rates["0.q"].tolist() == [0.0 if math.isinf(value) else 0.5, 0.5, 0.5, 0.5]
