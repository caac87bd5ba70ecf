"""Products are read from the calls of torch's functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import linear

from quacklr.util.torch_functions import product_of

ADDED, LEFT, RIGHT = torch.zeros(2, 3, 5), torch.ones(2, 3, 4), torch.ones(2, 4, 5)


@pytest.mark.parametrize(
    ("func", "args", "kwargs"),
    [
        (torch.baddbmm, (ADDED, LEFT, RIGHT), {"beta": 0}),
        (torch.bmm, (LEFT,), {"mat2": RIGHT}),
        (torch.matmul, (LEFT, RIGHT), {"out": torch.empty(2, 3, 5)}),
        (torch.einsum, ("bij, bjk -> bik", LEFT, RIGHT), {}),
        (torch.einsum, ("bij,bjk->bik", [LEFT, RIGHT]), {}),
    ],
    ids=["baddbmm", "bmm", "matmul", "einsum", "einsum of a list"],
)
def test_a_product_has_its_factors_and_labels_that_compute_it(func: Any, args: Any, kwargs: Any) -> None:
    product = product_of(func, args, kwargs)
    assert product is not None
    assert [id(each) for each in product.factors] == [id(LEFT), id(RIGHT)]
    assert (product.summand is ADDED) == (func is torch.baddbmm)
    labels = product.labels
    assert labels is not None
    by_labels = torch.einsum(f"{labels.left},{labels.right}->{labels.out}", LEFT, RIGHT)
    torch.testing.assert_close(by_labels, LEFT @ RIGHT)


def test_other_functions_are_no_products() -> None:
    assert product_of(torch.add, (LEFT, LEFT), {}) is None


@pytest.mark.parametrize(
    ("equation", "axis"), [("bhid,bhjd->bhij", -2), ("bihd,bjhd->bihj", -3), ("ibhd,jbhd->ibhj", -4)]
)
def test_the_rows_of_a_product_are_what_one_factor_has_and_the_other_has_not(equation: str, axis: int) -> None:
    product = product_of(torch.einsum, (equation, torch.ones(2, 2, 2, 2), torch.ones(2, 2, 2, 2)), {})
    assert product is not None
    assert product.labels is not None
    assert product.labels.rows_axis() == axis


def test_a_linear_layer_is_a_product_with_the_rows_of_its_weight() -> None:
    x, weight, bias = torch.randn(2, 3, 4), torch.randn(5, 4), torch.randn(5)
    product = product_of(linear, (x, weight), {"bias": bias})
    assert product is not None
    assert product.labels is not None
    assert product.summand is bias
    assert product.labels.kept_axes(of_right=True) == ((2, 0),)
    by_labels = torch.einsum(f"{product.labels.left},{product.labels.right}->{product.labels.out}", x, weight)
    torch.testing.assert_close(by_labels + bias, linear(x, weight, bias))
