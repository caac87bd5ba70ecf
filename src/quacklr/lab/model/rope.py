"""Rotary position embedding: rotates pairs of elements by an angle proportional to the position.

Element i is paired with element i + D/2 (the half-split order of Llama and Qwen, not the interleaved one of GPT-J).
Shapes: B batch, T position, H head, D size of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Rotary(nn.Module):
    """Rotary position embedding for `context` positions. Its tables are not saved in checkpoints."""

    cos_TD: Tensor
    sin_TD: Tensor

    def __init__(self, dim: int, context: int, theta: float) -> None:
        super().__init__()
        self.dim, self.context, self.theta = dim, context, theta
        self.register_buffer("cos_TD", torch.empty(context, dim), persistent=False)
        self.register_buffer("sin_TD", torch.empty(context, dim), persistent=False)
        self.reset()

    def reset(self) -> None:
        """Fill the tables, in float32. Must be called again after `to_empty`."""
        device = self.cos_TD.device
        rate_F = 1.0 / self.theta ** (torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim)
        angle_TF = torch.arange(self.context, device=device, dtype=torch.float32)[:, None] * rate_F
        with torch.no_grad():
            self.cos_TD.copy_(torch.cat([angle_TF.cos(), angle_TF.cos()], dim=-1))
            self.sin_TD.copy_(torch.cat([-angle_TF.sin(), angle_TF.sin()], dim=-1))

    def forward(self, x_BTHD: Tensor, start: int = 0) -> Tensor:
        """Rotate x; index t is position start + t."""
        end = start + x_BTHD.shape[1]
        apply = rotate if torch.compiler.is_compiling() else _rotate  # a compiler shortens the backward pass itself
        return apply(x_BTHD, self.cos_TD[start:end, None], self.sin_TD[start:end, None])


class Rotate(torch.autograd.Function):
    """x cos + swap(x) sin, where the sines of the first half are negative; its gradient is the inverse rotation.

    Autograd would save four intermediate tensors of x's size.
    """

    @staticmethod
    def forward(ctx: Any, x_BTHD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
        """Save only the tables."""
        ctx.save_for_backward(cos_T1D, sin_T1D)
        return rotate(x_BTHD, cos_T1D, sin_T1D)

    @staticmethod
    def backward(ctx: Any, grad_BTHD: Tensor) -> tuple[Tensor, None, None]:
        """Rotate by the opposite angle."""
        cos_T1D, sin_T1D = ctx.saved_tensors
        return rotate(grad_BTHD, cos_T1D, -sin_T1D), None, None


_rotate: Any = Rotate.apply


def rotate(x_BTHD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """x cos + swap(x) sin, in float32; the result in the dtype of x."""
    full_BTHD = x_BTHD.float()
    swapped_BTHD = full_BTHD.roll(full_BTHD.shape[-1] // 2, dims=-1)
    return swapped_BTHD.mul_(sin_T1D).addcmul_(full_BTHD, cos_T1D).to(x_BTHD.dtype)
