"""Tables, ranges and grouped lines of printed reports."""

from __future__ import annotations

import math

import torch

from quacklr.util.text_table import columns, grouped, merged, pattern, value_range


def test_columns_are_aligned() -> None:
    assert columns([("name", "x", "last"), ("a", "100", "")]) == ["  name  x    last", "  a     100"]


def test_a_range_is_one_number_if_both_ends_round_to_the_same() -> None:
    assert value_range(torch.tensor([0.5, 2.0])) == "0.5..2"
    assert value_range(torch.tensor([1.001, 1.004])) == "1"
    assert value_range(torch.tensor([1.0, math.nan])) == "?"


def test_rows_whose_names_differ_in_numbers_only_are_one() -> None:
    assert merged([("a.0", "x"), ("a.1", "x"), ("a.2", "y")]) == [("a.{0-1}", "x"), ("a.2", "y")]
    texts = {"a.0.q": "frozen", "a.1.q": "frozen", "a.2.q": "zero", "": "frozen"}
    assert grouped("alone:", texts) == ["alone:", "  a.{0-1}.q: frozen", "  a.2.q: zero", "  (model): frozen"]
    assert grouped("alone:", {}) == []


def test_names_of_equal_layers_are_written_as_one() -> None:
    assert pattern([f"a.{i}.b" for i in (0, 1, 2, 5, 7)]) == "a.{0-2,5,7}.b"
    assert pattern(["a.0.b.0", "a.0.b.1", "a.1.b.0", "a.1.b.1", "a.2.b.5"]) == "a.{0-1}.b.{0-1}, a.2.b.5"
    assert pattern(["model"]) == "model"
