"""Rules that derive the paths of an attention from its module, without running it, one for each kind of module."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from quacklr.find.finding import Finding, UnreadableError, unknown
from quacklr.find.parameter_rows import NotRowsError
from quacklr.find.tables.fused import fused, multihead
from quacklr.find.tables.latent import latent
from quacklr.find.tables.module_source import calls_attention, names_used
from quacklr.find.tables.separate import separate

RULES = (multihead, fused, latent, separate)
QUERY_OR_KEY = re.compile(r"(\w+_)?[wc]?_?(q|k|qk|qkv|kv|query|key|query_key_value|attn)(_\w+)?|in_proj", re.I)
FUSED = re.compile(r"(\w+_)?w?(qkv|query_key_value)(_\w+)?|c_attn|in_proj", re.I)
KERNEL = re.compile(r"scaled_dot_product_attention|multi_head_attention_forward|flash_attn|attention_interface")


def by_rule(module: Any) -> Finding | None:
    """The finding of the first rule that applies to the module.

    The finding is unknown if the module only looks like an attention. None if it does not look like one.
    """
    try:
        for rule in RULES:
            if (found := rule(module)) is not None:
                return found
    except UnreadableError as reason:
        return unknown(str(reason))
    except NotRowsError as reason:
        return Finding(reason=f"parametrised: {reason}")
    return unknown(_why_unknown(module)) if _looks_like_attention(module) else None


def _why_unknown(module: nn.Module) -> str:
    """The reason why no rule applies to an attention, if its projections have names that tell."""
    name = next(filter(FUSED.fullmatch, _own_projections(module)), None)
    return f"the order of the query and key rows in {name} depends on the code of the class" if name else ""


def _own_projections(module: nn.Module) -> list[str]:
    """The names of a module's projections and matrices."""
    own = [name for name, child in module.named_children() if _is_projection(child)]
    return own + [name for name, parameter in module.named_parameters(recurse=False) if parameter.ndim > 1]


def _looks_like_attention(module: nn.Module) -> bool:
    """Whether a module has projections and calls a kernel, or has a softmax and projections with names such as `q`."""
    own = _own_projections(module)
    if len(own) > 1 and any(KERNEL.search(name) for name in names_used(module)):
        return True
    return any(QUERY_OR_KEY.fullmatch(name) for name in own) and calls_attention(module)


def _is_projection(child: nn.Module) -> bool:
    """Whether a module has a matrix, and at most one level of submodules."""
    nested = any(list(part.children()) for part in child.children())
    return not nested and any(parameter.ndim > 1 for parameter in child.parameters())
