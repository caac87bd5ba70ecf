"""Measures the cost of QuacK in a training step on the CPU: ratios from interleaved steps in one process.

Times are CPU times of one thread, so that other processes on the machine count less.

    python benchmarks/step_overhead.py                              about five minutes on 2 cores
    python benchmarks/step_overhead.py --cycles 20                  faster, with more noise
    python benchmarks/step_overhead.py --out results/costs.md       also writes the table that README quotes

A step is forward, backward and fused AdamW on 1,024 or 8,192 tokens. A cycle takes a plain step, a step with QuacK,
and a step with the floor instead of QuacK. The floor is the least work possible: one copy of the q/k rows, kept during
the step, and one sum of their squares, in plain torch calls.

    hooks   1 + time in QuacK's hooks / time of a plain step, medians
    step    time of a step with QuacK / mean time of the plain steps before and after it; median over the cycles, with
            its standard error. It includes the machine's noise
    floor   time in QuacK's hooks / time of the floor, medians
    memory  bytes that QuacK allocates in its first step and keeps for the next one / bytes of the q/k rows
    calls   torch operations that QuacK adds to a step, with the given number of heads and with eight times as many
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median, stdev
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from quacklr import Limit, LogitPath, Paper, QuacK, Rule, mha, packed

HEAD = "| model | hooks | step | floor | memory | calls |"
SMALL, LARGE = (128, 4, 4), (512, 8, 8)  # width, layers, heads
PAPER, LIMIT = "`Paper` (tau)", "`Limit`"
RULES: dict[str, Callable[[], Rule]] = {PAPER: Paper, LIMIT: Limit}
CASES = [  # a model, tokens in a step, a share of the cycles, a rule
    ("1M (d 128, 4 layers)", SMALL, 1024, 1.0, PAPER),
    ("1M (d 128, 4 layers)", SMALL, 1024, 1.0, LIMIT),
    ("25M (d 512, 8 layers)", LARGE, 1024, 0.1, PAPER),
    ("25M (d 512, 8 layers)", LARGE, 1024, 0.1, LIMIT),
    ("25M (d 512, 8 layers)", LARGE, 8192, 0.02, LIMIT),
]


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (proj(x_BTD).unflatten(2, (self.heads, -1)).transpose(1, 2) for proj in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))

    def logit_paths(self) -> list[LogitPath]:
        size = self.q.out_features // self.heads
        return mha(*packed(self.q, ("q", self.heads, size)), *packed(self.k, ("k", self.heads, size)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention, self.norm1, self.norm2 = Attention(width, heads), nn.RMSNorm(width), nn.RMSNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.norm1(x_BTD))
        return x_BTD + self.mlp(self.norm2(x_BTD))


def decoder(width: int, layers: int, heads: int, vocab: int = 256) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [Block(width, heads) for _ in range(layers)]
    return nn.Sequential(nn.Embedding(vocab, width), *blocks, nn.RMSNorm(width), nn.Linear(width, vocab))


def rows_of(model: nn.Module) -> list[Tensor]:
    return [p for m in model.modules() if isinstance(m, Attention) for p in (m.q.weight, m.k.weight)]


class Timed:
    """A function that adds up the time it takes."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.seconds = function, 0.0

    def __call__(self, *args: Any) -> None:
        start = time.process_time()
        self.function(*args)
        self.seconds += time.process_time() - start


class Floor:
    """The least that any such method must do: keep a copy of the rows, and sum their squares."""

    def __init__(self, rows: list[Tensor]) -> None:
        self.rows, self.copies = rows, list[Tensor]()

    @torch.no_grad()
    def before(self, *_: Any) -> None:
        self.copies = [p.clone() for p in self.rows]
        for p in self.rows:
            p.square().sum(1)

    def after(self, *_: Any) -> None:
        self.copies = []


def timed_step(
    model: nn.Module, optimizer: Optimizer, batch: Tensor, *hooks: Callable[..., Any]
) -> tuple[float, float]:
    """Seconds of a whole step, and of the two hooks in it if any."""
    timed = [Timed(hook) for hook in hooks]
    handles = [
        register(hook)
        for register, hook in zip(
            (optimizer.register_step_pre_hook, optimizer.register_step_post_hook), timed, strict=False
        )
    ]
    start = time.process_time()
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).backward()
    optimizer.step()
    seconds = time.process_time() - start
    for handle in handles:
        handle.remove()
    return seconds, sum(hook.seconds for hook in timed)


def cycles(model: nn.Module, rule: Rule, tokens: int) -> Iterator[dict[str, float]]:
    """The times of one cycle after another."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batch, floor = torch.randint(256, (tokens // 128, 129)), Floor(rows_of(model))
    quack = QuacK(model, optimizer, rule=rule)
    quack.remove()
    while True:
        plain, _ = timed_step(model, optimizer, batch)
        with_quack, hooks = timed_step(model, optimizer, batch, quack._scaler.before, quack._scaler.after)
        again, _ = timed_step(model, optimizer, batch)
        _, least = timed_step(model, optimizer, batch, floor.before, floor.after)
        yield {"plain": plain, "hooks": hooks, "floor": least, "ratio": 2 * with_quack / (plain + again)}


class Operations(TorchDispatchMode):
    """Counts torch operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def calls(rule: Rule, width: int, layers: int, heads: int) -> int:
    model = decoder(width, layers, heads)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with QuacK(model, optimizer, rule=rule) as quack:
        for _ in range(2):  # the first step makes checks that the others do not
            with Operations() as operations:
                quack._scaler.before(optimizer)
                quack._scaler.after(optimizer)
    return operations.count


def memory(rule: Rule, width: int, layers: int, heads: int) -> float:
    def alive() -> int:
        gc.collect()
        tensors = [o for o in gc.get_objects() if type(o) in (Tensor, nn.Parameter)]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    model = decoder(width, layers, heads)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with QuacK(model, optimizer, rule=rule) as quack:
        before = alive()
        quack._scaler.before(optimizer)
        quack._scaler.after(optimizer)
        kept = alive()
    return (kept - before) / sum(p.numel() * p.element_size() for p in rows_of(model))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cycles", type=int, default=200, help="for the small model; a tenth or less for the large one"
    )
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    given = parser.parse_args()
    lines = [HEAD, "|---" * HEAD.count(" | ") + "|---|"]
    print("\n".join(lines), flush=True)
    torch.set_num_threads(1)
    for name, size, tokens, share, way in CASES:
        rule = RULES[way]
        run = cycles(decoder(*size), rule(), tokens)
        rows = [next(run) for _ in range(max(2, int(share * given.cycles)) + 1)][1:]
        middle = {key: median(row[key] for row in rows) for key in rows[0]}
        error = 1.25 * stdev(row["ratio"] for row in rows) / len(rows) ** 0.5
        width, layers, heads = size
        cells = (
            f"{name}, {tokens:,} tokens, {way}",
            f"{1 + middle['hooks'] / middle['plain']:.4f}",
            f"{middle['ratio']:.3f} (standard error {error:.3f})",
            f"{middle['hooks'] / middle['floor']:.2f}",
            f"{memory(rule(), *size):.2f}",
            f"{calls(rule(), *size)} with {heads} heads, {calls(rule(), width, layers, 8 * heads)} with {8 * heads}",
        )
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    if given.out:
        command = f"`python benchmarks/step_overhead.py --cycles {given.cycles}`"
        about = f"# What a step costs\n\n{command}, CPU times of one thread.\n\n"
        given.out.write_text(about + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
