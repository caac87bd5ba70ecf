"""A flat range of a parameter is a few boxes: together they are its entries, in order."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from quacklr.core.local import (
    flat_boxes,
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
