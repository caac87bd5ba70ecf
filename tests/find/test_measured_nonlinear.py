"""Measuring functions of queries and keys before their product: on a path, bounded, or not describable by paths.

The tests multiply the weights of queries and keys by a large number. The weights are on a path if the largest logit
grows in proportion, and on none if it does not grow. If it grows faster, no path describes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quacklr.find.finding import QK_NORM, Finding
from quacklr.find.measure.assemble import measured_paths
from stand_ins_kit import HF, WIDTH, Model, Plain, complex_rope, linear, rms

SAMPLE = torch.randint(61, (2, 5), generator=torch.Generator().manual_seed(0))
SHORT = [SAMPLE, SAMPLE[:1, :4], SAMPLE[:1, :3], SAMPLE[:1, :2], SAMPLE[:, :2]]
SCALE = 1e4
Made = Callable[[Tensor], Tensor]
SAME = nn.Identity()


class Changed(Plain):
    """Queries and keys (B, H, T, K) go through functions before their product."""

    def __init__(self, of_q: Made, of_k: Made, groups: int = 2) -> None:
        super().__init__(groups=groups)
        self.of_q, self.of_k = of_q, of_k
        self.gate, self.logits = linear(32), torch.zeros(())

    def forward(self, hidden_states: Tensor) -> Tensor:
        self.open = self.split(self.gate(hidden_states))
        return super().forward(hidden_states)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key = self.of_q(query), self.of_k(key).repeat_interleave(self.num_key_value_groups, 1)
        self.logits = query @ key.mT
        return self.logits.softmax(-1) @ value.repeat_interleave(self.num_key_value_groups, 1)

    def growth(self, name: str) -> float:
        """The power of a weight's scale with which the largest logit grows. The measurement is judged by it."""
        x = torch.randn(2, 50, WIDTH, generator=torch.Generator().manual_seed(1))
        sizes = []
        with torch.no_grad():
            for scale in (SCALE, SCALE, SCALE):
                self.get_parameter(f"{name}.weight").mul_(scale)
                self(x)
                sizes.append(float(self.logits.double().abs().max()))
            self.get_parameter(f"{name}.weight").div_(SCALE**3)
        return math.log(sizes[1] / sizes[0]) / math.log(SCALE)


def roped(function: Made) -> Made:
    return lambda x: function(complex_rope(x.transpose(1, 2)).transpose(1, 2))


PROPORTIONAL: dict[str, Made] = {
    "relu": F.relu,
    "relu by where": lambda x: torch.where(x > 0, x, 0),
    "softplus": F.softplus,
    "gelu": F.gelu,
    "concatenated relus": lambda x: torch.cat([F.relu(x), F.relu(-x)], -1),
}


def measured(attention: nn.Module, sample: Tensor = SAMPLE) -> Finding:
    (finding,) = measured_paths(Model(HF, attention), sample).values()
    return finding


def blocks(finding: Finding, attention: nn.Module) -> dict[str, list[int]]:
    """The block of every row, by parameter."""
    names = {id(param): name for name, param in attention.named_parameters()}
    return {names[id(w.param)]: w.block_of_row.tolist() for path in finding.paths for w in path.weights}


Q, K = [row // 8 for row in range(32)], [row // 8 for row in range(16)]


@pytest.mark.parametrize("name", PROPORTIONAL)
def test_what_grows_in_proportion_to_a_query_is_on_its_path(name: str) -> None:
    function = PROPORTIONAL[name]
    one_sided = ((function, nn.Identity()), (rms, function)) if function(torch.ones(2, 4, 5, 8)).shape[-1] == 8 else ()
    for of_q, of_k in ((function, function), *one_sided):
        attention = Changed(of_q, of_k)
        assert attention.growth("q_proj") == pytest.approx(0 if of_q is rms else 1, abs=0.05)
        assert attention.growth("k_proj") == pytest.approx(1, abs=0.05)
        expected = {"k_proj.weight": K} | ({} if of_q is rms else {"q_proj.weight": Q})
        assert blocks(measured(attention), attention) == expected


@pytest.mark.parametrize("sample", SHORT, ids=lambda sample: str(tuple(sample.shape)))
@pytest.mark.parametrize("name", ["relu", "gelu", "concatenated relus"])
def test_a_short_sample_shows_every_row_behind_a_function(name: str, sample: Tensor) -> None:
    attention = Changed(PROPORTIONAL[name], PROPORTIONAL[name])
    assert blocks(measured(attention, sample), attention) == {"q_proj.weight": Q, "k_proj.weight": K}


@pytest.mark.parametrize("sample", SHORT, ids=lambda sample: str(tuple(sample.shape)))
@pytest.mark.parametrize("function", [roped(F.relu), lambda x: F.relu(x - x.mean(-1, True)), lambda x: F.relu(x - 2)])
def test_rows_that_a_sample_may_have_missed_are_never_left_out_in_silence(function: Made, sample: Tensor) -> None:
    """Some entries have no gradient. Either all rows are found nevertheless, or the finding has a reason."""
    attention = Changed(function, nn.Identity())
    finding = measured(attention, sample)
    if "have no gradient" not in finding.reason:
        assert blocks(finding, attention) == {"q_proj.weight": Q, "k_proj.weight": K}


class Fused(nn.Module):
    """Queries and keys are rows of one weight; a function of one of them may have no gradient."""

    def __init__(self, of_q: Made, of_k: Made) -> None:
        super().__init__()
        self.qkv, self.of_q, self.of_k = linear(96), of_q, of_k

    def forward(self, hidden_states: Tensor) -> Tensor:
        q, k, v = (x.unflatten(-1, (4, 8)).transpose(1, 2) for x in self.qkv(hidden_states).chunk(3, -1))
        return F.scaled_dot_product_attention(self.of_q(q), self.of_k(k), v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("functions", [(SAME, lambda x: F.relu(x - 2)), (lambda x: F.relu(x - 2), SAME)])
def test_missing_gradients_are_seen_on_both_sides_of_a_fused_weight(functions: tuple[Made, Made]) -> None:
    finding = measured(Fused(*functions))
    assert "have no gradient" in finding.reason
    assert finding.undecided


def test_what_is_bounded_is_on_no_path() -> None:
    attention = Changed(torch.tanh, nn.Identity())
    assert attention.growth("q_proj") == pytest.approx(0, abs=0.05)
    assert blocks(measured(attention), attention) == {"k_proj.weight": K}
    both = measured(Changed(torch.tanh, torch.tanh))
    assert not both.paths
    assert not both.unknown
    assert "bounded" in both.reason
    assert QK_NORM not in both.reason


@pytest.mark.parametrize("function", [rms, lambda x: F.softplus(rms(x)), lambda x: rms(F.relu(x))])
def test_a_norm_is_called_a_norm(function: Made) -> None:
    attention = Changed(function, function)
    assert attention.growth("q_proj") == pytest.approx(0, abs=1e-3)
    finding = measured(attention)
    assert finding.reason == QK_NORM
    assert not finding.unknown


@pytest.mark.parametrize("function", [torch.square, lambda x: F.relu(x) ** 2])
def test_what_grows_faster_is_refused_and_never_called_a_norm(function: Made) -> None:
    for attention in (Changed(function, nn.Identity()), Changed(rms, function)):
        part = "k_proj" if attention.of_q is rms else "q_proj"
        assert attention.growth(part) > 1.5
        finding = measured(attention)
        assert finding.unknown
        assert "not linear" in finding.reason
        assert "norm" not in finding.reason
        assert "logit_paths()" in finding.reason


class Gated(Changed):
    """Queries are multiplied by another projection."""

    def __init__(self, gate: Made, of_q: Made = SAME) -> None:
        super().__init__(lambda q: of_q(q) * gate(self.open), nn.Identity())


@pytest.mark.parametrize("gate", [torch.sigmoid, lambda x: x.softmax(-1)])
@pytest.mark.parametrize("of_q", [nn.Identity(), F.relu, F.softplus])
def test_a_bounded_gate_is_on_no_path(gate: Made, of_q: Made) -> None:
    attention = Gated(gate, of_q)
    assert attention.growth("gate") == pytest.approx(0, abs=0.1)
    finding = measured(attention)
    if of_q is not F.softplus or finding.paths:
        assert blocks(finding, attention) == {"q_proj.weight": Q, "k_proj.weight": K}
    else:
        assert "not linear" in finding.reason


@pytest.mark.parametrize("gate", [nn.Identity(), F.silu])
def test_a_gate_that_is_not_bounded_is_refused(gate: Made) -> None:
    """With the weights of the gate a logit grows without bound, so the query's norm alone does not bound it."""
    attention = Gated(gate)
    assert attention.growth("gate") > 0.9
    finding = measured(attention)
    assert finding.unknown
    assert "not linear" in finding.reason


class OfTheLogit(Changed):
    """A function of the logits after the product."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(nn.Identity(), nn.Identity())
        self.function = function

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (each.repeat_interleave(2, 1) for each in (key, value))
        self.logits = self.function(query @ key.mT, self.open.mean(-1, keepdim=True))
        return self.logits.softmax(-1) @ value


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda z, _: 3 * torch.tanh(z / 3), True),
        (lambda z, g: z * torch.sigmoid(g), True),
        (lambda z, g: z + g, True),
        (lambda z, _: z.exp(), False),
        (lambda z, g: z * g, False),
    ],
    ids=["cap", "gate", "projected bias", "exp", "projected factor"],
)
def test_a_logit_that_grows_faster_than_the_product_is_refused(
    function: Callable[[Tensor, Tensor], Tensor], found: bool
) -> None:
    attention = OfTheLogit(function)
    finding = measured(attention)
    if found:
        assert blocks(finding, attention) == {"q_proj.weight": Q, "k_proj.weight": K}
    else:
        assert finding.unknown
        assert "not linear" in finding.reason or "not finite" in finding.reason


class TwoLayers(Plain):
    """Queries are made by two layers, with a function between them."""

    def __init__(self, function: Made, gated: bool = False) -> None:
        super().__init__()
        self.up, self.gate, self.function, self.gated = linear(24), linear(24), function, gated
        self.q_proj = linear(32, 24)

    def forward(self, hidden_states: Tensor) -> Tensor:
        inner = self.function(self.gate(hidden_states) if self.gated else self.up(hidden_states))
        q = self.split(self.q_proj(inner * self.up(hidden_states) if self.gated else inner))
        k, v = (self.split(proj(hidden_states)) for proj in (self.k_proj, self.v_proj))
        return self.o_proj(self.attend(q, k, v).transpose(1, 2).flatten(2))


def names(finding: Finding, attention: nn.Module) -> set[frozenset[str]]:
    known = {id(param): name.removesuffix(".weight") for name, param in attention.named_parameters()}
    return {frozenset(known[id(w.param)] for w in path.weights) for path in finding.paths}


@pytest.mark.parametrize(
    ("attention", "expected"),
    [
        (TwoLayers(nn.Identity()), {frozenset({"up", "q_proj", "k_proj"})}),
        (TwoLayers(F.relu), {frozenset({"up", "q_proj", "k_proj"})}),
        (TwoLayers(F.gelu), {frozenset({"up", "q_proj", "k_proj"}), frozenset({"q_proj", "k_proj"})}),
        (TwoLayers(torch.tanh), {frozenset({"q_proj", "k_proj"})}),
        (
            TwoLayers(torch.sigmoid, gated=True),
            {frozenset({"up", "q_proj", "k_proj"}), frozenset({"q_proj", "k_proj"})},
        ),
        (TwoLayers(F.silu, gated=True), set()),
    ],
    ids=["linear", "relu", "gelu", "tanh", "sigmoid gate", "SwiGLU"],
)
def test_a_query_made_by_two_layers_is_a_longer_path_if_it_grows_in_proportion(
    attention: nn.Module, expected: set[frozenset[str]]
) -> None:
    finding = measured(attention)
    assert names(finding, attention) == expected
    assert ("not linear" in finding.reason) == (not expected)


class Identity(TwoLayers):
    """The second layer starts as the identity, or at zero: every head reads all of the first nevertheless."""

    def __init__(self, start: Callable[[Tensor], Tensor]) -> None:
        super().__init__(nn.Identity())
        self.up, self.q_proj = linear(32), linear(32, 32)
        start(self.q_proj.weight)


@pytest.mark.parametrize("start", [nn.init.eye_, nn.init.zeros_, nn.init.normal_])
def test_a_weight_that_starts_as_the_identity_does_not_hide_rows(start: Callable[[Tensor], Tensor]) -> None:
    attention = Identity(start)
    before = attention.q_proj.get_parameter("weight").clone()
    assert blocks(measured(attention), attention) == {"up.weight": [0] * 32, "q_proj.weight": Q, "k_proj.weight": K}
    assert torch.equal(attention.q_proj.get_parameter("weight"), before)


def test_a_norm_of_some_rows_of_a_projection_is_refused() -> None:
    """Of two rows of one head, the normed one is on no path and the other is. Paths cannot describe that."""
    finding = measured(Changed(lambda x: torch.cat([rms(x[..., :4]), x[..., 4:]], -1), SAME))
    assert finding.unknown
    assert "not linear" in finding.reason


def test_a_norm_of_a_sum_of_products_is_a_norm() -> None:
    class Sum(Plain):
        def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            key, value = (each.repeat_interleave(2, 1) for each in (key, value))
            one, two = (a @ b.mT for a, b in zip(query.chunk(2, -1), key.chunk(2, -1), strict=True))
            return F.layer_norm(one + two, one.shape[-1:]).softmax(-1) @ value

    assert measured(Sum()).reason == QK_NORM
