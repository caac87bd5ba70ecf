"""The check calls modules as the model does: one tensor given twice is one tensor, and inputs are what they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from models import Separate
from quacklr.checking.copies import copied
from quacklr.checking.prove import check
from quacklr.checking.report import CheckReport

X_BTD = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class Strict(Separate):
    """Called in a way of its own, which it checks."""

    def __init__(self, demand: Callable[..., Tensor]) -> None:
        super().__init__()
        self.demand = demand

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(self.demand(*args, **kwargs))


class Calls(nn.Module):
    """Such an attention, and how it is called."""

    def __init__(self, call: Callable[[nn.Module, Tensor], Tensor], demand: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layers, self.call = nn.ModuleList([Strict(demand)]), call

    def forward(self, x_BTD: Tensor) -> Tensor:
        for layer in self.layers:
            x_BTD = self.call(layer, x_BTD)
        return x_BTD


def same(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    assert query is key
    assert key is value
    return query


def by_name_and_nested(x: Tensor, *, others: dict[str, Any]) -> Tensor:
    assert others["pair"][0] is x
    assert others["pair"][1][0] is x
    return x


def named_pair(pair: Pair, again: Pair) -> Tensor:
    assert pair is again
    assert pair.first is pair.second
    return pair.first


def views(whole: Tensor, part: Tensor) -> Tensor:
    assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    assert part.data_ptr() == whole[:, 1:].data_ptr()
    torch.testing.assert_close(part, whole[:, 1:], rtol=0, atol=0)
    return whole


def filled(x: Tensor, notes: dict[str, int]) -> Tensor:
    notes["called"] = 1
    return x


def noted(layer: nn.Module, x: Tensor) -> Tensor:
    """The module writes into a dict, which the caller reads."""
    notes: dict[str, int] = {}
    y: Tensor = layer(x, notes)
    assert notes == {"called": 1}
    return y


def written_into(x: Tensor) -> Tensor:
    return x.mul_(2)


CALLS: dict[str, tuple[Callable[[nn.Module, Tensor], Tensor], Callable[..., Tensor]]] = {
    "query, key and value": (lambda layer, x: layer(x, x, x), same),
    "query, and key and value by name": (lambda layer, x: layer(x, key=x, value=x), same),
    "in a dict and lists": (lambda layer, x: layer(x, others={"pair": (x, [x])}), by_name_and_nested),
    "one tuple twice": (lambda layer, x: layer(pair := Pair(x, x), pair), named_pair),
    "a view": (lambda layer, x: layer(x, x[:, 1:]), views),
    "a dict to be filled": (noted, filled),
    "an input that is written into": (lambda layer, x: layer(x.clone()), written_into),
}


@pytest.mark.parametrize("way", CALLS)
def test_modules_are_called_with_what_the_model_calls_them_with(way: str) -> None:
    torch.manual_seed(0)
    model = Calls(*CALLS[way])
    report: CheckReport = check(model, SGD(model.parameters(), lr=0.1), X_BTD, steps=1)
    assert report.ok, report


def test_a_copy_is_a_copy_and_what_is_not_floating_point_stays_what_it_is() -> None:
    x, mask, cache = torch.randn(3, 4), torch.ones(3, dtype=torch.bool), object()
    given = ((x, x.T), {"mask": mask, "cache": cache, "also": [x, {"x": x}], "text": "x"})
    (one, turned), named = copied(given)
    x.zero_()
    assert one.any()
    torch.testing.assert_close(turned, one.T, rtol=0, atol=0)
    assert turned.data_ptr() == one.data_ptr()
    assert named["also"][0] is one
    assert named["also"][1]["x"] is one
    assert named["mask"] is mask
    assert named["cache"] is cache


def test_recorded_vectors_take_the_place_of_the_given_ones_and_are_not_handed_out_themselves() -> None:
    x, mask = torch.randn(3, 4), torch.ones(3, dtype=torch.bool)
    recorded = copied(((x, x), {"mask": mask}))
    y, other = torch.randn(3, 4), ~mask
    (one, two), named = copied(((y, y), {"mask": other}), recorded)
    assert one is two
    assert one is not recorded[0][0]
    torch.testing.assert_close(one, x, rtol=0, atol=0)
    assert named["mask"] is other


def test_a_part_of_a_large_tensor_is_copied_alone() -> None:
    part = torch.zeros(1000, 4)[:2]
    assert copied(((part,), {}))[0][0].untyped_storage().nbytes() == part.numel() * 4
