"""Attention whose queries and keys are projections of their own: q[h] . k[h]."""

from __future__ import annotations

import re
from itertools import product as every
from typing import Any

from torch import nn

from quacklr.core.path import LogitPath
from quacklr.core.weight import Segment
from quacklr.find.finding import NO_SOFTMAX, QK_NORM, SCALE_FREE, Finding, unknown
from quacklr.find.parameter_rows import NotRowsError
from quacklr.find.rules.evidence import NO_PRODUCT, NOT_SHOWN, is_trusted, shows_consecutive_rows, shows_product
from quacklr.find.rules.module_source import attends, called, child, norm_calls, sizes, strange_parts
from quacklr.find.rules.naming import K_NORM, Q_NORM, QUERY_AND_KEY
from quacklr.find.rules.projections import Chain, ProjectionWeight, projection_weights

LINEAR = re.compile(
    r"Delta|Lightning|LSTM|Rwkv|RWKV|Mamba|Linear|Retention|Hyena|SSM|Recurrent|Gated\w*Net", re.IGNORECASE
)
NORMS_ITS_INPUT = {"BltCrossAttention": ("q_norm", "k_norm"), "PerceiverSelfAttention": ("layernorm1", "layernorm2")}
NORMED = {"DeepseekV4Attention", "ZayaAttention"}  # other projections, but normed all the same
HOLDER = "qkv_linear"
GATED = re.compile(r"Qwen(3_?5|3Next|4Exp)\w*Attention")  # rows of q_proj are [q, gate] a head


def separate(module: nn.Module) -> Finding | None:
    """MHA, GQA and MQA with separate projections; None if the module has none of the usual names."""
    holder: Any = _holder(module)
    pair = next((pair for pair in QUERY_AND_KEY if all(_projects(getattr(holder, name, None)) for name in pair)), None)
    if any(cls.__name__ in NORMED for cls in type(module).__mro__) and is_trusted(module, {"transformers"}):
        return Finding(reason=QK_NORM)
    if pair is None:
        return _queries_alone(module)
    if not attends(module):
        return Finding(reason=NO_SOFTMAX) if LINEAR.search(type(module).__name__) else unknown("it shows no softmax")
    if not is_trusted(module) and not shows_product(module):
        return unknown(NO_PRODUCT)
    if not is_trusted(module) and any(isinstance(getattr(holder, name), nn.Parameter) for name in pair):
        return unknown(f"{pair[0]} and {pair[1]} are parameters: which of their dimensions has the rows is not read")
    if (reason := normed(module)) is not None:
        return reason
    if strange := strange_parts(module, (*pair, *input_norms(module), HOLDER)):
        return unknown(f"beside {pair[0]} and {pair[1]} it has {', '.join(strange)}")
    q, k = (projection_weights(getattr(holder, name)) for name in pair)
    if not q or not k:
        return unknown(f"{pair[0] if not q else pair[1]} is not a projection that we can read")
    return _paired(module, q, k)


def _holder(module: nn.Module) -> nn.Module:
    """What has the projections: the attention itself, or in torchtitan a part of it."""
    held = getattr(module, HOLDER, None)
    return held if isinstance(held, nn.Module) and is_trusted(module, {"torchtitan"}) else module


def _paired(module: nn.Module, q: list[ProjectionWeight], k: list[ProjectionWeight]) -> Finding:
    gated = any(GATED.fullmatch(cls.__name__) for cls in type(module).__mro__) and is_trusted(module)
    q_rows, k_rows = (side[0].weight.shape[side[0].dim] for side in (q, k))
    read = sizes(module, q_rows // 2 if gated else q_rows, k_rows)
    if isinstance(read, str):
        return unknown(read)
    heads, groups, d = read
    tiled = "repeat" in called(module) and "repeat_kv" not in called(module)  # the latter is transformers'
    if 1 < groups < heads and (hasattr(module, "to_q") or tiled):
        return unknown("it may repeat keys for groups of heads, or groups of keys for heads")
    if not is_trusted(module) and not shows_consecutive_rows(module, {heads, groups}, {d}):
        return unknown(NOT_SHOWN)
    of_q: list[Segment] = [("q", 1, d), (None, 1, d)] if gated else [("q", heads, d)]
    try:
        q_chains = [chain for source in q for chain in source.cut(of_q, heads if gated else 1)["q"]]
        k_chains = [chain for source in k for chain in source.cut([("k", groups, d)], 1)["k"]]
    except NotRowsError as reason:
        return Finding(reason=f"parametrised: {reason}")
    return multiplied(q_chains, k_chains)


def multiplied(q: list[Chain], k: list[Chain]) -> Finding:
    """A path for every chain that makes a query with every one that makes a key."""
    chains = [(*one[::-1], *other) for one, other in every(q, k)]
    paths = [LogitPath(chain, max(weight.blocks for weight in chain)) for chain in chains if chain]
    return Finding(paths, "" if paths else SCALE_FREE)


def normed(module: nn.Module) -> Finding | None:
    """Whether queries and keys are normed after their projections; nothing if neither is."""
    harmless = input_norms(module)
    q, k = (child(module, *(name for name in names if name not in harmless)) for names in (Q_NORM, K_NORM))
    if q is not None and k is not None:
        return Finding(reason=QK_NORM)
    if q is not None or k is not None:
        return unknown("only queries or only keys have a norm")
    calls = norm_calls(module) if not is_trusted(module, {"megatron"}) else []  # a self-test of its calls torch.norm
    if calls == ["normalize"] and hasattr(module, "logit_scale"):
        return Finding(reason=QK_NORM)  # cosine attention
    if calls and type(module).__name__ == "CausalSelfAttention" and hasattr(module, "c_q"):
        return Finding(reason=QK_NORM)  # nanochat, by a function
    if calls:
        return unknown(f"its code calls {' and '.join(calls)}")
    return None


def input_norms(module: nn.Module) -> tuple[str, ...]:
    """Norms of some classes that come before the projections."""
    return NORMS_ITS_INPUT.get(type(module).__name__, ()) if is_trusted(module, {"transformers"}) else ()


def _projects(found: Any) -> bool:
    return isinstance(found, nn.Module | nn.Parameter)


def _queries_alone(module: nn.Module) -> Finding | None:
    """A layer that reads the keys of another one."""
    for q, k in QUERY_AND_KEY:
        if isinstance(getattr(module, q, None), nn.Linear) and getattr(module, k, None) is None and attends(module):
            if child(module, *Q_NORM) is not None:
                return Finding(reason=QK_NORM + " (its keys are another layer's)")
            fused = any("kv" in name for name, _ in module.named_children())
            return unknown("its keys and values are fused" if fused else "its keys are another layer's")
    return None
