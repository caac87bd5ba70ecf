"""Calls of torch's functions, as a function mode sees them: which of them are one and the same, and what is given."""

from __future__ import annotations

from collections.abc import Sequence
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SDPA: Any = F.scaled_dot_product_attention
MULTIHEAD: Any = F.multi_head_attention_forward
SOFTMAX: set[Any] = {F.softmax, torch.softmax, torch.special.softmax, Tensor.softmax}
LOGSUMEXP: set[Any] = {torch.logsumexp, Tensor.logsumexp}  # a softmax in two steps
MATMUL: set[Any] = {torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__}
ADDED_MATMUL: set[Any] = {torch.baddbmm, Tensor.baddbmm, torch.addmm, Tensor.addmm, Tensor.addbmm, torch.addbmm}
CONVOLUTION: set[Any] = {F.conv1d, F.conv2d, F.conv3d}
ADD: set[Any] = {torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__iadd__, Tensor.__radd__}
SUBTRACT: set[Any] = {torch.sub, Tensor.sub, Tensor.sub_, Tensor.__sub__, Tensor.__isub__}
MULTIPLY: set[Any] = {torch.mul, Tensor.mul, Tensor.mul_, Tensor.__mul__, Tensor.__rmul__, Tensor.__imul__}
DIVIDE: set[Any] = {torch.div, Tensor.div, Tensor.div_, Tensor.__truediv__, Tensor.__itruediv__}
CONCATENATE: set[Any] = {torch.cat, torch.concat, torch.stack}

# torch's own code of it but for its first check: a function mode is told of it as a whole, and then sees nothing inside
multihead_opened: Any = FunctionType(
    MULTIHEAD.__code__,
    {**MULTIHEAD.__globals__, "has_torch_function": lambda _: False},
    MULTIHEAD.__name__,
    MULTIHEAD.__defaults__,
)
multihead_opened.__kwdefaults__ = MULTIHEAD.__kwdefaults__


def tensors_in(values: Sequence[Any]) -> list[Tensor]:
    """The tensors among some arguments, and in lists and tuples of them."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_in(value)
    return found


def bound(args: Sequence[Any], kwargs: dict[str, Any], *names: str) -> list[Any]:
    """The first arguments of a call, given by place or by name; None where they were not."""
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in enumerate(names)]
