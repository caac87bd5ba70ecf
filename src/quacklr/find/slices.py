"""Small slices of a batch: the first examples, and of each of them the first tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quacklr.util.modules import Arguments

EXAMPLES, TOKENS = 2, 8
LONGEST = 512  # tokens of the longest example that is run whole, if the model fails on its first tokens


def slices(call: Arguments) -> Iterator[Arguments]:
    """The call with a few tokens of each example; then with all of them, if they are not too many."""
    batch, lengths = _sizes(call)
    if any(length > TOKENS for length in lengths):
        yield call.map(lambda tensor: _first_tokens(tensor, batch, lengths))
    if all(length <= LONGEST for length in lengths):
        yield call


def first_examples(call: Arguments) -> Arguments:
    """A copy of the first examples of a call."""
    batch, _ = _sizes(call)
    with torch.no_grad():
        return call.map(lambda tensor: _narrowed(tensor, batch).detach().clone())


def _sizes(call: Arguments) -> tuple[int, set[int]]:
    """The batch size, and the sequence lengths: second dimensions of token ids, or of a batch of vectors."""
    tensors = call.tensors()
    ids = [tensor for tensor in tensors if tensor.ndim == 2 and not tensor.is_floating_point()]
    vectors = [tensor for tensor in tensors if tensor.ndim == 3 and tensor.is_floating_point()]
    batch = next((len(tensor) for tensor in [*ids, *tensors] if tensor.ndim > 1), 0)
    return batch, {tensor.shape[1] for tensor in ids or vectors[:1]}


def _narrowed(tensor: Tensor, batch: int) -> Tensor:
    dim = next((dim for dim in range(min(2, tensor.ndim)) if tensor.shape[dim] == batch), None)
    return tensor if dim is None else tensor.narrow(dim, 0, min(EXAMPLES, batch))


def _first_tokens(tensor: Tensor, batch: int, lengths: set[int]) -> Tensor:
    for dim, size in enumerate(tensor.shape):
        if size in lengths and (dim or size != batch):
            tensor = tensor.narrow(dim, 0, min(TOKENS, size))
    return tensor
