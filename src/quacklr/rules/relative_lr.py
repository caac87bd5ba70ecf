"""The lr of each param group, divided by its initial lr. A budget is multiplied by it, so it follows the schedule.

The initial lr is `initial_lr` of the param group, which torch's schedulers write, or `max_lr` if that is larger
(OneCycleLR). If no scheduler has written it, it is the lr when QuacK was attached. This lr is kept in the param group
as `quack_initial_lr`, so it is part of the optimizer's state dict, and a resumed run has the same initial lr.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from quacklr.core.stepped import Stepped
from quacklr.util.caller import warn

KEY = "quack_initial_lr"
ABOVE_INITIAL = (
    "the lr of a param group of {} is {:.3g} times its {}. The budget follows lr, so it is {:.3g} now instead of {:g}, "
    "and grows with lr. If a warmup had lowered lr before QuacK was attached, set 'initial_lr' in the param group to "
    "the peak lr"
)
WARN_ABOVE = 1.5


class RelativeLr:
    """Relative lrs of the param groups that have tensors on paths. `on_paths` are the ids of these tensors."""

    def __init__(self, on_paths: set[int], stepped: Stepped) -> None:
        self._on_paths, self._stepped = on_paths, stepped
        self._warn_above = WARN_ABOVE

    def remember(self, optimizer: Optimizer) -> None:
        """Keep the lrs of an optimizer as initial lrs where it has none; ValueError if such an lr is 0."""
        for group, ids in self._stepped.groups(optimizer):
            if not ids.isdisjoint(self._on_paths) and not _remember(group):
                raise ValueError(
                    f"the lr of a param group of {type(optimizer).__name__} is 0. A budget follows lr relative to its "
                    "initial value: attach QuacK before a warmup sets lr to 0, or set 'initial_lr' in the param group "
                    "to the peak lr"
                )

    def now(self, optimizer: Optimizer, group: dict[str, Any], budget: float) -> float | Tensor:
        """The relative lr of a param group. Warns if it is above 1.5, and again if it is above ten times that value."""
        if "lr" not in group or not _remember(group):  # _remember: the group may be new, or loaded
            return 1.0
        by_scheduler = "initial_lr" in group
        lr, keys = _readable(group["lr"]), ("initial_lr" if by_scheduler else KEY, "max_lr")
        initial = max(_readable(group[key]) for key in keys if key in group)
        if isinstance(lr, Tensor) or isinstance(initial, Tensor):
            return lr / initial
        relative = lr / initial if initial else 1.0
        if relative > self._warn_above:
            self._warn_above = 10 * relative
            name, kind = "initial_lr" if by_scheduler else "lr when QuacK was attached", type(optimizer).__name__
            warn(ABOVE_INITIAL.format(kind, relative, name, relative * budget, budget))
        return relative


def _remember(group: dict[str, Any]) -> bool:
    """Keep the lr of a param group if it has no initial lr. Returns False if that lr is 0; 0 is not kept."""
    if "initial_lr" in group or KEY in group or "lr" not in group:
        return True
    lr = float(group["lr"])  # if it is a tensor on an accelerator, this waits for the device
    if lr:
        group[KEY] = lr
    return bool(lr)


def _readable(lr: Any) -> Any:
    """The lr as a number. A tensor on an accelerator is returned as it is: reading it would wait for the device."""
    return float(lr) if isinstance(lr, Tensor) and lr.device.type == "cpu" else lr
