"""Causal attention, with QK norm and soft-capping as options: the base class of MHA and MLA.

Shapes: B batch, T position, S position of a key, H head, G head of keys and values, R = H / G, D size of a query or
key, E size of a value.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from quacklr import LogitPath, Weight, packed
from quacklr.lab.model.cache import Cache
from quacklr.lab.model.norm import PartsNorm, RMSNorm


class Attention(nn.Module, ABC):
    """Causal softmax attention over the queries, keys and values of a subclass."""

    logit_roles: tuple[str, ...]  # roles of the projections that compute queries and keys
    product_roles: tuple[tuple[str, str], ...]  # roles whose rows of a head are multiplied; the second may be shared
    o: nn.Linear

    def __init__(self, parts: Sequence[int]) -> None:
        """`parts` are the sizes of the parts that are concatenated to a query or a key."""
        super().__init__()
        self.parts, self.query_size = list(parts), sum(parts)
        self.cap: float | None = None
        self.norms_cut = True  # whether the logit paths end at a norm; False to ignore that a norm removes the scale
        self.values_have_rates = False  # whether the product of values and output projection is declared as a path
        self.q_norm: RMSNorm | PartsNorm | None = None
        self.k_norm: RMSNorm | PartsNorm | None = None

    def add_qk_norm(self, eps: float, apart: bool = False) -> None:
        """Add RMS norms with gains to queries and keys, before the rotation; with `apart` one for each part."""
        device = next(self.parameters()).device
        self.q_norm, self.k_norm = (
            PartsNorm(self.parts, eps, device=device) if apart else RMSNorm(self.query_size, eps, device=device)
            for _ in "qk"
        )

    def apply_qk_norm(self, q_BTHD: Tensor, k_BTGD: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys after their norms, if there are any."""
        if self.q_norm is None or self.k_norm is None:
            return q_BTHD, k_BTGD
        return self.q_norm(q_BTHD), self.k_norm(k_BTGD)

    def attend(self, q_BTHD: Tensor, k_BTGD: Tensor, v_BTGE: Tensor, cache: Cache | None = None) -> Tensor:
        """(B, T, H * E): the attention's output. With a cache, keys and values of earlier positions are read too."""
        q_BHTD, k_BGSD, v_BGSE = q_BTHD.transpose(1, 2), k_BTGD.transpose(1, 2), v_BTGE.transpose(1, 2)
        if cache is not None:
            k_BGSD, v_BGSE = cache.append(k=k_BGSD, v=v_BGSE)
        if q_BHTD.shape[2] == 1 and cache is not None:
            return self.attend_one(query_key_products(q_BHTD[:, :, 0], k_BGSD), v_BGSE)
        if self.cap is None:
            output_BHTE = causal_attention(q_BHTD, k_BGSD, v_BGSE)
        else:
            output_BHTE = capped_attention(q_BHTD, k_BGSD, v_BGSE, self.cap)
        return output_BHTE.transpose(1, 2).flatten(2)

    def attend_one(self, product_BHS: Tensor, v_BGSE: Tensor) -> Tensor:
        """(B, 1, H * E): the output at one position, from the products of its queries with all keys."""
        logit_BHS = product_BHS * self.query_size**-0.5
        logit_BHS = logit_BHS if self.cap is None else soft_cap(logit_BHS, self.cap)
        share_BGRS = logit_BHS.softmax(dim=-1).unflatten(1, (v_BGSE.shape[1], -1))
        return (share_BGRS @ v_BGSE).flatten(1).unsqueeze(1)

    @abstractmethod
    def cache_layout(self) -> dict[str, tuple[int, int]]:
        """The tensors of a cache by name: number of heads, and elements per head and position."""

    @abstractmethod
    def matrices(self) -> dict[str, tuple[nn.Linear, int]]:
        """The projection of each role, and the number of blocks (heads) that its rows are split into."""

    @abstractmethod
    def logit_paths(self) -> list[LogitPath]:
        """The logit paths; none if the logits do not depend on the scale of the weights."""

    @property
    def scale_free(self) -> bool:
        """Whether the logits do not depend on the weights' scale: under QK norm, or with parametrized weights."""
        matrices = self.matrices()
        normed = self.q_norm is not None and self.norms_cut
        return normed or any(parametrize.is_parametrized(matrices[r][0]) for r in self.logit_roles)

    def weight(self, role: str) -> Weight:
        """The projection of a role as a quacklr Weight."""
        linear, blocks = self.matrices()[role]
        return packed(linear, (role, blocks, linear.out_features // blocks))[0]

    def value_paths(self, role: str, *before: Weight) -> list[LogitPath]:
        """o[h] . v[h], if it is to have rates: `role` is that of the values, `before` a weight that they read."""
        if not self.values_have_rates:
            return []
        values = self.weight(role)
        size = int(values.rows_of_block[0])
        block_of_column = torch.arange(self.o.in_features, device="cpu") // size
        o = Weight("o", self.o.weight, block_of_column, dim=1)
        return [LogitPath((o, values, *before), heads=o.blocks)]


def causal_attention(q_BHTD: Tensor, k_BGSD: Tensor, v_BGSE: Tensor) -> Tensor:
    """Causal attention of the last T of S positions, by torch's fused kernels."""
    grouped, new, seen = q_BHTD.shape[1] != k_BGSD.shape[1], q_BHTD.shape[2], k_BGSD.shape[2]
    mask = None if new == seen else ~future_mask(new, seen, q_BHTD.device)
    return F.scaled_dot_product_attention(
        q_BHTD, k_BGSD, v_BGSE, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
    )


def capped_attention(q_BHTD: Tensor, k_BGSD: Tensor, v_BGSE: Tensor, cap: float) -> Tensor:
    """Causal attention with Gemma 2's soft-capped logits. No fused kernel does this, so the logits are materialised."""
    repeats = q_BHTD.shape[1] // k_BGSD.shape[1]
    k_BHSD, v_BHSE = k_BGSD.repeat_interleave(repeats, dim=1), v_BGSE.repeat_interleave(repeats, dim=1)
    logit_BHTS = soft_cap((q_BHTD * q_BHTD.shape[-1] ** -0.5) @ k_BHSD.mT, cap)
    mask_TS = future_mask(q_BHTD.shape[2], k_BGSD.shape[2], q_BHTD.device)
    return torch.softmax(logit_BHTS.masked_fill(mask_TS, -torch.inf), dim=-1) @ v_BHSE


def query_key_products(q_BHD: Tensor, k_BGSD: Tensor) -> Tensor:
    """(B, H, S): the queries of one position times all keys. Computed as K @ q': reading K' is slower on a CPU."""
    q_BGRD = q_BHD.unflatten(1, (k_BGSD.shape[1], -1))
    return (k_BGSD @ q_BGRD.mT).mT.flatten(1, 2)


def soft_cap(logit: Tensor, cap: float) -> Tensor:
    """cap * tanh(logit / cap)."""
    return cap * torch.tanh(logit / cap)


def future_mask(new: int, seen: int, device: torch.device) -> Tensor:
    """(T, S): True where a key comes after the query. The queries are the last `new` of `seen` positions."""
    return torch.ones(new, seen, dtype=torch.bool, device=device).triu(1 + seen - new)
