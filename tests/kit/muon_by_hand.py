"""Muon, line by line, one matrix after another: the judge of the fast one."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def reference(update_RC: Tensor) -> Tensor:
    """Newton-Schulz, as Keller Jordan wrote it down."""
    x = update_RC.T if update_RC.shape[0] > update_RC.shape[1] else update_RC
    x = x / max(float(x.norm()), 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if update_RC.shape[0] > update_RC.shape[1] else x


def reference_step(param: Tensor, grad: Tensor, buffer: Tensor, lr: float, options: dict[str, Any]) -> None:
    momentum, (rows, columns) = options.get("momentum", 0.95), param.shape
    buffer.mul_(momentum).add_((1 - momentum) * grad)
    update = (1 - momentum) * grad + momentum * buffer if options.get("nesterov", True) else buffer
    wide = options.get("scale") == "rms"
    scale = 0.2 * max(rows, columns) ** 0.5 if wide else max(1, rows / columns) ** 0.5
    param.mul_(1 - lr * options.get("weight_decay", 0.0)).sub_(lr * scale * reference(update))
