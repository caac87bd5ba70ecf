"""The check fails on every deliberate mistake, and says which heads and rows it is about."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from check_runs import checked, named, of_each, q_and_k, stack
from models import PerHead, Separate
from quacklr import LogitPath, Weight, packed


def test_queries_keys_values_a_head_declared_as_all_queries_all_keys_all_values_are_wrong() -> None:
    model = stack(PerHead)
    report = checked(model, of_each(model, lambda one: packed(one.qkv, ("q", 4, 4), ("k", 4, 4), (None, 4, 4))))
    text = str(report)
    assert not report.ok
    assert "{0-1}: heads 0-1 are moved by rows of q claimed for others: head 0 by q[1]" in text
    assert "{0-1}: heads 1-2 are moved by rows of k claimed for others: head 1 by k[0]" in text
    assert "{0-1}: q[2-3] moves no logit of its heads" in text
    assert "{0-1}: head 3 is moved by rows of qkv.weight that are on no path" in text
    assert "wrong: 8 heads in 2 of 2 layers; give the module a method logit_paths()" in text


def test_interleaved_rows_are_wrong() -> None:
    model = stack(Separate)
    text = str(checked(model, of_each(model, lambda one: q_and_k(one, torch.arange(16) % 4))))
    assert "{0-1}: heads 0-3 are moved by rows of q claimed for others: head 0 by q[1-3]" in text
    assert "{0-1}: some rows of k[0-3] move no logit of its heads" in text


def test_keys_of_the_wrong_group_are_wrong_and_only_the_heads_that_get_another_are_named() -> None:
    model = stack(lambda: Separate(groups=2))

    def grouped(one: Separate) -> list[Weight]:
        return [*packed(one.q, ("q", 4, 4)), *packed(one.k, ("k", 2, 4))]

    assert checked(model, of_each(model, grouped)).ok
    report = checked(model, of_each(model, grouped, torch.arange(4) % 2))
    assert [layer.wrong.tolist() for layer in report.layers] == [[False, True, True, False]] * 2
    assert "{0-1}: heads 1-2 are moved by rows of k claimed for others: head 1 by k[0]" in str(report)


def test_values_declared_as_keys_are_wrong() -> None:
    model = stack(PerHead)
    text = str(
        checked(model, of_each(model, lambda one: packed(one.qkv, ("q", 1, 4), (None, 1, 4), ("k", 1, 4), repeat=4)))
    )
    assert "{0-1}: k[0-3] moves no logit of its heads" in text
    assert "{0-1}: heads 0-3 are moved by rows of qkv.weight that are on no path" in text


def test_half_of_a_heads_rows_missing_is_wrong() -> None:
    model = stack(PerHead)
    segments = ("q", 1, 2), (None, 1, 2), ("k", 1, 2), (None, 1, 6)
    report = checked(model, of_each(model, lambda one: packed(one.qkv, *segments, repeat=4)))
    assert [fault.text for fault in report.layers[0].faults] == [
        "heads 0-3 are moved by rows of qkv.weight that are on no path"
    ]


def test_a_gate_declared_with_its_query_is_wrong() -> None:
    model = stack(Gated)
    assert checked(model, of_each(model, lambda one: gated(one, ("q", 1, 4), (None, 1, 4)))).ok
    text = str(checked(model, of_each(model, lambda one: gated(one, ("q", 1, 8)))))
    assert "{0-1}: some rows of q[0-3] move no logit of its heads" in text


class Gated(Separate):
    """Rows of q are each head's query and a gate on its output."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(16, 32, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q_BTHK, gate_BTHK = self.q(x_BTD).unflatten(2, (4, 8)).chunk(2, 3)
        k_BTHK, v_BTHK = (of(x_BTD).unflatten(2, (4, 4)) for of in (self.k, self.v))
        heads = (of.transpose(1, 2) for of in (q_BTHK, k_BTHK, v_BTHK))
        mixed_BHTK = nn.functional.scaled_dot_product_attention(*heads)
        return (mixed_BHTK.transpose(1, 2) * gate_BTHK.sigmoid()).flatten(2)


def gated(one: Gated, *segments: Any) -> list[Weight]:
    return [*packed(one.q, *segments, repeat=4), *packed(one.k, ("k", 4, 4))]


def test_the_key_of_another_layer_is_wrong() -> None:
    model = stack(Separate)
    (q0, k0), (q1, k1) = (named(number, *q_and_k(one, torch.arange(16) // 4)) for number, one in enumerate(model))
    text = str(checked(model, [LogitPath((q0, k1), 4), LogitPath((q1, k0), 4)]))
    assert "0: heads 0-3 are moved by rows claimed for 1" in text
    assert "1: heads 0-3 are moved by rows claimed for 0" in text


def test_two_heads_swapped_in_q_only_are_wrong_and_no_others() -> None:
    model = stack(Separate)
    pairs = [named(number, *q_and_k(one, torch.arange(16) // 4)) for number, one in enumerate(model)]
    report = checked(model, [LogitPath(pairs[0], 4), LogitPath(pairs[1], 4, (torch.tensor([0, 2, 1, 3]), None))])
    assert [layer.wrong.tolist() for layer in report.layers] == [[False] * 4, [False, True, True, False]]


def test_more_heads_than_the_model_attends_with_are_wrong() -> None:
    model = stack(lambda: Separate(heads=2, groups=2))
    text = str(checked(model, of_each(model, lambda one: q_and_k(one, torch.arange(16) // 4))))
    assert "{0-1}: attends with 2 heads, but its paths say 4" in text


def test_a_row_that_takes_no_step_is_still_tested() -> None:
    model = stack(PerHead)
    model[1].requires_grad_(False)
    wrong = of_each(model, lambda one: packed(one.qkv, ("q", 4, 4), ("k", 4, 4), (None, 4, 4)))
    assert checked(model, steps=1).ok
    assert [bool(layer.wrong.any()) for layer in checked(model, wrong).layers] == [True, True]
    assert "ok, but its rows took no step: no gradient" in str(checked(model, steps=1))
