"""A LightningModule with one attention, and batches for it."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from models import Separate

EPOCHS, BATCHES, LR = 3, 5, 0.05


class Regression(LightningModule):
    """Fits noise, with one optimizer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention, self.out = Separate(), nn.Linear(16, 1)

    def loss(self, x_BTD: Tensor) -> Tensor:
        return (self.out(self.attention(x_BTD))[:, :, 0] - x_BTD.sum(2)).square().mean()

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, _: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=LR)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]


def batches() -> list[Tensor]:
    return list(torch.randn(BATCHES, 4, 5, 16, generator=torch.Generator().manual_seed(1)))
