"""Reading an attention module without running it: its projections, the sizes of its heads, what its forward calls."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from inspect import unwrap
from types import CodeType, FunctionType, NoneType
from typing import Any

from torch import nn

from quacklr.find.rules.naming import HARMLESS, K_NORM, Q_NORM

HEAD_SIZE = (
    *("head_dim", "attention_head_size", "head_size", "d_head", "dim_head", "dim_per_head", "key_value_proj_dim"),
    *("hidden_size_per_attention_head", "kv_channels", "d_kv", "d_k"),
)
HEADS = (
    *("num_heads", "num_attention_heads", "n_heads", "n_head", "num_attn_heads", "nheads", "heads", "n_local_heads"),
    *("num_attention_heads_per_partition", "h"),
)
GROUPS = (
    *("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads", "n_local_kv_heads"),
    *("num_query_groups_per_partition", "num_query_groups", "n_query_groups", "n_groups"),
)
ATTENDS = re.compile(
    r"softmax|logsumexp|scaled_dot_product|multi_head_attention|attention_interface|eager_attention|flash|sdpa"
    r"|(core|inner|dot_product|fused|memory_efficient)_attention|attn_(fn|func|op)$|attend$",
    re.IGNORECASE,
)
KERNEL = re.compile(r"scaled_dot_product_attention|multi_head_attention_forward|flash_attn|attention_interface")
NORM_CALL = re.compile(r".*norm.*|rsqrt|std|var|cosine_similarity", re.IGNORECASE)


def read(module: Any, names: tuple[str, ...]) -> list[int]:
    """The whole numbers that a module has under some of these names."""
    found = [getattr(module, name, None) for name in names]
    return [value for value in found if isinstance(value, int) and not isinstance(value, bool) and value > 0]


def sizes(module: nn.Module, q_rows: int, k_rows: int) -> tuple[int, int, int] | str:
    """Heads, groups and the size of a head, if all that the module and its config say agrees; else what does not."""
    config = getattr(module, "config", None)
    heads, groups = read(module, HEADS), read(module, GROUPS)
    size = [*read(module, HEAD_SIZE), *(q_rows // n for n in heads), *read(config, HEAD_SIZE)][:1]
    if not size:
        size = [q_rows // n for n in read(config, HEADS)][:1]
    if not size:
        return "it does not say how many heads it has"
    if not size[0]:
        return f"it says it has {heads} heads, and its queries have {q_rows} rows"
    d = size[0]
    said = f"queries have {q_rows} rows, keys {k_rows}, and a head {d}"
    if q_rows % d or k_rows % d or (q_rows // d) % (k_rows // d):
        return f"{said}, which does not divide"
    if any(n * d != q_rows for n in heads) or any(n * d != k_rows for n in groups):
        return f"{said}, but it says it has {heads or groups} heads"
    in_config = numbers_of_heads(config)
    if not heads and in_config and q_rows // d not in in_config:
        return f"{said}, so {q_rows // d} heads, which its config does not mention"
    return q_rows // d, k_rows // d, d


def numbers_of_heads(config: Any) -> set[int]:
    """Every number that a config has under a name with `head` in it."""
    said: set[int] = set()
    for name, value in (config if isinstance(config, dict) else getattr(config, "__dict__", {})).items():
        if "head" in name:
            said |= {v for v in (value if isinstance(value, list | tuple) else [value]) if isinstance(v, int)}
    return said


def called(module: nn.Module) -> set[str]:
    """The names that a module's forward uses, and those of the functions, methods and submodules that it calls."""
    return {name for _, function in functions(module) for name in names_in(function.__code__)}


def functions(module: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """The module's forward, and the functions, methods and submodules that it calls; each with the module it is of.

    Followed are methods of its own, functions that are not torch's, and submodules without parameters.
    """
    waiting: list[Any] = [(module, type(module).forward, type(module))]
    seen: set[CodeType] = set()
    while waiting:
        owner, function, cls = waiting.pop()
        function = unwrap(function)
        code = getattr(function, "__code__", None)
        if code is None or code in seen:
            continue
        seen.add(code)
        yield owner, function
        for name in names_in(code):
            waiting += _followed(owner, function, cls, name)


def _followed(owner: nn.Module, function: Any, cls: type, name: str) -> Iterator[tuple[nn.Module, Any, type]]:
    """The functions that a name in the code of a module's function stands for."""
    if name == "super":
        above = type(owner).__mro__[type(owner).__mro__.index(cls) + 1 :] if cls in type(owner).__mro__ else ()
        yield from ((owner, vars(c)[function.__name__], c) for c in above[:-1] if function.__name__ in vars(c))
        return
    submodule = dict(owner.named_children()).get(name)
    if submodule is not None and not has_weights(submodule):
        yield submodule, type(submodule).forward, type(submodule)
    for c in type(owner).__mro__:
        if issubclass(c, nn.Module) and c is not nn.Module and name in vars(c):
            yield owner, vars(c)[name], c
            return
    kept = vars(owner).get(name)  # a function, or an object that is called, as diffusers' processors
    kept = kept if isinstance(kept, FunctionType) else vars(type(kept)).get("__call__")
    if isinstance(kept, FunctionType):
        yield owner, kept, cls
    found = getattr(function, "__globals__", {}).get(name)
    if isinstance(found, FunctionType) and found.__module__.split(".")[0] != "torch":
        yield owner, found, cls


def names_in(code: CodeType) -> Iterator[str]:
    """The names that code uses, and functions within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


def attends(module: nn.Module) -> bool:
    """Whether what the module runs has a softmax in some form."""
    own = {name for cls in type(module).__mro__ if issubclass(cls, nn.Module) for name in vars(cls)}
    return any(ATTENDS.search(name) for name in called(module) - own)


def norm_calls(module: nn.Module) -> list[str]:
    """Names in the forward that sound like a norm, and are neither a part nor a setting of the module.

    A usual name of a norm of queries or keys that the module does not have is one that is switched off.
    """
    config = getattr(module, "config", None)
    harmless = (nn.Module, int, float, NoneType)
    return sorted(
        name
        for name in called(module)
        if NORM_CALL.fullmatch(name)
        and not (hasattr(module, name) and isinstance(getattr(module, name), harmless))
        and not hasattr(config, name)
        and name not in {*Q_NORM, *K_NORM}
    )


def strange_parts(module: nn.Module, known: Iterable[str]) -> list[str]:
    """Parts with weights, and norms, that are neither known nor harmless."""
    parts = [name for name, part in module.named_children() if has_weights(part)]
    parts += [name for name, _ in module.named_parameters(recurse=False)]
    return [name for name in parts if name not in {*known, *HARMLESS}]


def has_weights(module: nn.Module) -> bool:
    """Whether anything in it can be a projection, or a norm."""
    return next(module.parameters(), None) is not None or "norm" in type(module).__name__.lower()


def child(module: nn.Module, *names: str) -> nn.Module | None:
    """The first of these children that the module has, and that does something."""
    for name in names:
        found = getattr(module, name, None)
        if isinstance(found, nn.Module) and "Identity" not in type(found).__name__:  # Megatron has its own, IdentityOp
            return found
    return None
