"""Facts about a module, read without running it: its package, its parts, its sizes, the names its forward uses."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from functools import partial
from inspect import unwrap
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from quacklr.find.tables.naming import GROUPS, HARMLESS, HEAD_SIZE, HEADS, K_NORM, Q_NORM

TRUSTED = {
    *("torch", "transformers", "timm", "torchtitan", "megatron", "litgpt", "olmo", "olmo_core", "diffusers", "peft"),
    "llmfoundry.models.layers.attention",
}
ATTENTION_CALL = re.compile(
    r"softmax|logsumexp|scaled_dot_product|multi_head_attention|attention_interface|eager_attention|flash|sdpa"
    r"|(core|inner|dot_product|fused|memory_efficient)_attention|attn_(fn|func|op)$",
    re.IGNORECASE,
)
NORM_CALL = re.compile(r".*norm.*|rsqrt|std|var|cosine_similarity", re.IGNORECASE)


class UnreadableError(ValueError):
    """A table has the module's class, but not this form of it. The message is the reason."""


def is_trusted(module: nn.Module, packages: Collection[str] = TRUSTED) -> bool:
    """Whether the module's class and its forward are of one of these packages, whose classes were tested row by row.

    A subclass of such a class is trusted too, if it defines no method but `__init__` and other special ones. The
    forward may be wrapped (by accelerate, by QKClip), but not replaced by a function of another package.
    """
    for cls in type(module).__mro__:
        if _is_of(cls.__module__, packages):
            processor = vars(module).get("processor", cls)  # in diffusers, this object attends
            code = (_own_forward(module), processor)
            return all(_is_of(getattr(each, "__module__", None) or "", packages) for each in code)
        own = [name for name, value in vars(cls).items() if isinstance(value, FunctionType)]
        if any(not name.startswith("__") or name == "__call__" for name in own):
            return False
    return False


def _own_forward(module: nn.Module) -> Any:
    """The forward of the instance or of its class, without wrappers."""
    forward = unwrap(vars(module).get("forward", type(module).forward))
    while isinstance(forward, partial):
        forward = unwrap(forward.func)
    return forward


def _is_of(name: str, packages: Collection[str]) -> bool:
    return any(f"{name}.".startswith(f"{package}.") for package in packages)


def int_attributes(owner: Any, names: tuple[str, ...]) -> list[int]:
    """The positive integers that a module or config has under these names."""
    found = [getattr(owner, name, None) for name in names]
    return [value for value in found if isinstance(value, int) and not isinstance(value, bool) and value > 0]


def int_setting(module: nn.Module, names: tuple[str, ...]) -> int:
    """The first of `int_attributes` of the module, or else of its config; 0 if there is none."""
    config = getattr(module, "config", None)
    return next(iter([*int_attributes(module, names), *int_attributes(config, names)]), 0)


def head_sizes(module: nn.Module, q_rows: int, k_rows: int) -> tuple[int, int, int]:
    """The number of heads, of key groups, and the head size. UnreadableError if the module and its config disagree."""
    config = getattr(module, "config", None)
    heads, groups = int_attributes(module, HEADS), int_attributes(module, GROUPS)
    sizes = [*int_attributes(module, HEAD_SIZE), *(q_rows // n for n in heads), *int_attributes(config, HEAD_SIZE)]
    sizes += [q_rows // n for n in int_attributes(config, HEADS)]
    if not any(sizes[:1]):
        raise UnreadableError("it does not say how many heads it has")
    d = sizes[0]
    said = f"queries have {q_rows} rows, keys {k_rows}, and a head {d}"
    if q_rows % d or k_rows % d or (q_rows // d) % (k_rows // d):
        raise UnreadableError(f"{said}, which does not divide")
    if any(n * d != q_rows for n in heads) or any(n * d != k_rows for n in groups):
        raise UnreadableError(f"{said}, but it says it has {heads or groups} heads")
    of_layers = [value for name, value in getattr(config, "__dict__", {}).items() if "head" in name]
    counts = [count for each in of_layers for count in (each if isinstance(each, list | tuple) else [each])]
    if counts and not heads and q_rows // d not in counts:
        raise UnreadableError(f"{said}, so {q_rows // d} heads, which its config does not mention")
    return q_rows // d, k_rows // d, d


def names_used(module: nn.Module) -> set[str]:
    """The names in the code that the module's forward reaches by calling its own methods, parts and functions."""
    found: set[str] = set()
    seen: set[CodeType] = set()
    waiting = [_own_forward(module)]
    while waiting:
        function = unwrap(waiting.pop())
        code = getattr(function, "__code__", None)
        if code is not None and code not in seen:
            names = _names_in(code)
            seen.add(code)
            found |= names
            waiting += [called for name in names for called in _called(name, function, module)]
    return found


def _called(name: str, function: Any, module: nn.Module) -> list[Any]:
    """What a name in the code of a function may call, if the code of that is not torch's.

    Parts with weights are not followed. A callable object may be a processor of diffusers.
    """
    classes = type(module).__mro__
    if name == "super":
        return [vars(cls)[function.__name__] for cls in classes if function.__name__ in vars(cls)]
    scopes = (module._modules, *map(vars, classes), vars(module), function.__globals__)
    called: Any = next((scope[name] for scope in scopes if name in scope), None)
    if isinstance(called, nn.Module):
        return [] if has_weights(called) else [type(called).forward]
    if str(getattr(called, "__module__", "")).startswith("torch."):
        return []
    return [called, vars(type(called)).get("__call__")]


def _names_in(code: CodeType) -> set[str]:
    """The names that a code object uses, including those of nested functions."""
    nested = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return {*code.co_names}.union(*map(_names_in, nested))


def norm_calls(module: nn.Module) -> list[str]:
    """Names in the forward that look like a norm function, and are neither a part nor a setting of the module.

    The usual names of query and key norms are not listed: where the module lacks such a part, the norm is disabled.
    """
    if is_trusted(module, {"megatron"}):  # its code has norms that it does not call
        return []
    return sorted(
        name
        for name in names_used(module) - {*Q_NORM, *K_NORM}
        if NORM_CALL.fullmatch(name)
        and not isinstance(getattr(module, name, ""), nn.Module | int | float | None)
        and not hasattr(getattr(module, "config", None), name)
    )


def validate_parts(module: nn.Module, known: Iterable[str], projections: str) -> None:
    """UnreadableError if the module has parts with weights, or norms, that are neither known nor harmless."""
    parts = [name for name, part in module.named_children() if has_weights(part)]
    parts += [name for name, _ in module.named_parameters(recurse=False)]
    if unexpected := [name for name in parts if name not in {*known, *HARMLESS}]:
        raise UnreadableError(f"besides {projections} it has {', '.join(unexpected)}")


def has_weights(module: nn.Module) -> bool:
    """Whether a module has parameters, or is a norm."""
    return next(module.parameters(), None) is not None or "norm" in type(module).__name__.lower()


def active_child(module: nn.Module, *names: str) -> nn.Module | None:
    """The first submodule under these names that is not an identity; None if there is none."""
    for name in names:
        found = getattr(module, name, None)
        if isinstance(found, nn.Module) and "Identity" not in type(found).__name__:  # Megatron has its own, IdentityOp
            return found
    return None
