"""What QuacK costs a training step: ratios from interleaved steps of one process, on the CPU.

    python benchmarks/step_overhead.py              about three minutes on 2 cores
    python benchmarks/step_overhead.py --cycles 20  quicker, noisier

Each cycle takes one step (forward, backward, fused AdamW) plain, one with QuacK and one with the floor in QuacK's place: a
copy of the q/k rows and a squared sum over them, in plain torch calls. All on the same model and batch, in turn.

    step     median of (step with QuacK / plain step) over the cycles
    hooks    1 + median time in QuacK's hooks / median plain step: the same thing, measured where it happens
    floor    median time in QuacK's hooks / median time of the floor
    memory   most bytes that QuacK has allocated at any time in a step / bytes of the q/k rows
    ops      torch operations that QuacK's hooks call, at 4 heads and at 32
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from quacklr import Path, QuacK, mha, packed


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (proj(x_BTD).unflatten(2, (self.heads, -1)).transpose(1, 2) for proj in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))

    def logit_paths(self) -> list[Path]:
        d_head = self.q.out_features // self.heads
        return mha(*packed(self.q, ("q", self.heads, d_head)), *packed(self.k, ("k", self.heads, d_head)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention, self.norm1, self.norm2 = Attention(width, heads), nn.RMSNorm(width), nn.RMSNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.norm1(x_BTD))
        return x_BTD + self.mlp(self.norm2(x_BTD))


def decoder(width: int, layers: int, heads: int, vocab: int = 256) -> nn.Sequential:
    blocks = [Block(width, heads) for _ in range(layers)]
    return nn.Sequential(nn.Embedding(vocab, width), *blocks, nn.RMSNorm(width), nn.Linear(width, vocab))


class Timed:
    """A function that keeps the time it took."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.seconds = function, 0.0

    def __call__(self, *args: Any) -> None:
        start = time.perf_counter()
        self.function(*args)
        self.seconds += time.perf_counter() - start


class Operations(TorchDispatchMode):
    """Counts torch operations, and follows how many bytes of newly allocated results are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def cycle(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> Iterator[dict[str, float]]:
    """Times of one plain step, one with QuacK and one with the floor, and of the hooks themselves; again and again."""
    rows = [p for name, p in model.named_parameters() if "attention.q" in name or "attention.k" in name]
    quack = QuacK(model, optimizer)
    quack.remove()

    @torch.no_grad()
    def floor(*_: Any) -> None:
        copies = [p.clone() for p in rows]
        sums = [p.square().sum(1) for p in rows]
        del copies, sums

    def step() -> float:
        start = time.perf_counter()
        optimizer.zero_grad()
        logits = model(batch[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
        optimizer.step()
        return time.perf_counter() - start

    while True:
        before, after, plain_calls = Timed(quack._before), Timed(quack._after), Timed(floor)
        row = {"plain": step()}
        hooks = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
        row["quack"] = step()
        for hook in hooks:
            hook.remove()
        hook = optimizer.register_step_pre_hook(plain_calls)
        step()
        hook.remove()
        yield row | {"hooks": before.seconds + after.seconds, "floor": plain_calls.seconds}


def operations(heads: int, layers: int = 4) -> int:
    """How many torch operations QuacK adds to a step."""
    model = decoder(128, layers, heads)
    counts = []
    for attach in (False, True):
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        quack = QuacK(model, optimizer) if attach else None
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        with Operations() as counter:
            optimizer.step()
        counts.append(counter.count)
        if quack is not None:
            quack.remove()
    return counts[1] - counts[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=150, help="interleaved steps of each kind for the small model")
    cycles: int = parser.parse_args().cycles
    print(f"{'model':<28}{'step':>9}{'hooks':>9}{'floor':>9}")
    for width, layers, heads, share in ((128, 4, 4, 1.0), (512, 8, 8, 0.2)):
        torch.manual_seed(0)
        model = decoder(width, layers, heads)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        run = cycle(model, optimizer, torch.randint(256, (8, 129)))
        for _ in range(3):
            next(run)
        rows = [next(run) for _ in range(max(3, int(share * cycles)))]
        middle = {key: median(row[key] for row in rows) for key in rows[0]}
        size = sum(p.numel() for p in model.parameters()) / 1e6
        name = f"{size:.1f}M (d {width}, {layers} layers)"
        ratio = median(row["quack"] / row["plain"] for row in rows)
        print(
            f"{name:<28}{ratio:>9.4f}{1 + middle['hooks'] / middle['plain']:>9.4f}{middle['hooks'] / middle['floor']:>9.2f}",
            middle,
        )
    print(operations(4), operations(32))


if __name__ == "__main__":
    main()
