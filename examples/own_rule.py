"""A rule of your own: no step moves a head's query or key weights by more than a share of their norm.

A rule says how far each block of weights steps. A block is the rows of one head in one weight. Rates are a flat vector
with one number for each block, and this rule computes them from two such vectors, the norms of the weights and the
sizes of the step.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quacklr import QuacK, Rule
from quacklr.core.rule import Step


class RelativeLimit(Rule):
    """rate = min(1, share * ||W|| / sigma_max(step)), where the step is the one that the optimizer took."""

    measures = True  # `after` measures the step

    def __init__(self, share: float) -> None:
        self.share = share

    def after(self, step: Step) -> Tensor:
        norms, sizes = step.measure()
        allowed = (self.share * norms / sizes).clamp(max=1.0)
        rates = torch.where((norms > 0) & (sizes > 0), allowed, 1.0)  # weights that are all zeros may step
        self.rates = torch.where(sizes > 0, rates, self.rates)  # for quack.rates(); another optimizer steps the rest
        return rates

    def __repr__(self) -> str:
        return f"RelativeLimit({self.share:g})"


def main() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(32, 4, batch_first=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    quack = QuacK(model, optimizer, rule=RelativeLimit(0.01))
    weight = model.self_attn.in_proj_weight

    for step in range(10):
        optimizer.zero_grad()
        x = torch.randn(4, 10, 32)
        nn.functional.mse_loss(model(x), x.roll(1, 1)).backward()
        before = weight.detach().clone()
        optimizer.step()
        q_head = before[:8], (weight.detach() - before)[:8]  # the first head's query rows, and how they moved
        share = torch.linalg.matrix_norm(q_head[1], 2) / torch.linalg.matrix_norm(q_head[0])
        print(f"step {step}: the first head's queries moved by {float(share):.4f} of their norm")
        assert 0 < share < 0.0101

    print(quack)
    assert all((rates < 1).all() for rates in quack.rates().values()), "lr is too high, so every head is limited"


if __name__ == "__main__":
    main()
