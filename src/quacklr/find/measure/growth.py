"""Whether Lemma 1's bound holds though a logit is not linear in something: asked by scaling.

The bound needs that a query is Lipschitz in its projection, and a logit in the product. Then a step of the weights
moves the logit no further, up to a constant, than if it were linear. A second forward with all leaves SCALE times as
large shows it: the slope of a linear function is the same there, that of a square is SCALE times as large.

    softplus, GELU, SiLU, ELU of a query     slopes stay      on the path
    a gate, sigmoid(g) * q                   slopes of q stay q is on the path, g is not
    q * q, q * g, silu(g) * q                slopes grow      cannot be written as a path
    tanh(q)                                  slopes vanish    on no path: the logit is bounded
    a cap of the logit, 30 tanh(z / 30)      slopes vanish    its queries and keys are on the path
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from quacklr.find.measure.projection_rows import size_of_rows
from quacklr.find.measure.records import Attention, Projection
from quacklr.util.autograd import gradients

SCALE = 2.0**12
MOST = SCALE**0.5  # a slope that changes by less has not changed
MANY = 0.75  # of the rows


class Change(Enum):
    """What becomes of a slope at a larger scale."""

    STAYS = "stays"
    GROWS = "grows"
    VANISHES = "vanishes"


@dataclass(frozen=True, slots=True)
class Slope:
    """Of what, with respect to what. All are given by number, since in another forward they are other tensors.

    `part` "q" or "k": the query or key of a product, with respect to projection `at`. "logits": the logits, with
    respect to the product. "output": what projection `of` puts out, with respect to an earlier one, `at`.
    """

    part: str
    product: int
    at: int = -1
    of: int = -1
    linear: bool = False  # it is linear in the projection, times something that is not

    def is_of(self, attention: Attention) -> bool:
        """Whether the product is one of this attention's."""
        return any(product.number == self.product for product in attention.products)

    def taken(self, attention: Attention, projections: Mapping[int, Projection]) -> Tensor:
        """The mean slope, in absolute value; one for every row of a projection."""
        (product,) = [product for product in attention.products if product.number == self.product]
        numbered = {projection.number: projection for projection in projections.values()}
        output = {"logits": attention.logits, "q": product.q.tensor, "k": product.k.tensor}.get(self.part)
        output = numbered[self.of].output if output is None else output
        assert output is not None
        leaf = product.leaf if self.part == "logits" else numbered[self.at].leaf
        noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(0)).to(output)
        (gradient,) = gradients(output, [leaf], noise)
        if gradient is None:
            return torch.zeros(())
        return (
            gradient.abs().mean() if self.part == "logits" else size_of_rows(numbered[self.at], gradient, Tensor.mean)
        )

    def changed(self, before: Tensor, after: Tensor) -> Change:
        """From one forward to another on larger numbers. Caps of logits, and gates, may make it as small as they like.

        Otherwise a slope that vanishes in some rows and not in others counts as one that grows: no path says that. But
        what saturates (its slope falls faster than a norm's) may by chance not do so everywhere.
        """
        if before.shape != after.shape or not after.isfinite().all() or (after > MOST * before).any():
            return Change.GROWS
        before, after = before[before > 0], after[before > 0]
        vanishing, saturated = MOST * after < before, SCALE**1.5 * after < before
        if self.part == "logits" or self.linear or not vanishing.any():
            return Change.STAYS
        return Change.VANISHES if vanishing.all() or saturated.float().mean() > MANY else Change.GROWS
