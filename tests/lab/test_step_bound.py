"""AdamW^2 beside its formula with exact singular values; and what its bound promises."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lab_runs import ATTENTIONS, make_corpus, small
from quacklr.lab.data import open_corpus
from quacklr.lab.methods import BoundedStep
from quacklr.lab.optim.step_bound import StepBound
from quacklr.lab.train.session import Session

SLACK = 1.2
"""The bound that the method uses for a singular value is at most S^(1/32) too large: 1.11 for 24 rows."""


def largest(matrix: Tensor) -> float:
    return float(torch.linalg.svdvals(matrix.detach().double())[0])


def rank_one(seed: int) -> Tensor:
    """Of rank one, where the method's norms are exact."""
    left, right = torch.randn(2, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.outer(left, right)


@pytest.mark.parametrize("ratio", [1e-3, 0.1, 100.0])
def test_the_learning_rate_is_bounded_by_the_formula(ratio: float) -> None:
    """alpha <= ratio s(W) / s(D / alpha), for plain SGD, whose step is alpha times the gradient."""
    weight, gradient, alpha = nn.Parameter(rank_one(0)), rank_one(1), 0.5
    start, optimizer = weight.detach().clone(), torch.optim.SGD([weight], lr=alpha)
    StepBound([weight], [optimizer], ratio)
    weight.grad = gradient.clone()
    optimizer.step()
    bounded = min(alpha, ratio * largest(start) / largest(gradient))
    assert torch.allclose(weight.detach(), start - bounded * gradient, rtol=0, atol=1e-9)


def test_no_step_is_larger_than_the_ratio_and_small_steps_are_untouched() -> None:
    generator = torch.Generator().manual_seed(0)
    bounded, plain = ([nn.Parameter(torch.ones(24, 40)), nn.Parameter(torch.ones(5))] for _ in range(2))
    optimizers = [torch.optim.AdamW(params, lr=1e-3) for params in (bounded, plain)]
    StepBound(bounded[:1], optimizers[:1], ratio=1e-2)
    for lr in (1e-3, 1e-3, 1.0, 1.0, 1e-3):
        before, gradients = bounded[0].detach().clone(), torch.randn(24, 40, generator=generator)
        for params, optimizer in zip((bounded, plain), optimizers, strict=True):
            params[0].grad, params[1].grad = gradients.clone(), gradients[0, :5].clone()
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
        step = largest(bounded[0] - before)
        assert step <= 1e-2 * largest(before) * SLACK
        if lr == 1.0:
            assert step >= 1e-2 * largest(before) / SLACK, "it is scaled to the bound, not below it"
            assert not torch.equal(bounded[0], plain[0])
    assert torch.equal(bounded[1], plain[1]), "vectors are left alone"


def test_steps_below_the_bound_are_bitwise_those_of_the_optimizer() -> None:
    one, other = (nn.Parameter(torch.eye(4)) for _ in range(2))
    optimizers = [torch.optim.AdamW([param], lr=1e-3) for param in (one, other)]
    StepBound([one], optimizers[:1], ratio=0.1)
    for seed in range(3):
        gradient = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
        for param, optimizer in zip((one, other), optimizers, strict=True):
            param.grad = gradient.clone()
            optimizer.step()
    assert torch.equal(one, other)


def test_a_step_of_zero_and_a_weight_without_gradient_change_nothing() -> None:
    still, frozen = nn.Parameter(torch.eye(4)), nn.Parameter(torch.eye(4))
    optimizer = torch.optim.SGD([still, frozen], lr=1.0)
    StepBound([still, frozen], [optimizer], ratio=0.1)
    still.grad = torch.zeros(4, 4)
    optimizer.step()
    assert torch.equal(still, torch.eye(4))
    assert torch.equal(frozen, torch.eye(4))


def test_a_step_whose_closure_computes_the_gradient_is_bounded_too() -> None:
    weight = nn.Parameter(torch.eye(4))
    optimizer = torch.optim.SGD([weight], lr=100.0)
    StepBound([weight], [optimizer], ratio=0.1)

    def closure() -> float:
        loss = weight.square().sum()
        loss.backward()
        return loss.item()

    optimizer.step(closure)
    assert largest(weight - torch.eye(4)) <= 0.1 * SLACK


def test_a_weight_of_zeros_is_refused() -> None:
    weight = nn.Parameter(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"a weight of shape \(2, 3\) is all zeros"):
        StepBound([weight], [torch.optim.SGD([weight], lr=1.0)], ratio=0.1)


def test_in_a_run_every_linear_layer_is_bounded(tmp_path: Path) -> None:
    corpus = open_corpus(str(make_corpus(tmp_path)))
    session = Session(small(corpus.folder, BoundedStep(0.01), ATTENTIONS["mla"]), corpus)
    rows, linears = session.rows(), [m for m in session.model.modules() if isinstance(m, nn.Linear)]
    next(rows)
    for _ in range(6):
        before = [linear.weight.detach().clone() for linear in linears]
        next(rows)
        for old, linear in zip(before, linears, strict=True):
            assert 0 < largest(linear.weight - old) <= 0.01 * largest(old) * SLACK
