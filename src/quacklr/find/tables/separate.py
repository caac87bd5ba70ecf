"""The table of attention with separate query and key projections: q[h] . k[h]."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import nn

from quacklr.core.weight import Segment
from quacklr.find.finding import NO_SOFTMAX, QK_NORM, Finding
from quacklr.find.tables.facts import (
    UnreadableError,
    active_child,
    calls,
    head_sizes,
    names_used,
    norm_calls,
    validate_parts,
)
from quacklr.find.tables.naming import K_NORM, Q_NORM, QUERY_AND_KEY
from quacklr.find.tables.projections import ProjectionWeight, chains, finding_from, projection_weights

LINEAR_ATTENTION = re.compile(
    r"Delta|Lightning|LSTM|Rwkv|RWKV|Mamba|Linear|Retention|Hyena|SSM|Recurrent|Gated\w*Net", re.IGNORECASE
)
# transformers' classes with norms before their projections
INPUT_NORMS = {"BltCrossAttention": ("q_norm", "k_norm"), "PerceiverSelfAttention": ("layernorm1", "layernorm2")}
QK_NORM_CLASSES = {"DeepseekV4Attention", "ZayaAttention"}  # their projections have other names
CONTAINER = "qkv_linear"  # the submodule of torchtitan's attention that has the projections
GATED = re.compile(r"Qwen(3_?5|3Next|4Exp)\w*Attention")  # rows of a head in q_proj are [q, gate]


def separate(module: nn.Module) -> Finding | None:
    """The finding for MHA, GQA and MQA with separate projections; None if the parts have none of the usual names."""
    if any(cls.__name__ in QK_NORM_CLASSES for cls in type(module).__mro__):
        return Finding(reason=QK_NORM)
    container = getattr(module, CONTAINER, module)
    for names in QUERY_AND_KEY:
        q, k = projections = [getattr(container, name, None) for name in names]
        if all(isinstance(each, nn.Module | nn.Parameter) for each in projections):
            return _read(module, names, projections)
        if isinstance(q, nn.Linear) and k is None and active_child(module, *Q_NORM) is not None:
            return Finding(reason=QK_NORM + " (its keys are another layer's)")
    return None


def _read(module: nn.Module, names: tuple[str, str], projections: Sequence[Any]) -> Finding:
    if not calls(module):
        if LINEAR_ATTENTION.search(type(module).__name__):
            return Finding(reason=NO_SOFTMAX)
        raise UnreadableError("its forward calls no softmax")
    if has_qk_norm(module):
        return Finding(reason=QK_NORM)
    validate_parts(module, (*names, *INPUT_NORMS.get(type(module).__name__, ()), CONTAINER), " and ".join(names))
    q, k = map(projection_weights, projections)
    if not q or not k:
        raise UnreadableError(f"{names[0] if not q else names[1]} is not a projection that we can read")
    return _paths(module, q, k)


def _paths(module: nn.Module, q: list[ProjectionWeight], k: list[ProjectionWeight]) -> Finding:
    gated = any(GATED.fullmatch(cls.__name__) for cls in type(module).__mro__)
    heads, groups, d = head_sizes(module, q[0].rows // 2 if gated else q[0].rows, k[0].rows)
    tiled = "repeat" in names_used(module) and "repeat_kv" not in names_used(module)  # the latter is transformers'
    if 1 < groups < heads and (hasattr(module, "to_q") or tiled):
        raise UnreadableError("it may repeat each key for consecutive heads, or all keys one after another")
    q_rows: list[Segment] = [("q", 1, d), (None, 1, d)] if gated else [("q", heads, d)]
    return finding_from(chains(q, *q_rows, repeat=heads if gated else 1)["q"], chains(k, ("k", groups, d))["k"])


def has_qk_norm(module: nn.Module) -> bool:
    """Whether queries and keys are normed after their projections. UnreadableError if only one is, or it is unclear."""
    before = INPUT_NORMS.get(type(module).__name__, ())
    q, k = (active_child(module, *(name for name in names if name not in before)) for names in (Q_NORM, K_NORM))
    if (q is None) != (k is None):
        raise UnreadableError("only queries or only keys have a norm")
    norms = norm_calls(module)
    cosine = norms == ["normalize"] and hasattr(module, "logit_scale")
    if q is not None or cosine:
        return True
    if norms:
        raise UnreadableError(f"its code calls {' and '.join(norms)}")
    return False
