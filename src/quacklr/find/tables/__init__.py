"""Tables of the attention classes of reviewed packages: which rows of which parameter make a head's query and key.

A table applies only to a class of such a package, with its own forward. Every other attention has to be measured: here
it is only recognised, by the names of its parts and of the functions that its forward calls.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from quacklr.find.finding import Finding, UnreadableError, pending
from quacklr.find.tables.facts import ATTENTION_CALL, calls, is_trusted
from quacklr.find.tables.fused import fused, multihead
from quacklr.find.tables.latent import latent
from quacklr.find.tables.separate import separate

TABLES = (fused, latent, separate)
QUERY_OR_KEY = re.compile(r"(\w+_)?[wc]?_?(q|k|qk|qkv|kv|query|key|query_key_value|attn)(_\w+)?|in_proj", re.I)
KERNEL = re.compile(r"scaled_dot_product_attention|multi_head_attention_forward|flash_attn|attention_interface")

# classes whose attribute `scaling` is not the scale of the logit
SCALES: dict[str, Callable[[Any], float | None]] = {
    "GPTNeoSelfAttention": lambda _: 1.0,  # its logits are not scaled
    "EsmSelfAttention": lambda _: None,  # it multiplies the query by 1 / sqrt(head size), and has `scaling` 1
    "EvollaSaProtSelfAttention": lambda _: None,
    "OpenAIPrivacyFilterAttention": lambda module: (
        getattr(module, "scaling", 0) ** 2
    ),  # it multiplies the query and the key
    "MptAttention": lambda module: getattr(module, "softmax_scale", None),
}


def by_table(module: nn.Module) -> Finding | None:
    """The finding of the first table that has the module; pending if the module only looks like an attention.

    None if it does not look like one.
    """
    try:
        if (found := _in_tables(module)) is not None:
            return scaled(found, module)
    except UnreadableError as reason:
        return pending(str(reason))
    return pending(f"no table has the class {type(module).__name__}") if _looks_like_attention(module) else None


def scaled(finding: Finding, module: nn.Module) -> Finding:
    """The finding with the scale of its paths, if the module has the attribute `scaling` of transformers' attention."""
    scale = SCALES.get(type(module).__name__, lambda module: getattr(module, "scaling", None))(module)
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale < float("inf"):
        return finding
    return replace(finding, paths=[replace(path, scale=scale) for path in finding.paths])


def _in_tables(module: nn.Module) -> Finding | None:
    if is_trusted(module, {"torch"}):
        return multihead(module)
    found = (table(module) for table in TABLES) if is_trusted(module) else ()
    return next((finding for finding in found if finding is not None), None)


def _looks_like_attention(module: nn.Module) -> bool:
    """Whether a module has projections and calls a kernel, or has a softmax and projections with names such as `q`."""
    own = _own_projections(module)
    named = any(QUERY_OR_KEY.fullmatch(name) for name in own)
    return (named or len(own) > 1) and calls(module, ATTENTION_CALL if named else KERNEL)


def _own_projections(module: nn.Module) -> list[str]:
    """The names of a module's projections and matrices."""
    own = [name for name, child in module.named_children() if _is_projection(child)]
    return own + [name for name, parameter in module.named_parameters(recurse=False) if parameter.ndim > 1]


def _is_projection(child: nn.Module) -> bool:
    """Whether a module has a matrix, and at most one level of submodules."""
    nested = any(list(part.children()) for part in child.children())
    return not nested and any(parameter.ndim > 1 for parameter in child.parameters())
