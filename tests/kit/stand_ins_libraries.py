"""Stand-ins for the attention of small training scripts and of libraries, each written from scratch in its manner.

Four heads of size 8 on a width of 32; where the original groups heads, two groups.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stand_ins_kit import WIDTH, Case, Model, Rows, Sample, Truth, at, called, layers, linear, qk, rms, rope

HEADS, GROUPS, SIZE = 4, 2, 8


@called("CausalSelfAttention")
class NanoGPTAttention(nn.Module):
    """nanoGPT's: [q|k|v]; the causal mask is a buffer named `bias`."""

    bias: Tensor

    def __init__(self, flash: bool, bias: bool) -> None:
        super().__init__()
        self.n_head, self.n_embd, self.flash = HEADS, WIDTH, flash
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH, bias=bias), nn.Linear(WIDTH, WIDTH, bias=bias)
        self.attn_dropout, self.resid_dropout = nn.Dropout(0.0), nn.Dropout(0.0)
        if not flash:
            self.register_buffer("bias", torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k, q, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (k, q, v))
        if self.flash:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0, is_causal=True)
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
            y = self.attn_dropout(F.softmax(att, dim=-1)) @ v
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C)))


@called("CausalSelfAttention")
class NanochatAttention(nn.Module):
    """nanochat's: a norm without parameters after the rotation."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head, self.n_kv_head, self.n_embd, self.head_dim = HEADS, GROUPS, WIDTH, SIZE
        self.c_q, self.c_k, self.c_v, self.c_proj = linear(32), linear(16), linear(16), linear(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.size()
        q, k, v = (c(x).view(B, T, -1, self.head_dim) for c in (self.c_q, self.c_k, self.c_v))
        q, k = rms(rope(q)), rms(rope(k))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, -1))


@called("CausalSelfAttention")
class LitGPTAttention(nn.Module):
    """litgpt's: [q|k|v] with fewer k and v; half of a head is rotated; the kernel is behind a method of its name."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = linear((HEADS + 2 * GROUPS) * SIZE), linear(WIDTH)
        self.kv_cache, self.norm_q, self.norm_k, self.rope_n_elem = None, None, None, SIZE // 2

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.size()
        q, k, v = self.qkv(x).split((HEADS * SIZE, GROUPS * SIZE, GROUPS * SIZE), dim=-1)
        q, k, v = (t.view(B, T, -1, SIZE).transpose(1, 2) for t in (q, k, v))
        q, k = (torch.cat((self.turn(t[..., : self.rope_n_elem]), t[..., self.rope_n_elem :]), dim=-1) for t in (q, k))
        k, v = (t.repeat_interleave(HEADS // GROUPS, dim=1) for t in (k, v))
        return self.proj(self.scaled_dot_product_attention(q, k, v).reshape(B, T, SIZE * HEADS))

    def turn(self, x_BHTK: Tensor) -> Tensor:
        return rope(x_BHTK.transpose(1, 2)).transpose(1, 2)

    def scaled_dot_product_attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.0, scale=1 / math.sqrt(SIZE), is_causal=True)
        return y.transpose(1, 2)


@called("CausalSelfAttention")
class ModdedNanoGPTAttention(nn.Module):
    """modded-nanogpt's: one parameter (3, H * K, D) without a module, and an output that begins at zero."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.norm = HEADS, SIZE, norm
        self.qkv_w = nn.Parameter(torch.empty(3, HEADS * SIZE, WIDTH).uniform_(-0.3, 0.3))
        self.lambdas, self.c_proj = nn.Parameter(torch.tensor([0.5, 0.5])), linear(WIDTH)
        self.c_proj.weight.detach().zero_()

    def forward(self, x: Tensor) -> Tensor:
        B, T = x.size(0), x.size(1)
        qkv = F.linear(x, self.qkv_w.flatten(end_dim=1).type_as(x))
        q, k, v = qkv.view(B, T, 3 * self.num_heads, self.head_dim).chunk(3, dim=-2)
        if self.norm:
            q, k = rms(q), rms(k)
        q, k, v = rope(q).transpose(1, 2), rope(k).transpose(1, 2), (self.lambdas[0] * v).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.12).transpose(1, 2)
        return self.c_proj(y.contiguous().view(B, T, self.num_heads * self.head_dim))


@called("Attention")
class TimmAttention(nn.Module):
    """timm's: [q|k|v], and a norm of q and k or none in its place."""

    def __init__(self, qk_norm: bool = False, fused_attn: bool = True) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.scale, self.fused_attn = HEADS, SIZE, SIZE**-0.5, fused_attn
        self.qkv = nn.Linear(WIDTH, WIDTH * 3)
        self.q_norm = nn.LayerNorm(SIZE) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(SIZE) if qk_norm else nn.Identity()
        self.attn_drop, self.norm, self.proj = nn.Dropout(0.0), nn.Identity(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.fused_attn:
            x = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0.0)
        else:
            attn = (q * self.scale) @ k.transpose(-2, -1)
            x = self.attn_drop(attn.softmax(dim=-1)) @ v
        return self.proj(self.norm(x.transpose(1, 2).reshape(B, N, C)))


class PatchEmbed(nn.Module):
    """timm's: an image's patches as tokens, and a class token before them."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.cls_token = nn.Conv2d(3, WIDTH, 4, 4), nn.Parameter(torch.randn(1, 1, WIDTH))

    def forward(self, image: Tensor) -> Tensor:
        patches = self.proj(image).flatten(2).transpose(1, 2)
        return torch.cat([self.cls_token.expand(len(image), -1, -1), patches], dim=1)


class Attend(nn.Module):
    """x-transformers': repeats keys as (r kvh), so that head h reads group h % groups; a single group has no dim."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads, kv_heads = q.shape[1], k.shape[1]
        if kv_heads == 1:
            k, v = k.squeeze(1), v.squeeze(1)
        elif kv_heads < heads:
            k, v = (t.repeat(1, heads // kv_heads, 1, 1) for t in (k, v))
        kv_einsum_eq = "bjd" if k.ndim == 3 else "bhjd"
        sim = torch.einsum(f"bhid,{kv_einsum_eq}->bhij", q, k) * q.shape[-1] ** -0.5
        i, j = sim.shape[-2:]
        causal_mask = torch.ones(i, j, dtype=torch.bool).triu(j - i + 1)
        sim = sim.masked_fill(causal_mask, -torch.finfo(sim.dtype).max)
        attn = F.softmax(sim, dim=-1, dtype=torch.float32).type(sim.dtype)
        return torch.einsum(f"bhij,{kv_einsum_eq}->bhid", attn, v)


@called("Attention")
class XTransformersAttention(nn.Module):
    """x-transformers', perhaps with learned keys beside those of the tokens."""

    def __init__(self, kv_heads: int, num_mem_kv: int = 0) -> None:
        super().__init__()
        self.mem_k = nn.Parameter(torch.randn(kv_heads, num_mem_kv, SIZE)) if num_mem_kv else None
        self.mem_v = nn.Parameter(torch.randn(kv_heads, num_mem_kv, SIZE)) if num_mem_kv else None
        self.heads, self.kv_heads = HEADS, kv_heads
        self.to_q, self.to_k, self.to_v = linear(32), linear(SIZE * kv_heads), linear(SIZE * kv_heads)
        self.attend, self.to_out = Attend(), linear(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (to(x).unflatten(2, (-1, SIZE)).transpose(1, 2) for to in (self.to_q, self.to_k, self.to_v))
        if self.mem_k is not None and self.mem_v is not None:
            mem_k, mem_v = (t.expand(len(x), -1, -1, -1) for t in (self.mem_k, self.mem_v))
            k, v = torch.cat((mem_k, k), dim=-2), torch.cat((mem_v, v), dim=-2)
        return self.to_out(self.attend(q, k, v).transpose(1, 2).flatten(2))


def images() -> Sample:
    return torch.randn(2, 3, 8, 8)


CONCAT_Q, CONCAT_K = at(8, 0, 8, 16, 24), at(8, 32, 40, 48, 56)
C_ATTN = qk(Rows("c_attn.weight", CONCAT_Q), Rows("c_attn.weight", CONCAT_K))
C_ATTN_BIAS = qk(
    Rows("c_attn.weight", CONCAT_Q, bias="c_attn.bias"), Rows("c_attn.weight", CONCAT_K, bias="c_attn.bias")
)
LITGPT = qk(Rows("qkv.weight", CONCAT_Q), Rows("qkv.weight", at(8, 32, 32, 40, 40)))
MODDED = qk(Rows("qkv_w", CONCAT_Q, dim=(0, 1)), Rows("qkv_w", CONCAT_K, dim=(0, 1)))
TIMM = qk(Rows("qkv.weight", CONCAT_Q, bias="qkv.bias"), Rows("qkv.weight", CONCAT_K, bias="qkv.bias"))
TILED = qk(Rows("to_q.weight", CONCAT_Q), Rows("to_k.weight", at(8, 0, 8, 0, 8)))
MULTI_QUERY = qk(Rows("to_q.weight", CONCAT_Q), Rows("to_k.weight", at(8, 0, 0, 0, 0)))
MEMORY = Truth(TILED.roles | {"mem_k": Rows("mem_k", [[0], [1], [0], [1]])}, [("q", "k"), ("q", "mem_k")])
GPT2, XT, VIT = "transformer.h.{}.attn", "attn_layers.layers.{}.1", "blocks.{}.attn"

CASES = [
    Case(
        "nanoGPT, flash and by hand",
        lambda: Model(
            GPT2, NanoGPTAttention(flash=True, bias=True), NanoGPTAttention(flash=False, bias=False), norm=nn.LayerNorm
        ),
        layers(GPT2, C_ATTN_BIAS, C_ATTN),
    ),
    Case(
        "nanochat",
        lambda: Model(
            GPT2, NanochatAttention(), NanochatAttention(), norm=lambda size: nn.RMSNorm(size, elementwise_affine=False)
        ),
        {},
        {"transformer.h.0.attn": "norm", "transformer.h.1.attn": "norm"},
    ),
    Case("litgpt", lambda: Model(GPT2, LitGPTAttention(), LitGPTAttention()), layers(GPT2, LITGPT, LITGPT)),
    Case(
        "modded-nanogpt, no norm in the first layer",
        lambda: Model(VIT, ModdedNanoGPTAttention(norm=False), ModdedNanoGPTAttention(norm=True)),
        layers(VIT, MODDED),
        {"blocks.1.attn": "norm"},
    ),
    Case(
        "modded-nanogpt",
        lambda: Model(VIT, ModdedNanoGPTAttention(norm=True), ModdedNanoGPTAttention(norm=True)),
        {},
        {"blocks.0.attn": "norm", "blocks.1.attn": "norm"},
    ),
    Case(
        "timm, fused and by hand",
        lambda: Model(VIT, TimmAttention(), TimmAttention(fused_attn=False), norm=nn.LayerNorm, embed=PatchEmbed()),
        layers(VIT, TIMM, TIMM),
        sample=images,
    ),
    Case(
        "timm, norm",
        lambda: Model(VIT, TimmAttention(qk_norm=True), TimmAttention(True, False), embed=PatchEmbed()),
        {},
        {"blocks.0.attn": "norm", "blocks.1.attn": "norm"},
        images,
    ),
    Case(
        "x-transformers, two groups and one",
        lambda: Model(XT, XTransformersAttention(kv_heads=2), XTransformersAttention(kv_heads=1)),
        layers(XT, TILED, MULTI_QUERY),
    ),
    Case(
        "x-transformers, learned keys",
        lambda: Model(XT, XTransformersAttention(kv_heads=2, num_mem_kv=3), XTransformersAttention(kv_heads=2)),
        layers(XT, MEMORY, TILED),
    ),
]
