"""Records the logits of every head during training: in TensorBoard while it runs, and as one figure at the end.

A small causal transformer learns to output the token from four positions earlier. In the figure, the logits of the
heads of the first layer grow far beyond those of all other heads: these heads do the work.

    python examples/watch_logits.py FOLDER      keeps the figure and the TensorBoard files in FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

from quacklr import LogitMonitor
from quacklr.integrations.heatmap import History
from quacklr.integrations.writers import charts, to_tensorboard

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
    history, writer = History(), SummaryWriter(str(folder))

    for step in range(steps + 1):
        if step % 4 == 0:  # costs about a forward of the probe
            stats = monitor.measure()
            to_tensorboard(writer, stats, step, heads=True)
            history.add(step, stats)
        tokens_BT = torch.randint(VOCAB, (16, LENGTH))
        loss = nn.functional.cross_entropy(model(tokens_BT)[:, 4:].flatten(0, 1), tokens_BT[:, :-4].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    writer.add_custom_scalars(charts(stats))  # the tab Custom Scalars: a chart for each layer, a line for each head
    writer.close()
    history.save(folder / "logits.png")  # all statistics; history.save(folder / "logits.pdf", "max") for one

    largest_RC = history.numbers("max")  # a row a head, a column a measurement
    print(f"loss {loss.item():.3f}; the largest logit of each head:", largest_RC[:, -1].round().int().tolist())
    assert largest_RC[:, 0].max() < 5, "all heads begin alike"
    assert largest_RC[:HEADS, -1].mean() > 1.5 * largest_RC[HEADS:, -1].mean(), "then the first layer is ahead"
    assert (folder / "logits.png").read_bytes().startswith(b"\x89PNG")


if __name__ == "__main__":
    if len(sys.argv) > 1:  # python examples/watch_logits.py FOLDER keeps what it makes
        main(Path(sys.argv[1]))
    else:
        with TemporaryDirectory() as temporary:
            main(Path(temporary))
