"""Measures a step of Muon on the CPU: ratios from interleaved steps in one process.

    python benchmarks/muon_step.py               about a minute
    python benchmarks/muon_step.py --cycles 10   faster, with more noise
    python benchmarks/muon_step.py --threads 2   only on an idle machine, because threads wait for each other

The matrices are those of the `cpu` preset: 4 layers of four 128 x 128, two 512 x 128 and one 128 x 512. A cycle takes
one step of each optimizer and one bare Newton-Schulz: the textbook's five steps in fp32, batched, on tensors that are
already stacked and transposed.

    torch / ours      a step of torch.optim.Muon in bf16 / a step of ours in fp32
    ours / bare       a step of ours / the bare Newton-Schulz. It is below 1 because for long matrices ours multiplies
                      polynomials of the small Gram matrix
    per head / ours   a step with every parameter split into 4 blocks / a step with whole matrices

Ratios are computed within a cycle; the table has medians over the cycles. The speed of torch.optim.Muon depends on how
the CPU computes in bf16. So the benchmark runs with all features of this CPU, and again in processes whose libraries
are restricted: to AVX-512 without bf16 units, where oneDNN emulates them, and to AVX2, where torch multiplies bf16
matrices in a plain loop.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from quacklr.lab.optim import Muon

LAYERS, SHAPES = 4, [(128, 128)] * 4 + [(512, 128)] * 2 + [(128, 512)]
STACKS = [(16, 128, 128), (8, 128, 512), (4, 128, 512)]
MACHINES: dict[str, dict[str, str]] = {
    "as it is": {},
    "AVX-512, no bf16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
}


def parameters() -> list[Tensor]:
    made = [torch.randn(shape, requires_grad=True) for _ in range(LAYERS) for shape in SHAPES]
    for param in made:
        param.grad = torch.randn_like(param)
    return made


def bare(x_BRC: Tensor) -> Tensor:
    x_BRC = x_BRC / x_BRC.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram_BRR = x_BRC @ x_BRC.mT
        polynomial_BRR = torch.baddbmm(gram_BRR, gram_BRR, gram_BRR, beta=-4.7750, alpha=2.0315)
        x_BRC = torch.baddbmm(x_BRC, polynomial_BRR, x_BRC, beta=3.4445)
    return x_BRC


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(machine: str, cycles: int, threads: int) -> None:
    """One line: the ratios in this process."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    stacks = [torch.randn(shape) for shape in STACKS]
    work: dict[str, Callable[[], object]] = {
        "torch": torch.optim.Muon(parameters(), lr=0.01, weight_decay=0.0).step,
        "ours": Muon(parameters(), lr=0.01).step,
        "bare": lambda: [bare(stack_BRC) for stack_BRC in stacks],
        "per head": Muon(parameters(), lr=0.01, blocks=4).step,
    }
    rows = [{name: seconds(each) for name, each in work.items()} for _ in range(cycles + 2)][2:]
    pairs = [("torch", "ours"), ("ours", "bare"), ("per head", "ours")]
    ratios = [median(row[above] / row[below] for row in rows) for above, below in pairs]
    print(f"{machine:<20}" + "".join(f"{ratio:>18.2f}" for ratio in ratios), flush=True)


def bf16_units() -> str:
    """The flags of this CPU for bf16 arithmetic."""
    file = Path("/proc/cpuinfo")
    flags = set(re.findall(r"\b(?:avx512_bf16|amx_bf16)\b", file.read_text())) if file.exists() else {"unknown"}
    return " ".join(sorted(flags)) or "none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=30, help="steps of each optimizer, for each CPU setting")
    parser.add_argument("--threads", type=int, default=1, help="number of CPU threads")
    parser.add_argument("--machine", choices=MACHINES, help="measure only this CPU setting, in this process")
    options = parser.parse_args()
    if options.machine:
        return measure(options.machine, options.cycles, options.threads)
    print(f"bf16 units of this CPU: {bf16_units()}; threads: {options.threads}")
    print(f"{'machine':<20}{'torch / ours':>18}{'ours / bare':>18}{'per head / ours':>18}", flush=True)
    for machine, less in MACHINES.items():
        numbers = ["--cycles", str(options.cycles), "--threads", str(options.threads)]
        subprocess.run(
            [sys.executable, __file__, *numbers, "--machine", machine], env={**os.environ, **less}, check=True
        )
    return None


if __name__ == "__main__":
    main()
