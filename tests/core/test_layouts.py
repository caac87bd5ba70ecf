"""Layouts of rows: norms and scaled steps of exactly the rows of each block. Judge: indexing by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from models import assert_equal
from quacklr import QuacK, Weight, frobenius, mha, packed, spectral
from quacklr.core.blocks import Blocks

H, D = 4, 3


def rows(*numbers: int) -> Tensor:
    return nn.Parameter(torch.empty(sum(numbers), 2))


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        (lambda: packed(rows(6), ("q", 2, 3)), {"q": [0, 0, 0, 1, 1, 1]}),
        (
            lambda: packed(rows(8), ("q", 2, 2), ("k", 1, 2), (None, 1, 2)),
            {"q": [0, 0, 1, 1, -1, -1, -1, -1], "k": [-1, -1, -1, -1, 0, 0, -1, -1]},
        ),
        (
            lambda: packed(rows(6), ("q", 1, 1), ("k", 1, 1), (None, 1, 1), repeat=2),
            {"q": [0, -1, -1, 1, -1, -1], "k": [-1, 0, -1, -1, 1, -1]},
        ),
        (
            lambda: packed(rows(8), ("q", 2, 1), ("k", 1, 1), (None, 1, 1), repeat=2),
            {"q": [0, 1, -1, -1, 2, 3, -1, -1], "k": [-1, -1, 0, -1, -1, -1, 1, -1]},
        ),
        (lambda: packed(rows(4), ("q", 1, 1), (None, 1, 1), repeat=2), {"q": [0, -1, 1, -1]}),
        (
            lambda: packed(rows(6), ("uq", 1, 2), ("qr", 1, 1), repeat=2),
            {"uq": [0, 0, -1, 1, 1, -1], "qr": [-1, -1, 0, -1, -1, 1]},
        ),
    ],
    ids=["separate", "concatenated", "per head", "grouped", "gated", "mla"],
)
def test_packed_gives_the_block_of_each_row(
    weights: Callable[[], list[Weight]], expected: dict[str, list[int]]
) -> None:
    assert {weight.name: weight.block_of_row.tolist() for weight in weights()} == expected


def test_packed_includes_the_bias_of_a_module() -> None:
    linear = nn.Linear(2, 6)
    q, k = packed(linear, ("q", 1, 3), ("k", 1, 3))
    assert [part.param for part in q.parts] == [linear.weight, linear.bias]
    assert k.parts[1].block_of_row.tolist() == [-1, -1, -1, 0, 0, 0]
    assert k.parts[1].name == "k.bias"


owners = st.lists(st.integers(-1, 3), min_size=1, max_size=12)


def without_gaps(owner: list[int]) -> Tensor:
    present = sorted({o for o in owner if o >= 0})
    return torch.tensor([present.index(o) if o >= 0 else -1 for o in owner])


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("bias", [False, True])
@given(owner=owners, seed=st.integers(0, 99))
def test_any_assignment_of_rows_is_measured_and_moved_as_if_by_hand(
    dim: int, bias: bool, owner: list[int], seed: int
) -> None:
    block_of_row = without_gaps([0, *owner])
    torch.manual_seed(seed)
    shape = [2, 3, 4][: max(2, dim + 1)]
    shape[dim] = len(block_of_row)
    param, b = nn.Parameter(torch.randn(shape)), nn.Parameter(torch.randn(len(block_of_row)))
    weight = Weight("w", param, block_of_row, dim, b if bias else None)
    blocks = Blocks([weight])

    matrix = param.detach().clone().movedim(dim, 0).flatten(1)
    matrix = torch.cat([matrix, b.detach().unsqueeze(1)], 1) if bias else matrix
    for norm, order, rtol in ((spectral, 2, 0.01), (frobenius, "fro", 1e-5)):
        by_hand = [torch.linalg.matrix_norm(matrix[block_of_row == block], order) for block in range(weight.blocks)]
        copies, norms = blocks.measure(norm)
        torch.testing.assert_close(norms[blocks.flat_index[weight]], torch.stack(by_hand), rtol=rtol, atol=0)

    rate = torch.rand(weight.blocks)
    flat = torch.empty(blocks.total)
    flat[blocks.flat_index[weight]] = rate
    of_row = torch.where(block_of_row >= 0, rate[block_of_row], 1.0)
    new = torch.randn_like(matrix)
    with torch.no_grad():
        param.movedim(dim, 0).copy_(new[:, : matrix.shape[1] - bias].view_as(param.movedim(dim, 0)))
        if bias:
            b.copy_(new[:, -1])
    blocks.scale_step(copies, flat, {id(param), id(b)})
    moved = param.detach().movedim(dim, 0).flatten(1)
    moved = torch.cat([moved, b.detach().unsqueeze(1)], 1) if bias else moved
    torch.testing.assert_close(moved, matrix + of_row.unsqueeze(1) * (new - matrix), rtol=1e-5, atol=1e-6)
    assert_equal(moved[block_of_row < 0], new[block_of_row < 0])


def test_matrices_stacked_in_one_parameter_step_as_if_they_were_apart() -> None:
    """Judge: the same rows as parameters of their own, three steps of AdamW."""
    torch.manual_seed(0)
    stacked = nn.Parameter(torch.randn(3, H * D, 5))
    bias = nn.Parameter(torch.randn(3 * H * D))
    apart = [nn.Parameter(part.detach().clone()) for part in stacked]
    biases = [nn.Parameter(part.clone()) for part in bias.detach().view(3, -1)]
    head = torch.arange(H).repeat_interleave(D)
    outside = torch.full_like(head, -1)
    together = [
        Weight("q", stacked, torch.cat([head, outside, outside]), (0, 1), bias),
        Weight("k", stacked, torch.cat([outside, head, outside]), (0, 1), bias),
    ]
    alone = [Weight(n, w, head, 0, b) for n, w, b in zip("qk", apart, biases, strict=False)]
    optimizers = [torch.optim.AdamW(p, lr=0.3) for p in ([stacked, bias], [*apart, *biases])]
    quacks = [QuacK(mha(*w), o, tau=1.0) for w, o in zip((together, alone), optimizers, strict=True)]
    for _ in range(3):
        stacked.grad, bias.grad = torch.randn_like(stacked), torch.randn_like(bias)
        for part, b, g, g_b in zip(apart, biases, stacked.grad, bias.grad.view(3, -1), strict=True):
            part.grad, b.grad = g.clone(), g_b.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(stacked, torch.stack([p.detach() for p in apart]))
    torch.testing.assert_close(bias, torch.cat([b.detach() for b in biases]))
    rate = quacks[0].rate_of(stacked)
    assert rate is not None
    assert rate.shape == (3, H * D, 1)
    torch.testing.assert_close(rate[0, :, 0], quacks[1].rates()["q"].repeat_interleave(D))
    assert_equal(rate[2], torch.ones(H * D, 1))


@pytest.mark.parametrize(
    ("param", "dim", "error"),
    [
        (torch.randn(2, 3, 4), (1, 2), r"w: dim=\(1, 2\), .*; several dimensions are the first ones: \(0, 1\)"),
        (torch.randn(2, 3, 4), (0,), r"w: dim=\(0,\), .* several"),
        (torch.randn(3, 2, 4).transpose(0, 1), (0, 1), r"w: dim=\(0, 1\), but its parameter is not contiguous"),
    ],
    ids=["not the first", "just one", "not contiguous"],
)
def test_rows_along_several_dimensions_that_cannot_be_are_refused(
    param: Tensor, dim: tuple[int, ...], error: str
) -> None:
    with pytest.raises(ValueError, match=error):
        Weight("w", param, torch.zeros(6, dtype=torch.long), dim)
