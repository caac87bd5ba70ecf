"""Compositional Muon beside its formula in plain loops, with exact singular vectors in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from quacklr.lab.methods import CompositionalMuon, attach
from quacklr.lab.model import MHA, MLA, Decoder, Shape
from quacklr.lab.model_parts import factors
from quacklr.lab.optim import Muon, compositional
from quacklr.lab.optim.compositional import Composition, Factor

WIDTH, SIZE, HEADS, GROUPS = 12, 3, 4, 2


def polar(matrix: Tensor) -> Tensor:
    """U V' of each matrix."""
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    return left @ right


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compositional, "orthogonalise", polar)


def inverse_root(gram: Tensor, damping: float) -> Tensor:
    """By singular values, not by eigenvalues."""
    left, values, right = torch.linalg.svd(gram + damping * torch.eye(len(gram)))
    return left @ torch.diag(values**-0.5) @ right


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def weights() -> dict[str, Tensor]:
    q, k, v = (numbers(heads * SIZE, WIDTH, seed=heads + i) for i, heads in enumerate((HEADS, GROUPS, GROUPS)))
    return {"q": q, "k": k, "v": v, "o": numbers(WIDTH, HEADS * SIZE, seed=9)}


def head(matrix: Tensor, index: int) -> Tensor:
    return matrix[index * SIZE : (index + 1) * SIZE]


def steps(weights: dict[str, Tensor], gradients: dict[str, Tensor], isotropic: bool = False) -> dict[str, Tensor]:
    factor = {
        "q": Factor(weights["q"], HEADS),
        "k": Factor(weights["k"], GROUPS),
        "v": Factor(weights["v"], GROUPS),
        "o": Factor(weights["o"], HEADS, by_columns=True),
    }
    products = [(factor["q"], factor["k"]), (factor["o"], factor["v"])]
    names = {id(weight): name for name, weight in weights.items()}
    found = Composition(products, 1.5, 0.1, isotropic).steps(lambda param: gradients[names[id(param)]])
    return {names[id(param)]: step for param, step in found}


@pytest.mark.parametrize("isotropic", [False, True])
def test_the_steps_are_those_of_the_formula(weights: dict[str, Tensor], isotropic: bool) -> None:
    gradients = {name: numbers(*weight.shape, seed=20 + i) for i, (name, weight) in enumerate(weights.items())}
    found = steps(weights, gradients, isotropic)
    shared = HEADS // GROUPS

    def root(gram: Tensor) -> Tensor:
        if isotropic:
            return torch.eye(SIZE, dtype=torch.float64) / (gram.trace() / SIZE + 0.1) ** 0.5
        return inverse_root(gram, 0.1)

    whitened = torch.empty(HEADS * SIZE, WIDTH, dtype=torch.float64)
    for h in range(HEADS):
        k, v = head(weights["k"], h // shared), head(weights["v"], h // shared)
        expected = root(k @ k.T) @ polar(root(k @ k.T) @ head(gradients["q"], h))
        assert torch.allclose(head(found["q"], h), expected * 1.5 / 2)
        whitened[h * SIZE : (h + 1) * SIZE] = root(v @ v.T) @ gradients["o"].T[h * SIZE : (h + 1) * SIZE]
    one_sign = polar(whitened)
    for h in range(HEADS):
        v = head(weights["v"], h // shared)
        expected = root(v @ v.T) @ head(one_sign, h) * 1.5 / 2
        assert torch.allclose(found["o"].T[h * SIZE : (h + 1) * SIZE], expected)
    for g in range(GROUPS):
        members = range(g * shared, (g + 1) * shared)
        of_q = root(sum((head(weights["q"], h) @ head(weights["q"], h).T for h in members), torch.zeros(SIZE, SIZE)))
        of_o = root(
            sum((head(weights["o"].T, h) @ head(weights["o"].T, h).T for h in members), torch.zeros(SIZE, SIZE))
        )
        for name, of_partner in (("k", of_q), ("v", of_o)):
            expected = of_partner @ polar(of_partner @ head(gradients[name], g))
            assert torch.allclose(head(found[name], g), expected * 1.5 / 2 / shared), name


def test_the_product_changes_as_much_however_large_the_partner_is() -> None:
    q, k = numbers(SIZE, WIDTH, seed=0), numbers(SIZE, WIDTH, seed=1)
    gradient = numbers(SIZE, WIDTH, seed=2)
    changes = []
    for size in (1.0, 30.0):
        composition = Composition([(Factor(q, 1), Factor(k * size, 1))], damping=1e-12)
        step = dict(composition.steps(lambda _: gradient))[q]
        changes.append(torch.linalg.svdvals(step.T @ (k * size))[:SIZE])
    for values in changes:  # half of the budget for each of the two weights
        assert torch.allclose(values, torch.full_like(values, 0.5))


@pytest.mark.parametrize(
    ("spec", "blocks"),
    [
        (MHA(4, 2, 8), {"q": 4, "k": 2, "o": 4, "v": 2}),
        (MLA(4, 8, 4, 6, d_cq=10, d_ckv=9), {"uq": 4, "uk": 4, "qr": 4, "kr": 1, "o": 4, "uv": 4}),
    ],
)
def test_the_products_of_an_attention_share_their_features(spec: MHA | MLA, blocks: dict[str, int]) -> None:
    model = Decoder(Shape(d_model=16, layers=1, d_ff=24, context=8, vocab=32), spec)
    (attention,) = model.attentions().values()
    names = {id(module.weight): name for name, module in attention.named_modules() if isinstance(module, nn.Linear)}
    found: dict[str, int] = {}
    for first, second in factors(attention):
        sizes = [each.split(each.param).shape[1] for each in (first, second)]
        assert sizes[0] == sizes[1], "the features that are multiplied"
        found |= {names[id(each.param)]: each.blocks for each in (first, second)}
    assert found == blocks


def test_other_weights_take_muons_step_and_momentum_is_the_same_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    shape, spec = Shape(d_model=16, layers=1, d_ff=24, context=8, vocab=32), MHA(2, 2, 8)
    models = [Decoder(shape, spec) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    muons = [Muon([p for p in model.blocks.parameters() if p.ndim == 2], lr=0.1) for model in models]
    attach(CompositionalMuon(), models[1], muons[1:])
    for model, muon in zip(models, muons, strict=True):
        for i, param in enumerate(model.blocks.parameters()):
            param.grad = numbers(*param.shape, seed=i).to(param.dtype)
        muon.step()
    plain, composed = ({n: p for n, p in model.blocks.named_parameters() if p.ndim == 2} for model in models)
    moved = {name for name in plain if not torch.equal(plain[name], composed[name])}
    assert moved == {f"0.attention.{role}.weight" for role in "qkvo"}
    for name in plain:
        one, other = (m.state[p[name]]["momentum_buffer"] for m, p in zip(muons, (plain, composed), strict=True))
        assert torch.equal(one, other)


def test_a_weight_that_muon_does_not_step_is_an_error() -> None:
    stranger = nn.Parameter(torch.ones(2, 2))
    muon = Muon([nn.Parameter(torch.ones(2, 2))], lr=0.1)
    with pytest.raises(ValueError, match="is to be composed but is not this Muon's"):
        muon.compose(Composition([(Factor(stranger, 1), Factor(stranger, 1))]))
