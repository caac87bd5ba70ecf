"""Measures the cost of LogitMonitor and of QK clip on the CPU: ratios from interleaved runs in one process.

    python benchmarks/watching.py                                 about six minutes on 2 cores
    python benchmarks/watching.py --cycles 3                      faster, with more noise
    python benchmarks/watching.py --out results/watching.md       also writes the tables that docs/monitor.md quotes

measure   time of LogitMonitor.measure() / time of a forward of the same probe with eager attention, for transformers'
          Llama with eager attention and with scaled_dot_product_attention; the target is 1.3 or less
a step    time of a training step (forward, backward, fused AdamW; 2048 tokens) with QuacK, QK norm or QK clip /
          without; the lab's decoder of width 256, 4 layers, 4 heads

Each time is divided by the mean time of the baseline just before and after it. The tables have medians over the cycles.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from quacklr import LogitMonitor
from quacklr.lab.methods import Default, Method, QKClipping, QKNorm, Quack, alter, attach
from quacklr.lab.model import MHA, MLA, Shape, build

PROBES = [(256, 4, 8, 128, 16), (512, 4, 8, 512, 4), (512, 4, 8, 2048, 1)]  # width, layers, heads, context, sequences
METHODS: dict[str, Method] = {"QuacK": Quack(), "QK norm": QKNorm(), "QK clip": QKClipping()}
ATTENTIONS: dict[str, MHA | MLA] = {
    "MHA": MHA(heads=4, kv_heads=4, head_dim=64),
    "GQA": MHA(heads=4, kv_heads=2, head_dim=64),
    "MLA": MLA(heads=4, nope_dim=64, rope_dim=32, v_head_dim=64, d_cq=96, d_ckv=64),
}
CONTEXTS = (128, 512, 2048)
TOKENS = 2048


def ratios(base: Callable[[], Any], others: list[Callable[[], Any]], cycles: int) -> list[str]:
    """Time of each function over that of the base, which is run before and after it; medians over the cycles."""
    found: list[list[float]] = [[] for _ in others]
    seconds(base)
    for _ in range(cycles + 1):
        for function, of in zip(others, found, strict=True):
            before, taken, after = seconds(base), seconds(function), seconds(base)
            of.append(2 * taken / (before + after))
    return [f"{median(of[1:]):.2f}" for of in found]  # the first is to warm up


def seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def llama(width: int, layers: int, heads: int, context: int, implementation: str) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=context,
        vocab_size=2048,
    )
    config._attn_implementation = implementation
    return LlamaForCausalLM(config).eval()  # type: ignore[no-untyped-call]


def measuring(cycles: int) -> Iterator[list[str]]:
    """A row for each probe."""
    for width, layers, heads, context, sequences in PROBES:
        eager, fused = (llama(width, layers, heads, context, each) for each in ("eager", "sdpa"))
        probe = {"input_ids": torch.randint(2048, (sequences, context)), "use_cache": False}

        def forward(eager: nn.Module = eager, probe: dict[str, Any] = probe) -> None:
            with torch.no_grad():
                eager(**probe)

        monitors = [LogitMonitor(model, probe).measure for model in (eager, fused)]
        model = f"d {width}, {layers} layers, {heads} heads, {sequences} x {context} tokens"
        yield [model, *ratios(forward, list(monitors), cycles)]


def stepper(attention: MHA | MLA, method: Method, context: int) -> Callable[[], None]:
    """A function that takes a training step."""
    shape = Shape(d_model=256, layers=4, d_ff=1024, context=context, vocab=256)
    model = build(shape, attention, seed=0)
    alter(method, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    attached = attach(method, model, [optimizer])
    tokens = torch.randint(256, (TOKENS // context, context + 1))

    def step(_: Any = attached) -> None:  # what is attached must live as long as the function
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()

    return step


def stepping(cycles: int) -> Iterator[list[str]]:
    """A row for each attention and context."""
    for name, attention in ATTENTIONS.items():
        for context in CONTEXTS:
            plain, *others = (stepper(attention, method, context) for method in (Default(), *METHODS.values()))
            yield [name, str(context), *ratios(plain, others, cycles)]


def table(head: list[str], rows: Iterator[list[str]]) -> list[str]:
    """A table of Markdown, printed as it grows."""
    lines = []
    for row in chain([head, ["---"] * len(head)], rows):
        lines.append(f"| {' | '.join(row)} |")
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=9, help="number of interleaved runs (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="also write the tables to this file")
    given = parser.parse_args()
    watching = table(["probe", "eager", "sdpa"], measuring(given.cycles))
    print()
    clipping = table(["attention", "context", *METHODS], stepping(given.cycles))
    if given.out:
        about = f"`python benchmarks/watching.py --cycles {given.cycles}`, on the CPU; medians of interleaved runs."
        parts = [
            ["# What watching and clipping cost", "", about, ""],
            ["## A measurement of the monitor over a forward of its probe with eager attention", "", *watching, ""],
            ["## A training step with a method over one without", "", *clipping, ""],
        ]
        given.out.write_text("\n".join(line for part in parts for line in part))


if __name__ == "__main__":
    main()
