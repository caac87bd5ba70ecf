"""Functions of torch, as a TorchFunctionMode gets them: sets of equivalent functions, and their arguments.

Some names here are internal to torch: tests/util/test_torch_contract.py fails if a version of torch changes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

SDPA: Any = F.scaled_dot_product_attention
MULTIHEAD: Any = F.multi_head_attention_forward
SOFTMAX: set[Any] = {F.softmax, torch.softmax, torch.special.softmax, Tensor.softmax}
LOGSUMEXP: set[Any] = {torch.logsumexp, Tensor.logsumexp}  # some models compute a softmax with it
MATMUL: set[Any] = {torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__}
ADDED_MATMUL: set[Any] = {torch.baddbmm, Tensor.baddbmm, torch.addmm, Tensor.addmm, Tensor.addbmm, torch.addbmm}
CONVOLUTION: set[Any] = {F.conv1d, F.conv2d, F.conv3d}
ADD: set[Any] = {torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__iadd__, Tensor.__radd__}
SUBTRACT: set[Any] = {torch.sub, Tensor.sub, Tensor.sub_, Tensor.__sub__, Tensor.__isub__}
CAT: set[Any] = {torch.cat, torch.concat}
CONCATENATE: set[Any] = {*CAT, torch.stack}
FILL: set[Any] = {torch.masked_fill, Tensor.masked_fill, Tensor.masked_fill_}
WHERE: set[Any] = {torch.where, Tensor.where}
SET_ITEM: Any = Tensor.__setitem__
MATRIX_T: Any = vars(torch._C.TensorBase)["mT"].__get__
LAYOUT: set[Any] = {
    *(Tensor.view, Tensor.reshape, Tensor.transpose, Tensor.permute, Tensor.flatten, Tensor.unflatten, Tensor.movedim),
    *(Tensor.unsqueeze, Tensor.squeeze, Tensor.swapaxes, Tensor.__getitem__, MATRIX_T),
    *(torch.reshape, torch.transpose, torch.permute, torch.flatten, torch.unflatten, torch.movedim, torch.unsqueeze),
    *(torch.squeeze, torch.swapaxes),
}

# multi_head_attention_forward without its first check, `if has_torch_function(...)`: with that check, a function mode
# gets one call of the whole function, and not the calls inside it
multihead_opened: Any = FunctionType(
    MULTIHEAD.__code__,
    {**MULTIHEAD.__globals__, "has_torch_function": lambda _: False},
    MULTIHEAD.__name__,
    MULTIHEAD.__defaults__,
)
multihead_opened.__kwdefaults__ = MULTIHEAD.__kwdefaults__


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a value: itself, or those in lists, tuples and dicts, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def bound(args: Sequence[Any], kwargs: dict[str, Any], *names: str) -> list[Any]:
    """The first arguments of a call, positional or named; None for those that were not given."""
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in enumerate(names)]
