"""What both kinds of attention share: the product itself, and what the rival methods change in it.

Shapes: B batch, T position, H head, G head of keys and values, D size of a query or key, E size of a value.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from quacklr import Path, Weight, packed
from quacklr.lab.model.norm import RMSNorm


class Attention(nn.Module, ABC):
    """Causal softmax attention over queries, keys and values that a subclass makes."""

    logit_roles: tuple[str, ...]  # roles of the projections that make queries and keys

    def __init__(self, query_size: int) -> None:
        super().__init__()
        self.query_size = query_size
        self.cap: float | None = None
        self.norms_cut = True  # whether a norm on a latent ends the paths there, as it does
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None

    def add_qk_norm(self, eps: float) -> None:
        """From now on queries and keys are RMS-normed, each with a gain, before they are turned by their positions."""
        device = next(self.parameters()).device
        self.q_norm = RMSNorm(self.query_size, eps, device=device)
        self.k_norm = RMSNorm(self.query_size, eps, device=device)

    def normed(self, q_BTHD: Tensor, k_BTGD: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys, normed if they are to be."""
        if self.q_norm is None or self.k_norm is None:
            return q_BTHD, k_BTGD
        return self.q_norm(q_BTHD), self.k_norm(k_BTGD)

    def attend(self, q_BTHD: Tensor, k_BTGD: Tensor, v_BTGE: Tensor) -> Tensor:
        """(B, T, H * E): softmax of the capped logits, times the values."""
        q_BHTD, k_BGTD, v_BGTE = q_BTHD.transpose(1, 2), k_BTGD.transpose(1, 2), v_BTGE.transpose(1, 2)
        if self.cap is None:
            grouped = q_BHTD.shape[1] != k_BGTD.shape[1]
            mixed_BHTE = F.scaled_dot_product_attention(q_BHTD, k_BGTD, v_BGTE, is_causal=True, enable_gqa=grouped)
        else:
            mixed_BHTE = capped_attention(q_BHTD, k_BGTD, v_BGTE, self.cap)
        return mixed_BHTE.transpose(1, 2).flatten(2)

    @abstractmethod
    def matrices(self) -> dict[str, tuple[nn.Linear, int]]:
        """For each role the projection that has it, and into how many blocks (heads) its rows are cut."""

    @abstractmethod
    def logit_paths(self) -> list[Path]:
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


def capped_attention(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTE: Tensor, cap: float) -> Tensor:
    """Gemma 2's: the softmax sees cap * tanh(logit / cap). No fused kernel does that, so the logits are made."""
    repeats = q_BHTD.shape[1] // k_BGTD.shape[1]
    k_BHTD, v_BHTE = k_BGTD.repeat_interleave(repeats, dim=1), v_BGTE.repeat_interleave(repeats, dim=1)
    logit_BHTT = (q_BHTD * q_BHTD.shape[-1] ** -0.5) @ k_BHTD.mT
    logit_BHTT = cap * torch.tanh(logit_BHTT / cap)
    future_TT = torch.ones(logit_BHTT.shape[-2:], dtype=torch.bool, device=logit_BHTT.device).triu(1)
    return torch.softmax(logit_BHTT.masked_fill(future_TT, -torch.inf), dim=-1) @ v_BHTE
