"""The tokens of a split, memory-mapped from many files, and the batches made of them.

A batch is a pure function of (seed, step). A split is divided into windows. Each epoch visits every window once, in an
order that depends on (seed, epoch) only, and each step takes the next `sequences` windows. So a resumed run needs no
loader state, and each rank takes its rows of the same batch for every world size.
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
    """The tokens of a split as one array over all its shards. Only the parts that are read are loaded."""

    def __init__(self, name: str, shards: Iterable[Path], vocab: int) -> None:
        self.name, self.vocab = name, vocab
        self._shards = [np.memmap(path, DTYPE, mode="r").view(np.ndarray) for path in shards]
        self._starts = [0, *accumulate(len(shard) for shard in self._shards)]

    def __len__(self) -> int:
        return self._starts[-1]

    def window(self, start: int, length: int) -> NDArray[np.uint16]:
        """`length` tokens from index `start` on: a view if one shard holds them all, otherwise a copy."""
        if start < 0 or start + length > len(self):
            raise IndexError(f"tokens {start} to {start + length} of {self.name}, which has {len(self)}")
        first = bisect_right(self._starts, start) - 1
        begin = start - self._starts[first]
        part = self._shards[first][begin : begin + length]
        if len(part) == length:
            return part
        return np.concatenate([part, self.window(start + len(part), length - len(part))])


def batch(tokens: Tokens, seed: int, step: int, sequences: int, length: int) -> torch.Tensor:
    """The training batch of a step, (sequences, length + 1) int64: inputs are [:, :-1], targets [:, 1:].

    The order of an epoch is computed once and cached, at 8 bytes per window.
    """
    windows = _window_count(tokens, length)
    drawn = range(step * sequences, (step + 1) * sequences)
    return _stack(tokens, [int(_epoch_order(windows, seed, i // windows)[i % windows]) for i in drawn], length)


def evaluation_batch(tokens: Tokens, sequences: int, length: int) -> torch.Tensor:
    """A fixed batch for validation and the probe, (at most `sequences`, length + 1) int64: evenly spaced windows."""
    windows = _window_count(tokens, length)
    rows = min(sequences, windows)
    return _stack(tokens, [row * windows // rows for row in range(rows)], length)


def _window_count(tokens: Tokens, length: int) -> int:
    """Number of windows; the last target of a window is the first token of the next."""
    windows = (len(tokens) - 1) // length
    if windows < 1:
        raise UserError(
            f"{tokens.name} has {len(tokens):,} tokens, fewer than one window of {length:,} and its next token; "
            "use shorter sequences or prepare more text"
        )
    return windows


@lru_cache(maxsize=4)
def _epoch_order(windows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    # argsort of raw bits: numpy guarantees that these never change, and does not guarantee it for Generator.permutation
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
