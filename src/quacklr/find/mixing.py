"""Which head every logit belongs to: the head whose rows make the product that the logit is a function of.

A logit may be any function of the products of its own head: scaled, capped, masked, convolved over keys. One that is
a function of the products of several heads (talking heads) has no head of its own. Adding the same number to all
logits of a row changes no softmax, so that does not count: some subtract the largest logit of all heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quacklr.find.records import Product

MASKED = -1e4  # a logit below it is masked
ROUNDING = 1e-5  # of the largest derivative in a row: less is no difference between two keys


def mixes_heads(logits: Tensor, product: Product, head_of_entry: Tensor, generator: torch.Generator) -> bool:
    """Whether a logit depends on entries of the product that belong to different heads.

    `head_of_entry` broadcasts to the product. Every head's entries are moved in a random direction: the derivative of
    the logits is zero but for that head's own.
    """
    heads = head_of_entry.unique().tolist()
    if len(heads) < 2:
        return False
    cotangent = torch.zeros_like(logits, requires_grad=True)
    (pulled,) = torch.autograd.grad(logits, [product.leaf], cotangent, create_graph=True)
    direction = torch.randn(pulled.shape, generator=generator, device=pulled.device, dtype=pulled.dtype)
    taken = torch.zeros_like(logits, dtype=torch.bool)
    for head in heads:
        along = direction * (head_of_entry == head)
        (derivative,) = torch.autograd.grad(pulled, [cotangent], along, retain_graph=True)
        moved = _moves_softmax(derivative, logits)
        if (moved & taken).any():
            return True
        taken |= moved
    return False


def _moves_softmax(derivative: Tensor, logits: Tensor) -> Tensor:
    """Which logits move, relative to the others of their row that are not masked."""
    derivative, seen = derivative.double(), ~(logits <= MASKED)
    count = seen.sum(-1, keepdim=True)
    if (count < 2).all():
        return derivative != 0
    mean = derivative.where(seen, 0).sum(-1, keepdim=True) / count.clamp(min=1)
    return ~((derivative - mean).abs() <= ROUNDING * derivative.abs().amax(-1, keepdim=True)) & seen
