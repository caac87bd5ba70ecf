"""Which parameters the param groups of an optimizer step.

Usually a param group has the parameters themselves. The engines that flatten parameters put flat tensors into it, and
each steps the ranges of many parameters. Parameters are given by id.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

Group = dict[str, Any]


class Stepped:
    """Maps param groups to the ids of parameters.

    `of_tensor` has, by the id of a flat tensor, the ids of all parameters that it may hold a range of. That is the same
    in all processes, also in one whose range is empty: they all take part in the collectives of a step.
    """

    def __init__(self, of_tensor: Mapping[int, Collection[int]] | None = None) -> None:
        self._of_tensor = dict(of_tensor or {})

    def of(self, tensor: object) -> Collection[int]:
        """The ids of the parameters that a tensor in a param group stands for."""
        return self._of_tensor.get(id(tensor), (id(tensor),))

    def groups(self, optimizer: Optimizer) -> list[tuple[Group, set[int]]]:
        """The param groups that the optimizer has now, each with the ids of its parameters."""
        return [(group, {i for tensor in group["params"] for i in self.of(tensor)}) for group in optimizer.param_groups]

    @property
    def is_plain(self) -> bool:
        """Whether the param groups have the parameters themselves."""
        return not self._of_tensor

    @property
    def known(self) -> set[int]:
        """The ids of all parameters that are stepped through flat tensors, whatever is in the param groups now."""
        return {i for ids in self._of_tensor.values() for i in ids}

    def by(self, optimizer: Optimizer) -> set[int]:
        """The ids of all parameters in the param groups that the optimizer has now."""
        return set().union(*(ids for _, ids in self.groups(optimizer)))


PLAIN = Stepped()


def is_idle(optimizer: Optimizer) -> bool:
    """Whether the next step moves nothing because every lr is 0, as in the first step of a warmup.

    A learning rate that is a tensor on an accelerator is not read, because that would wait for the device.
    """
    lrs = [group.get("lr", 1.0) for group in optimizer.param_groups]
    return all((not isinstance(lr, Tensor) or lr.device.type == "cpu") and lr == 0 for lr in lrs)


def has_stepped(optimizer: Optimizer) -> bool:
    """Whether its state says that it has taken a step; False if it keeps neither a number of steps nor a momentum."""
    states = [state for state in optimizer.state.values() if isinstance(state, Mapping)]
    return any(float(state.get("step", "momentum_buffer" in state)) > 0 for state in states)
