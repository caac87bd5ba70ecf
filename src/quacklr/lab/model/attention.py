"""What both kinds of attention share: the product itself, and what the rival methods change in it.

Shapes: B batch, T position, S position so far, H head, G head of keys and values, R = H / G, D size of a query or key,
E size of a value.
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
    """Causal softmax attention over queries, keys and values that a subclass makes."""

    logit_roles: tuple[str, ...]  # roles of the projections that make queries and keys

    def __init__(self, parts: Sequence[int]) -> None:
        """`parts` are the sizes of what a query and a key are put together from."""
        super().__init__()
        self.parts, self.query_size = list(parts), sum(parts)
        self.cap: float | None = None
        self.norms_cut = True  # whether a norm on a latent ends the paths there, as it does
        self.q_norm: RMSNorm | PartsNorm | None = None
        self.k_norm: RMSNorm | PartsNorm | None = None

    def add_qk_norm(self, eps: float, apart: bool = False) -> None:
        """From now on queries and keys, or with `apart` both parts of each, are RMS-normed with a gain, then turned."""
        device = next(self.parameters()).device
        self.q_norm, self.k_norm = (
            PartsNorm(self.parts, eps, device=device) if apart else RMSNorm(self.query_size, eps, device=device)
            for _ in "qk"
        )

    def normed(self, q_BTHD: Tensor, k_BTGD: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys, normed if they are to be."""
        if self.q_norm is None or self.k_norm is None:
            return q_BTHD, k_BTGD
        return self.q_norm(q_BTHD), self.k_norm(k_BTGD)

    def attend(self, q_BTHD: Tensor, k_BTGD: Tensor, v_BTGE: Tensor, cache: Cache | None = None) -> Tensor:
        """(B, T, H * E): softmax of the capped logits, times the values. A cache adds what came before."""
        q_BHTD, k_BGSD, v_BGSE = q_BTHD.transpose(1, 2), k_BTGD.transpose(1, 2), v_BTGE.transpose(1, 2)
        if cache is not None:
            k_BGSD, v_BGSE = cache.add(k=k_BGSD, v=v_BGSE)
        if q_BHTD.shape[2] == 1 and cache is not None:
            return self.mixed(products(q_BHTD[:, :, 0], k_BGSD), v_BGSE)
        if self.cap is None:
            mixed_BHTE = causal_attention(q_BHTD, k_BGSD, v_BGSE)
        else:
            mixed_BHTE = capped_attention(q_BHTD, k_BGSD, v_BGSE, self.cap)
        return mixed_BHTE.transpose(1, 2).flatten(2)

    def mixed(self, product_BHS: Tensor, v_BGSE: Tensor) -> Tensor:
        """(B, 1, H * E): what one position reads, from the products of its queries with all keys."""
        logit_BHS = product_BHS * self.query_size**-0.5
        logit_BHS = logit_BHS if self.cap is None else capped(logit_BHS, self.cap)
        share_BGRS = logit_BHS.softmax(dim=-1).unflatten(1, (v_BGSE.shape[1], -1))
        return (share_BGRS @ v_BGSE).flatten(1).unsqueeze(1)

    @abstractmethod
    def cached(self) -> dict[str, tuple[int, int]]:
        """What a cache keeps of each position: how many heads, and how many numbers of each."""

    @abstractmethod
    def matrices(self) -> dict[str, tuple[nn.Linear, int]]:
        """For each role the projection that has it, and into how many blocks (heads) its rows are cut."""

    @abstractmethod
    def logit_paths(self) -> list[LogitPath]:
        """What a logit is a product of, as long as it depends on the scale of the weights at all."""

    @property
    def scale_free(self) -> bool:
        """Whether the logit does not depend on the weights' scale: under QK norm, or when the weights are normed."""
        matrices = self.matrices()
        return self.q_norm is not None or any(parametrize.is_parametrized(matrices[r][0]) for r in self.logit_roles)

    def weight(self, role: str) -> Weight:
        """The projection in a role, as quacklr knows weights."""
        linear, blocks = self.matrices()[role]
        return packed(linear, (role, blocks, linear.out_features // blocks))[0]


def causal_attention(q_BHTD: Tensor, k_BGSD: Tensor, v_BGSE: Tensor) -> Tensor:
    """Each of the last T of S positions reads those up to itself, by torch's fused kernels."""
    grouped, new, seen = q_BHTD.shape[1] != k_BGSD.shape[1], q_BHTD.shape[2], k_BGSD.shape[2]
    if new == seen:
        return F.scaled_dot_product_attention(q_BHTD, k_BGSD, v_BGSE, is_causal=True, enable_gqa=grouped)
    mask = ~future(new, seen, q_BHTD.device)
    return F.scaled_dot_product_attention(q_BHTD, k_BGSD, v_BGSE, attn_mask=mask, enable_gqa=grouped)


def capped_attention(q_BHTD: Tensor, k_BGSD: Tensor, v_BGSE: Tensor, cap: float) -> Tensor:
    """Gemma 2's: the softmax sees cap * tanh(logit / cap). No fused kernel does that, so the logits are made."""
    repeats = q_BHTD.shape[1] // k_BGSD.shape[1]
    k_BHSD, v_BHSE = k_BGSD.repeat_interleave(repeats, dim=1), v_BGSE.repeat_interleave(repeats, dim=1)
    logit_BHTS = capped((q_BHTD * q_BHTD.shape[-1] ** -0.5) @ k_BHSD.mT, cap)
    hidden_TS = future(q_BHTD.shape[2], k_BGSD.shape[2], q_BHTD.device)
    return torch.softmax(logit_BHTS.masked_fill(hidden_TS, -torch.inf), dim=-1) @ v_BHSE


def products(q_BHD: Tensor, k_BGSD: Tensor) -> Tensor:
    """(B, H, S): one position's queries with all keys. Keys first: a CPU reads them faster than their transpose."""
    q_BGRD = q_BHD.unflatten(1, (k_BGSD.shape[1], -1))
    return (k_BGSD @ q_BGRD.mT).mT.flatten(1, 2)


def capped(logit: Tensor, cap: float) -> Tensor:
    """Bounded by the cap, and about the same where it is small."""
    return cap * torch.tanh(logit / cap)


def future(new: int, seen: int, device: torch.device) -> Tensor:
    """(T, S): which of the positions seen come after each of the new ones, which are the last."""
    return torch.ones(new, seen, dtype=torch.bool, device=device).triu(1 + seen - new)
