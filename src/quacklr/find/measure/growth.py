"""Tests whether Lemma 1's bound holds for a logit that is not linear in a projection, by scaling the inputs.

The bound needs a query that is Lipschitz in its projection, and a logit that is Lipschitz in the product. Then a step
of the weights changes the logit, up to a constant, no more than if it were linear. A second forward pass, with all
leaves SCALE times as large, tests this: a linear function keeps its slope, a square has a SCALE times larger slope.

    softplus, GELU, SiLU, ELU of a query     slopes stay         on the path
    a gate, sigmoid(g) * q                   slopes of q stay    q is on the path, g is not
    q * q, q * g, silu(g) * q                slopes grow         cannot be written as a path
    tanh(q)                                  slopes vanish       on no path: the logit is bounded
    a cap of the logit, 30 tanh(z / 30)      slopes vanish       its queries and keys are on the path
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor

from quacklr.find.measure.records import Attention, Projection
from quacklr.util.autograd import gradients

SCALE = 2.0**12
THRESHOLD = SCALE**0.5  # a slope that changes by a smaller factor counts as unchanged
MOST_ROWS = 0.75  # tanh at a SCALE times larger input is flat in all rows but a few whose input was near 0


class SlopeChange(Enum):
    """How a slope changes at a larger scale."""

    STAYS = auto()
    GROWS = auto()
    VANISHES = auto()


@dataclass(frozen=True, slots=True)
class Slope:
    """A derivative, identified by the numbers of its records, because another forward pass has other tensors.

    `part` is what is differentiated. "q" or "k": the query or key of the product, by projection `at`. "logits": the
    logits, by the product. "output": the output of projection `of`, by an earlier projection, `at`.
    """

    part: str
    product: int
    at: int = -1
    of: int = -1
    linear: bool = False  # the part is linear in the projection, times something that is not

    def belongs_to(self, attention: Attention) -> bool:
        """Whether the product is one of this attention's."""
        return any(product.number == self.product for product in attention.products)

    def measure(self, attention: Attention, projections: Mapping[int, Projection]) -> Tensor:
        """The mean absolute slope, one for every row of a projection."""
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
        if self.part == "logits":
            return gradient.abs().mean()
        return numbered[self.at].gradient_per_row(gradient, Tensor.mean)

    def change(self, before: Tensor, after: Tensor) -> SlopeChange:
        """How the slope changes from a forward pass to the one at the larger scale.

        The slope of a capped logit, or of a gated projection, may become small: it counts as STAYS. Other slopes that
        vanish in all rows count as VANISHES. So do slopes that fall faster than a norm's in most rows: the function
        saturates, but not in a few rows, by chance. Slopes that vanish only in some rows have no path: GROWS.
        """
        if before.shape != after.shape or not after.isfinite().all() or (after > THRESHOLD * before).any():
            return SlopeChange.GROWS
        before, after = before[before > 0], after[before > 0]
        vanishing, saturated = THRESHOLD * after < before, SCALE**1.5 * after < before
        if self.part == "logits" or self.linear or not vanishing.any():
            return SlopeChange.STAYS
        return SlopeChange.VANISHES if vanishing.all() or saturated.float().mean() > MOST_ROWS else SlopeChange.GROWS
