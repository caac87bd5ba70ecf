"""Tables, ranges and grouped lines of printed reports."""

from __future__ import annotations

import math

import torch

from quacklr.util.layer_names import pattern
from quacklr.util.text_table import columns, grouped, value_range


def test_columns_are_aligned_and_a_cell_with_line_breaks_takes_several_lines() -> None:
    assert columns([("name", "x", "last"), ("a", "10\n200", "")]) == ["  name  x    last", "  a     10", "        200"]


def test_a_range_is_one_number_if_both_ends_round_to_the_same() -> None:
    assert value_range(torch.tensor([0.5, 2.0])) == "0.5..2"
    assert value_range(torch.tensor([1.001, 1.004]), digits=2) == "1"
    assert value_range(torch.tensor([1.0, math.nan]), missing="-") == "-"
    assert value_range(torch.tensor([1.0, math.inf])) == "?"


def test_names_that_differ_in_numbers_only_and_have_one_text_are_one_line() -> None:
    texts = [("a.0.q", "frozen"), ("a.1.q", "frozen"), ("a.2.q", "zero"), ("", "frozen")]
    assert grouped(texts) == ["  a.{0-1}.q: frozen", "  a.2.q: zero", "  (model): frozen"]
    assert grouped(texts[:2], lambda names: f"{len(names)} names") == ["  2 names: frozen"]


def test_names_of_equal_layers_are_written_as_one() -> None:
    assert pattern([f"a.{i}.b" for i in (0, 1, 2, 5, 7)]) == "a.{0-2,5,7}.b"
    assert pattern([f"a.{i}" for i in range(3, 48, 4)]) == "a.{3,7,...,47}"
    assert pattern([f"a.{i}" for i in range(24) if i % 4 != 3]) == "a.{0-2,4-6,...,20-22}"
    assert pattern(["a.0.b.0", "a.0.b.1", "a.1.b.0", "a.1.b.1", "a.2.b.5"]) == "a.{0-1}.b.{0-1}, a.2.b.5"
    assert pattern(["model"]) == "model"
