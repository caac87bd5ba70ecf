"""Which rows of a projection reach a head: those whose output has a gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from quacklr.find.measure.records import Projection
from quacklr.find.parameter_rows import fingerprint

LEAST = 1e-6  # of the largest gradient: below it, a row is not touched but for rounding


@dataclass(frozen=True, slots=True, eq=False)
class Rowset:
    """Some rows of a projection: a mask in the shape of its weight, with size 1 along what it sums over."""

    projection: Projection
    mask: Tensor

    @property
    def key(self) -> tuple[int, bytes]:
        """Equal for the same rows of the same weight."""
        return id(self.projection.weight), fingerprint(self.mask)


def rows_of(projection: Projection, gradient: Tensor) -> Rowset:
    """The rows whose output has a gradient."""
    largest = size_of_rows(projection, gradient)
    touched = (largest > LEAST * largest.max()).cpu()
    in_output = sorted(projection.rows)
    order = sorted(range(len(in_output)), key=lambda i: in_output[i][1])
    shape = [1] * projection.weight.ndim
    for _, axis in projection.rows:
        shape[axis] = projection.weight.shape[axis]
    return Rowset(projection, touched.permute(order).reshape(shape))


def size_of_rows(projection: Projection, gradient: Tensor, over: Callable[..., Tensor] = Tensor.amax) -> Tensor:
    """The largest entry of a gradient of the output in every row, or the mean, over all tokens."""
    kept = [axis for axis, _ in projection.rows]
    others = [axis for axis in range(gradient.ndim) if axis not in kept]
    size = gradient.detach().abs()
    return over(size, others) if others else size


def is_sparse(projection: Projection, gradient: Tensor) -> bool:
    """Whether entries have no gradient, here and there: by chance, whole rows may have none.

    Otherwise those that have one are some rows, the same for every token that has any.
    """
    if len(projection.rows) != 1 or projection.output is None:
        return False
    by_row = gradient.movedim(projection.rows[0][0], 0).flatten(1) != 0
    rows, tokens = by_row.any(1), by_row.any(0)
    alone = bool(tokens.sum() == 1 < len(tokens))  # that the others have none may be chance, too
    return alone or not bool(by_row[rows][:, tokens].all())
