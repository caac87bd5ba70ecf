"""What the source of a forward proves: that a head's rows are consecutive, and that a softmax is over a product.

A rule takes rows of a projection for consecutive: rows 0 to d - 1 are the first head's. The source shows it where the
output is reshaped to (..., heads, d), as in `view(B, T, self.num_heads, self.head_dim)`, `unflatten(-1, (heads, -1))`
or `rearrange(q, "b n (h d) -> b h n d")`. Where it shows (..., d, heads), or nothing, the rule declines.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from types import FunctionType

from torch import nn

from quacklr.find.rules.module_source import ATTENDS, HEADS
from quacklr.find.rules.syntax import FunctionSource, name_of, sources_of

TRUSTED = {
    *("torch", "transformers", "timm", "torchtitan", "megatron", "litgpt", "olmo", "olmo_core", "diffusers", "peft"),
}
RESHAPES = {"view", "reshape", "unflatten"}
NONLINEAR = re.compile(r"elu|relu|softplus|sigmoid|silu|gelu|exp|ELU|ReLU|Softplus|Sigmoid|SiLU|GELU")
ROPE_WORD = re.compile(r"rope|pos_emb|rotary", re.I)
HEADS_WORD = re.compile("|".join(HEADS))
NOT_SHOWN = "its source does not show that the rows of a head are consecutive"
NO_PRODUCT = "its source shows no softmax over a product of queries and keys"


def is_trusted(module: nn.Module, packages: Collection[str] = TRUSTED) -> bool:
    """Whether what the module runs was defined by a project whose classes have been judged row by row.

    A class derived from one of those may have another `__init__`, but no method of its own.
    """
    for cls in type(module).__mro__:
        if any(f"{cls.__module__}.".startswith(f"{package}.") for package in packages):
            return "forward" not in vars(module)
        own = [name for name, value in vars(cls).items() if isinstance(value, FunctionType)]
        if any(not name.startswith("__") or name == "__call__" for name in own):
            return False
    return False


def shows_product(module: nn.Module) -> bool:
    """Whether an attention kernel is called, or softmaxes are, all of them over the last dimension of a product.

    Not where a function as `elu` is called (of linear attention), or something is written into a part of a tensor.
    """
    sources = sources_of(module) or []
    shown = [verdict for source in sources for verdict in _attentions(source, sources)]
    return any(shown) and all(shown) and not any(map(_is_unclear, sources))


def _attentions(source: FunctionSource, sources: Collection[FunctionSource]) -> Iterator[bool]:
    """Of every call of a kernel or a softmax: whether it makes attention of a product."""
    for call in (node for node in ast.walk(source.tree) if isinstance(node, ast.Call)):
        name = name_of(call.func)
        layer = getattr(source.owner, name, None) if isinstance(call.func, ast.Attribute) else None
        is_softmax = isinstance(layer, nn.Softmax) or "softmax" in name.lower() or "logsumexp" in name
        if is_softmax:
            given = [*call.args[:1], *([call.func.value] if isinstance(call.func, ast.Attribute) else [])]
            dims = [keyword.value for keyword in call.keywords if keyword.arg == "dim"] or call.args[-1:]
            dim = layer.dim if isinstance(layer, nn.Softmax) else next(map(source.number, dims), None)
            yield dim in (None, -1, 3) and any(source.is_product(each, sources) for each in given)
        elif ATTENDS.search(name):
            yield True


def _is_unclear(source: FunctionSource) -> bool:
    """Whether a function has a decorator that is not torch's, calls a nonlinear function, or writes into a tensor."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef) and not all(map(_is_harmless, node.decorator_list)):
            return True
        if isinstance(node, ast.Call) and NONLINEAR.fullmatch(name_of(node.func)):
            return True
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            return True
    return False


def _is_harmless(decorator: ast.expr) -> bool:
    return ast.unparse(decorator).startswith(("torch.", "staticmethod", "classmethod", "property"))


def shows_rope_last(module: nn.Module, rope: int) -> bool:
    """Whether rows of MLA are split into [nope, rope] and [latent, rope], and none the other way round."""
    verdicts = []
    for source in sources_of(module) or []:
        for call in (node for node in ast.walk(source.tree) if isinstance(node, ast.Call)):
            lists = [each for each in call.args if isinstance(each, ast.List | ast.Tuple) and len(each.elts) == 2]
            if name_of(call.func).startswith("split") and lists:
                first, last = lists[0].elts
                if source.number(last) == rope and not ROPE_WORD.search(name_of(first)):
                    verdicts.append(True)
                elif source.number(first) == rope or ROPE_WORD.search(name_of(first)):
                    verdicts.append(False)
    return len(verdicts) > 1 and all(verdicts)


def shows_consecutive_rows(module: nn.Module, heads: Collection[int], sizes: Collection[int]) -> bool:
    """Whether rows are reshaped to (..., heads, size) somewhere in the source, and nowhere in another order."""
    verdicts = [verdict for source in sources_of(module) or [] for verdict in _verdicts(source, heads, sizes)]
    patterns = [pattern for part in module.modules() if isinstance(pattern := getattr(part, "pattern", None), str)]
    verdicts += [_is_consecutive(pattern) for pattern in patterns if "->" in pattern]
    return any(verdict is True for verdict in verdicts) and not any(verdict is False for verdict in verdicts)


def _verdicts(source: FunctionSource, heads: Collection[int], sizes: Collection[int]) -> Iterator[bool | None]:
    """Of every reshape: True if it makes consecutive heads, False if it makes others, None if it makes none."""
    after = {
        id(node.func.value): node
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "->" in node.value and "(" in node.value:
            yield _is_consecutive(node.value)
        if isinstance(node, ast.Call) and name_of(node.func) in RESHAPES and len(given := source.sizes(node)) > 1:
            verdict = _verdict(source, given[-2:], heads, sizes)
            moved = after.get(id(node))
            yield (
                False if verdict and moved is not None and _moves_heads(source, moved, max(4, len(given))) else verdict
            )


def _verdict(
    source: FunctionSource, given: list[ast.expr], heads: Collection[int], sizes: Collection[int]
) -> bool | None:
    first, second = (source.number(each) for each in given)
    words = [bool(HEADS_WORD.fullmatch(name_of(each))) for each in given]
    if second in sizes and not (second in heads and words[1]):
        return True if first in heads or first == -1 or first is None else None
    if second in (None, -1) and first in heads and not (first in sizes and not words[0]):
        return True  # the rest of the rows is the size
    pairs = isinstance(given[1], ast.Constant)  # as rotations reshape to (..., -1, 2)
    if second in heads and (first in sizes or (first in (None, -1) and not pairs)):
        return False
    if (
        second is not None
        and (first == -1 or first in heads)
        and max(heads) not in (second, *_quotients(second, sizes))
    ):
        return False if _quotients(second, sizes) else None  # a head's query and gate, or query, key and value
    return None


def _quotients(number: int, sizes: Collection[int]) -> list[int]:
    """How many times each of the sizes that divide the number is in it."""
    return [number // size for size in sizes if number > size and number % size == 0]


def _moves_heads(source: FunctionSource, call: ast.Call, ndim: int) -> bool:
    """Whether a permutation right after the reshape puts what was last before what was the last but one."""
    order = [source.number(each) for each in call.args]
    if name_of(call.func) == "permute":
        if None in order or not order:
            return True  # it cannot be read
        axes = [axis % len(order) for axis in order if axis is not None]
        return axes.index(len(axes) - 1) < axes.index(len(axes) - 2)
    return name_of(call.func) in ("transpose", "swapaxes") and {1, ndim - 1} <= {
        a % ndim for a in order if a is not None
    }


def _is_consecutive(pattern: str) -> bool | None:
    """Of an einops pattern such as "b n (h d) -> b h n d": whether what is outer before is outer afterwards."""
    before, after = pattern.split("->")[:2]
    places = {name: place for place, name in enumerate(re.findall(r"\w+", after))}
    for group in re.findall(r"\(([^)]*)\)", before):
        axes = [places[name] for name in group.split() if name in places]
        if len(axes) > 1:
            return axes == sorted(axes)
    return None
