"""The table of attention whose queries and keys are rows of one parameter. The class determines the layout of the rows.

concat     [q | k | v]        the queries of all heads, then all keys, then all values
grouped    [g, r + 2, d]      each group's r queries, then its key and value; with r = 1, each head's query, key, value
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from quacklr.core.path import LogitPath, mha
from quacklr.core.weight import Segment, Weight, packed
from quacklr.find.finding import QK_NORM, Finding
from quacklr.find.tables.facts import (
    UnreadableError,
    head_sizes,
    int_attributes,
    int_setting,
    is_trusted,
    validate_parts,
)
from quacklr.find.tables.naming import GROUPS, HEAD_SIZE, HEADS, K_NORM, Q_NORM
from quacklr.find.tables.projections import ProjectionWeight, chains, finding_from, projection_weights
from quacklr.find.tables.separate import has_qk_norm

Layout = Callable[[int, int, int], tuple[list[Segment], int]]  # (heads, groups, d) -> segments, and their repeats


def concat(heads: int, groups: int, d: int) -> tuple[list[Segment], int]:
    """[q | k | v]"""
    return [("q", heads, d), ("k", groups, d), (None, groups, d)], 1


def grouped(heads: int, groups: int, d: int) -> tuple[list[Segment], int]:
    """[g, r + 2, d]"""
    return [("q", heads // groups, d), ("k", 1, d), (None, 1, d)], groups


def codegen(heads: int, _groups: int, d: int) -> tuple[list[Segment], int]:
    """Four parts, one for each of four TPU cores, each [q | v | k] of its heads."""
    return [("q", heads // 4, d), (None, heads // 4, d), ("k", heads // 4, d)], 4


class FusedClasses(NamedTuple):
    """Some attention classes of a package: the name of their projection, and its layout."""

    package: str
    child: str
    layout: Layout
    classes: tuple[str, ...]


CLASSES = (
    FusedClasses("transformers", "c_attn", concat, ("Attention", "GPT2Attention", "ImageGPTAttention")),
    FusedClasses("transformers", "c_attn", grouped, ("GPTBigCodeAttention",)),
    FusedClasses("transformers", "in_proj", grouped, ("DisentangledSelfAttention",)),  # DeBERTa
    FusedClasses("transformers", "qkv", concat, ("MgpstrAttention", "SamVisionAttention", "SamHQVisionAttention")),
    FusedClasses("transformers", "qkv", concat, ("GotOcr2VisionAttention",)),
    FusedClasses("transformers", "qkv_proj", codegen, ("CodeGenAttention",)),
    FusedClasses("transformers", "qkv_proj", concat, ("Phi3Attention", "Phi4MultimodalAttention")),
    FusedClasses("transformers", "query_key_value", grouped, ("BloomAttention", "FalconAttention", "GPTNeoXAttention")),
    FusedClasses("transformers", "query_key_value", grouped, ("GPTNeoXJapaneseAttention", "PersimmonAttention")),
    FusedClasses("transformers", "Wqkv", concat, ("DbrxAttention", "ModernBertAttention", "MptAttention")),
    FusedClasses("timm.layers.attention", "qkv", concat, ("Attention",)),
    FusedClasses("torchtitan", "qkv_linear.wqkv", grouped, ("Attention", "GQAttention")),
    FusedClasses("litgpt", "qkv", concat, ("CausalSelfAttention",)),
    FusedClasses("olmo", "att_proj", concat, ("OLMoSequentialBlock",)),
    FusedClasses("olmo_core", "w_qkv", concat, ("FusedAttentionV2",)),
    FusedClasses("llmfoundry.models.layers.attention", "Wqkv", concat, ("GroupedQueryAttention",)),
    FusedClasses("megatron", "linear_qkv", grouped, ("SelfAttention",)),
)
Q_BIAS = "q_bias"  # DeBERTa's, added to all queries
OTHER_PARTS = (
    *(Q_BIAS, "v_bias"),  # DeBERTa
    *("rel_pos_h", "rel_pos_w"),  # SAM
    *("attn_out", "ff_out", "ff_proj", "attn_norm", "ff_norm"),  # OLMo's block has the MLP too
    *(*Q_NORM, *K_NORM),  # these are checked elsewhere
)


def fused(module: nn.Module) -> Finding | None:
    """The finding for a class in `CLASSES`; None for other modules."""
    names = {cls.__name__ for cls in type(module).__mro__}
    for known in CLASSES:
        if names.isdisjoint(known.classes) or not is_trusted(module, {known.package}):
            continue
        if terms := projection_weights(dict(module.named_modules()).get(known.child)):
            return _read(module, known, terms)
    return None


def _read(module: nn.Module, known: FusedClasses, terms: list[ProjectionWeight]) -> Finding:
    if getattr(module, "relative_attention", False):
        raise UnreadableError("its logits have terms with positions")
    if q := projection_weights(getattr(module, "q_attn", None)):  # GPT-2's cross-attention: [k | v] and a q
        heads, groups, d = head_sizes(module, q[0].rows, terms[0].rows // 2)
        return finding_from(chains(q, ("q", heads, d))["q"], chains(terms, ("k", groups, d), (None, groups, d))["k"])
    validate_parts(module, (known.child.split(".")[0], *OTHER_PARTS), known.child)
    return Finding(reason=QK_NORM) if has_qk_norm(module) else _paths(module, known.layout, terms)


def _paths(module: nn.Module, layout: Layout, terms: list[ProjectionWeight]) -> Finding:
    rows, heads = terms[0].rows, int_setting(module, HEADS)
    groups = int_setting(module, GROUPS) or heads
    if not heads or rows % (heads + 2 * groups):
        raise UnreadableError(f"{heads} heads and {groups} groups do not divide {rows} rows")
    d = rows // (heads + 2 * groups)
    if (sizes := int_attributes(module, HEAD_SIZE)) and d not in sizes:
        raise UnreadableError(f"{rows} rows make heads of {d}, but it says {sizes[0]}")
    segments, repeat = layout(heads, groups, d)
    found = chains(terms, *segments, repeat=repeat)
    if isinstance(bias := getattr(module, Q_BIAS, None), nn.Parameter):
        found["q"] += [(weight,) for weight in packed(bias, (Q_BIAS, heads, d))]
    return finding_from(found["q"], found["k"])


def multihead(module: nn.Module) -> Finding | None:
    """The finding for nn.MultiheadAttention: rows [q|k|v] in one parameter, or in three; None for other modules."""
    return Finding(_multihead_paths(module)) if isinstance(module, nn.MultiheadAttention) else None


def _multihead_paths(module: nn.MultiheadAttention) -> list[LogitPath]:
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
