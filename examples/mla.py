"""QuacK with multi-head latent attention (MLA), written with the paper's six matrices.

The module declares its logit as two paths, in the method `logit_paths` below `forward`. With this declaration QuacK
trains it by the paper's Algorithm 2. At the end, one factor of Algorithm 2 is computed by hand and compared.

Shapes: B batch, T tokens, H heads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quacklr import LogitPath, QuacK, mla, packed

WIDTH, HEADS, NOPE, ROPE, LATENT_Q, LATENT_KV = 32, 4, 8, 4, 16, 12


class MLA(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dq = nn.Linear(WIDTH, LATENT_Q, bias=False)
        self.q_b = nn.Linear(LATENT_Q, HEADS * (NOPE + ROPE), bias=False)  # rows of a head: [nope, rope]
        self.kv_a = nn.Linear(WIDTH, LATENT_KV + ROPE, bias=False)  # rows: [latent, rope key]
        self.kv_b = nn.Linear(LATENT_KV, HEADS * 2 * NOPE, bias=False)  # rows of a head: [nope key, value]
        self.out = nn.Linear(HEADS * NOPE, WIDTH, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q_BTHK = self.q_b(self.dq(x_BTD)).unflatten(2, (HEADS, NOPE + ROPE))
        latent, k_rope = self.kv_a(x_BTD).split([LATENT_KV, ROPE], dim=2)
        k_nope, v_BTHK = self.kv_b(latent).unflatten(2, (HEADS, 2 * NOPE)).split(NOPE, dim=3)
        k_BTHK = torch.cat([k_nope, k_rope.unsqueeze(2).expand(-1, -1, HEADS, -1)], 3)  # (rotation left out here)
        q, k, v = (z.transpose(1, 2) for z in (q_BTHK, k_BTHK, v_BTHK))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def logit_paths(self) -> list[LogitPath]:
        """dq uq[h] . uk[h] dkv  +  dq qr[h] . kr"""
        (dq,) = packed(self.dq, ("dq", 1, LATENT_Q))
        uq, qr = packed(self.q_b, ("uq", 1, NOPE), ("qr", 1, ROPE), repeat=HEADS)
        dkv, kr = packed(self.kv_a, ("dkv", 1, LATENT_KV), ("kr", 1, ROPE))
        (uk,) = packed(self.kv_b, ("uk", 1, NOPE), (None, 1, NOPE), repeat=HEADS)
        return mla(uq, uk, qr, kr, dq, dkv)


@torch.no_grad()
def factor_uq(model: MLA, head: int) -> float:
    """The paper's W_uq.factor, by hand: 1 / (||W_dq|| ||W_uk[h]|| ||W_dkv||)."""
    uk = model.kv_b.weight.view(HEADS, 2, NOPE, LATENT_KV)[head, 0]
    dkv = model.kv_a.weight[:LATENT_KV]
    return 1 / float(model.dq.weight.norm() * uk.norm() * dkv.norm())


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(MLA())
    attention = next(m for m in model.modules() if isinstance(m, MLA))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    quack = QuacK(model, optimizer, tau=0.5)
    start = factor_uq(attention, head=2)

    for _ in range(20):
        optimizer.zero_grad()
        x_BTD = torch.randn(4, 10, WIDTH)
        nn.functional.mse_loss(model(x_BTD), x_BTD.roll(1, 1)).backward()
        optimizer.step()

    print(quack)
    by_hand = 0.5 * factor_uq(attention, head=2) / start
    assert abs(float(quack.rates()["0.uq"][2]) / by_hand - 1) < 1e-5
    of_row = quack.rate_of(attention.kv_b.weight)
    assert of_row is not None
    assert of_row[NOPE : 2 * NOPE].eq(1).all(), "values keep the plain learning rate"


if __name__ == "__main__":
    main()
