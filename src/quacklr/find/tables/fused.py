"""The table of attention whose queries and keys are rows of one parameter. The class determines the layout of the rows.

concat     [q | k | v]              the queries of all heads, then all keys, then all values
per head   [h, 3, d]                each head's query, key and value together
grouped    [g, r + 2, d]            each group's r queries, then its key and value
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from quacklr.core.path import LogitPath, mha
from quacklr.core.weight import Segment, Weight, packed
from quacklr.find.finding import QK_NORM, Finding, UnreadableError
from quacklr.find.tables.facts import head_sizes, int_attributes, int_setting, is_trusted, names_used, validate_parts
from quacklr.find.tables.naming import GROUPS, HEAD_SIZE, HEADS, K_NORM, Q_NORM
from quacklr.find.tables.projections import ProjectionWeight, chains, finding_from, projection_weights
from quacklr.find.tables.separate import has_qk_norm

Layout = Callable[[int, int, int], tuple[list[Segment], int]]  # (heads, groups, d) -> segments, and their repeats


def concat(heads: int, groups: int, d: int) -> tuple[list[Segment], int]:
    """[q | k | v]"""
    return [("q", heads, d), ("k", groups, d), (None, groups, d)], 1


def per_head(heads: int, _groups: int, d: int) -> tuple[list[Segment], int]:
    """[h, 3, d]"""
    return [("q", 1, d), ("k", 1, d), (None, 1, d)], heads


def grouped(heads: int, groups: int, d: int) -> tuple[list[Segment], int]:
    """[g, r + 2, d]"""
    return [("q", heads // groups, d), ("k", 1, d), (None, 1, d)], groups


def codegen(heads: int, _groups: int, d: int) -> tuple[list[Segment], int]:
    """Four parts, one for each of four TPU cores, each [q | v | k] of its heads."""
    return [("q", heads // 4, d), (None, heads // 4, d), ("k", heads // 4, d)], 4


def bigcode(module: Any) -> Layout:
    """GPTBigCode: multi-query, or multi-head."""
    return concat if module.multi_query else per_head


def falcon(module: Any) -> Layout:
    """Falcon: 40B and later, 7B, or RW."""
    return grouped if module.new_decoder_architecture else bigcode(module)


@dataclass(frozen=True, slots=True)
class FusedClass:
    """A fused attention class: the name of its projection, and its layout, which may depend on the module's settings.

    The class must be defined in the package, and its forward must use the names in `uses`.
    """

    child: str
    layout: Layout
    layout_of: Callable[[Any], Layout] | None = None
    q_bias: str = ""  # a parameter that is added to all queries
    package: str = "transformers"
    uses: frozenset[str] = frozenset()

    def projection(self, module: nn.Module) -> list[ProjectionWeight]:
        """The terms of the fused projection; empty if the module is of another class with the same name."""
        if not is_trusted(module, {self.package}) or not self.uses <= names_used(module):
            return []
        return projection_weights(dict(module.named_modules()).get(self.child))


CLASSES: dict[str, tuple[FusedClass, ...]] = {
    "Attention": (
        FusedClass("c_attn", concat),
        FusedClass("qkv", concat, package="timm.layers.attention"),
        FusedClass("qkv_linear.wqkv", grouped, package="torchtitan"),
    ),
    "CausalSelfAttention": (FusedClass("qkv", concat, package="litgpt"),),
    "OLMoSequentialBlock": (FusedClass("att_proj", concat, package="olmo"),),
    "FusedAttentionV2": (FusedClass("w_qkv", concat, package="olmo_core"),),
    "GroupedQueryAttention": (FusedClass("Wqkv", concat, package="llmfoundry.models.layers.attention"),),
    "SelfAttention": (FusedClass("linear_qkv", grouped, package="megatron", uses=frozenset({"core_attention"})),),
    "GQAttention": (FusedClass("qkv_linear.wqkv", grouped, package="torchtitan"),),
    "GPTBigCodeAttention": (FusedClass("c_attn", concat, bigcode),),
    "FalconAttention": (FusedClass("query_key_value", concat, falcon),),
    "CodeGenAttention": (FusedClass("qkv_proj", codegen),),
    "DisentangledSelfAttention": (FusedClass("in_proj", per_head, q_bias="q_bias"),),  # DeBERTa
    **{
        name: (FusedClass(child, layout),)
        for child, layout, names in (
            ("c_attn", concat, ("GPT2Attention", "ImageGPTAttention")),
            ("qkv_proj", concat, ("Phi3Attention", "Phi4MultimodalAttention")),
            ("Wqkv", concat, ("DbrxAttention", "MptAttention", "ModernBertAttention")),
            (
                "qkv",
                concat,
                ("MgpstrAttention", "SamVisionAttention", "SamHQVisionAttention", "GotOcr2VisionAttention"),
            ),
            ("query_key_value", per_head, ("BloomAttention", "GPTNeoXAttention", "GPTNeoXJapaneseAttention")),
            ("query_key_value", per_head, ("PersimmonAttention",)),
        )
        for name in names
    },
}
OTHER_PARTS = ("v_bias", "rel_pos_h", "rel_pos_w", *Q_NORM, *K_NORM)  # DeBERTa's, SAM's; norms are checked elsewhere


def fused(module: nn.Module) -> Finding | None:
    """The finding for a class in `CLASSES`; None for other modules."""
    for cls in type(module).__mro__:
        for known in CLASSES.get(cls.__name__, ()):
            if terms := known.projection(module):
                return _read(module, known, terms)
    return None


def _read(module: nn.Module, known: FusedClass, terms: list[ProjectionWeight]) -> Finding:
    if getattr(module, "relative_attention", False):
        raise UnreadableError("its logits have terms with positions")
    if q := projection_weights(getattr(module, "q_attn", None)):  # GPT-2's cross-attention: [k | v] and a q
        heads, groups, d = head_sizes(module, q[0].rows, terms[0].rows // 2)
        return finding_from(chains(q, ("q", heads, d))["q"], chains(terms, ("k", groups, d), (None, groups, d))["k"])
    validate_parts(module, (known.child.split(".")[0], known.q_bias, *OTHER_PARTS), known.child)
    return Finding(reason=QK_NORM) if has_qk_norm(module) else _paths(module, known, terms)


def _paths(module: nn.Module, known: FusedClass, terms: list[ProjectionWeight]) -> Finding:
    layout = known.layout if known.layout_of is None else known.layout_of(module)
    rows, heads = terms[0].rows, int_setting(module, HEADS)
    groups = heads if layout in (per_head, codegen) else int_setting(module, GROUPS) or heads
    if not heads or rows % (heads + 2 * groups):
        raise UnreadableError(f"{heads} heads and {groups} groups do not divide {rows} rows")
    d = rows // (heads + 2 * groups)
    if (sizes := int_attributes(module, HEAD_SIZE)) and d not in sizes:
        raise UnreadableError(f"{rows} rows make heads of {d}, but it says {sizes[0]}")
    segments, repeat = layout(heads, groups, d)
    found = chains(terms, *segments, repeat=repeat)
    if known.q_bias:
        found["q"] += [(weight,) for weight in packed(getattr(module, known.q_bias), ("q_bias", heads, d))]
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
