"""The largest singular value of a block, or of its step: an upper bound, tight as it says, judged by an SVD."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from quacklr import spectral
from quacklr.core.norms import gram, largest_singular_values


def exact(blocks_BRC: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(blocks_BRC.double(), 2)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 3), (32, 128), (64, 16), (128, 128), (3, 1)])
@pytest.mark.parametrize("rank", [1, 2, None])
@pytest.mark.parametrize("size", [1e-12, 1e9])
def test_bounds_are_from_above_and_as_tight_as_they_say(rows: int, columns: int, rank: int | None, size: float) -> None:
    torch.manual_seed(0)
    inner = rank or min(rows, columns)
    blocks_BRC = size * torch.randn(7, rows, inner) @ torch.randn(7, inner, columns)
    (of_step,) = largest_singular_values([gram(blocks_BRC)])
    of_weights = spectral(blocks_BRC)
    assert (torch.minimum(of_step, of_weights).double() / exact(blocks_BRC)).min() >= 1 - 1e-5
    assert (of_step.double() / exact(blocks_BRC)).max() <= min(rows, columns, inner) ** (1 / 32) + 1e-5
    assert (of_weights.double() / exact(blocks_BRC)).max() <= 1.01


def test_equal_singular_values_are_the_worst_case() -> None:
    torch.manual_seed(0)
    orthogonal = torch.linalg.qr(torch.randn(3, 64, 32)).Q.mT
    (found,) = largest_singular_values([gram(orthogonal)])
    torch.testing.assert_close(found, torch.full((3,), 32 ** (1 / 32)), rtol=1e-4, atol=0)
    (large,) = largest_singular_values([torch.eye(1024).unsqueeze(0)])  # powers of it do not vanish
    torch.testing.assert_close(large, torch.tensor([1024 ** (1 / 32)]), rtol=1e-3, atol=0)
    assert 1 <= spectral(torch.linalg.qr(torch.randn(1, 128, 128)).Q).item() <= 1.01


def test_sizes_are_kept_apart_and_zeros_and_what_is_not_finite_stay() -> None:
    torch.manual_seed(0)
    steps = [torch.randn(2, 4, 8), torch.zeros(3, 6, 8), torch.randn(1, 8, 4), torch.randn(2, 4, 8).double()]
    steps[0][1, 2, 3] = math.nan
    for found in (largest_singular_values([gram(each) for each in steps]), [spectral(each) for each in steps]):
        assert [len(each) for each in found] == [2, 3, 1, 2]
        assert found[0].isnan().tolist() == [False, True]
        assert found[1].tolist() == [0, 0, 0]
        assert found[3].dtype == torch.float64
        for each, blocks in zip(found, steps, strict=True):
            finite = each.isfinite() & (each > 0)
            torch.testing.assert_close(each[finite].double(), exact(blocks[finite]), rtol=0.05, atol=0)


def test_steps_of_bf16_are_measured_in_fp32() -> None:
    (found,) = largest_singular_values([gram(torch.ones(1, 2, 1000, dtype=torch.bfloat16))])
    torch.testing.assert_close(found, torch.tensor([2000**0.5]), rtol=1e-5, atol=0)
