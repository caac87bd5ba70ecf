"""Multi-head latent attention with the paper's six matrices: logit = dq uq[h] . uk[h] dkv + dq qr[h] . kr.

Shapes: B batch, T position, S position so far, C width, H head, L latent, N part without rotary positions, R part with
them, D = N + R, E value, X = L + R: the cached elements of a position.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quacklr import LogitPath, mla
from quacklr.lab.model.attention import Attention, query_key_products
from quacklr.lab.model.cache import Cache
from quacklr.lab.model.norm import PartsNorm, RMSNorm
from quacklr.lab.model.rope import Rotary
from quacklr.lab.model.spec import MLA, Shape


class Latent(Attention):
    """MLA: queries from one low-rank latent, keys and values from another, and a rotary part in both."""

    logit_roles = ("dq", "uq", "qr", "dkv", "uk", "kr")
    product_roles = (("uq", "uk"), ("qr", "kr"), ("o", "uv"))

    def __init__(self, shape: Shape, spec: MLA) -> None:
        super().__init__(parts=[spec.nope_dim, spec.rope_dim])
        self.heads = spec.heads
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

    def forward(self, x_BTC: Tensor, rotary: Rotary, cache: Cache | None = None) -> Tensor:
        """(B, T, C): attention over all positions up to each one. Without a cache, keys are computed explicitly."""
        q_latent_BTL, kv_latent_BTL = self.dq(x_BTC), self.dkv(x_BTC)
        if self.q_latent_norm is not None and self.kv_latent_norm is not None:
            q_latent_BTL, kv_latent_BTL = self.q_latent_norm(q_latent_BTL), self.kv_latent_norm(kv_latent_BTL)
        q_BTHN, q_BTHR = self._by_head(self.uq(q_latent_BTL)), self._by_head(self.qr(q_latent_BTL))
        k_BT1R = self.kr(x_BTC).unsqueeze(2)
        if cache is not None and self.caches_latents:
            return self.o(self._attend_latents(q_BTHN, q_BTHR, kv_latent_BTL, k_BT1R, rotary, cache))
        k_BTHN, start = self._by_head(self.uk(kv_latent_BTL)), cache.length if cache else 0
        if self.q_norm is not None:  # over whole queries and keys, so each head has its own rotary key
            q_BTHD, k_BTHD = self.apply_qk_norm(concat_parts(q_BTHN, q_BTHR), concat_parts(k_BTHN, k_BT1R))
            (q_BTHN, q_BTHR), (k_BTHN, k_BT1R) = q_BTHD.split(self.parts, -1), k_BTHD.split(self.parts, -1)
        q_BTHD, k_BTHD = concat_parts(q_BTHN, rotary(q_BTHR, start)), concat_parts(k_BTHN, rotary(k_BT1R, start))
        return self.o(self.attend(q_BTHD, k_BTHD, self._by_head(self.uv(kv_latent_BTL)), cache))

    @property
    def caches_latents(self) -> bool:
        """Whether the cache holds latents instead of keys and values. Plain QK norm needs the keys."""
        return self.q_norm is None or isinstance(self.q_norm, PartsNorm)

    def cache_layout(self) -> dict[str, tuple[int, int]]:
        """Keys and values; or the latent with the rotary key, and under a norm the inverse RMS of each head's key."""
        if not self.caches_latents:
            return {"k": (self.heads, self.query_size), "v": (self.heads, self.uv.out_features // self.heads)}
        latents = {"latent": (1, self.dkv.out_features + self.kr.out_features)}
        return latents if self.q_norm is None else latents | {"inverse_rms": (self.heads, 1)}

    def _attend_latents(
        self, q_BTHN: Tensor, q_BTHR: Tensor, latent_BTL: Tensor, k_BT1R: Tensor, rotary: Rotary, cache: Cache
    ) -> Tensor:
        """(B, T, H * E): attention over cached latents; keys are computed only if there are several new positions."""
        new_positions, start, q_norm, k_norm = q_BTHN.shape[1], cache.length, self.q_norm, self.k_norm
        new_entries = {}
        if isinstance(q_norm, PartsNorm) and isinstance(k_norm, PartsNorm):
            new_entries["inverse_rms"] = k_norm.content.inverse_rms(self._by_head(self.uk(latent_BTL))).transpose(1, 2)
            q_BTHN, q_BTHR, k_BT1R = q_norm.content(q_BTHN), q_norm.rotary(q_BTHR), k_norm.rotary(k_BT1R)
        q_BTHR, k_BT1R = rotary(q_BTHR, start), rotary(k_BT1R, start)
        new_entries["latent"] = torch.cat([latent_BTL, k_BT1R.squeeze(2)], dim=-1).unsqueeze(1)
        *inverse_rms, seen_B1SX = cache.append(**new_entries)
        if new_positions == 1:
            return self._absorbed(q_BTHN[:, 0], q_BTHR[:, 0], seen_B1SX, *inverse_rms)
        latent_BSL, k_BSR = seen_B1SX[:, 0].split([latent_BTL.shape[-1], k_BT1R.shape[-1]], dim=-1)
        k_BSHN = self._by_head(self.uk(latent_BSL))
        k_BSHN = k_norm.content(k_BSHN) if isinstance(k_norm, PartsNorm) else k_BSHN
        values_BSHE = self._by_head(self.uv(latent_BSL))
        return self.attend(concat_parts(q_BTHN, q_BTHR), concat_parts(k_BSHN, k_BSR.unsqueeze(2)), values_BSHE)

    def _absorbed(
        self, q_BHN: Tensor, q_BHR: Tensor, seen_B1SX: Tensor, inverse_rms_BHS1: Tensor | None = None
    ) -> Tensor:
        """(B, 1, H * E): attention over the latents themselves, with uk applied to the query and uv to the output.

        The gain of a key norm is applied to the query as well, and its inverse RMS to the product.
        """
        uk_HNL, uv_HEL = (linear.weight.unflatten(0, (self.heads, -1)) for linear in (self.uk, self.uv))
        latent_B1SL, k_B1SR = seen_B1SX.split([uk_HNL.shape[-1], q_BHR.shape[-1]], dim=-1)
        gain_N = self.k_norm.content.weight if isinstance(self.k_norm, PartsNorm) else 1
        q_BHL = torch.einsum("bhn,hnl->bhl", q_BHN * gain_N, uk_HNL)
        if inverse_rms_BHS1 is None:
            product_BHS = query_key_products(torch.cat([q_BHL, q_BHR], dim=-1), seen_B1SX)
        else:
            product_BHS = query_key_products(q_BHL, latent_B1SL) * inverse_rms_BHS1.squeeze(-1) + query_key_products(
                q_BHR, k_B1SR
            )
        read_BHL = self.attend_one(product_BHS, latent_B1SL).squeeze(1).unflatten(-1, (self.heads, -1))
        return torch.einsum("bhl,hel->bhe", read_BHL, uv_HEL).flatten(1).unsqueeze(1)

    def logit_paths(self) -> list[LogitPath]:
        """dq uq[h] . uk[h] dkv + dq qr[h] . kr; norms on the latents exclude dq and dkv, if `norms_cut`.

        And o[h] . uv[h] dkv, if that is to have rates.
        """
        if self.scale_free:
            return []
        uq, uk, qr, kr = (self.weight(role) for role in ("uq", "uk", "qr", "kr"))
        if self.q_latent_norm is not None and self.norms_cut:
            return mla(uq, uk, qr, kr) + self.value_paths("uv")
        dq, dkv = self.weight("dq"), self.weight("dkv")
        return mla(uq, uk, qr, kr, dq, dkv) + self.value_paths("uv", dkv)

    def matrices(self) -> dict[str, tuple[nn.Linear, int]]:
        """The rows of a head are contiguous; dq, dkv and kr are shared by all heads."""
        shared = {role: (getattr(self, role), 1) for role in ("dq", "dkv", "kr")}
        return shared | {role: (getattr(self, role), self.heads) for role in ("uq", "qr", "uk", "uv")}

    def _by_head(self, x_BTX: Tensor) -> Tensor:
        return x_BTX.unflatten(-1, (self.heads, -1))


def concat_parts(x_BTHN: Tensor, x_BTHR: Tensor) -> Tensor:
    """Concatenate the two parts of a query or key; the second is expanded over the heads if it is shared."""
    return torch.cat([x_BTHN, x_BTHR.expand(*x_BTHN.shape[:3], -1)], dim=-1)
