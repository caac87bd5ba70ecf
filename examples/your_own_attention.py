"""QuacK with a new kind of attention: declare its logit as paths in `logit_paths`; QuacK needs no other information.

In this attention every two heads share a query, and a logit is a sum of two terms. The content term is a product of
three weights, with a mixing matrix between query and key. The position term has a key that is computed from positions
and shared by all heads:

    logit[h] = q[h/2] mix[h] . k[h]  +  q[h/2] . p

Shapes: B batch, T tokens, H heads, K head size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quacklr import LogitPath, QuacK, Weight, packed, sensitivity

WIDTH, HEADS, SIZE, LENGTH = 32, 4, 8, 12


class PairedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, HEADS // 2 * SIZE)
        self.k = nn.Linear(WIDTH, HEADS * SIZE)
        self.v = nn.Linear(WIDTH, WIDTH)
        self.mix_HKK = nn.Parameter(torch.eye(SIZE).repeat(HEADS, 1, 1) + 0.1 * torch.randn(HEADS, SIZE, SIZE))
        self.p = nn.Linear(WIDTH, SIZE, bias=False)
        self.places = nn.Embedding(LENGTH, WIDTH)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q_BTHK = self.q(x_BTD).unflatten(2, (HEADS // 2, SIZE)).repeat_interleave(2, dim=2)
        k_BTHK, v_BTHK = (proj(x_BTD).unflatten(2, (HEADS, SIZE)) for proj in (self.k, self.v))
        content = torch.einsum("bihk,hkl,bjhl->bhij", q_BTHK, self.mix_HKK, k_BTHK)
        place = torch.einsum("bihk,jk->bhij", q_BTHK, self.p(self.places.weight))
        weights_BHTT = ((content + place) / SIZE**0.5).softmax(3)
        return torch.einsum("bhij,bjhk->bihk", weights_BHTT, v_BTHK).flatten(2)

    def logit_paths(self) -> list[LogitPath]:
        (q,) = packed(self.q, ("q", HEADS // 2, SIZE))  # heads read its blocks in equal runs: 0 0 1 1
        (k,) = packed(self.k, ("k", HEADS, SIZE))
        (p,) = packed(self.p, ("p", 1, SIZE))
        mix = Weight("mix", self.mix_HKK, torch.arange(HEADS))
        return [LogitPath((q, mix, k), HEADS), LogitPath((q, p), HEADS)]


def main() -> None:
    torch.manual_seed(0)
    model = PairedAttention()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    quack = QuacK(model, optimizer, tau=1.0)
    for _ in range(20):
        optimizer.zero_grad()
        x_BTD = torch.randn(4, LENGTH, WIDTH)
        nn.functional.mse_loss(model(x_BTD), x_BTD.roll(1, 1)).backward()
        optimizer.step()
    print(quack)

    before = quack.rates()["q"]
    with torch.no_grad():
        model.p.weight.mul_(1000)  # now the place term is what a change of q moves most, in every head
    after = quack.rates()["q"]
    assert (after < before / 10).all(), "a louder position key slows every query"
    by_name = {weight.name: s for weight, s in sensitivity(model.logit_paths()).items()}
    assert torch.allclose(by_name["q"], model.p.weight.norm()), "how far a unit change of q can move a logit"


if __name__ == "__main__":
    main()
