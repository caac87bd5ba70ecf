"""QuacK in Lightning: add one callback; every checkpoint of Lightning then contains QuacK's state."""

from __future__ import annotations

import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from quacklr.integrations.lightning import QuacKCallback

EPOCHS, WIDTH = 4, 32


class Encoder(LightningModule):
    """Learns to repeat the token before."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        (x_BTD,) = batch
        return nn.functional.mse_loss(self.layers(x_BTD), x_BTD.roll(1, 1))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)]


def train(checkpoint: Path, epochs: int) -> tuple[Encoder, QuacKCallback]:
    """Fit up to an epoch, from the checkpoint if there is one, and save one at the end."""
    torch.manual_seed(0)
    model, quack = Encoder(), QuacKCallback(tau=1.0)
    x_NTD = torch.randn(160, 12, WIDTH)
    quiet: dict[str, Any] = dict.fromkeys(["logger", "enable_progress_bar", "enable_model_summary"], False)
    trainer = Trainer(
        callbacks=[quack],
        max_epochs=epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        enable_checkpointing=False,  # or ModelCheckpoint, which writes the same
        accelerator="cpu",
        **quiet,
    )
    loader = DataLoader(TensorDataset(x_NTD), batch_size=8)
    trainer.fit(model, loader, ckpt_path=checkpoint if checkpoint.exists() else None)
    trainer.save_checkpoint(checkpoint)
    return model, quack


def main() -> None:
    warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)  # Lightning's, about torch
    with TemporaryDirectory() as folder:
        whole, callback = train(Path(folder, "whole.ckpt"), EPOCHS)
        train(Path(folder, "stopped.ckpt"), 2)
        resumed, _ = train(Path(folder, "stopped.ckpt"), EPOCHS)

    print(callback.quack)
    pairs = zip(whole.parameters(), resumed.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs), "stopped and resumed is bitwise the whole run"
    assert callback.quack is not None
    rates = callback.quack.rates()
    assert all(rate.max() < 1 for rate in rates.values()), "all weights have grown, so all rates have shrunk"


if __name__ == "__main__":
    main()
