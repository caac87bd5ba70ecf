"""Measures the cost of QuacK in a training step of a sharded model: ratios of interleaved steps on the same two ranks.

    python benchmarks/sharded_step.py                                     a minute or two on 2 cores
    python benchmarks/sharded_step.py --out results/sharded_step.md       also writes the table to a file

The model is the lab's decoder under FSDP2 on two processes (gloo, CPU, one thread each), with AdamW and 1024 tokens per
process. A round takes one plain step and one step with each norm. The time of a step is that of the slower rank:

    hooks         1 + time in QuacK's hooks / time of a plain step, medians
    step          time of a step with QuacK / time of a plain step, median over the rounds; includes the machine's noise
    collectives   number of collectives in optimizer.step, counted by torch's CommDebugMode; AdamW uses none

On a shared machine gloo waits until the processes are scheduled, and `hooks` is mostly this waiting time. A network
card does not have it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.multiprocessing.spawn import spawn

from quacklr import QuacK, frobenius, spectral
from quacklr.lab.model import MHA, MLA, Shape, build

RANKS = 2
SHAPE = Shape(d_model=256, layers=6, d_ff=1024, context=128, vocab=256)
SPECS: dict[str, MHA | MLA] = {"MHA": MHA(8, 8, 32), "MLA": MLA(8, 32, 32, 32, d_cq=64, d_ckv=32)}
NORMS: dict[str, Any] = {"frobenius": frobenius, "spectral": spectral}


class Trained:
    """A sharded model, its optimizer, and QuacK on it with a norm or without one."""

    def __init__(self, spec: MHA | MLA, norm: Any) -> None:
        self.model = build(SHAPE, spec, seed=0)
        for block in self.model.blocks:
            fully_shard(block)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.in_hooks = 0.0
        if norm is not None:
            quack: Any = QuacK(self.model, self.optimizer, norm=norm)
            for hook in quack._hooks[:2]:
                self._time(hook)

    def _time(self, hook: Any) -> None:
        """Add up what a hook takes."""
        hooks = hook.hooks_dict_ref()
        inner = hooks[hook.id]

        def timed(*args: Any) -> None:
            began = time.perf_counter()
            inner(*args)
            self.in_hooks += time.perf_counter() - began

        hooks[hook.id] = timed

    def step(self, tokens_BT: Tensor) -> tuple[float, float]:
        """Seconds of a step, and of them in hooks, of the slower rank."""
        dist.barrier()
        self.in_hooks, began = 0.0, time.perf_counter()
        self.model(tokens_BT[:, :-1], tokens_BT[:, 1:]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        taken = torch.tensor([time.perf_counter() - began, self.in_hooks])
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        whole, hooks = taken.tolist()
        return whole, hooks

    def collectives(self, tokens_BT: Tensor) -> int:
        """Of the optimizer's step."""
        self.model(tokens_BT[:, :-1], tokens_BT[:, 1:]).backward()
        with CommDebugMode() as counted:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return int(counted.get_total_counts())


def taken(several: tuple[Trained, ...], tokens_BT: Tensor, first: int) -> list[tuple[float, float]]:
    """A step of each; another one begins every time."""
    order = [(first + place) % len(several) for place in range(len(several))]
    times = {number: several[number].step(tokens_BT) for number in order}
    return [times[number] for number in range(len(several))]


def rows(spec: str, rounds: int) -> list[str]:
    """A line of the table for each norm."""
    tokens_BT = torch.randint(0, 256, (8, 129), generator=torch.Generator().manual_seed(dist.get_rank()))
    plain, *others = (Trained(SPECS[spec], norm) for norm in (None, *NORMS.values()))
    counts = [each.collectives(tokens_BT) for each in (plain, *others)]
    size = sum(param.numel() for param in plain.model.parameters())
    times = [taken((plain, *others), tokens_BT, first) for first in range(rounds)]
    base = median(step for (step, _), *_ in times)
    found = []
    for number, name in enumerate(NORMS, start=1):
        hooks = 1 + median(round_[number][1] for round_ in times) / base
        ratio = median(round_[number][0] / round_[0][0] for round_ in times)
        found.append(f"| {spec}, {size / 1e6:.0f}M | {name} | {hooks:.3f} | {ratio:.3f} | {counts[number]} |")
    assert counts[0] == 0
    return found


def rank_main(rank: int, folder: str, rounds: int, out: Path | None) -> None:
    """One of the processes; the first prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    lines = [row for spec in SPECS for row in rows(spec, rounds)]
    if rank == 0:
        head = ["| model | norm | hooks | step | collectives |", "|---|---|---|---|---|"]
        command = f"`python benchmarks/sharded_step.py --rounds {rounds}`, two ranks on gloo, on the CPU, FSDP2, AdamW"
        text = "\n".join(["# What QuacK costs a step of a sharded model", "", f"{command}.", "", *head, *lines]) + "\n"
        print(text)
        if out:
            out.write_text(text, encoding="utf-8")
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="steps of each kind (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spawn(rank_main, (folder, given.rounds, given.out), nprocs=RANKS)


if __name__ == "__main__":
    main()
