"""A flat range of a parameter is a few boxes: together they are its entries, in order."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from models import assert_equal
from quacklr import Weight
from quacklr.core.local import (
    FlatTensor,
    flat_boxes,
    gradient_of,
    is_sharded,
    local_boxes,
    local_tensor,
    original,
    shard_groups,
)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_boxes_are_the_entries_of_a_range_in_order(shape: list[int], data: st.DataObject) -> None:
    count = math.prod(shape)
    start = data.draw(st.integers(0, count))
    end = data.draw(st.integers(start, count))
    entries = torch.arange(count).view(shape)
    boxes = flat_boxes(start, end, shape)
    assert len(boxes) <= 2 * len(shape) - 1
    found = [i for box in boxes for i in entries[tuple(slice(*each) for each in box)].flatten().tolist()]
    assert found == list(range(start, end))


def flat(start: int, end: int, shape: tuple[int, ...] = (4, 3)) -> tuple[FlatTensor, torch.Tensor]:
    param = nn.Parameter(torch.arange(math.prod(shape), dtype=torch.bfloat16).view(shape))
    memory = param.detach().float().flatten()[start:end].clone()
    return FlatTensor(param, shape, lambda: memory, start, None, lambda: memory * 2), memory


def test_a_flat_tensor_has_the_shape_of_the_whole_and_the_dtype_of_what_is_stepped() -> None:
    tensor, memory = flat(2, 10)
    assert tuple(tensor.shape) == (4, 3)
    assert tensor.dtype == torch.float32
    assert tensor.requires_grad
    assert is_sharded(tensor)
    assert shard_groups(tensor) == []
    assert_equal(local_tensor(tensor), memory)
    assert_equal(gradient_of(tensor), memory * 2)
    assert original(tensor).dtype == torch.bfloat16
    assert repr(tensor) == "FlatTensor(2:10 of (4, 3))"
    original(tensor).requires_grad_(False)
    assert not tensor.requires_grad
    with pytest.raises(TypeError, match="only describes which entries"):
        torch.add(tensor, 1)


def test_boxes_have_global_indices_and_write_to_the_memory_of_the_range() -> None:
    tensor, memory = flat(2, 10)
    weight = Weight("q", tensor, torch.tensor([0, 0, 1, 1]))
    boxes = local_boxes(tensor)
    assert [[index.tolist() for index in box.indices] for box in boxes] == [
        [[0], [2]],
        [[1, 2], [0, 1, 2]],
        [[3], [0]],
    ]
    assert [weight.blocks_in(box).tolist() for box in boxes] == [[0], [0, 1], [1]]
    assert [weight.columns_in(box).tolist() for box in boxes] == [[2], [0, 1, 2], [0]]
    for box in boxes:
        box.tensor().mul_(-1)
    assert_equal(memory, -torch.arange(2.0, 10.0))
    assert local_boxes(flat(5, 5)[0]) == []
