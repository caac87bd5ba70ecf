"""Sigma-Reparam (Zhai et al., 2023): a linear layer uses gain * W / sigma(W), sigma its largest singular value.

The gain is learned and starts at 1. Sigma is followed by power iteration, one step at each training forward, and the
gradient flows through it as u' W v with u and v held fixed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

FIRST = 100  # power iterations before training; later steps are small and one at a time follows them
_again: ContextVar[bool] = ContextVar("again", default=False)


class SigmaReparam(nn.Module):
    """The parametrization of one weight."""

    u: Tensor
    v: Tensor

    def __init__(self, weight_RC: Tensor) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1, device=weight_RC.device))  # FSDP2 takes no scalars
        start = torch.randn(weight_RC.shape[1], generator=torch.Generator().manual_seed(0))
        self.register_buffer("v", F.normalize(start, dim=0).to(weight_RC.device))
        self.register_buffer("u", torch.zeros(weight_RC.shape[0], device=weight_RC.device))
        for _ in range(FIRST):
            self.follow(weight_RC)

    @torch.no_grad()
    def follow(self, weight_RC: Tensor) -> None:
        """One power iteration; new tensors, because a backward may still need the old ones."""
        weight_RC = weight_RC.to(self.v.dtype)
        self.u = F.normalize(weight_RC @ self.v, dim=0)
        self.v = F.normalize(weight_RC.mT @ self.u, dim=0)

    def forward(self, weight_RC: Tensor) -> Tensor:
        """The weight that the layer uses."""
        if self.training and not _again.get():
            self.follow(weight_RC)
        sigma = self.u @ weight_RC.to(self.u.dtype) @ self.v  # FSDP2 may give the weight in bf16
        return (self.gain / sigma).to(weight_RC.dtype) * weight_RC


def once_followed() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For a checkpointed forward and for its repetition, which must use the same sigma."""
    return nullcontext(), _repetition()


@contextmanager
def _repetition() -> Iterator[None]:
    token = _again.set(True)
    try:
        yield
    finally:
        _again.reset(token)


def reparametrise(linear: nn.Linear) -> None:
    """Let a layer use its weight through SigmaReparam from now on."""
    parametrize.register_parametrization(linear, "weight", SigmaReparam(linear.weight.detach()))
