"""Perturb rows on paths, and find the heads whose logits change.

A head may change only if it reads a perturbed block, and a block must change some head that reads it. Layers, blocks
and rows are perturbed in halves, one half for each bit of their number, so that the number of forward passes grows
with the logarithm of the model's size. They are perturbed one by one only where an error was found.

Perturbations are random and as large as the weights. They are not optimizer steps, so that rows that are frozen or
have no gradient yet are tested too.

Shapes: H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quacklr.checking.expected_rows import ExpectedLayer, ExpectedRows, WeightRows
from quacklr.checking.frozen_inputs import FrozenInputs
from quacklr.checking.sandbox import Sandbox, restored

Numbers = Mapping[WeightRows, Tensor]  # for each row a number: its layer, its block, or its index in the block


@dataclass(frozen=True, slots=True, eq=False)
class Perturbation:
    """The effect of one perturbation: `blocks` is the flat mask of perturbed blocks.

    `moved` and `still` are (H,) masks for each layer: heads whose logits changed, and heads whose logits did not. A
    head whose logits cannot be compared is in neither.
    """

    blocks: Tensor
    moved: list[Tensor]
    still: list[Tensor]

    def strays(self, layers: Iterable[ExpectedLayer]) -> list[Tensor]:
        """For each layer (H,): the heads that moved although they read no perturbed block."""
        return [moved & ~layer.heads_reading(self.blocks) for layer, moved in zip(layers, self.moved, strict=True)]

    def dead_blocks(self, layers: Iterable[ExpectedLayer]) -> Tensor:
        """Flat mask of the perturbed blocks that moved none of the heads that read them."""
        alive = torch.zeros_like(self.blocks)
        for layer, still in zip(layers, self.still, strict=True):
            for path in layer.paths:
                alive[path.reads_WH[:, ~still]] = True
        return self.blocks & ~alive


class Perturbations:
    """Perturbs a model while the inputs of every attention are frozen. Rows of zeros are filled with noise first.

    `lost`: for each layer, whether its logits could not be compared after a perturbation.
    """

    def __init__(self, sandbox: Sandbox, expected: ExpectedRows) -> None:
        self.expected = expected
        generator = torch.Generator().manual_seed(0)
        self.noise = {param: _noise(param, generator) for param in expected.params}
        with torch.no_grad():  # perturbing the partner of a row of zeros would change no logit
            for rows in expected.rows:
                self._add(rows, rows.on_path & ~rows.part.rows_first().reshape(len(rows.block), -1).any(1).cpu())
        self.frozen = FrozenInputs(sandbox, expected.layers)
        self.lost = [False] * len(expected.layers)

    def perturb(self, masks: Mapping[WeightRows, Tensor]) -> Perturbation:
        """Add noise to the rows on paths that are True in the masks."""
        blocks = torch.zeros(self.expected.rule.blocks.total, dtype=torch.bool)
        with restored(self.expected.params):
            for rows, mask in masks.items():
                chosen = rows.on_path & mask
                blocks[rows.flat_index[rows.block[chosen]]] = True
                self._add(rows, chosen)
            change = self._change()
        pairs = [(of, logits.rounding) for of, logits in zip(change, self.frozen.logits, strict=True)]
        return Perturbation(blocks, [of > none for of, none in pairs], [of <= none for of, none in pairs])

    def double_rows_on_no_path(self) -> list[Tensor]:
        """For each layer (H,): the |change| when rows on no path of parameters that are on paths are doubled.

        They are doubled, not perturbed, because rows before a norm (DeepSeek's latents) are rightly on no path: the
        logit depends on them, but not on their scale.
        """
        with restored(self.expected.params):
            for part, mask in self.expected.rows_on_no_path():
                part.param.mul_(part.spread(1 + mask.to(part.param)))
            return self._change()

    def _change(self) -> list[Tensor]:
        change = self.frozen.change()
        self.lost = [lost or bool(of.isnan().any()) for lost, of in zip(self.lost, change, strict=True)]
        return change

    def _add(self, rows: WeightRows, chosen: Tensor) -> None:
        rows.part.param.add_(self.noise[rows.part.param] * rows.spread(chosen))

    def numbers(self, number: Callable[[WeightRows], Tensor], role: int | None = None) -> Numbers:
        """A number for each row of every weight, or of the weights with one role."""
        return {rows: number(rows) for rows in self.expected.rows if role in (None, rows.role)}

    def halves(self, numbers: Numbers) -> Iterator[Perturbation]:
        """For each bit, perturb the rows whose number does not have it, then those whose number has it."""
        for bit in range(_largest(numbers).bit_length()):
            for value in (0, 1):
                yield self.perturb({rows: (number >> bit & 1) == value for rows, number in numbers.items()})

    def singles(self, numbers: Numbers) -> Iterator[Perturbation]:
        """Perturb the rows of one number after the other."""
        for one in range(_largest(numbers) + 1):
            yield self.perturb({rows: number == one for rows, number in numbers.items()})


def _largest(numbers: Numbers) -> int:
    return max((int(number[rows.on_path].max()) for rows, number in numbers.items()), default=0)


def _noise(param: Tensor, generator: torch.Generator) -> Tensor:
    """Random numbers with the root mean square of the parameter."""
    size = float(param.detach().float().square().mean().sqrt()) or 0.1
    return size * torch.randn(param.shape, generator=generator).to(param)
