"""Measures the cost of QuacK in a training step of a sharded model: ratios of interleaved steps on the same two ranks.

    python benchmarks/sharded_step.py                                     a few minutes on 2 cores
    python benchmarks/sharded_step.py --engines FSDP2 FSDP1               only these
    python benchmarks/sharded_step.py --out results/sharded_step.md       also writes the table to a file

The model is the lab's decoder on two processes (gloo, CPU, one thread each), with AdamW and 1024 tokens per process:
under FSDP2, under FSDP1, and in DeepSpeed's ZeRO stages 1 to 3. A round takes one plain step and one step with each
rule. The time of a step is that of the slower rank:

    hooks         1 + time in QuacK's hooks / time of a plain step, medians
    step          time of a step with QuacK / time of a plain step, median over the rounds; includes the machine's noise
    collectives   number of collectives of QuacK in a step, counted by torch's CommDebugMode
    bytes         bytes that one process gives to QuacK's all-reduces in a step, and to its all-to-alls

On a shared machine gloo waits until the processes are scheduled, and `hooks` is mostly this waiting time. A network
card does not have it.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.debug import CommDebugMode
from torch.multiprocessing.spawn import spawn

from quacklr import Limit, Paper, QuacK, spectral
from quacklr.lab.model import MHA, MLA, Shape, build

RANKS = 2
all_reduce, all_to_all = dist.all_reduce, dist.all_to_all_single
SHAPE = Shape(d_model=256, layers=6, d_ff=1024, context=128, vocab=256)
SPECS: dict[str, MHA | MLA] = {"MHA": MHA(8, 8, 32), "MLA": MLA(8, 32, 32, 32, d_cq=64, d_ckv=32)}
RULES: dict[str, Any] = {"Limit": Limit, "Paper": Paper, "Paper, spectral": partial(Paper, norm=spectral)}
ENGINES = ("FSDP2", "FSDP1", "ZeRO-1", "ZeRO-2", "ZeRO-3")


def fsdp2(model: Any) -> tuple[Any, Any]:
    """The model and its optimizer."""
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def fsdp1(model: Any) -> tuple[Any, Any]:
    """The model and its optimizer."""
    policy = ModuleWrapPolicy({type(model.blocks[0])})
    device = torch.device("cpu")
    wrapped = FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=device)
    return wrapped, torch.optim.AdamW(wrapped.parameters(), lr=1e-4, fused=True)


def zero(model: Any, stage: int) -> tuple[Any, Any]:
    """DeepSpeed's engine, twice: it is called, and it steps."""
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "DS_ACCELERATOR": "cpu"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    import deepspeed  # type: ignore[import-untyped]

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled, which takes minutes
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    config = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": stage}, "steps_per_print": 10**9}
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    return engine, engine


class Trained:
    """A sharded model, its optimizer, and QuacK on it, or not."""

    def __init__(self, spec: MHA | MLA, engine: str, rule: Any) -> None:
        whole = build(SHAPE, spec, seed=0)
        self.size = sum(param.numel() for param in whole.parameters())
        make = {"FSDP2": fsdp2, "FSDP1": fsdp1}.get(engine) or partial(zero, stage=int(engine[-1]))
        self.model, self.optimizer = make(whole)
        self.in_hooks, self.reduced, self.exchanged = 0.0, 0, 0
        if rule is not None:
            quack: Any = QuacK(self.model, self.optimizer, rule=rule(), verify=False)
            for hook in quack._scaler._hooks[:2]:
                self._time(hook)

    def _time(self, hook: Any) -> None:
        """Add up what a hook takes."""
        hooks = hook.hooks_dict_ref()
        inner = hooks[hook.id]

        def timed(*args: Any) -> None:
            began = time.perf_counter()
            exchange = patch.object(dist, "all_to_all_single", self._all_to_all)
            with patch.object(dist, "all_reduce", self._all_reduce), exchange:
                inner(*args)
            self.in_hooks += time.perf_counter() - began

        hooks[hook.id] = timed

    def _all_reduce(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.reduced += tensor.nbytes
        return all_reduce(tensor, *args, **kwargs)

    def _all_to_all(self, received: Tensor, sent: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.exchanged += sent.nbytes
        return all_to_all(received, sent, *args, **kwargs)

    def _backward(self, tokens_BT: Tensor) -> None:
        loss = self.model(tokens_BT[:, :-1], tokens_BT[:, 1:])
        self.model.backward(loss) if self.model is self.optimizer else loss.backward()

    def step(self, tokens_BT: Tensor) -> tuple[float, float]:
        """Seconds of a step, and of them in hooks, of the slower rank."""
        dist.barrier()
        self.in_hooks, began = 0.0, time.perf_counter()
        self._backward(tokens_BT)
        self.optimizer.step()
        self.optimizer.zero_grad()
        taken = torch.tensor([time.perf_counter() - began, self.in_hooks])
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        whole, hooks = taken.tolist()
        return whole, hooks

    def collectives(self, tokens_BT: Tensor) -> int:
        """Of the optimizer's step. Also counts the bytes of QuacK's."""
        self._backward(tokens_BT)
        self.reduced = self.exchanged = 0
        with CommDebugMode() as counted:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return int(counted.get_total_counts())


def taken(several: tuple[Trained, ...], tokens_BT: Tensor, first: int) -> list[tuple[float, float]]:
    """A step of each; another one begins every time."""
    order = [(first + place) % len(several) for place in range(len(several))]
    times = {number: several[number].step(tokens_BT) for number in order}
    return [times[number] for number in range(len(several))]


def rows(spec: str, engine: str, rounds: int) -> list[str]:
    """A line of the table for each rule."""
    tokens_BT = torch.randint(0, 256, (8, 129), generator=torch.Generator().manual_seed(dist.get_rank()))
    plain, *others = (Trained(SPECS[spec], engine, rule) for rule in (None, *RULES.values()))
    for each in (plain, *others):
        each.step(tokens_BT)  # the first step plans the exchange
    counts = [each.collectives(tokens_BT) for each in (plain, *others)]
    sent = [f"{each.reduced:,} and {each.exchanged:,}" for each in (plain, *others)]
    times = [taken((plain, *others), tokens_BT, first) for first in range(rounds)]
    base = median(step for (step, _), *_ in times)
    found = []
    for number, name in enumerate(RULES, start=1):
        hooks = 1 + median(round_[number][1] for round_ in times) / base
        ratio = median(round_[number][0] / round_[0][0] for round_ in times)
        own = f"{counts[number] - counts[0]} | {sent[number]}"
        found.append(f"| {engine} | {spec}, {plain.size / 1e6:.0f}M | {name} | {hooks:.3f} | {ratio:.3f} | {own} |")
    return found


def rank_main(rank: int, folder: str, rounds: int, engines: list[str], out: Path | None) -> None:
    """One of the processes; the first prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    lines = [row for engine in engines for spec in SPECS for row in rows(spec, engine, rounds)]
    if rank == 0:
        head = ["| engine | model | rule | hooks | step | collectives | bytes |", "|---|---|---|---|---|---|---|"]
        command = f"`python benchmarks/sharded_step.py --rounds {rounds}`, two ranks on gloo, on the CPU, AdamW"
        text = "\n".join(["# What QuacK costs a step of a sharded model", "", f"{command}.", "", *head, *lines]) + "\n"
        print(text)
        if out:
            out.write_text(text, encoding="utf-8")
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="steps of each kind (default: %(default)s)")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), help="(default: all)")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spawn(rank_main, (folder, given.rounds, given.engines, given.out), nprocs=RANKS)


if __name__ == "__main__":
    main()
