"""Multi-head attention, or grouped-query attention, as in Llama and Qwen3.

Shapes: B batch, T position, C width, H head, G head of keys and values, D size of a head.
"""

from __future__ import annotations

from torch import Tensor, nn

from quacklr import LogitPath, mha
from quacklr.lab.model.attention import Attention
from quacklr.lab.model.cache import Cache
from quacklr.lab.model.rope import Rotary
from quacklr.lab.model.spec import MHA, Shape


class MultiHead(Attention):
    """MHA or GQA: queries, keys and values are projections of the residual stream."""

    logit_roles = ("q", "k")
    product_roles = (("q", "k"), ("o", "v"))

    def __init__(self, shape: Shape, spec: MHA) -> None:
        super().__init__(parts=[spec.head_dim])
        self.heads, self.kv_heads = spec.heads, spec.kv_heads
        self.q = nn.Linear(shape.d_model, spec.heads * spec.head_dim, bias=False)
        self.k = nn.Linear(shape.d_model, spec.kv_heads * spec.head_dim, bias=False)
        self.v = nn.Linear(shape.d_model, spec.kv_heads * spec.head_dim, bias=False)
        self.o = nn.Linear(spec.heads * spec.head_dim, shape.d_model, bias=False)

    def forward(self, x_BTC: Tensor, rotary: Rotary, cache: Cache | None = None) -> Tensor:
        """(B, T, C): attention over all positions up to each one, cached positions included."""
        start = cache.length if cache else 0
        q_BTHD = self.q(x_BTC).unflatten(-1, (self.heads, -1))
        k_BTGD = self.k(x_BTC).unflatten(-1, (self.kv_heads, -1))
        v_BTGD = self.v(x_BTC).unflatten(-1, (self.kv_heads, -1))
        q_BTHD, k_BTGD = self.apply_qk_norm(q_BTHD, k_BTGD)
        return self.o(self.attend(rotary(q_BTHD, start), rotary(k_BTGD, start), v_BTGD, cache))

    def cache_layout(self) -> dict[str, tuple[int, int]]:
        """Rotated keys, and values."""
        return {"k": (self.kv_heads, self.query_size), "v": (self.kv_heads, self.query_size)}

    def logit_paths(self) -> list[LogitPath]:
        """q[h] . k[g(h)]; and o[h] . v[g(h)], if that is to have rates."""
        if self.scale_free:
            return []
        return mha(self.weight("q"), self.weight("k")) + self.value_paths("v")

    def matrices(self) -> dict[str, tuple[nn.Linear, int]]:
        """The rows of a head are contiguous."""
        return {"q": (self.q, self.heads), "k": (self.k, self.kv_heads), "v": (self.v, self.kv_heads)}
