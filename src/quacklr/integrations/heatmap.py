"""A heatmap of the statistics of a LogitMonitor: every head of every layer, over the steps of training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quacklr.attention.monitor import LogitStats
from quacklr.integrations.writers import Tables, tables

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class History:
    """The measurements of a monitor, and a heatmap of them: one row per head, one column per measurement.

        history = History()
        history.add(step, monitor.measure())      # from time to time
        history.save("logits.png")                # all statistics; history.save("logits.pdf", "max") for one

    Keeps 4 bytes per head, statistic and measurement on the CPU. Drawing needs matplotlib and takes under a second.
    Under torch.distributed, measure on every rank, and add and save on one.
    """

    def __init__(self) -> None:
        self._heads: dict[str, int] = {}
        self._measured: dict[int, dict[str, Tensor]] = {}  # by step and statistic: (all heads of all attentions,)

    def add(self, step: int, stats: Mapping[str, LogitStats]) -> None:
        """Add the result of `monitor.measure()`. It replaces an earlier one of the same step."""
        self.add_tables(step, tables(stats))

    def add_tables(self, step: int, numbers: Tables) -> None:
        """The same from Python numbers by statistic and attention, as in a log; None is a missing number."""
        if not isinstance(step, int):
            raise ValueError(f"step {step!r}: a step is a whole number; history.add(step, stats)")
        for attentions in numbers.values():
            heads = {name: len(values) for name, values in attentions.items()}
            self._heads = self._heads or heads
            if heads != self._heads:
                raise ValueError(f"step {step}: attentions with {heads} heads, but before there were {self._heads}")
        self._measured[step] = {
            statistic: torch.tensor([torch.nan if each is None else each for row in rows.values() for each in row])
            for statistic, rows in numbers.items()
        }

    @property
    def steps(self) -> list[int]:
        """The steps with a measurement, in order."""
        return sorted(self._measured)

    @property
    def statistics(self) -> list[str]:
        """The names of the measured statistics."""
        return list(dict.fromkeys(name for each in self._measured.values() for name in each))

    def numbers(self, statistic: str) -> Tensor:
        """(all heads of all attentions, steps); NaN for missing numbers."""
        missing = torch.full((sum(self._heads.values()),), torch.nan)
        return torch.stack([self._measured[step].get(statistic, missing) for step in self.steps], dim=1)

    def figure(self, *statistics: str) -> Figure:
        """The heatmap of these statistics, or of all. The figure is not registered in pyplot and need not be closed."""
        if not self._measured:
            raise ValueError("nothing to draw: history.add(step, monitor.measure()) comes first")
        if unknown := set(statistics) - set(self.statistics):
            raise ValueError(f"{', '.join(sorted(unknown))}: not measured; there are {', '.join(self.statistics)}")
        try:
            from quacklr.integrations.drawing import draw
        except ModuleNotFoundError as missing:
            raise ModuleNotFoundError(
                f"drawing a History needs {missing.name}: pip install 'quacklr[lab]'", name=missing.name
            ) from missing
        return draw(self._heads, self.steps, {name: self.numbers(name) for name in statistics or self.statistics})

    def save(self, path: str | Path, *statistics: str) -> None:
        """Write the figure atomically as PNG, PDF or SVG, according to the file name."""
        figure = self.figure(*statistics)
        from quacklr.util.figures import save

        save(figure, Path(path))

    def state_dict(self) -> dict[str, Any]:
        """The measurements for a checkpoint, so that the heatmap of a resumed run is complete."""
        numbers = {name: self.numbers(name) for name in self.statistics}
        return {"heads": dict(self._heads), "steps": self.steps, "numbers": numbers}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace all measurements by those of a `state_dict()`."""
        self._heads = dict(state_dict["heads"])
        self._measured = {
            step: {name: numbers[:, column].cpu().clone() for name, numbers in state_dict["numbers"].items()}
            for column, step in enumerate(state_dict["steps"])
        }
