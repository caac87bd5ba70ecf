"""The rows of a projection that a head reads: those whose output has a gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from quacklr.find.measure.records import Projection
from quacklr.find.parameter_rows import mask_key

THRESHOLD = 1e-6  # relative to the largest gradient of a row: smaller ones are rounding


@dataclass(frozen=True, slots=True, eq=False)
class RowMask:
    """Some rows of a projection: a mask in the shape of its weight, with size 1 along the axes that it sums over."""

    projection: Projection
    mask: Tensor

    @property
    def key(self) -> tuple[int, bytes]:
        """Equal for the same rows of the same weight."""
        return id(self.projection.weight), mask_key(self.mask)


def rows_with_gradient(projection: Projection, gradient: Tensor) -> RowMask:
    """The rows whose output has a gradient."""
    largest = gradient_per_row(projection, gradient)
    nonzero = (largest > THRESHOLD * largest.max()).cpu()
    in_output = sorted(projection.rows)
    order = sorted(range(len(in_output)), key=lambda i: in_output[i][1])
    axes = {axis for _, axis in projection.rows}
    shape = [size if axis in axes else 1 for axis, size in enumerate(projection.weight.shape)]
    return RowMask(projection, nonzero.permute(order).reshape(shape))


def gradient_per_row(projection: Projection, gradient: Tensor, reduce: Callable[..., Tensor] = Tensor.amax) -> Tensor:
    """The absolute gradient of the output, reduced over all axes but those of the rows."""
    kept = [axis for axis, _ in projection.rows]
    others = [axis for axis in range(gradient.ndim) if axis not in kept]
    size = gradient.detach().abs()
    return reduce(size, others) if others else size


def is_sparse(projection: Projection, gradient: Tensor) -> bool:
    """Whether single entries of the output have no gradient, as after a ReLU. Whole rows may then have none by chance.

    Otherwise the entries with a gradient are some rows, the same for every token that has any.
    """
    if len(projection.rows) != 1 or projection.output is None:
        return False
    by_row = gradient.movedim(projection.rows[0][0], 0).flatten(1) != 0
    rows, tokens = by_row.any(1), by_row.any(0)
    one_token = bool(tokens.sum() == 1 < len(tokens))  # that the other tokens have none may be chance, too
    return one_token or not bool(by_row[rows][:, tokens].all())
