"""One flat sequence of tokens over many memory-mapped files, and the batches that training reads from it.

A batch is a pure function of (seed, step). A split is cut into windows; every epoch visits each of them once, in an
order that depends on (seed, epoch) alone; step s takes the next `sequences` windows of this endless order. So a resumed
run needs no reader's state, and a rank of a distributed run takes its rows of the same batch, whatever the world size.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from quacklr.lab.errors import UserError

DTYPE = np.dtype("<u2")


class Tokens:
    """The tokens of a split, as if its shards were one array. Only what is read is loaded."""

    def __init__(self, name: str, shards: Iterable[Path], vocab: int) -> None:
        self.name, self.vocab = name, vocab
        self._shards = [np.memmap(path, DTYPE, mode="r").view(np.ndarray) for path in shards]
        self._starts = [0, *accumulate(len(shard) for shard in self._shards)]

    def __len__(self) -> int:
        return self._starts[-1]

    def window(self, start: int, length: int) -> NDArray[np.uint16]:
        """`length` tokens from `start` on; a view where one shard holds them all, else a copy."""
        if start < 0 or start + length > len(self):
            raise IndexError(f"tokens {start} to {start + length} of {self.name}, which has {len(self)}")
        first = bisect_right(self._starts, start) - 1
        begin = start - self._starts[first]
        part = self._shards[first][begin : begin + length]
        if len(part) == length:
            return part
        return np.concatenate([part, self.window(start + len(part), length - len(part))])


def batch(tokens: Tokens, seed: int, step: int, sequences: int, length: int) -> torch.Tensor:
    """(sequences, length + 1) int64 for training: inputs are [:, :-1], targets [:, 1:].

    Reading costs microseconds; the order of an epoch is made once and kept, at 8 bytes a window.
    """
    windows = _windows(tokens, length)
    places = range(step * sequences, (step + 1) * sequences)
    return _stack(tokens, [int(_order(windows, seed, place // windows)[place % windows]) for place in places], length)


def fixed(tokens: Tokens, sequences: int, length: int) -> torch.Tensor:
    """(at most `sequences`, length + 1) int64: evenly spaced windows, always the same, for validation and the probe."""
    windows = _windows(tokens, length)
    rows = min(sequences, windows)
    return _stack(tokens, [row * windows // rows for row in range(rows)], length)


def _windows(tokens: Tokens, length: int) -> int:
    """How many windows there are; each also reads the first token of the next, as its last target."""
    windows = (len(tokens) - 1) // length
    if windows < 1:
        raise UserError(
            f"{tokens.name} has {len(tokens):,} tokens, fewer than one window of {length:,} and its next token; "
            "use shorter sequences or prepare more text"
        )
    return windows


@lru_cache(maxsize=4)
def _order(windows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    # Sorting raw bits, since numpy promises that these never change; it does not promise so of Generator.permutation.
    return np.argsort(np.random.PCG64([seed, epoch]).random_raw(windows), kind="stable")


def _stack(tokens: Tokens, windows: Sequence[int], length: int) -> torch.Tensor:
    rows = np.empty((len(windows), length + 1), dtype=np.int64)
    for row, window in enumerate(windows):
        rows[row] = tokens.window(window * length, length + 1)
    if (largest := int(rows.max())) >= tokens.vocab:
        raise UserError(
            f"{tokens.name} has the token {largest}, but its tokenizer has {tokens.vocab} tokens, from 0 to "
            f"{tokens.vocab - 1}; remove the folder and prepare it again"
        )
    return torch.from_numpy(rows)
