"""The heatmap shows what was measured: cells are read from the figure's own artists, and files are decoded."""

from __future__ import annotations

import io
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib import colormaps
from matplotlib.colors import to_hex
from PIL import Image

from histories import Numbers, history
from quacklr import LogitStats
from quacklr.integrations.drawing import COLUMNS, NO_NUMBER, panel_height
from quacklr.integrations.heatmap import History
from quacklr.util.layer_names import described, short


def mesh(axes: Any) -> Any:
    (found,) = [each for each in axes.collections if type(each).__name__ == "QuadMesh"]
    return found


def cells(axes: Any) -> Any:
    """Rows x columns of numbers; NaN for what has none."""
    return np.ma.filled(mesh(axes).get_array(), np.nan)


def edges(axes: Any) -> list[float]:
    return [float(x) for x in mesh(axes).get_coordinates()[0, :, 0]]


def colour_of(axes: Any, row: int, column: int) -> str:
    """As it is painted."""
    image = mesh(axes)
    return str(to_hex(image.cmap(image.norm(image.get_array()))[row, column]))


def bar_of(figure: Any) -> Any:
    (found,) = [axes for axes in figure.axes if axes.get_label() == "<colorbar>"]
    return found


def bar_labels(figure: Any) -> list[str]:
    return [label.get_text() for label in bar_of(figure).get_yticklabels()]


def warm(colour: str) -> bool:
    return int(colour[1:3], 16) > int(colour[5:7], 16) + 60


def test_a_cell_is_the_number_of_its_head_at_its_step() -> None:
    first: Numbers = {"layers.0.attn": [1.0, 2.0], "layers.1.attn": [3.0, 4.0]}
    later: Numbers = {"layers.0.attn": [5.0, 6.0], "layers.1.attn": [7.0, 80.0]}
    axes: Any = history({0: first, 10: later}).figure("max").axes[0]
    assert cells(axes).tolist() == [[1, 5], [2, 6], [3, 7], [4, 80]]
    assert axes.get_ylim() == (4, 0), "the first attention is on top"
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "1"]
    assert list(axes.get_yticks()) == [1, 3]
    assert [label.get_text() for label in axes.get_yticklabels(minor=True)] == ["0", "1", "0", "1"]
    assert [line.get_ydata()[0] for line in axes.lines] == [2], "a line between the attentions"
    assert axes.get_figure()._supylabel.get_text() == "heads of layers.{0-1}.attn"


def test_columns_stand_at_their_steps_even_if_uneven_and_added_in_any_order() -> None:
    axes: Any = history({step: {"a": [float(step + 1)]} for step in (100, 0, 4, 20)}).figure().axes[0]
    assert edges(axes) == [0, 2, 12, 60, 100]
    assert cells(axes).tolist() == [[1, 5, 21, 101]]
    assert axes.get_xlim() == (0, 100)


def test_a_single_measurement_is_a_column_with_its_step_below() -> None:
    figure: Any = history({7: {"a": [3.0, 4.0]}}).figure()
    figure.draw_without_rendering()
    assert edges(figure.axes[0]) == [6.5, 7.5]
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["7"]
    assert len(bar_labels(figure)) >= 1


def test_attentions_may_have_different_numbers_of_heads() -> None:
    axes: Any = history({0: {"a": [1.0], "b": [2.0, 3.0, 4.0]}, 1: {"a": [5.0], "b": [6.0, 7.0, 8.0]}}).figure().axes[0]
    assert cells(axes).tolist() == [[1, 5], [2, 6], [3, 7], [4, 8]]
    assert list(axes.get_yticks()) == [0.5, 2.5]
    assert [line.get_ydata()[0] for line in axes.lines] == [1]


def test_what_has_no_number_is_grey_and_the_figure_says_so() -> None:
    figure: Any = history({0: {"a": [None, 2.0]}, 5: {"a": [3.0, 4.0]}}).figure()
    assert colour_of(figure.axes[0], 0, 0) == NO_NUMBER
    assert colour_of(figure.axes[0], 1, 0) != NO_NUMBER
    assert "grey" in figure.axes[0].get_xlabel()
    assert history({0: {"a": [1.0]}}).figure().axes[0].get_xlabel() == "step"


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_all_statistics_of_a_monitor_that_measured_no_finite_number_can_be_drawn(broken: float) -> None:
    found = History()
    found.add(0, {"a": LogitStats(**{field.name: torch.full((2,), broken) for field in fields(LogitStats)})})
    figure: Any = found.figure()
    figure.draw_without_rendering()
    for axes in figure.axes[: len(fields(LogitStats))]:
        assert colour_of(axes, 0, 0) == NO_NUMBER


def test_negative_and_tiny_logits_have_the_colour_of_the_lower_end() -> None:
    figure: Any = history({0: {"a": [-5.0, 0.0, 1e-9, 500.0]}, 1: {"a": [0.5, 5.0, 50.0, 500.0]}}).figure()
    axes = figure.axes[0]
    lowest = {colour_of(axes, row, 0) for row in range(3)}
    assert lowest == {to_hex(mesh(axes).cmap(0.0))}
    assert colour_of(axes, 0, 1) in lowest, "three decades below the largest the scale ends"
    assert colour_of(axes, 1, 1) not in lowest
    shades = [mesh(axes).norm(value) for value in (5.0, 50.0, 500.0)]
    assert shades[1] - shades[0] == pytest.approx(shades[2] - shades[1]), "a logarithmic scale"


@pytest.mark.parametrize(("lowest", "end"), [(0.5, "min"), (0.6, "neither")])
def test_a_colour_bar_is_pointed_where_numbers_are_below_its_scale(lowest: float, end: str) -> None:
    axes: Any = history({0: {"a": [lowest, 600.0]}}).figure().axes[0]
    assert mesh(axes).colorbar.extend == end


def test_equal_logits_have_a_scale_of_a_factor_of_two_around_them() -> None:
    axes: Any = history({0: {"a": [10.0, 10.0]}}).figure().axes[0]
    assert (mesh(axes).norm.vmin, mesh(axes).norm.vmax) == pytest.approx((5.0, 20.0))


def test_only_negative_logits_are_shown_on_a_linear_scale() -> None:
    figure: Any = history({0: {"a": [-5.0, -1.0]}}).figure()
    figure.draw_without_rendering()
    assert cells(figure.axes[0]).tolist() == [[-5.0], [-1.0]]
    assert (mesh(figure.axes[0]).norm.vmin, mesh(figure.axes[0]).norm.vmax) == (-5.0, 0.0)


def test_logits_above_the_threshold_of_qk_clip_are_warm_and_counted() -> None:
    measured: dict[int, Numbers] = {0: {"a": [1, 2, 99]}, 9: {"a": [1, 101, 5000]}, 12: {"a": [1, 50, 200]}}
    figure: Any = history(measured).figure()
    axes = figure.axes[0]
    painted = [[warm(colour_of(axes, row, column)) for column in range(3)] for row in range(3)]
    assert painted == [[False, False, False], [False, True, False], [False, True, True]]
    assert axes.get_title(loc="left") == "largest logit: 2 of 3 heads went above 100"
    assert "100 QK clip" in bar_labels(figure)
    (mark,) = bar_of(figure).lines
    assert list(mark.get_ydata()) == [100, 100]


def test_logits_below_the_threshold_are_all_cold() -> None:
    figure: Any = history({0: {"a": [1.0, 60.0]}}).figure()
    assert not any(warm(colour_of(figure.axes[0], row, 0)) for row in range(2))
    assert figure.axes[0].get_title(loc="left") == "largest logit: none of 2 heads went above 100"
    assert bar_labels(figure) == ["1", "3", "10", "30"]
    assert not bar_of(figure).lines


@pytest.mark.parametrize(
    ("statistic", "log"), [("max", True), ("mean_change", True), ("entropy", False), ("sink", False), ("new", False)]
)
def test_what_grows_without_bound_is_logarithmic_and_the_rest_is_linear_from_zero(statistic: str, log: bool) -> None:
    axes: Any = history({0: {"a": [0.2, 0.8]}}, statistic).figure().axes[0]
    norm = mesh(axes).norm
    assert (type(norm).__name__ == "LogNorm") is log
    assert norm.vmin == pytest.approx(0.2 if log else 0.0)
    assert norm.vmax == pytest.approx(1.0 if statistic == "sink" else 0.8)  # a share is of 1 in every picture


def test_low_entropy_is_bright_as_it_is_what_one_looks_for() -> None:
    axes: Any = history({0: {"a": [0.0, 3.0]}}, "entropy").figure().axes[0]
    assert colour_of(axes, 0, 0) == to_hex(colormaps["cividis"](1.0))
    assert colour_of(axes, 1, 0) == to_hex(colormaps["cividis"](0.0))


def test_one_spike_among_thousands_of_measurements_is_not_lost() -> None:
    steps = range(0, 10 * 4000, 10)
    axes: Any = history({step: {"a": [900.0 if step == 12340 else 1.0]} for step in steps}).figure().axes[0]
    assert len(edges(axes)) <= COLUMNS + 1
    ((column,),) = np.nonzero(cells(axes)[0] == 900.0)
    assert edges(axes)[column] <= 12340 <= edges(axes)[column + 1]
    means = history({step: {"a": [float(step % 20)]} for step in steps}, "entropy").figure().axes[0]
    assert cells(means)[0].tolist() == [5.0] * COLUMNS


def test_all_statistics_share_one_figure_and_a_choice_of_them_too() -> None:
    found = History()
    found.add_tables(0, {"max": {"a": [1.0]}, "entropy": {"a": [0.5]}, "sink": {"a": [0.25]}})
    found.add_tables(1, {"max": {"a": [2.0]}, "entropy": {"a": [0.6]}, "sink": {"a": [0.35]}, "late": {"a": [9.0]}})
    figure: Any = found.figure()
    panels = figure.axes[:4]
    assert [cells(axes).tolist() for axes in panels[:3]] == [
        [[1, 2]],
        [[0.5, pytest.approx(0.6)]],
        [[0.25, pytest.approx(0.35)]],
    ]
    assert math.isnan(cells(panels[3])[0, 0])
    assert cells(panels[3])[0, 1] == 9
    assert [axes.get_title(loc="left") for axes in found.figure("sink", "late").axes[:2]] == [
        "share of attention on the first key",
        "late",
    ]


def test_every_head_of_a_large_model_has_a_pixel_and_its_layers_have_names() -> None:
    heads = {f"model.layers.{layer}.self_attn": 64 for layer in range(80)}
    assert panel_height(heads) * 150 >= 80 * 64
    found = history({0: {name: [1.0] * 16 for name in list(heads)[:28]}})
    axes: Any = found.figure().axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [str(layer) for layer in range(28)]
    assert not axes.get_yticklabels(minor=True)


def test_names_are_written_without_what_they_have_in_common() -> None:
    assert short(["model.layers.0.attn", "model.layers.12.attn"]) == ["0", "12"]
    assert short(["enc.0.self_attn", "dec.0.self_attn", "dec.0.cross"]) == [
        "enc.0.self_attn",
        "dec.0.self_attn",
        "dec.0.cross",
    ]
    assert short(["layers.0.attn", "layers.0.attn#2"]) == ["attn", "attn#2"]
    assert short(["vision.blocks.0.attn", "text.blocks.0.attn"]) == ["vision", "text"]
    assert short(["attn", "attn.inner"]) == ["attn", "attn.inner"]
    assert short(["", "inner"]) == ["model", "inner"]
    assert short(["layers.0.attn"]) == [""]
    assert described(["layers.0.attn"]) == "layers.0.attn"
    assert described(["enc.0.attn", "dec.0.attn"]) == ""


@pytest.mark.parametrize("kind", ["png", "pdf", "svg"])
def test_a_figure_is_written_whole_by_its_suffix_and_the_same_twice(kind: str, tmp_path: Path) -> None:
    found = history({step: {"layers.0.attn": [1.0 + step, 300.0]} for step in range(3)})
    for name in ("one", "two"):
        found.save(tmp_path / f"deep/{name}.{kind}", "max")
    one, two = ((tmp_path / f"deep/{name}.{kind}").read_bytes() for name in ("one", "two"))
    assert one == two
    assert one.startswith({"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}[kind])
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == [f"one.{kind}", f"two.{kind}"]
    if kind == "png":
        with Image.open(io.BytesIO(one)) as image:
            colours = {pixel for _, pixel in image.convert("RGB").getcolors(2**24) or []}
        assert len(colours) > 50
