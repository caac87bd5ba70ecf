"""Records the logits of every head during training, in TensorBoard.

A small causal transformer learns to output the token from four positions earlier. The logits of the heads of the first
layer grow far beyond those of all other heads: these heads do the work.

    python examples/watch_logits.py FOLDER      keeps the TensorBoard files in FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

from quacklr import LogitMonitor
from quacklr.integrations.writers import to_tensorboard

VOCAB, LENGTH, WIDTH, HEADS, LAYERS = 16, 24, 32, 4, 3


class Repeater(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        return self.out(self.encoder(self.tokens(tokens_BT) + self.places.weight, mask, is_causal=True))


def main(folder: Path, steps: int = 80) -> None:
    torch.manual_seed(0)
    model = Repeater()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    monitor = LogitMonitor(model, torch.randint(VOCAB, (4, LENGTH)))  # the probe: a batch that stays the same
    writer = SummaryWriter(str(folder))
    largest: list[Tensor] = []  # at each measurement, the largest logit of each head of all layers

    for step in range(steps + 1):
        if step % 4 == 0:  # costs about a forward of the probe
            stats = monitor.measure()
            to_tensorboard(writer, stats, step, heads=True)
            largest.append(torch.cat([each.max for each in stats.values()]))
        tokens_BT = torch.randint(VOCAB, (16, LENGTH))
        loss = nn.functional.cross_entropy(model(tokens_BT)[:, 4:].flatten(0, 1), tokens_BT[:, :-4].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    writer.close()
    print(f"loss {loss.item():.3f}; the largest logit of each head:", largest[-1].round().int().tolist())
    assert largest[0].max() < 5, "all heads begin alike"
    assert largest[-1][:HEADS].mean() > 1.5 * largest[-1][HEADS:].mean(), "then the first layer is ahead"


if __name__ == "__main__":
    if len(sys.argv) > 1:  # python examples/watch_logits.py FOLDER keeps what it makes
        main(Path(sys.argv[1]))
    else:
        with TemporaryDirectory() as temporary:
            main(Path(temporary))
