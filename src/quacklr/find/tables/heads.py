"""Tables of attention where each head has rows of queries and of keys, q[h] . k[h], in two projections or in one.

The class determines the layout of the rows of one projection:

concat     [q | k | v]        the queries of all heads, then all keys, then all values
grouped    [g, r + 2, d]      each group's r queries, then its key and value; with r = 1, each head's query, key, value
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from quacklr.core.weight import Segment, packed
from quacklr.find.finding import NO_SOFTMAX, QK_NORM, Finding
from quacklr.find.tables.facts import (
    ATTENTION_CALL,
    UnreadableError,
    active_child,
    head_sizes,
    int_attributes,
    int_setting,
    is_trusted,
    names_used,
    norm_calls,
    validate_parts,
)
from quacklr.find.tables.naming import GROUPS, HEAD_SIZE, HEADS, K_NORM, Q_NORM, QUERY_AND_KEY
from quacklr.find.tables.projections import Chain, ProjectionWeight, chains, joined, projection_weights

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


# the package, the name of the projection, its layout, and the attention classes
CLASSES: tuple[tuple[str, str, Layout, tuple[str, ...]], ...] = (
    ("transformers", "c_attn", concat, ("Attention", "GPT2Attention", "ImageGPTAttention")),
    ("transformers", "c_attn", grouped, ("GPTBigCodeAttention",)),
    ("transformers", "in_proj", grouped, ("DisentangledSelfAttention",)),  # DeBERTa
    ("transformers", "qkv", concat, ("MgpstrAttention", "SamVisionAttention", "SamHQVisionAttention")),
    ("transformers", "qkv", concat, ("GotOcr2VisionAttention",)),
    ("transformers", "qkv_proj", codegen, ("CodeGenAttention",)),
    ("transformers", "qkv_proj", concat, ("Phi3Attention", "Phi4MultimodalAttention")),
    ("transformers", "query_key_value", grouped, ("BloomAttention", "FalconAttention", "GPTNeoXAttention")),
    ("transformers", "query_key_value", grouped, ("GPTNeoXJapaneseAttention", "PersimmonAttention")),
    ("transformers", "Wqkv", concat, ("DbrxAttention", "ModernBertAttention", "MptAttention")),
    ("timm.layers.attention", "qkv", concat, ("Attention",)),
    ("torchtitan", "qkv_linear.wqkv", grouped, ("Attention", "GQAttention")),
    ("litgpt", "qkv", concat, ("CausalSelfAttention",)),
    ("olmo", "att_proj", concat, ("OLMoSequentialBlock",)),
    ("olmo_core", "w_qkv", concat, ("FusedAttentionV2",)),
    ("llmfoundry.models.layers.attention", "Wqkv", concat, ("GroupedQueryAttention",)),
    ("megatron", "linear_qkv", grouped, ("SelfAttention",)),
)
Q_BIAS = "q_bias"  # DeBERTa's, added to all queries
OTHER_PARTS = (
    *(Q_BIAS, "v_bias"),  # DeBERTa
    *("rel_pos_h", "rel_pos_w"),  # SAM
    *("attn_out", "ff_out", "ff_proj", "attn_norm", "ff_norm"),  # OLMo's block has the MLP too
    *(*Q_NORM, *K_NORM),  # these are checked elsewhere
)
LINEAR_ATTENTION = re.compile(r"Delta|Lightning|LSTM|Rwkv|Mamba|Linear|Retention|Hyena|SSM|Recurrent|Gated\w*Net", re.I)
# transformers' classes with norms before their projections
INPUT_NORMS = {"BltCrossAttention": ("q_norm", "k_norm"), "PerceiverSelfAttention": ("layernorm1", "layernorm2")}
QK_NORM_CLASSES = {"DeepseekV4Attention", "ZayaAttention"}  # their projections have other names
CONTAINER = "qkv_linear"  # the submodule of torchtitan's attention that has the projections
GATED = re.compile(r"Qwen(3_?5|3Next|4Exp)\w*Attention")  # rows of a head in q_proj are [q, gate]


def multihead(module: nn.Module) -> Finding | None:
    """The finding for nn.MultiheadAttention: rows [q|k|v] in one parameter, or in three; None for other modules."""
    if not isinstance(module, nn.MultiheadAttention):
        return None
    segments: list[Segment] = [(role, module.num_heads, module.head_dim) for role in ("q", "k", None)]
    if module.in_proj_weight is not None:
        q, k = packed(module.in_proj_weight, *segments, bias=module.in_proj_bias)
    else:
        (q,), (k,) = packed(module.q_proj_weight, segments[0]), packed(module.k_proj_weight, segments[1])
        if module.in_proj_bias is not None:
            q_bias, k_bias = packed(module.in_proj_bias, *segments)
            q, k = replace(q, bias=q_bias), replace(k, bias=k_bias)
    keys: list[Chain] = [(k,)]
    if module.bias_k is not None:  # with add_bias_kv there is one more, learned key
        keys.append(tuple(packed(module.bias_k, ("bias_k", module.num_heads, module.head_dim), dim=2)))
    return Finding(joined([(q,)], keys))


def fused(module: nn.Module) -> Finding | None:
    """The finding for a class in `CLASSES`; None for other modules."""
    names = {cls.__name__ for cls in type(module).__mro__}
    for package, child, layout, classes in CLASSES:
        if names.isdisjoint(classes) or not is_trusted(module, {package}):
            continue
        if terms := projection_weights(dict(module.named_modules()).get(child)):
            return _in_one(module, child, layout, terms)
    return None


def _in_one(module: nn.Module, child: str, layout: Layout, terms: list[ProjectionWeight]) -> Finding:
    if getattr(module, "relative_attention", False):
        raise UnreadableError("its logits have terms with positions")
    if q := projection_weights(getattr(module, "q_attn", None)):  # GPT-2's cross-attention: [k | v] and a q
        heads, groups, d = head_sizes(module, q[0].rows, terms[0].rows // 2)
        keys = chains(terms, ("k", groups, d), (None, groups, d))["k"]
        return Finding(joined(chains(q, ("q", heads, d))["q"], keys))
    validate_parts(module, (child.split(".")[0], *OTHER_PARTS), child)
    if _has_qk_norm(module):
        return Finding(reason=QK_NORM)
    rows, heads = terms[0].rows, int_setting(module, HEADS)
    groups = int_setting(module, GROUPS) or heads
    d, rest = divmod(rows, heads + 2 * groups) if heads else (0, rows)
    if rest or d not in (sizes := int_attributes(module, HEAD_SIZE) or [d]):
        raise UnreadableError(f"{rows} rows do not make {heads} heads and {groups} groups of {sizes[0]}")
    segments, repeat = layout(heads, groups, d)
    found = chains(terms, *segments, repeat=repeat)
    if isinstance(bias := getattr(module, Q_BIAS, None), nn.Parameter):
        found["q"] += [(weight,) for weight in packed(bias, (Q_BIAS, heads, d))]
    return Finding(joined(found["q"], found["k"]))


def separate(module: nn.Module) -> Finding | None:
    """The finding for MHA, GQA and MQA with separate projections; None if the parts have none of the usual names."""
    if any(cls.__name__ in QK_NORM_CLASSES for cls in type(module).__mro__):
        return Finding(reason=QK_NORM)
    container = getattr(module, CONTAINER, module)
    for names in QUERY_AND_KEY:
        q, k = (getattr(container, name, None) for name in names)
        if isinstance(q, nn.Module | nn.Parameter) and isinstance(k, nn.Module | nn.Parameter):
            return _in_two(module, names, q, k)
        if isinstance(q, nn.Linear) and k is None and active_child(module, *Q_NORM) is not None:
            return Finding(reason=QK_NORM + " (its keys are another layer's)")
    return None


def _in_two(module: nn.Module, names: tuple[str, str], *projections: Any) -> Finding:
    kind, used = type(module).__name__, names_used(module)
    if not any(map(ATTENTION_CALL.search, used)):
        if LINEAR_ATTENTION.search(kind):
            return Finding(reason=NO_SOFTMAX)
        raise UnreadableError("its forward calls no softmax")
    if _has_qk_norm(module):
        return Finding(reason=QK_NORM)
    validate_parts(module, (*names, *INPUT_NORMS.get(kind, ()), CONTAINER), " and ".join(names))
    q, k = map(projection_weights, projections)
    if not q or not k:
        raise UnreadableError(f"{names[0] if not q else names[1]} is not a projection that we can read")
    gated = any(GATED.fullmatch(cls.__name__) for cls in type(module).__mro__)
    heads, groups, d = head_sizes(module, q[0].rows // 2 if gated else q[0].rows, k[0].rows)
    tiled = "repeat" in used and "repeat_kv" not in used  # the latter is transformers'
    if 1 < groups < heads and (hasattr(module, "to_q") or tiled):
        raise UnreadableError("it may repeat each key for consecutive heads, or all keys one after another")
    q_rows: list[Segment] = [("q", 1, d), (None, 1, d)] if gated else [("q", heads, d)]
    return Finding(joined(chains(q, *q_rows, repeat=heads if gated else 1)["q"], chains(k, ("k", groups, d))["k"]))


def _has_qk_norm(module: nn.Module) -> bool:
    """Whether queries and keys are normed after their projections. UnreadableError if only one is, or it is unclear."""
    before = INPUT_NORMS.get(type(module).__name__, ())
    q, k = (active_child(module, *(name for name in names if name not in before)) for names in (Q_NORM, K_NORM))
    if (q is None) != (k is None):
        raise UnreadableError("only queries or only keys have a norm")
    norms = norm_calls(module)
    if q is None and norms and not (norms == ["normalize"] and hasattr(module, "logit_scale")):  # not cosine attention
        raise UnreadableError(f"its code calls {' and '.join(norms)}")
    return q is not None or bool(norms)
