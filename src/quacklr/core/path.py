"""An attention logit as a sum of paths, each a product of weights.

    MHA   q[h] . k[h]                               one path
    GQA   q[h] . k[g(h)]                            one path, a group of heads reads one key block
    MLA   dq uq[h] . uk[h] dkv  +  dq qr[h] . kr    two paths; all heads read dq, dkv, kr

The rest of the code does not depend on the kind of attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from quacklr.core.weight import Weight, validate_factor, whole_numbers


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class LogitPath:
    """A chain of weights whose product is one term of the logit of each head.

    Args:
        weights: in order from the query's input to the key's input. The first and the last read an input, the others
            read the output of a neighbour.
        heads: the number of heads.
        block_of_head: for each weight a (heads,) vector, the block that each head reads. None if groups of consecutive
            heads, all of the same size, share a block: head h reads block h * blocks // heads.
        scale: the factor between the product and the logit. None for 1 / sqrt(head size). Only a budget depends on it.
        origin: the `LogitPaths` that has the path, and the name of its module; None for a path that you made.
    """

    weights: tuple[Weight, ...]
    heads: int
    block_of_head: Sequence[Tensor | None] | None = None
    scale: float | None = None
    origin: Any = None
    reads: Tensor = field(init=False)
    """(weights, heads): the block of each weight that each head reads."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", tuple(self.weights))
        if not self.weights:
            raise ValueError("a path needs at least one weight")
        heads: object = self.heads
        if not isinstance(heads, int) or isinstance(heads, bool) or heads < 1:
            raise ValueError(f"{self}: heads={heads!r}; the number of heads is a positive whole number")
        if self.scale is not None:
            validate_factor(self, "scale", self.scale)
        for weight in self.weights[1:-1]:
            if weight.bias is not None:
                raise ValueError(
                    f"{weight.name}: its bias adds a term that the weights before it are not on; leave it out of the "
                    "Weight, and begin a path of its own with it: LogitPath((Weight(..., the bias, ...), ...), heads)"
                )
        given = [None] * len(self.weights) if self.block_of_head is None else list(self.block_of_head)
        if len(given) != len(self.weights):
            raise ValueError(f"{self}: {len(self.weights)} weights, but block_of_head has {len(given)} entries")
        reads = torch.stack([self._read(weight, each) for weight, each in zip(self.weights, given, strict=True)])
        object.__setattr__(self, "reads", reads)

    def _read(self, weight: Weight, given: Tensor | None) -> Tensor:
        """(heads,): the block that each head reads."""
        if given is None:
            if self.heads % weight.blocks:
                blocks = f"{weight.blocks} blocks in equal runs"
                raise ValueError(f"{weight.name}: {self.heads} heads cannot read {blocks}; pass block_of_head")
            return torch.arange(self.heads, device="cpu") // (self.heads // weight.blocks)
        read = whole_numbers(given)
        if read is None or read.shape != (self.heads,) or read.min() < 0 or read.max() >= weight.blocks:
            raise ValueError(
                f"{weight.name}: block_of_head must give each of {self.heads} heads one of its {weight.blocks} blocks"
            )
        return read

    @property
    def meeting(self) -> int:
        """The index of the query's last weight. Its rows are multiplied with the rows of the next weight, the key's.

        It is found from the shapes: on the query side a weight has as many columns as the weight before it has rows, on
        the key side as many as the weight after it. If several indices fit, all have the same number of rows.
        """
        rows = [int(weight.rows_of_block[0]) for weight in self.weights]
        columns = [weight.columns for weight in self.weights]
        pairs = [i for i in range(len(rows) - 1) if rows[i] == rows[i + 1]]
        fits = [i for i in pairs if columns[1 : i + 1] == rows[:i] and columns[i + 1 : -1] == rows[i + 2 :]]
        return [*fits, *pairs, 0][0]

    def __repr__(self) -> str:
        return f"LogitPath({self}: {self.heads} heads)"

    def __str__(self) -> str:
        return " . ".join(weight.name for weight in self.weights)


def as_paths(given: object, demand: str) -> list[LogitPath]:
    """The given paths as a list; ValueError, with a message that begins with `demand`, if they are not paths."""
    paths: list[Any] = list(given) if isinstance(given, Iterable) else [given]
    for path in paths:
        if not isinstance(path, LogitPath):
            raise ValueError(f"{demand} a list of LogitPath, not {type(path).__name__}")
    return paths


def changed(paths: Sequence[LogitPath], change: Callable[[Weight], Weight]) -> list[LogitPath]:
    """The same paths, with a change of each weight."""
    weights = {weight: change(weight) for weight in dict.fromkeys(weight for path in paths for weight in path.weights)}
    return [replace(path, weights=tuple(weights[weight] for weight in path.weights)) for path in paths]


def module_of(path: LogitPath) -> str:
    """The name of the attention module of a path, "" without one: a weight is named `<module>.<role>`."""
    return path.weights[0].name.rpartition(".")[0]


def attentions_of(paths: Iterable[LogitPath]) -> dict[str, list[LogitPath]]:
    """The paths of each attention, by the name of its module: the paths whose terms add up to one logit.

    Paths of weights without a module belong to one attention if they share a weight and have the same number of heads;
    this attention is named after its first weight.
    """
    attentions: dict[str, list[LogitPath]] = {}
    for path in paths:
        name = module_of(path)
        if not name:
            own = set(path.weights)
            sharing = (each for each, others in attentions.items() if any(own & set(p.weights) for p in others))
            name = next(sharing, path.weights[0].name)
        if any(other.heads != path.heads for other in attentions.get(name, ())):
            name = str(path)
        attentions.setdefault(name, []).append(path)
    return attentions


def mha(q: Weight, k: Weight) -> list[LogitPath]:
    """The logit of multi-head attention, q[h] . k[h]; grouped- and multi-query when k has fewer blocks than q."""
    _validate_head_size(q, k)
    return [LogitPath((q, k), heads=q.blocks)]


def mla(
    uq: Weight, uk: Weight, qr: Weight, kr: Weight, dq: Weight | None = None, dkv: Weight | None = None
) -> list[LogitPath]:
    """The logit of multi-head latent attention, dq uq[h] . uk[h] dkv + dq qr[h] . kr, as in the paper's Algorithm 2.

    Leave out `dq` or `dkv` if the model has no such projection, or normalises its output: then the logit does not
    depend on the scale of the projection.
    """
    _validate_head_size(uq, uk)
    _validate_head_size(qr, kr)
    nope = [weight for weight in (dq, uq, uk, dkv) if weight is not None]
    rope = [weight for weight in (dq, qr, kr) if weight is not None]
    return [LogitPath(tuple(nope), heads=uq.blocks), LogitPath(tuple(rope), heads=qr.blocks)]


def _validate_head_size(q: Weight, k: Weight) -> None:
    """Validate that the blocks of both have the same number of rows, as a dot product needs."""
    sizes = [sorted(set(weight.rows_of_block.tolist())) for weight in (q, k)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"{q.name} has {sizes[0]} rows a block and {k.name} has {sizes[1]}, so they cannot be multiplied; is a "
            "number of heads where a head's size should be?"
        )
