"""Attention whose queries and keys are rows of one parameter: neither name nor shape says which, its class does.

concat     [q | k | v]              heads, then groups, then groups
per head   [h, 3, d]                each head's q, k, v together
grouped    [g, r + 2, d]            each group's r queries, then its key and value
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from quacklr.core.weight import Segment, packed
from quacklr.find.finding import Finding, unknown
from quacklr.find.parameter_rows import NotRowsError
from quacklr.find.rules.evidence import NOT_SHOWN, is_trusted, shows_consecutive_rows
from quacklr.find.rules.module_source import GROUPS, HEAD_SIZE, HEADS, called, read, sizes, strange_parts
from quacklr.find.rules.naming import K_NORM, Q_NORM
from quacklr.find.rules.projections import ProjectionWeight, projection_weights
from quacklr.find.rules.separate import multiplied, normed

Layout = tuple[list[Segment], int]  # the segments of its rows, and how often they are repeated


def concat(heads: int, groups: int, d: int) -> Layout:
    """[q | k | v]"""
    return [("q", heads, d), ("k", groups, d), (None, groups, d)], 1


def per_head(heads: int, _groups: int, d: int) -> Layout:
    """[h, 3, d]"""
    return [("q", 1, d), ("k", 1, d), (None, 1, d)], heads


def grouped(heads: int, groups: int, d: int) -> Layout:
    """[g, r + 2, d]"""
    return [("q", heads // groups, d), ("k", 1, d), (None, 1, d)], groups


def codegen(heads: int, _groups: int, d: int) -> Layout:
    """Four parts, made for as many TPU cores, each [q | v | k] of its heads."""
    return [("q", heads // 4, d), (None, heads // 4, d), ("k", heads // 4, d)], 4


def bigcode(module: Any) -> Callable[[int, int, int], Layout]:
    """GPTBigCode: one key for all heads at the end, or each head's q, k, v together."""
    return concat if module.multi_query else per_head


def falcon(module: Any) -> Callable[[int, int, int], Layout]:
    """Falcon 40B and later; 7B; RW."""
    return grouped if module.new_decoder_architecture else concat if module.multi_query else per_head


@dataclass(frozen=True, slots=True)
class Known:
    """A class by its name and that of its fused projection; some choose their layout by a setting.

    The class must be the package's own, with its forward. Where there is no package (nanoGPT is copied, not imported),
    the source must use some names, and show how rows are split into heads.
    """

    child: str
    layout: Callable[[int, int, int], Layout]
    chosen: Callable[[Any], Callable[[int, int, int], Layout]] | None = None
    q_bias: str = ""  # a parameter that is added to all queries
    package: str = "transformers"
    uses: frozenset[str] = frozenset()

    def fits(self, module: nn.Module) -> bool:
        """Whether a module of a class of that name is the one that is meant."""
        from_there = not self.package or is_trusted(module, {self.package})
        return from_there and (not self.uses or self.uses <= called(module))


KNOWN: dict[str, tuple[Known, ...]] = {
    "GPT2Attention": (Known("c_attn", concat),),
    "Attention": (
        Known("c_attn", concat),
        Known("qkv", concat, package="timm.layers.attention"),
        Known("qkv_linear.wqkv", grouped, package="torchtitan"),
    ),
    "CausalSelfAttention": (
        Known("c_attn", concat, package="", uses=frozenset({"split", "n_embd"})),  # nanoGPT: split(self.n_embd, dim=2)
        Known("qkv", concat, package="litgpt"),
    ),
    "GPTBigCodeAttention": (Known("c_attn", concat, bigcode),),
    "FalconAttention": (Known("query_key_value", concat, falcon),),
    "BloomAttention": (Known("query_key_value", per_head),),
    "GPTNeoXAttention": (Known("query_key_value", per_head),),
    "GPTNeoXJapaneseAttention": (Known("query_key_value", per_head),),
    "PersimmonAttention": (Known("query_key_value", per_head),),
    "CodeGenAttention": (Known("qkv_proj", codegen),),
    "Phi3Attention": (Known("qkv_proj", concat),),
    "Phi4MultimodalAttention": (Known("qkv_proj", concat),),
    "DbrxAttention": (Known("Wqkv", concat),),
    "MptAttention": (Known("Wqkv", concat),),
    "DisentangledSelfAttention": (Known("in_proj", per_head, q_bias="q_bias"),),  # DeBERTa
    "ImageGPTAttention": (Known("c_attn", concat),),
    "MgpstrAttention": (Known("qkv", concat),),
    **dict.fromkeys(("SamVisionAttention", "SamHQVisionAttention", "GotOcr2VisionAttention"), (Known("qkv", concat),)),
    "ModernBertAttention": (Known("Wqkv", concat),),
    "GQAttention": (Known("qkv_linear.wqkv", grouped, package="torchtitan"),),
    "SelfAttention": (Known("linear_qkv", grouped, package="megatron", uses=frozenset({"core_attention"})),),
}


BESIDE = ("v_bias", "rel_pos_h", "rel_pos_w", *Q_NORM, *K_NORM)  # of DeBERTa and SAM; norms are told as such


def fused(module: nn.Module) -> Finding | None:
    """A class that KNOWN has; None otherwise."""
    for cls in type(module).__mro__:
        for known in KNOWN.get(cls.__name__, ()):
            terms = projection_weights(_part(module, known.child)) if known.fits(module) else []
            if terms and getattr(module, "relative_attention", False):
                return unknown("its logits have terms with positions")
            if terms and (
                q := projection_weights(getattr(module, "q_attn", None))
            ):  # GPT-2's cross-attention: [k | v] and a q
                return _across(module, q, terms)
            if terms and (strange := strange_parts(module, (known.child.split(".")[0], known.q_bias, *BESIDE))):
                return unknown(f"beside {known.child} it has {', '.join(strange)}")
            if terms:
                return normed(module) or _laid_out(module, terms, known)
    return None


def _part(module: nn.Module, name: str) -> nn.Module | None:
    return dict(module.named_modules()).get(name)


def _across(module: nn.Module, q: list[ProjectionWeight], kv: list[ProjectionWeight]) -> Finding:
    rows, kv_rows = (each[0].weight.shape[each[0].dim] for each in (q, kv))
    read_sizes = sizes(module, rows, kv_rows // 2)
    if isinstance(read_sizes, str):
        return unknown(read_sizes)
    heads, groups, d = read_sizes
    k = [chain for source in kv for chain in source.cut([("k", groups, d), (None, groups, d)], 1)["k"]]
    return multiplied([chain for source in q for chain in source.cut([("q", heads, d)], 1)["q"]], k)


def _laid_out(module: nn.Module, terms: list[ProjectionWeight], known: Known) -> Finding:
    rows = terms[0].weight.shape[terms[0].dim]
    config = getattr(module, "config", None)
    heads = next(iter([*read(module, HEADS), *read(config, HEADS)]), 0)
    groups = next(iter([*read(module, GROUPS), *read(config, GROUPS)]), heads)
    layout = known.layout if known.chosen is None else known.chosen(module)
    if layout is per_head or layout is codegen:
        groups = heads
    if not heads or rows % (heads + 2 * groups):
        return unknown(f"{heads} heads and {groups} groups do not divide {rows} rows")
    d = rows // (heads + 2 * groups)
    if (said := read(module, HEAD_SIZE)) and d not in said:
        return unknown(f"{rows} rows make heads of {d}, but it says {said[0]}")
    if not known.package and not shows_consecutive_rows(module, {heads, groups}, {d}):
        return unknown(NOT_SHOWN)
    segments, repeat = layout(heads, groups, d)
    try:
        cut = [source.cut(segments, repeat) for source in terms]
    except NotRowsError as reason:
        return Finding(reason=f"parametrised: {reason}")
    q, k = ([chain for each in cut for chain in each[role]] for role in ("q", "k"))
    if known.q_bias:
        q += [(weight,) for weight in packed(getattr(module, known.q_bias), ("q_bias", heads, d))]
    return multiplied(q, k)
