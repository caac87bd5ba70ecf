"""The rule for torch.nn.MultiheadAttention."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from quacklr.core.path import LogitPath, mha
from quacklr.core.weight import Segment, Weight, packed
from quacklr.find.finding import Finding


def multihead(module: nn.Module) -> Finding | None:
    """The rows [q|k|v] in one parameter, or in three where keys have another width; None for other modules."""
    return Finding(_paths(module)) if isinstance(module, nn.MultiheadAttention) else None


def _paths(module: nn.MultiheadAttention) -> list[LogitPath]:
    segments: list[Segment] = [(role, module.num_heads, module.head_dim) for role in ("q", "k", None)]
    if module.in_proj_weight is not None:
        q, k = packed(module.in_proj_weight, *segments, bias=module.in_proj_bias)
    else:
        (q,), (k,) = packed(module.q_proj_weight, segments[0]), packed(module.k_proj_weight, segments[1])
        if module.in_proj_bias is not None:
            q_bias, k_bias = packed(module.in_proj_bias, *segments)
            q, k = replace(q, bias=q_bias), replace(k, bias=k_bias)
    return [*mha(q, k), *_learned_key(module, q)]


def _learned_key(module: nn.MultiheadAttention, q: Weight) -> list[LogitPath]:
    """With add_bias_kv there is one more, learned key: q[h] . bias_k[h]."""
    if module.bias_k is None:
        return []
    (bias_k,) = packed(module.bias_k, ("bias_k", module.num_heads, module.head_dim), dim=2)
    return [LogitPath((q, bias_k), heads=q.blocks)]
