"""QuacK in a plain training loop with gradient accumulation, clipping, a schedule, and a checkpoint to resume from.

QuacK needs two lines and one entry in the checkpoint. Rates are relative to the weights at the start of the run, so a
resumed run must load them. A run that is stopped and resumed ends with bitwise the same weights.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from quacklr import QuacK

STEPS, ACCUMULATE, WIDTH = 40, 2, 32


def micro_batches(step: int) -> Tensor:
    return torch.randn(ACCUMULATE, 8, 12, WIDTH, generator=torch.Generator().manual_seed(step))


def train(checkpoint: Path, until: int) -> tuple[nn.Module, QuacK]:
    """Train up to a step, from the checkpoint if there is one, and save one at the end."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = CosineAnnealingLR(optimizer, STEPS)
    quack = QuacK(model, optimizer)  # after the weights are initialised
    step = 0

    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        quack.load_state_dict(saved["quack"])
        step = saved["step"]

    while step < until:
        for x_BTD in micro_batches(step):
            loss = nn.functional.mse_loss(model(x_BTD), x_BTD.roll(1, 1))
            (loss / ACCUMULATE).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        step += 1

    saved = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "quack": quack.state_dict(),
        "step": step,
    }
    torch.save(saved, checkpoint)
    return model, quack


def main() -> None:
    with TemporaryDirectory() as folder:
        whole, quack = train(Path(folder, "whole.pt"), STEPS)
        train(Path(folder, "stopped.pt"), 15)
        resumed, _ = train(Path(folder, "stopped.pt"), STEPS)

    print(quack)
    pairs = zip(whole.parameters(), resumed.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs), "stopped and resumed is bitwise the whole run"
    assert all(rate.max() < 1 for rate in quack.rates().values()), "all weights have grown, so all rates have shrunk"


if __name__ == "__main__":
    main()
