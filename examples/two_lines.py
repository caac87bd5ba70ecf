"""An existing training loop to which the two lines of QuacK were added; nothing else is changed.

A small causal transformer of torch's own layers learns to output the token from four positions earlier. The learning
rate is too high for its query and key weights.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quacklr import QuacK  # line 1

VOCAB, LENGTH, WIDTH = 16, 24, 32


class Repeater(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        x_BTD = self.tokens(tokens_BT) + self.places.weight
        return self.out(self.layers(x_BTD, mask, is_causal=True))


def main(steps: int = 60) -> None:
    torch.manual_seed(0)
    model = Repeater()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 10)
    quack = QuacK(model, optimizer)  # line 2

    for _ in range(steps):
        tokens_BT = torch.randint(VOCAB, (16, LENGTH))
        logits_BTV = model(tokens_BT)[:, 4:]
        loss = nn.functional.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT[:, :-4].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()

    print(quack)
    rates = quack.rates()
    assert list(rates)[:2] == ["layers.layers.0.self_attn.q", "layers.layers.0.self_attn.k"]
    assert all(rate.max() < 0.9 for rate in rates.values()), "all weights have grown, so all rates have shrunk"
    assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0], "the learning rate itself was never written"


if __name__ == "__main__":
    main()
