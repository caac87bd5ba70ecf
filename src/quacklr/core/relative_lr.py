"""The lr of each param group relative to its initial lr: a budget is multiplied by it, so it follows the schedule.

The initial lr is `initial_lr` of the param group, which torch's schedulers write; `max_lr` if that is larger
(OneCycleLR). If no scheduler has written it, it is the lr when QuacK was attached, which is kept in the param group
under a key of its own: so the optimizer's state dict has it, and a run that is resumed has the same initial lr.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

KEY = "quack_initial_lr"
ABOVE_INITIAL = (
    "the lr of a param group of {} is {:.3g} times its {}. The budget follows lr, so it is {:.3g} now instead of {:g}, "
    "and grows with lr. If a warmup had lowered lr before QuacK was attached, set 'initial_lr' in the param group to "
    "the peak lr"
)
WARN_ABOVE = 1.5


class RelativeLr:
    """Relative lrs of the param groups that have tensors on paths (by id)."""

    def __init__(self, on_paths: Collection[int]) -> None:
        self._on_paths = on_paths
        self._warn_above = WARN_ABOVE

    def remember(self, optimizer: Optimizer) -> None:
        """Keep the lrs of an optimizer as its initial lrs, unless it has some; ValueError if an lr is 0."""
        for group in optimizer.param_groups:
            if any(id(param) in self._on_paths for param in group["params"]) and not _remember(group):
                raise ValueError(
                    f"the lr of a param group of {type(optimizer).__name__} is 0. A budget follows lr relative to its "
                    "initial value: attach QuacK before a warmup sets lr to 0, or set 'initial_lr' in the param group "
                    "to the peak lr"
                )

    def now(self, optimizer: Optimizer, group: dict[str, Any], budget: float) -> float | Tensor:
        """The relative lr of a param group. Warns if it is above 1.5, and again when it is ten times larger."""
        if "lr" not in group or not _remember(group):  # a group that was added, or a loaded one
            return 1.0
        name = "initial_lr" if "initial_lr" in group else "lr when QuacK was attached"
        lr, initial = _readable(group["lr"]), _readable(group.get("initial_lr", group.get(KEY)))
        if "max_lr" in group:
            initial = max(initial, _readable(group["max_lr"]))
        if isinstance(lr, Tensor) or isinstance(initial, Tensor):
            return lr / initial
        relative = lr / initial if initial else 1.0
        if relative > self._warn_above:
            self._warn_above = 10 * relative
            text = ABOVE_INITIAL.format(type(optimizer).__name__, relative, name, relative * budget, budget)
            warnings.warn(text, stacklevel=9)
        return relative


def _remember(group: dict[str, Any]) -> bool:
    """Keep the lr of a param group, unless it has an initial lr. Returns False if the lr is 0, which is not kept."""
    if "initial_lr" in group or KEY in group or "lr" not in group:
        return True
    lr = float(group["lr"])  # if it is a tensor on an accelerator, this waits for the device
    if lr:
        group[KEY] = lr
    return bool(lr)


def _readable(lr: Any) -> Any:
    """The lr as a number; a tensor on an accelerator stays one, because reading it would wait for the device."""
    return float(lr) if isinstance(lr, Tensor) and lr.device.type == "cpu" else lr
