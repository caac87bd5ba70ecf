"""The decoder written out in float64, without caches, fused kernels or shortcuts: the judge of what decoding gives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quacklr.lab.model import Decoder


def rms(x: Tensor, norm: Any) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight.double()


def turned(x_BTHR: Tensor) -> Tensor:
    """Number i of the first half and of the second are a pair; position t turns it by t / theta^(2 i / R)."""
    half = x_BTHR.shape[-1] // 2
    angle_TR = torch.arange(x_BTHR.shape[1])[:, None] * 1e6 ** (-torch.arange(half, dtype=torch.float64) / half)
    sine, cosine = angle_TR.sin()[:, None], angle_TR.cos()[:, None]
    first, second = x_BTHR[..., :half], x_BTHR[..., half:]
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


def of(x: Tensor, linear: Any, heads: int | None = None) -> Tensor:
    made = x @ linear.weight.double().mT
    return made if heads is None else made.unflatten(-1, (heads, -1))


def qkv_multi_head(a: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    heads, groups = a.matrices()["q"][1], a.matrices()["k"][1]
    q, k, v = of(x, a.q, heads), of(x, a.k, groups), of(x, a.v, groups)
    if a.q_norm is not None:
        q, k = rms(q, a.q_norm), rms(k, a.k_norm)
    return turned(q), turned(k).repeat_interleave(heads // groups, 2), v.repeat_interleave(heads // groups, 2)


def qkv_latent(a: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    heads = a.matrices()["uq"][1]
    cq, ckv = of(x, a.dq), of(x, a.dkv)
    if getattr(a, "kv_latent_norm", None) is not None:
        cq, ckv = rms(cq, a.q_latent_norm), rms(ckv, a.kv_latent_norm)
    content_q, content_k, v = of(cq, a.uq, heads), of(ckv, a.uk, heads), of(ckv, a.uv, heads)
    rotary_q, rotary_k = of(cq, a.qr, heads), of(x, a.kr, 1).expand(-1, -1, heads, -1)
    if hasattr(a.q_norm, "content"):
        content_q, rotary_q = rms(content_q, a.q_norm.content), rms(rotary_q, a.q_norm.rotary)
        content_k, rotary_k = rms(content_k, a.k_norm.content), rms(rotary_k, a.k_norm.rotary)
    elif a.q_norm is not None:
        size = content_q.shape[-1]
        q, k = torch.cat([content_q, rotary_q], -1), torch.cat([content_k, rotary_k], -1)
        q, k = rms(q, a.q_norm), rms(k, a.k_norm)
        content_q, rotary_q, content_k, rotary_k = q[..., :size], q[..., size:], k[..., :size], k[..., size:]
    q, k = torch.cat([content_q, turned(rotary_q)], -1), torch.cat([content_k, turned(rotary_k)], -1)
    return q, k, v


def normed_products_from_latents(a: Any, x_BTC: Tensor) -> Tensor:
    """(B, H, T, S) under plain QK norm, from c, a rotary key and a number a head of each position, and no key."""
    q, _, _ = qkv_latent(a, x_BTC)
    content_q, rotary_q = q.split(a.parts, -1)
    content_gain, rotary_gain = a.k_norm.weight.double().split(a.parts)
    c, r = of(x_BTC, a.dkv), of(x_BTC, a.kr, 1)
    key = torch.cat([of(c, a.uk, a.heads), r.expand(-1, -1, a.heads, -1)], -1)
    number_BSH = 1 / (key.square().mean(-1) + 1e-6).sqrt()
    absorbed = torch.einsum(
        "bthn,hnl->bthl", content_q * content_gain, a.uk.weight.double().unflatten(0, (a.heads, -1))
    )
    kept = turned(r * rotary_gain)[:, :, 0]
    both = torch.einsum("bthl,bsl->bhts", absorbed, c) + torch.einsum("bthr,bsr->bhts", rotary_q, kept)
    return both * number_BSH.transpose(1, 2)[:, :, None]


def attention(a: Any, x_BTC: Tensor, cap: float | None) -> Tensor:
    """Position by position and head by head."""
    q, k, v = qkv_latent(a, x_BTC) if hasattr(a, "uk") else qkv_multi_head(a, x_BTC)
    mixed = torch.zeros_like(q[..., :1]).expand(*q.shape[:3], v.shape[-1]).clone()
    for head in range(q.shape[2]):
        for t in range(q.shape[1]):
            logit = (q[:, t, None, head] * k[:, : t + 1, head]).sum(-1) / q.shape[-1] ** 0.5
            logit = logit if cap is None else cap * (logit / cap).tanh()
            share = logit.exp() / logit.exp().sum(-1, keepdim=True)
            mixed[:, t, head] = (share[..., None] * v[:, : t + 1, head]).sum(1)
    return of(mixed.flatten(2), a.o)


def by_hand(model: Decoder, tokens_BT: Tensor, cap: float | None) -> Tensor:
    """(B, T, V) float64 logits."""
    table = model.embedding.weight.double()
    x = table[tokens_BT]
    blocks: Any = model.blocks
    for block in blocks:
        x = x + attention(block.attention, rms(x, block.attention_norm), cap)
        y, ff = rms(x, block.feed_forward_norm), block.feed_forward
        gate = of(y, ff.gate)
        x = x + of(gate * gate.sigmoid() * of(y, ff.up), ff.down)
    return rms(x, model.norm) @ table.mT
