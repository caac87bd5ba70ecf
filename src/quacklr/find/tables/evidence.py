"""Proofs from the source of a forward: the rows of a head are consecutive, and the softmax is over a product.

A rule assumes that rows of a projection are consecutive: rows 0 to d - 1 are the first head's. The source proves this
where the output is reshaped to (..., heads, d), as in `view(B, T, self.num_heads, self.head_dim)`,
`unflatten(-1, (heads, -1))` or `rearrange(q, "b n (h d) -> b h n d")`. Where the source has (..., d, heads), or no such
reshape, the rule does not apply. Classes of some packages are trusted without a proof, because they have been tested.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from types import FunctionType

from torch import nn

from quacklr.find.finding import UnreadableError
from quacklr.find.tables.module_source import ATTENTION_CALL
from quacklr.find.tables.naming import HEADS
from quacklr.find.tables.syntax import FunctionSource, function_sources, name_of

TRUSTED = {
    *("torch", "transformers", "timm", "torchtitan", "megatron", "litgpt", "olmo", "olmo_core", "diffusers", "peft"),
    "llmfoundry.models.layers.attention",
}
HARMLESS_DECORATORS = ("torch.", "staticmethod", "classmethod", "property")
RESHAPES = {"view", "reshape", "unflatten"}
NONLINEAR = re.compile(r"elu|relu|softplus|sigmoid|silu|gelu|exp|ELU|ReLU|Softplus|Sigmoid|SiLU|GELU")
ROPE_NAME = re.compile(r"rope|pos_emb|rotary", re.I)
HEADS_NAME = re.compile("|".join(HEADS))


def is_trusted(module: nn.Module, packages: Collection[str] = TRUSTED) -> bool:
    """Whether the module's class is of one of these packages, whose classes were tested row by row.

    A subclass of such a class is trusted too, if it defines no method but `__init__` and other special ones. A forward
    that was set on the instance must be of these packages too, as torchtitan's for tensor parallelism.
    """
    for cls in type(module).__mro__:
        if _is_of(cls.__module__, packages):
            forward = vars(module).get("forward")
            return forward is None or _is_of(getattr(forward, "__globals__", {}).get("__name__", ""), packages)
        own = [name for name, value in vars(cls).items() if isinstance(value, FunctionType)]
        if any(not name.startswith("__") or name == "__call__" for name in own):
            return False
    return False


def _is_of(name: str, packages: Collection[str]) -> bool:
    return any(f"{name}.".startswith(f"{package}.") for package in packages)


def validate_product(module: nn.Module) -> None:
    """UnreadableError unless the source calls an attention kernel, or every softmax is over the keys of a product.

    A function such as `elu` (linear attention), or a write into a part of a tensor, makes the source inconclusive.
    """
    sources = function_sources(module)
    shown = [verdict for source in sources for verdict in _softmaxes(source, sources)]
    if not any(shown) or not all(shown):
        raise UnreadableError("its source shows no softmax over a product of queries and keys")
    for source in sources:
        if why := _inconclusive(source):
            raise UnreadableError(f"{source.function.__name__} {why}, so its source does not show what a logit is")


def _softmaxes(source: FunctionSource, sources: Collection[FunctionSource]) -> Iterator[bool]:
    """For each call of a kernel or a softmax, whether it is over the last dimension of a product."""
    for call in source.calls():
        name, receiver = name_of(call.func), [call.func.value] if isinstance(call.func, ast.Attribute) else []
        layer = getattr(source.owner, name, None) if receiver else None
        if isinstance(layer, nn.Softmax) or "softmax" in name.lower() or "logsumexp" in name:
            dims = [keyword.value for keyword in call.keywords if keyword.arg == "dim"] or call.args[-1:]
            dim = layer.dim if isinstance(layer, nn.Softmax) else next(map(source.int_value, dims), None)
            operands = [*call.args[:1], *receiver]
            yield dim in (None, -1, 3) and any(source.is_product(each, sources) for each in operands)
        elif ATTENTION_CALL.search(name):
            yield True


def _inconclusive(source: FunctionSource) -> str:
    """Why a function can change rows or logits in a way that is not read from its source; empty if it cannot."""
    for node in ast.walk(source.tree):
        for decorator in node.decorator_list if isinstance(node, ast.FunctionDef) else []:
            if not ast.unparse(decorator).startswith(HARMLESS_DECORATORS):
                return f"has the decorator {ast.unparse(decorator)}"
        if isinstance(node, ast.Call) and NONLINEAR.fullmatch(name_of(node.func)):
            return f"calls {name_of(node.func)}"
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            return f"writes into a part of {node.value.id}"
    return ""


def validate_rope_last(module: nn.Module, rope: int) -> None:
    """UnreadableError unless the source splits MLA's rows into [nope, rope] and [latent, rope], never in reverse."""
    verdicts = []
    for source in function_sources(module):
        for call in source.calls():
            pairs = [each.elts for each in call.args if isinstance(each, ast.List | ast.Tuple) and len(each.elts) == 2]
            if name_of(call.func).startswith("split") and pairs:
                first, last = pairs[0]
                named = bool(ROPE_NAME.search(name_of(first)))
                if source.int_value(last) == rope and not named:
                    verdicts.append(True)
                elif source.int_value(first) == rope or named:
                    verdicts.append(False)
    if len(verdicts) < 2 or not all(verdicts):
        raise UnreadableError("its source does not show that the rows of rope come last")


def validate_consecutive_rows(module: nn.Module, heads: Collection[int], sizes: Collection[int]) -> None:
    """UnreadableError unless the source reshapes rows to (..., heads, size), and nowhere in another order."""
    verdicts = {verdict for source in function_sources(module) for verdict in _reshapes(source, heads, sizes)}
    patterns = [pattern for part in module.modules() if isinstance(pattern := getattr(part, "pattern", None), str)]
    verdicts |= {_keeps_order(pattern) for pattern in patterns if "->" in pattern}
    if True not in verdicts or False in verdicts:
        raise UnreadableError("its source does not show that the rows of a head are consecutive")


def _reshapes(source: FunctionSource, heads: Collection[int], sizes: Collection[int]) -> Iterator[bool | None]:
    """For each reshape: True if it makes consecutive heads, False if it makes others, None if it makes no heads."""
    next_call = {id(call.func.value): call for call in source.calls() if isinstance(call.func, ast.Attribute)}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "->" in node.value and "(" in node.value:
            yield _keeps_order(node.value)
        if isinstance(node, ast.Call) and name_of(node.func) in RESHAPES:
            given = source.reshape_sizes(node)
            if len(given) > 1:
                verdict, after = _makes_heads(source, given[-2:], heads, sizes), next_call.get(id(node))
                moved = verdict and after is not None and _swaps_last(source, after, max(4, len(given)))
                yield False if moved else verdict


def _makes_heads(
    source: FunctionSource, given: list[ast.expr], heads: Collection[int], sizes: Collection[int]
) -> bool | None:
    """Whether the last two sizes of a reshape are (heads, size), or another order (False), or no heads (None)."""
    first, second = (source.int_value(each) for each in given)
    named_heads = [bool(HEADS_NAME.fullmatch(name_of(each))) for each in given]
    if second in sizes and not (second in heads and named_heads[1]):
        return True if first in heads or first == -1 or first is None else None
    if second in (None, -1) and first in heads and not (first in sizes and not named_heads[0]):
        return True  # the second is the head size
    literal = isinstance(given[1], ast.Constant)  # rotary embeddings reshape to (..., -1, 2)
    if second in heads and (first in sizes or (first in (None, -1) and not literal)):
        return False
    if second is None or not (first == -1 or first in heads):
        return None
    multiples = [second // size for size in sizes if second > size and second % size == 0]
    # rows of a head are its query and gate, or its query, key and value
    return False if multiples and max(heads) not in (second, *multiples) else None


def _swaps_last(source: FunctionSource, call: ast.Call, ndim: int) -> bool:
    """Whether the call right after a reshape moves the last axis before the last but one."""
    order = [source.int_value(each) for each in call.args]
    axes = [axis for axis in order if axis is not None]
    if name_of(call.func) == "permute":
        if None in order or not order:
            return True  # the axes cannot be read from the source
        axes = [axis % len(axes) for axis in axes]
        return axes.index(len(axes) - 1) < axes.index(len(axes) - 2)
    return name_of(call.func) in ("transpose", "swapaxes") and {1, ndim - 1} <= {axis % ndim for axis in axes}


def _keeps_order(pattern: str) -> bool | None:
    """Whether an einops pattern such as "b n (h d) -> b h n d" splits an axis and keeps the order of its parts.

    None if it splits no axis.
    """
    before, after = pattern.split("->")[:2]
    position = {name: i for i, name in enumerate(re.findall(r"\w+", after))}
    for group in re.findall(r"\(([^)]*)\)", before):
        axes = [position[name] for name in group.split() if name in position]
        if len(axes) > 1:
            return axes == sorted(axes)
    return None
