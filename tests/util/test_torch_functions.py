"""The tensors in the arguments of a call."""

from __future__ import annotations

import torch

from quacklr.util.torch_functions import tensors_in


def test_tensors_are_found_in_lists_tuples_and_dicts_in_order() -> None:
    one, two, three = torch.zeros(3)
    assert [id(each) for each in tensors_in(([one, 1], {"a": (two,), "b": three}))] == [id(one), id(two), id(three)]
