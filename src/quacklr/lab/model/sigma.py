"""Sigma-Reparam (Zhai et al., 2023): a linear layer uses gain * W / sigma(W), with sigma the largest singular value.

The gain is learned, from 1. Sigma is estimated by one power iteration in each forward pass of training, and
differentiated as u' W v with u and v constant.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

INITIAL_ITERATIONS = 100  # of power iteration, before training
_recomputing: ContextVar[bool] = ContextVar("recomputing", default=False)


class SigmaReparam(nn.Module):
    """The parametrization of one weight matrix."""

    u: Tensor
    v: Tensor

    def __init__(self, weight_RC: Tensor) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1, device=weight_RC.device))  # FSDP2 does not support scalars
        start = torch.randn(weight_RC.shape[1], generator=torch.Generator().manual_seed(0))
        self.register_buffer("v", F.normalize(start, dim=0).to(weight_RC.device))
        self.register_buffer("u", torch.zeros(weight_RC.shape[0], device=weight_RC.device))
        for _ in range(INITIAL_ITERATIONS):
            self.power_iteration(weight_RC)

    @torch.no_grad()
    def power_iteration(self, weight_RC: Tensor) -> None:
        """Update u and v by one iteration. Out of place: a backward pass may still need the old tensors."""
        weight_RC = weight_RC.to(self.v.dtype)
        self.u = F.normalize(weight_RC @ self.v, dim=0)
        self.v = F.normalize(weight_RC.mT @ self.u, dim=0)

    def forward(self, weight_RC: Tensor) -> Tensor:
        """The weight that the layer uses."""
        if self.training and not _recomputing.get():
            self.power_iteration(weight_RC)
        sigma = self.u @ weight_RC.to(self.u.dtype) @ self.v  # under FSDP2 the weight can be in bf16
        return (self.gain / sigma).to(weight_RC.dtype) * weight_RC


def checkpoint_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts for `torch.utils.checkpoint`: the recomputed forward pass must use the same sigma as the first."""
    return nullcontext(), _recomputation()


@contextmanager
def _recomputation() -> Iterator[None]:
    token = _recomputing.set(True)
    try:
        yield
    finally:
        _recomputing.reset(token)


def reparametrise(linear: nn.Linear) -> None:
    """Register SigmaReparam on the weight of a layer."""
    parametrize.register_parametrization(linear, "weight", SigmaReparam(linear.weight.detach()))
