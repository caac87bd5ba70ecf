"""Tables of the attention classes of reviewed packages: which rows of which parameter make a head's query and key.

A table applies only to a class of such a package, with its own forward. Every other attention has to be measured: here
it is only recognised, by the names of its parts and of the functions that its forward calls.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from torch import nn

from quacklr.find.finding import PENDING, Finding
from quacklr.find.tables.facts import ATTENTION_CALL, UnreadableError, is_trusted, names_used
from quacklr.find.tables.heads import fused, multihead, separate
from quacklr.find.tables.latent import latent

QUERY_OR_KEY = re.compile(r"(\w+_)?[wc]?_?(q|k|qk|qkv|kv|query|key|query_key_value|attn)(_\w+)?|in_proj", re.I)
KERNEL = re.compile(r"scaled_dot_product_attention|multi_head_attention_forward|flash_attn|attention_interface")


def by_table(module: nn.Module) -> Finding | None:
    """The finding of the first table that has the module; pending if it only looks like an attention; or else None."""
    tables = [multihead] if is_trusted(module, {"torch"}) else [fused, latent, separate] if is_trusted(module) else []
    try:
        for table in tables:
            if (found := table(module)) is not None:
                return scaled(found, module)
        if not _looks_like_attention(module):
            return None
        note = f"no table has the class {type(module).__name__}"
    except UnreadableError as reason:
        note = str(reason)
    return Finding(reason="will be measured on the first batch", unknown=True, origin=PENDING, note=note)


def scaled(finding: Finding, module: nn.Module) -> Finding:
    """The finding with the scale of its paths, if the module has the attribute `scaling` of transformers' attention."""
    scale: Any = getattr(module, "scaling", 0)
    match type(module).__name__:
        case "GPTNeoSelfAttention":  # its logits are not scaled
            scale = 1.0
        case "EsmSelfAttention" | "EvollaSaProtSelfAttention":  # they multiply the query by 1 / sqrt(head size)
            scale = None
        case "OpenAIPrivacyFilterAttention":  # it multiplies the query and the key
            scale = scale**2
        case "MptAttention":
            scale = getattr(module, "softmax_scale", None)
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale < float("inf"):
        return finding
    return replace(finding, paths=[replace(path, scale=scale) for path in finding.paths])


def _looks_like_attention(module: nn.Module) -> bool:
    """Whether a module has projections and calls a kernel, or has a softmax and projections with names such as `q`."""
    matrices = [name for name, parameter in module.named_parameters() if parameter.ndim > 1]
    own = {name.split(".")[0] for name in matrices if name.count(".") <= 2}  # a projection may have one level of parts
    named = any(QUERY_OR_KEY.fullmatch(name) for name in own)
    pattern = ATTENTION_CALL if named else KERNEL
    return (named or len(own) > 1) and any(map(pattern.search, names_used(module)))
