"""The processes (ranks) that train one model together. Without torchrun there is one, and collectives do nothing.

    torchrun --nproc-per-node 4 -m quacklr train ...

Only rank 0 writes to the terminal and to the folder of the run; each rank writes its own shards of a checkpoint.
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
    """Process `rank` of `size`. Every rank must call the collective methods."""

    rank: int = 0
    size: int = 1

    @property
    def local_rank(self) -> int:
        """Rank among the processes on this machine."""
        return int(os.environ.get("LOCAL_RANK", "0")) if self.size > 1 else 0

    @property
    def local_size(self) -> int:
        """Number of processes on this machine."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if self.size > 1 else 1

    @property
    def is_rank0(self) -> bool:
        """Whether this process writes to the terminal and to the folder of the run."""
        return self.rank == 0

    def validate_divisible(self, sequences: int) -> None:
        """Raise UserError if the sequences of a step cannot be divided equally among the ranks."""
        if sequences % self.size:
            raise UserError(
                f"the {sequences} sequences of a step cannot be divided equally among {self.size} processes; change "
                "--batch-tokens, or how many processes torchrun starts"
            )

    def local_rows(self, rows: Tensor) -> Tensor:
        """This rank's rows of a batch; every rank has equally many."""
        self.validate_divisible(len(rows))
        return rows.view(self.size, -1, *rows.shape[1:])[self.rank]

    def all_reduce_sum(self, number: float) -> float:
        """Sum over all ranks."""
        return self._all_reduce(number, dist.ReduceOp.SUM)

    def all_reduce_max(self, number: float) -> float:
        """Maximum over all ranks."""
        return self._all_reduce(number, dist.ReduceOp.MAX)

    def _all_reduce(self, number: float, operation: Any) -> float:
        if self.size == 1:
            return number
        reduced = torch.tensor(number, dtype=torch.float64, device="cpu")
        dist.all_reduce(reduced, operation)
        return reduced.item()

    def broadcast(self, decide: Callable[[], T]) -> T:
        """Call `decide` on rank 0 and return its result on every rank.

        If it raises UserError, rank 0 raises it, and the other ranks exit silently.
        """
        if self.size == 1:
            return decide()
        message: list[Any] = [None, None]
        if self.is_rank0:
            try:
                message = [decide(), None]
            except UserError as error:
                message = [None, error]
        dist.broadcast_object_list(message, src=0, device=torch.device("cpu"))
        result: T = message[0]
        if message[1] is not None:
            raise message[1] if self.is_rank0 else SystemExit(2)
        return result


def world() -> World:
    """This process in the default process group, or a world of one."""
    if dist.is_available() and dist.is_initialized():
        return World(dist.get_rank(), dist.get_world_size())
    return World()


def is_rank0() -> bool:
    """Whether torchrun started this process as rank 0; can be called before the process group exists."""
    return int(os.environ.get("RANK", "0")) == 0


def is_restarted() -> bool:
    """Whether torchrun has restarted this process because a process had died."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def torchrun_id() -> str | None:
    """An identifier of one torchrun call, the same after its restarts; None without torchrun."""
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    if run is None:
        return None
    unique = str(os.getppid()) if run in ("", "none") else run
    return hashlib.sha256(unique.encode()).hexdigest()[:8]


@contextmanager
def process_group() -> Iterator[World]:
    """The default process group of the processes that torchrun started; destroyed at the end of the body."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield world()
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        store, rank, size = next(rendezvous("env://"))
        # torchrun may keep its store when it restarts processes, with the addresses of those that died
        fresh = PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        dist.init_process_group(backend, store=fresh, rank=rank, world_size=size)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        way = "" if "TORCHELASTIC_RUN_ID" in os.environ else "; start them with torchrun"
        raise UserError(f"the processes cannot find each other ({reason}){way}") from error
    yield world()
    # DDP's C++ object holds a reference to the group. If it is the last one, its destructor waits for a thread of gloo
    # that waits for the interpreter, forever. So the model is collected first.
    gc.collect()
    dist.destroy_process_group()  # not after an error: it would wait for processes that may have died


LOST_RANK_MESSAGES = (
    "closed by peer",
    "reset by peer",
    "connection refused",
    "broken pipe",
    "timed out",
    "remote process exited",
)


def is_lost_rank(error: BaseException) -> bool:
    """Whether an error of gloo or NCCL means that another process has died or does not answer."""
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in LOST_RANK_MESSAGES)
