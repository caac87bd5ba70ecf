"""Attention whose queries and keys are projections of their own: q[h] . k[h]."""

from __future__ import annotations

import re
from itertools import product as every
from typing import Any

from torch import nn

from quacklr.find.owners import NotRowsError
from quacklr.find.rules.finding import NO_SOFTMAX, QK_NORM, SCALE_FREE, Finding, unknown
from quacklr.find.rules.reading import attends, child, has_weights, norm_calls, sizes
from quacklr.find.rules.sources import Chain, Source, sources
from quacklr.path import Path
from quacklr.weight import Segment

NAMES = (
    *(("q_proj", "k_proj"), ("query", "key"), ("q", "k"), ("wq", "wk"), ("Wq", "Wk"), ("w_q", "w_k"), ("c_q", "c_k")),
    *(
        ("to_q", "to_k"),
        ("q_lin", "k_lin"),
        ("query_proj", "key_proj"),
        ("project_q", "project_k"),
        ("q_head", "k_head"),
    ),
    *(("linear_q", "linear_k"), ("q_linear", "k_linear"), ("query_layer", "key_layer"), ("W_q", "W_k"), ("W_Q", "W_K")),
)
Q_NORM = ("q_norm", "q_layernorm", "query_layernorm", "query_norm", "norm_q", "ln_q", "q_ln", "q_rmsnorm", "qk_norm")
K_NORM = ("k_norm", "k_layernorm", "key_layernorm", "key_norm", "norm_k", "ln_k", "k_ln", "k_rmsnorm", "qk_norm")
# what may stand beside queries and keys: values, outputs and gates, and what only adds to logits or picks among them
HARMLESS = re.compile(
    r"((v|o|g|out|gate|output|value|to_v|to_out|c_v|c_proj|dense|project_v|attention_out|proj|post)_?(proj|lin|linear|"
    r"head|layer|gate)?(_dropout)?)|projection_layer|[Ww]_?[vogVO]|w_?out|linear_(v|o|out|proj)|ve_gate|indexer|sinks?|lambda_\w+|\w*bias"
    r"|relative_(attention_bias|pos_embeddings|position_bias_table)|rel_attn_embed|gru_rel_pos_\w+|logit_scale"
    r"|(key_conv_attn|conv_kernel|conv_out)_layer|sequence_reduction|sr|spatial_reduction|rotary_emb|to_gates|(v|o|out|attn_sub|sub|group|layer)?_?(norm|Norm)|LayerNorm|inner_attn_ln"
)
OWN_BIAS = re.compile(
    r"(sinks?|lambda_\w+|gate_bias|dense_bias|relative_\w+|logit_scale|\w*temperature|gru_rel_pos_\w+)"
)
LINEAR = re.compile(
    r"Delta|Lightning|LSTM|Rwkv|RWKV|Mamba|Linear|Retention|Hyena|SSM|Recurrent|Gated\w*Net", re.IGNORECASE
)
NORMS_ITS_INPUT = {"BltCrossAttention", "PerceiverSelfAttention"}  # its norms come before the projections
NORMED = {"DeepseekV4Attention", "ZayaAttention"}  # other projections, but normed all the same
GATED = re.compile(r"Qwen(3_?5|3Next|4Exp)\w*Attention")  # rows of q_proj are [q, gate] a head


def separate(module: nn.Module) -> Finding | None:
    """MHA, GQA and MQA with separate projections; None if the module has none of the usual names."""
    pair = next((pair for pair in NAMES if all(_projects(getattr(module, name, None)) for name in pair)), None)
    if any(cls.__name__ in NORMED for cls in type(module).__mro__):
        return Finding(reason=QK_NORM)
    if pair is None:
        return _queries_alone(module)
    if not attends(module):
        return Finding(reason=NO_SOFTMAX) if LINEAR.search(type(module).__name__) else unknown("it shows no softmax")
    if (reason := normed(module)) is not None:
        return reason
    strange = [name for name, part in module.named_children() if has_weights(part) and not HARMLESS.fullmatch(name)]
    strange += [name for name, _ in module.named_parameters(recurse=False) if not OWN_BIAS.fullmatch(name)]
    norms = (*Q_NORM, *K_NORM, "layernorm1", "layernorm2")  # those that are left are of the input
    if strange := [name for name in strange if name not in pair and name not in norms]:
        return unknown(f"beside {pair[0]} and {pair[1]} it has {', '.join(strange)}")
    q, k = (sources(getattr(module, name)) for name in pair)
    if not q or not k:
        return unknown(f"{pair[0] if not q else pair[1]} is not a projection that we can read")
    return _paired(module, q, k)


def _paired(module: nn.Module, q: list[Source], k: list[Source]) -> Finding:
    gated = any(GATED.fullmatch(cls.__name__) for cls in type(module).__mro__)
    q_rows, k_rows = (side[0].weight.shape[side[0].dim] for side in (q, k))
    read = sizes(module, q_rows // 2 if gated else q_rows, k_rows)
    if isinstance(read, str):
        return unknown(read)
    heads, groups, d = read
    if 1 < groups < heads and hasattr(module, "to_q"):
        return unknown("which heads share a key differs between libraries that say to_q")
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
    paths = [Path(chain, max(weight.blocks for weight in chain)) for chain in chains if chain]
    return Finding(paths, "" if paths else SCALE_FREE)


def normed(module: nn.Module) -> Finding | None:
    """Whether queries and keys are normed after their projections; nothing if neither is."""
    if any(cls.__name__ in NORMS_ITS_INPUT for cls in type(module).__mro__):
        return None
    q, k = child(module, *Q_NORM), child(module, *K_NORM)
    if q is not None and k is not None:
        return Finding(reason=QK_NORM)
    if q is not None or k is not None:
        return unknown("only queries or only keys have a norm")
    calls = norm_calls(module)
    if calls == ["normalize"] and hasattr(module, "logit_scale"):
        return Finding(reason=QK_NORM)  # cosine attention
    if calls:
        return unknown(f"its code calls {' and '.join(calls)}")
    return None


def _projects(found: Any) -> bool:
    return isinstance(found, nn.Module | nn.Parameter)


def _queries_alone(module: nn.Module) -> Finding | None:
    """A layer that reads the keys of another one."""
    for q, k in NAMES:
        if isinstance(getattr(module, q, None), nn.Linear) and getattr(module, k, None) is None and attends(module):
            if child(module, *Q_NORM) is not None:
                return Finding(reason=QK_NORM + " (its keys are another layer's)")
            return unknown("its keys are another layer's")
    return None
