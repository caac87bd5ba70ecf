"""Multi-head latent attention with the paper's six matrices: logit = dq uq[h] . uk[h] dkv + dq qr[h] . kr.

Shapes: B batch, T position, C width, H head, L latent, N part without positions, R part with them, D = N + R, E value.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quacklr import Path, mla
from quacklr.lab.model.attention import Attention
from quacklr.lab.model.norm import RMSNorm
from quacklr.lab.model.rope import Rotary
from quacklr.lab.model.spec import MLA, Shape


class Latent(Attention):
    """Queries from one small latent, keys and values from another, and a rotary part beside both."""

    logit_roles = ("dq", "uq", "qr", "dkv", "uk", "kr")

    def __init__(self, shape: Shape, spec: MLA) -> None:
        super().__init__(query_size=spec.nope_dim + spec.rope_dim)
        self.heads, self.parts = spec.heads, [spec.nope_dim, spec.rope_dim]
        self.dq = nn.Linear(shape.d_model, spec.d_cq, bias=False)
        self.uq = nn.Linear(spec.d_cq, spec.heads * spec.nope_dim, bias=False)
        self.qr = nn.Linear(spec.d_cq, spec.heads * spec.rope_dim, bias=False)
        self.dkv = nn.Linear(shape.d_model, spec.d_ckv, bias=False)
        self.uk = nn.Linear(spec.d_ckv, spec.heads * spec.nope_dim, bias=False)
        self.kr = nn.Linear(shape.d_model, spec.rope_dim, bias=False)
        self.uv = nn.Linear(spec.d_ckv, spec.heads * spec.v_head_dim, bias=False)
        self.o = nn.Linear(spec.heads * spec.v_head_dim, shape.d_model, bias=False)
        self.q_latent_norm = RMSNorm(spec.d_cq, shape.norm_eps) if spec.latent_norm else None
        self.kv_latent_norm = RMSNorm(spec.d_ckv, shape.norm_eps) if spec.latent_norm else None

    def forward(self, x_BTC: Tensor, rotary: Rotary) -> Tensor:
        """What each position reads from those up to it; all keys are made, as training does it."""
        q_latent_BTL, kv_latent_BTL = self.dq(x_BTC), self.dkv(x_BTC)
        if self.q_latent_norm is not None and self.kv_latent_norm is not None:
            q_latent_BTL, kv_latent_BTL = self.q_latent_norm(q_latent_BTL), self.kv_latent_norm(kv_latent_BTL)
        q_BTHN, q_BTHR = self._by_head(self.uq(q_latent_BTL)), self._by_head(self.qr(q_latent_BTL))
        k_BTHN, k_BT1R = self._by_head(self.uk(kv_latent_BTL)), self.kr(x_BTC).unsqueeze(2)
        if self.q_norm is not None:  # over the whole query and the whole key, so each head has a rotary key of its own
            q_BTHD, k_BTHD = self.normed(joined(q_BTHN, q_BTHR), joined(k_BTHN, k_BT1R))
            (q_BTHN, q_BTHR), (k_BTHN, k_BT1R) = q_BTHD.split(self.parts, -1), k_BTHD.split(self.parts, -1)
        q_BTHD, k_BTHD = joined(q_BTHN, rotary(q_BTHR)), joined(k_BTHN, rotary(k_BT1R))
        return self.o(self.attend(q_BTHD, k_BTHD, self._by_head(self.uv(kv_latent_BTL))))

    def logit_paths(self) -> list[Path]:
        """dq uq[h] . uk[h] dkv + dq qr[h] . kr; a norm on the latents cuts dq and dkv off, if `norms_cut`."""
        if self.scale_free:
            return []
        uq, uk, qr, kr = (self.weight(role) for role in ("uq", "uk", "qr", "kr"))
        if self.q_latent_norm is not None and self.norms_cut:
            return mla(uq, uk, qr, kr)
        return mla(uq, uk, qr, kr, dq=self.weight("dq"), dkv=self.weight("dkv"))

    def matrices(self) -> dict[str, tuple[nn.Linear, int]]:
        """A head's rows lie together; dq, dkv and kr serve all heads."""
        shared = {role: (getattr(self, role), 1) for role in ("dq", "dkv", "kr")}
        return shared | {role: (getattr(self, role), self.heads) for role in ("uq", "qr", "uk", "uv")}

    def _by_head(self, x_BTX: Tensor) -> Tensor:
        return x_BTX.unflatten(-1, (self.heads, -1))


def joined(x_BTHN: Tensor, x_BTHR: Tensor) -> Tensor:
    """The two parts of a query or key, the second spread over the heads if it is shared."""
    return torch.cat([x_BTHN, x_BTHR.expand(*x_BTHN.shape[:3], -1)], dim=-1)
