"""Attention classes whose logit we know, and how to read it off an instance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from quacklr.path import Path, mha
from quacklr.weight import Segment, packed


def multihead_attention(module: nn.MultiheadAttention) -> list[Path]:
    """torch.nn.MultiheadAttention: [q|k|v] in one parameter, or three when keys have another width."""
    segments: list[Segment] = [(role, module.num_heads, module.head_dim) for role in ("q", "k", None)]
    if module.in_proj_weight is not None:
        return mha(*packed(module.in_proj_weight, *segments, bias=module.in_proj_bias))
    q, k = (
        packed(param, segment)[0]
        for param, segment in zip((module.q_proj_weight, module.k_proj_weight), segments, strict=False)
    )
    if module.in_proj_bias is not None:
        q_bias, k_bias = packed(module.in_proj_bias, *segments)
        q, k = replace(q, bias=q_bias), replace(k, bias=k_bias)
    return mha(q, k)


RULES: dict[type[nn.Module], Callable[[Any], list[Path]]] = {nn.MultiheadAttention: multihead_attention}
