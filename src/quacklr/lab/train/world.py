"""The processes that train one model together. Without torchrun there is one, and nothing here does anything.

    torchrun --nproc-per-node 4 -m quacklr train ...

Each is a rank. Rank 0 leads: it alone writes to the terminal and to the run's folder, but for the checkpoints, of
which each rank writes its own shards.
"""

from __future__ import annotations

import gc
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from quacklr.lab.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """Who is here: process `rank` of `size`."""

    rank: int = 0
    size: int = 1

    @property
    def local_rank(self) -> int:
        """Its number among the processes on this machine."""
        return int(os.environ.get("LOCAL_RANK", "0")) if self.size > 1 else 0

    @property
    def local_size(self) -> int:
        """How many of the processes are on this machine."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if self.size > 1 else 1

    @property
    def leads(self) -> bool:
        """Whether it is this process that writes and speaks for all."""
        return self.rank == 0

    def refuse_unless_shared(self, sequences: int) -> None:
        """UserError if the sequences of a step are not the same number for all."""
        if sequences % self.size:
            raise UserError(
                f"the {sequences} sequences of a step cannot be shared out equally to {self.size} processes; change "
                "--batch-tokens, or how many processes torchrun starts"
            )

    def share(self, rows: Tensor) -> Tensor:
        """The rows of a batch that are this process's: as many as any other's."""
        self.refuse_unless_shared(len(rows))
        return rows.view(self.size, -1, *rows.shape[1:])[self.rank]

    def total(self, *numbers: float) -> list[float]:
        """Sums over all processes. Every one must ask."""
        if self.size == 1:
            return list(numbers)
        sums = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        dist.all_reduce(sums)
        return list(sums.tolist())

    def largest(self, number: float) -> float:
        """The largest of what the processes say. Every one must."""
        if self.size == 1:
            return number
        found = torch.tensor(number, dtype=torch.float64, device="cpu")
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.item()

    def told(self, decide: Callable[[], T]) -> T:
        """What the leading process decides, in all of them. If it refuses, the others end without a word."""
        if self.size == 1:
            return decide()
        words: list[Any] = [None, None]
        if self.leads:
            try:
                words = [decide(), None]
            except UserError as error:
                words = [None, error]
        dist.broadcast_object_list(words, src=0, device=torch.device("cpu"))
        said, refusal = words
        if refusal is not None:
            raise refusal if self.leads else SystemExit(2)
        decided: T = said
        return decided


def world() -> World:
    """The processes that have found each other."""
    if dist.is_available() and dist.is_initialized():
        return World(dist.get_rank(), dist.get_world_size())
    return World()


def leads() -> bool:
    """Whether this process is the one that speaks, as torchrun numbers them, before they have found each other."""
    return int(os.environ.get("RANK", "0")) == 0


def is_restarted() -> bool:
    """Whether torchrun has started this process again, because one of the processes had died."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def job() -> str | None:
    """What a process of torchrun has in common with those that it starts again, and with no others; else None."""
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    if run is None:
        return None
    mark = str(os.getppid()) if run in ("", "none") else run
    return hashlib.sha256(mark.encode()).hexdigest()[:8]


@contextmanager
def joined() -> Iterator[World]:
    """The processes that torchrun started, brought together for as long as it is entered."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield world()
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        store, rank, size = next(rendezvous("env://"))
        # torchrun may keep its store when it starts processes again, and in it the addresses of those that died
        fresh = PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        dist.init_process_group(backend, store=fresh, rank=rank, world_size=size)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        way = "" if "TORCHELASTIC_RUN_ID" in os.environ else "; start them with torchrun"
        raise UserError(f"the processes cannot find each other ({reason}){way}") from error
    yield world()
    # DDP's part in C++ also holds the group, and if it is the last to let go, it waits for a thread of gloo that waits
    # for the interpreter, for ever: so what has been trained goes first
    gc.collect()
    dist.destroy_process_group()  # not after an error: it would wait for processes that may be gone


LOSSES = ("closed by peer", "reset by peer", "connection refused", "broken pipe", "timed out", "remote process exited")


def is_loss_of_a_process(error: BaseException) -> bool:
    """Whether an error says that another process is gone, or silent for too long: in the words of gloo and NCCL."""
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in LOSSES)
