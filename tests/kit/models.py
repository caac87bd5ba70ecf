"""Small attention models for the tests, in the layouts people use, with their logits declared.

Shapes: B batch, T tokens, D width, H heads, K head size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from quacklr import LogitPath, mha, mla, packed


def logits(q_BTHK: Tensor, k_BTHK: Tensor) -> Tensor:
    k_BTHK = k_BTHK.repeat_interleave(q_BTHK.shape[2] // k_BTHK.shape[2], 2)
    return torch.einsum("bihk,bjhk->bhij", q_BTHK, k_BTHK) / q_BTHK.shape[3] ** 0.5


class Separate(nn.Module):
    """Separate q and k, grouped when `groups` < `heads`."""

    def __init__(self, width: int = 16, heads: int = 4, groups: int = 4, bias: bool = False) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.q = nn.Linear(width, heads * self.size, bias)
        self.k = nn.Linear(width, groups * self.size, bias)
        self.v = nn.Linear(width, width, bias)

    def qk(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        return self.q(x_BTD).unflatten(2, (self.heads, -1)), self.k(x_BTD).unflatten(2, (self.groups, -1))

    def forward(self, x_BTD: Tensor) -> Tensor:
        v_BTHK = self.v(x_BTD).unflatten(2, (self.heads, -1))
        return torch.einsum("bhij,bjhk->bihk", logits(*self.qk(x_BTD)).softmax(3), v_BTHK).flatten(2)

    def logit_paths(self) -> list[LogitPath]:
        return mha(*packed(self.q, ("q", self.heads, self.size)), *packed(self.k, ("k", self.groups, self.size)))


class PerHead(nn.Module):
    """One parameter whose rows are [q, k, v] for each head in turn, [h, 3, d]."""

    def __init__(self, width: int = 16, heads: int = 4, bias: bool = False) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.qkv = nn.Linear(width, 3 * width, bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q_BTHK, k_BTHK, v_BTHK = self.qkv(x_BTD).unflatten(2, (self.heads, 3, self.size)).unbind(3)
        return torch.einsum("bhij,bjhk->bihk", logits(q_BTHK, k_BTHK).softmax(3), v_BTHK).flatten(2)

    def logit_paths(self) -> list[LogitPath]:
        q, k = packed(self.qkv, ("q", 1, self.size), ("k", 1, self.size), (None, 1, self.size), repeat=self.heads)
        return mha(q, k)


class Latent(nn.Module):
    """The paper's MLA: six matrices, no latent norm; here without values."""

    def __init__(self, width: int = 16, heads: int = 4, latent: int = 6, nope: int = 4, rope: int = 2) -> None:
        super().__init__()
        self.heads, self.nope, self.rope = heads, nope, rope
        self.dq = nn.Linear(width, latent, bias=False)
        self.dkv = nn.Linear(width, latent, bias=False)
        self.kr = nn.Linear(width, rope, bias=False)
        self.uq = nn.Linear(latent, heads * nope, bias=False)
        self.uk = nn.Linear(latent, heads * nope, bias=False)
        self.qr = nn.Linear(latent, heads * rope, bias=False)

    def forward(self, x_BTD: Tensor, turn: Callable[[Tensor], Tensor] = lambda rope: rope) -> Tensor:
        c_q, c_kv = self.dq(x_BTD), self.dkv(x_BTD)
        q_nope, k_nope = (u(c).unflatten(2, (self.heads, -1)) for u, c in ((self.uq, c_q), (self.uk, c_kv)))
        q_rope = turn(self.qr(c_q).unflatten(2, (self.heads, -1)))
        k_rope = turn(self.kr(x_BTD).unsqueeze(2)).expand(-1, -1, self.heads, -1)
        return logits(torch.cat([q_nope, q_rope], 3), torch.cat([k_nope, k_rope], 3))

    def logit_paths(self) -> list[LogitPath]:
        sizes = {
            "dq": (1, self.dq.out_features),
            "dkv": (1, self.dkv.out_features),
            "kr": (1, self.rope),
            "uq": (self.heads, self.nope),
            "uk": (self.heads, self.nope),
            "qr": (self.heads, self.rope),
        }
        return mla(**{role: packed(self.get_submodule(role), (role, *size))[0] for role, size in sizes.items()})


def layers(count: int, attention: Callable[[], nn.Module]) -> nn.Sequential:
    return nn.Sequential(*(attention() for _ in range(count)))


def train(model: nn.Module, *optimizers: torch.optim.Optimizer, steps: int = 3, seed: int = 0) -> None:
    """Real steps on random data: the loss is the mean square of what the model gives."""
    data = torch.Generator().manual_seed(seed)
    first = next(model.parameters())
    for _ in range(steps):
        x_BTD = torch.randn(2, 5, 16, generator=data).to(first)
        for optimizer in optimizers:
            optimizer.zero_grad()
        (100 * model(x_BTD).float().square().mean()).backward()
        for optimizer in optimizers:
            optimizer.step()


def assert_equal(actual: object, expected: object) -> None:
    """Bitwise."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
