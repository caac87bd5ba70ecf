"""The heatmap of a run shows what was measured: cells are read from the figure's own artists."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from torch import Tensor, tensor

from quacklr.lab.train.heatmap import COLUMNS, NO_NUMBER, draw

NAN = torch.nan


def mesh(axes: Any) -> Any:
    (found,) = [each for each in axes.collections if type(each).__name__ == "QuadMesh"]
    return found


def cells(axes: Any) -> Any:
    """Rows x columns of numbers; NaN for what has none."""
    return np.ma.filled(mesh(axes).get_array(), np.nan)


def edges(axes: Any) -> list[float]:
    return [float(x) for x in mesh(axes).get_coordinates()[0, :, 0]]


def panel(steps: list[int], number_RC: Tensor, statistic: str = "max", layers: int = 1) -> Any:
    figure = draw(steps, {statistic: number_RC}, layers)
    figure.draw_without_rendering()
    return figure.axes[0]


def test_a_cell_is_the_number_of_its_head_at_its_step_and_the_first_layer_is_on_top() -> None:
    axes = panel([0, 4, 20, 100], tensor([[1.0, 5, 2, 3], [2, 6, 3, 4], [3, 7, 4, 5], [4, 80, 5, 6]]), layers=2)
    assert cells(axes).tolist() == [[1, 5, 2, 3], [2, 6, 3, 4], [3, 7, 4, 5], [4, 80, 5, 6]]
    assert edges(axes) == [0, 2, 12, 60, 100]
    assert axes.get_ylim() == (4, 0)
    assert [(label.get_text(), label.get_position()[1]) for label in axes.get_yticklabels()] == [("0", 1), ("1", 3)]


def test_a_single_measurement_is_a_column() -> None:
    assert edges(panel([7], tensor([[3.0], [4.0]]))) == [6.5, 7.5]


@pytest.mark.parametrize("statistic", ["max", "entropy"])
def test_what_has_no_number_is_grey(statistic: str) -> None:
    for number_RC in (tensor([[NAN, 3.0], [2.0, 4.0]]), tensor([[NAN], [NAN]])):
        axes = panel(list(range(number_RC.shape[1])), number_RC, statistic)
        image = mesh(axes)
        assert to_hex(image.cmap(image.norm(image.get_array()))[0, 0]) == NO_NUMBER


def test_logits_have_a_logarithmic_scale_of_three_decades_and_large_ones_are_counted() -> None:
    axes = panel([0, 9], tensor([[-5.0, 0.4], [2.0, 101.0], [99.0, 500.0]]))
    norm = mesh(axes).norm
    assert (norm.vmin, norm.vmax) == pytest.approx((0.5, 500.0))
    assert cells(axes)[0].tolist() == [0.5, 0.5], "the colour of the lower end"
    assert norm(50.0) - norm(5.0) == pytest.approx(norm(500.0) - norm(50.0))
    assert axes.get_title(loc="left") == "largest logit: 2 of 3 heads went above 100"


def test_a_share_has_a_linear_scale_from_0_to_1_and_low_entropy_is_bright() -> None:
    norm = mesh(panel([0], tensor([[0.2]]), "sink")).norm
    assert (norm.vmin, norm.vmax) == (0.0, 1.0)
    image = mesh(panel([0], tensor([[0.0], [3.0]]), "entropy"))
    low, high = (sum(image.cmap(image.norm(value))[:3]) for value in (0.0, 3.0))
    assert low > high


def test_one_spike_among_thousands_of_measurements_is_not_lost() -> None:
    steps = list(range(0, 40_000, 10))
    number_RC = torch.ones(1, len(steps))
    number_RC[0, 1234] = 900.0
    axes = panel(steps, number_RC)
    assert len(edges(axes)) <= COLUMNS + 1
    ((column,),) = np.nonzero(cells(axes)[0] == 900.0)
    assert edges(axes)[column] <= 12340 <= edges(axes)[column + 1]


def test_all_statistics_share_one_figure() -> None:
    figure: Any = draw([0], {name: tensor([[0.5]]) for name in ("max", "entropy", "sink")}, 1)
    assert [axes.get_visible() for axes in figure.axes[:4]] == [True, True, True, False]
