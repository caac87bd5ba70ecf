"""Lemma 1 and its extension to paths: a step under QuacK moves no logit further than the bound, however weights grow.

The bound is docs/theory.md's, for unit inputs and updates of norm at most D, in plain Python:

    sqrt(d) |change| <= sum over paths of  P * (prod over its weights of (1 + lr tau D s_init / P) - 1)

with P the product of the norms on the path for that head. The steps are real ones: SGD with QuacK attached.
"""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import reference
from models import Latent, Separate
from quacklr import Paper, QuacK, frobenius, spectral
from quacklr.core.norms import Norm

LR, D = 0.1, 3.0
seeds = st.integers(0, 10_000)
growth = st.floats(-1, 3)  # decades


def bound(paths: list[list[tuple[float, float]]], tau: float) -> float:
    """Each path a list of (norm now, sensitivity at the start) of its weights, for one head."""
    total = 0.0
    for path in paths:
        product = math.prod(norm for norm, _ in path)
        total += product * math.expm1(sum(math.log1p(LR * tau * D * s / product) for _, s in path))
    return total


def unit(*shape: int) -> Tensor:
    return nn.functional.normalize(torch.randn(*shape, dtype=torch.float64), dim=-1)


def rotation(size: int, position: float) -> Tensor:
    """RoPE: pairs of coordinates turned by an angle each."""
    angles = position * 10.0 ** -torch.arange(size // 2, dtype=torch.float64)
    cos, sin = torch.diag(angles.cos()), torch.diag(angles.sin())
    return torch.cat([torch.cat([cos, -sin], 1), torch.cat([sin, cos], 1)])


def grow(model: nn.Module, decades: float) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(10.0 ** (decades * torch.rand(len(param), 1, dtype=torch.float64)))


def set_gradients(model: nn.Module, blocks: dict[str, int], norm: Norm = frobenius) -> None:
    """A random direction of norm D for each block."""
    for name, param in model.named_parameters():
        direction = torch.randn_like(param).view(blocks.get(name.split(".")[0], 1), -1, param.shape[1])
        size = torch.linalg.matrix_norm(direction, "fro" if norm is frobenius else 2, keepdim=True)
        param.grad = (D * direction / size).view_as(param)


def mha_logits(model: Separate, x: Tensor, y: Tensor, turn_x: Tensor, turn_y: Tensor) -> Tensor:
    q, k = (
        model.q(x).unflatten(-1, (model.heads, -1)) @ turn_x.T,
        model.k(y).unflatten(-1, (model.groups, -1)) @ turn_y.T,
    )
    return (q * k.repeat_interleave(model.heads // model.groups, -2)).sum(-1).detach()


def norms(param: Tensor, blocks: int, norm: Norm = frobenius) -> list[float]:
    if norm is spectral:
        return torch.linalg.matrix_norm(param.detach().view(blocks, -1, param.shape[1]), 2).tolist()
    return [reference.norm(block.tolist()) for block in param.detach().chunk(blocks)]


@given(
    seed=seeds,
    decades=growth,
    tau=st.floats(0.1, 10),
    groups=st.sampled_from([1, 2, 4]),
    norm=st.sampled_from([frobenius, spectral]),
)
def test_lemma_1_holds_for_grouped_heads_with_rope(
    seed: int, decades: float, tau: float, groups: int, norm: Norm
) -> None:
    torch.manual_seed(seed)
    model = Separate(16, 4, groups).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    q0, k0 = norms(model.q.weight, 4, norm), norms(model.k.weight, groups, norm)
    with QuacK(nn.Sequential(model), optimizer, rule=Paper(tau, norm=norm)):
        grow(model, decades)
        q, k = norms(model.q.weight, 4, norm), norms(model.k.weight, groups, norm)
        inputs = unit(50, 16), unit(50, 16), rotation(4, 7.0 * seed), rotation(4, 3.0)
        before = mha_logits(model, *inputs)
        set_gradients(model, {"q": 4, "k": groups}, norm)
        optimizer.step()
    change = (mha_logits(model, *inputs) - before).abs().amax(0)
    for h in range(4):
        g = h // (4 // groups)
        loudest = max(q0[g * (4 // groups) : (g + 1) * (4 // groups)])
        slack = 1.01 if norm is spectral else 1 + 1e-6
        assert change[h] <= bound([[(q[h], k0[g]), (k[g], loudest)]], tau) * slack


@given(seed=seeds, decades=growth, tau=st.floats(0.1, 10))
def test_its_extension_to_mla_holds(seed: int, decades: float, tau: float) -> None:
    torch.manual_seed(seed)
    model = Latent().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    roles = {"dq": 1, "dkv": 1, "kr": 1, "uq": 4, "uk": 4, "qr": 4}

    def measure() -> dict[str, list[float]]:
        return {role: norms(model.get_parameter(f"{role}.weight"), blocks) for role, blocks in roles.items()}

    (factor,) = reference.mla_factors([{r: _matrices(model, r, b) for r, b in roles.items()}])
    tokens = unit(1, 8, 16)

    def logits() -> Tensor:
        turned = [rotation(2, seed + 2.0 * position) for position in range(8)]
        turn = torch.stack(turned).unsqueeze(0).unsqueeze(2)
        return model(tokens, lambda rope: (turn @ rope.unsqueeze(4)).squeeze(4)).detach() * 6**0.5

    with QuacK(nn.Sequential(model), optimizer, tau=tau):
        grow(model, decades)
        now, before = measure(), logits()
        set_gradients(model, roles)
        optimizer.step()
    change = (logits() - before).abs().amax((0, 2, 3))
    for h in range(4):

        def of(role: str, h: int = h) -> tuple[float, float]:
            head = h if roles[role] > 1 else 0
            return now[role][head], 1 / (factor[role][head] if roles[role] > 1 else factor[role])

        paths = [[of("dq"), of("uq"), of("uk"), of("dkv")], [of("dq"), of("qr"), of("kr")]]
        assert change[h] <= bound(paths, tau) * (1 + 1e-6)


def _matrices(model: Latent, role: str, blocks: int) -> object:
    param = model.get_parameter(f"{role}.weight")
    return [block.tolist() for block in param.chunk(blocks)] if blocks > 1 else param.tolist()


def test_in_the_worst_case_the_bound_is_met_and_without_quack_it_is_not() -> None:
    """One head of rank one, its key grown a thousandfold, the query stepping straight along it."""
    for attach, reach in ((True, LR * D), (False, LR * D * 1000)):
        model = Separate(16, 1, 1).double()
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()[0, 0] = 1
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        quack = QuacK(nn.Sequential(model), optimizer, tau=1.0) if attach else None
        with torch.no_grad():
            model.k.weight *= 1000
        e = torch.zeros(1, 16, dtype=torch.float64)
        e[0, 0] = 1
        turn = torch.eye(16, dtype=torch.float64)
        before = mha_logits(model, e, e, turn, turn)
        model.q.weight.grad = torch.zeros_like(model.q.weight)
        model.q.weight.grad[0, 0] = -D
        optimizer.step()
        torch.testing.assert_close((mha_logits(model, e, e, turn, turn) - before).item(), reach, rtol=1e-6, atol=0)
        if quack:
            quack.remove()
