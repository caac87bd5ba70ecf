"""Optimizers that keep copies of the weights in their state: averages, slow weights, weights of higher precision.

QuacK scales the step of the weights, but not the step of such a copy. If the optimizer computes the next weights from
its copy, the scaling is lost.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from quacklr.core.local import local_tensor
from quacklr.core.stepped import PLAIN, Stepped

KEEPS_A_COPY = (
    "{} keeps a copy of the weights in its state ({!r}), and a budget scales the step of the weights only. If the "
    "optimizer computes weights from the copy, as schedule-free optimizers and those with master weights do, part of "
    "the scaling is lost. Use an optimizer without copies; QuacK with tau tests when it is attached whether scaled "
    "steps are right, and raises an error if not"
)


def warn_of_copies(optimizer: Optimizer, tensors: Collection[int], in_groups: Stepped = PLAIN) -> None:
    """Warn if an optimizer's state has a copy of one of these tensors (by id). Waits for the device.

    A tensor of the state counts as a copy if its distance to the weight is less than half of the weight's norm. Momenta
    and second moments are further away. To be called after the first step: copies that an optimizer makes later are not
    found.
    """
    wanted = set(tensors)
    stepped = (p for group in optimizer.param_groups for p in group["params"] if not wanted.isdisjoint(in_groups.of(p)))
    for param in stepped:
        state: Any = optimizer.state.get(param, {})
        for key, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, Tensor) and value.shape == param.shape and _is_copy(value, param):
                warnings.warn(KEEPS_A_COPY.format(type(optimizer).__name__, key), stacklevel=7)
                return


@torch.no_grad()
def _is_copy(value: Tensor, param: Tensor) -> bool:
    weight, kept = local_tensor(param).float(), local_tensor(value).float()
    return weight.shape == kept.shape and bool((kept.to(weight.device) - weight).norm() < 0.5 * weight.norm())
