"""Rules that read an attention off a module of a kind they know. Each says None to all others."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor, nn

from quacklr.find.finding import Finding, unknown
from quacklr.find.rules.fused import fused
from quacklr.find.rules.latent import latent
from quacklr.find.rules.module_source import KERNEL, attends, called
from quacklr.find.rules.multihead import multihead
from quacklr.find.rules.separate import separate

RULES = (multihead, fused, latent, separate)
QUERY_OR_KEY = re.compile(r"(\w+_)?[wc]?_?(q|k|qk|qkv|kv|query|key|query_key_value|attn)(_\w+)?|in_proj", re.I)


def by_rule(module: Any) -> Finding | None:
    """What the first rule that knows the module says; unknown if it only looks like an attention; else None."""
    for rule in RULES:
        found = rule(module)
        if found is not None:
            return found
    return unknown() if _looks_like_attention(module) else None


def _looks_like_attention(module: nn.Module) -> bool:
    """Whether it has a softmax, or calls an attention kernel, and projections that sound like it."""
    own = [name for name, child in module.named_children() if _holds_matrix(child)]
    own += [name for name, parameter in module.named_parameters(recurse=False) if _is_matrix(parameter)]
    if len(own) > 1 and any(KERNEL.search(name) for name in called(module)):
        return True
    return any(QUERY_OR_KEY.fullmatch(name) for name in own) and attends(module)


def _holds_matrix(child: nn.Module) -> bool:
    """A projection, or one with a norm or the like around it."""
    return any(_is_matrix(p) for p in child.parameters()) and not any(
        list(part.children()) for part in child.children()
    )


def _is_matrix(found: Any) -> bool:
    return isinstance(found, Tensor) and found.ndim > 1
