"""Tests whether each logit belongs to one head: whether it is a function of the products of one head's rows only.

A logit may be any function of the products of its own head: scaled, capped, masked, convolved over keys. A logit that
is a function of the products of several heads (talking heads) belongs to none. Adding one number to all logits of a
row does not change the softmax, so it does not count: some models subtract the largest logit of all heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations

import torch
from torch import Tensor

from quacklr.find.measure.records import Product
from quacklr.util.autograd import batches, gradients

MASKED = -1e4  # a logit below it is masked
ROUNDING = 1e-5  # relative to the largest derivative in a row: smaller differences between keys are rounding
Heads = tuple[Tensor, Sequence[frozenset[object]]]  # the head of each entry of a product; the rows of each head


def are_mixed(logits: Tensor, heads: Mapping[Product, Heads], generator: torch.Generator) -> bool:
    """Whether a logit depends on different heads, of one product or of several.

    The heads of two products are different if one of them reads rows that belong to another head in the other product.
    """
    head_of_logit: dict[Product, Tensor] = {}
    for product, (head_of_entry, rows) in heads.items():
        if len(rows) > 1:
            found = _head_of_logit(logits, product, head_of_entry, len(rows), generator)
            if found is None:
                return True
            head_of_logit[product] = found
    for (one, of_one), (other, of_other) in permutations(head_of_logit.items(), 2):
        both = (of_one >= 0) & (of_other >= 0)
        for a, b in torch.stack([of_one[both], of_other[both]], 1).unique(dim=0).tolist():
            rows, others = heads[one][1], heads[other][1][b]
            if any((others - rows[a]) & another for another in rows):
                return True
    return False


def _head_of_logit(
    logits: Tensor, product: Product, head_of_entry: Tensor, count: int, generator: torch.Generator
) -> Tensor | None:
    """The head that each logit depends on through the product; -1 if on none. None if a logit depends on several."""
    cotangent = torch.zeros_like(logits, requires_grad=True)
    (backward,) = torch.autograd.grad(logits, [product.leaf], cotangent, create_graph=True)
    direction = torch.randn(backward.shape, generator=generator, device=backward.device, dtype=backward.dtype)
    found = torch.full(logits.shape, -1, device=logits.device)
    for some in batches(torch.arange(count, device=logits.device), backward):
        along = direction * (head_of_entry == some.view(-1, *[1] * direction.ndim))
        (derivatives,) = gradients(backward, [cotangent], along)
        assert derivatives is not None
        changed = _changes_softmax(derivatives, logits)
        if ((found >= 0) + changed.sum(0) > 1).any():
            return None
        found = torch.where(changed.any(0), some[0] + changed.int().argmax(0), found)
    return found


def _changes_softmax(derivative: Tensor, logits: Tensor) -> Tensor:
    """Which logits change, relative to the other logits of their row that are not masked."""
    derivative, visible = derivative.to(torch.promote_types(derivative.dtype, torch.float32)), ~(logits <= MASKED)
    count = visible.sum(-1, keepdim=True)
    if (count < 2).all():
        return derivative != 0
    mean = derivative.where(visible, 0).sum(-1, keepdim=True) / count.clamp(min=1)
    return ~((derivative - mean).abs() <= ROUNDING * derivative.abs().amax(-1, keepdim=True)) & visible
