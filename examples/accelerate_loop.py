"""QuacK in a training loop with Hugging Face Accelerate.

Attach QuacK after `accelerator.prepare`, when the weights are on their device, and pass it the prepared optimizer.
`accelerator.register_for_checkpointing(quack)` adds QuacK's state to the checkpoints of `save_state`.
"""

from __future__ import annotations

from tempfile import TemporaryDirectory

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from quacklr import QuacK

STEPS, ACCUMULATE, WIDTH = 40, 2, 32


def micro_batches(step: int) -> Tensor:
    return torch.randn(ACCUMULATE, 8, 12, WIDTH, generator=torch.Generator().manual_seed(step))


def train(steps: range, load: str | None = None, save: str | None = None) -> tuple[nn.Module, QuacK]:
    """Take some steps, from a saved state or from the start."""
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATE, cpu=True)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
    model: nn.Module = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = CosineAnnealingLR(optimizer, STEPS)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    quack = QuacK(model, optimizer)  # line 1
    accelerator.register_for_checkpointing(quack)  # line 2

    if load is not None:
        accelerator.load_state(load)
    for step in steps:
        for x_BTD in micro_batches(step):
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(x_BTD), x_BTD.roll(1, 1)))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    if save is not None:
        accelerator.save_state(save)
    return model, quack


def main() -> None:
    whole, quack = train(range(STEPS))
    with TemporaryDirectory() as folder:
        train(range(15), save=folder)
        resumed, _ = train(range(15, STEPS), load=folder)

    print(quack)
    pairs = zip(whole.parameters(), resumed.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs), "stopped and resumed is bitwise the whole run"
    assert all(rate.max() < 1 for rate in quack.rates().values()), "all weights have grown, so all rates have shrunk"


if __name__ == "__main__":
    main()
