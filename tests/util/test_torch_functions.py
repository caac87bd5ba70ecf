"""Copies of arguments, and the tensors in them."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

from quacklr.util.torch_functions import copied, factors_of, tensors_in


class Cache:
    """An object with state; with a lock it cannot be copied."""

    def __init__(self, lock: Any = None) -> None:
        self.kept, self.lock = torch.ones(2, requires_grad=True) * 2, lock


def test_tensors_are_found_in_lists_tuples_and_dicts_in_order() -> None:
    one, two, three = torch.zeros(3)
    assert [id(each) for each in tensors_in(([one, 1], {"a": (two,), "b": three}))] == [id(one), id(two), id(three)]


def test_a_deep_copy_has_its_own_objects_and_leaves_out_those_that_cannot_be_copied() -> None:
    cache, module, name = Cache(), nn.Linear(1, 1), "name"
    copy, same, none, text = copied((cache, module, Cache(threading.Lock()), name), deep=True)
    assert copy is not cache
    assert copy.kept is not cache.kept
    torch.testing.assert_close(copy.kept, cache.kept.detach())
    assert same is module
    assert none is None
    assert text == name
    assert copied((cache,))[0] is cache


def test_the_factors_of_a_product_are_without_the_summand() -> None:
    added, left, right = torch.zeros(1, 2, 2), torch.ones(1, 2, 3), torch.ones(1, 3, 2)
    for func, args, kwargs in (
        (torch.baddbmm, (added, left, right), {}),
        (torch.bmm, (left,), {"mat2": right}),
        (torch.einsum, ("bij,bjk->bik", left, right), {}),
    ):
        found = factors_of(func, args, kwargs)
        assert [id(each) for each in found] == [id(left), id(right)]
    assert factors_of(torch.add, (left, left), {}) == []
