"""Measures a step of Muon on sharded matrices, on the CPU: ratios from interleaved steps on the same two ranks.

    python benchmarks/muon_sharded.py                                     half a minute
    python benchmarks/muon_sharded.py --rounds 5                          faster, with more noise
    python benchmarks/muon_sharded.py --out results/muon_sharded.md       also writes the table to a file

The matrices are those of 6 layers of width 256: four of 256 x 256, two of 1024 x 256 and one of 256 x 1024. Their rows
are sharded over two processes on gloo, as fully_shard does it. A round takes one step of each optimizer, after a
barrier. The time of a step is that of the slower rank:

    ours, sharded    quacklr's Muon in fp32: each matrix is sent to one rank, which orthogonalises it
    ours, whole      the same with whole matrices on every rank, as under DDP: no collectives, every rank does all work
    torch, sharded   torch.optim.Muon on the same DTensors, in bf16

Ratios are computed within a round; the table has medians over the rounds. Collectives are counted by torch's
CommDebugMode.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.multiprocessing.spawn import spawn
from torch.optim import Optimizer

from quacklr.lab.optim import Muon

RANKS, LAYERS, SHAPES = 2, 6, [(256, 256)] * 4 + [(1024, 256)] * 2 + [(256, 1024)]
OURS, WHOLE, TORCH = "ours, sharded", "ours, whole", "torch, sharded"
Round = dict[str, float]


def parameters(sharded: bool) -> list[Tensor]:
    """The same numbers on every rank, each with a gradient."""
    random, made = torch.Generator().manual_seed(0), []
    for shape in SHAPES * LAYERS:
        pair = [torch.randn(shape, generator=random) for _ in range(2)]
        param, grad = [shard(each) for each in pair] if sharded else pair
        made.append(nn.Parameter(param))
        made[-1].grad = grad
    return list(made)


def shard(whole: Tensor) -> Tensor:
    return distribute_tensor(whole, init_device_mesh("cpu", (RANKS,)), [Shard(0)], src_data_rank=None)


def seconds(optimizer: Optimizer) -> float:
    """Of a step, on the rank that takes longest."""
    dist.barrier()
    start = time.perf_counter()
    optimizer.step()
    taken = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.item()


def collectives(optimizer: Optimizer) -> int:
    with CommDebugMode() as comm:
        optimizer.step()
    return comm.get_total_counts()


def rank_main(rank: int, folder: str, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    optimizers: dict[str, Optimizer] = {
        OURS: Muon(parameters(sharded=True), lr=0.01),
        WHOLE: Muon(parameters(sharded=False), lr=0.01),
        TORCH: torch.optim.Muon(parameters(sharded=True), lr=0.01, weight_decay=0.0),
    }
    counts = {name: collectives(optimizer) for name, optimizer in optimizers.items()}  # the first step, unmeasured
    rows = [{name: seconds(optimizer) for name, optimizer in optimizers.items()} for _ in range(rounds + 1)][1:]
    if rank == 0:
        torch.save((counts, rows), f"{folder}/found")
    dist.destroy_process_group()


def measure(rounds: int) -> tuple[dict[str, int], list[Round]]:
    """Collectives of a step, and seconds of every round, by optimizer."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(rank_main, (folder, rounds), nprocs=RANKS)
        found: Any = torch.load(f"{folder}/found")
        return found


def table(counts: dict[str, int], rows: list[Round]) -> str:
    lines = ["| a step of | time, ours sharded = 1 | collectives | a matrix |", "| --- | --- | --- | --- |"]
    for name, count in counts.items():
        ratio = median(row[name] / row[OURS] for row in rows)
        lines.append(f"| {name} | {ratio:.2f} | {count} | {count / len(SHAPES * LAYERS):.2g} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="steps of each optimizer (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    found = table(*measure(options.rounds))
    print(found)
    if options.out:
        options.out.write_text(PAGE.format(command=" ".join(["python", *sys.argv]), table=found))


PAGE = """# What Muon costs on sharded matrices

`{command}`, two ranks on gloo, on the CPU; medians of interleaved rounds.

{table}

42 matrices of three shapes (6 layers of width 256). Ours computes in fp32, torch.optim.Muon in bf16.
"""

if __name__ == "__main__":
    main()
