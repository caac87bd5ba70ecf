"""What it costs to watch logits, and to clip them, as ratios from interleaved runs of one process, on the CPU.

    python benchmarks/watching.py               about six minutes on 2 cores
    python benchmarks/watching.py --cycles 3    quicker, noisier
    python benchmarks/watching.py --out results/watching.md       the tables that docs/monitor.md quotes

measure   time of LogitMonitor.measure() / time of a forward of the same probe with eager attention; transformers' Llama
          with eager attention and with scaled_dot_product_attention; 1.3 or less is wanted
a step    time of a training step (forward, backward, fused AdamW; 2048 tokens) with a method / without; the lab's
          decoder of width 256, 4 layers, 4 heads. A cycle takes one step of each; medians over the cycles
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path as File
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
METHODS: dict[str, Method] = {"default": Default(), "QuacK": Quack(), "QK norm": QKNorm(), "QK clip": QKClipping()}
ATTENTIONS: dict[str, MHA | MLA] = {
    "MHA": MHA(heads=4, kv_heads=4, head_dim=64),
    "GQA": MHA(heads=4, kv_heads=2, head_dim=64),
    "MLA": MLA(heads=4, nope_dim=64, rope_dim=32, v_head_dim=64, d_cq=96, d_ckv=64),
}
CONTEXTS = (128, 512, 2048)
TOKENS = 2048


def medians(functions: dict[str, Callable[[], Any]], cycles: int) -> dict[str, float]:
    """Median time of each function, taken in turn."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for cycle in range(cycles + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if cycle:  # the first is to warm up
                times[name].append(time.perf_counter() - start)
    return {name: median(taken) for name, taken in times.items()}


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

        taken = medians(
            {
                "forward": forward,
                "eager": LogitMonitor(eager, probe).measure,
                "sdpa": LogitMonitor(fused, probe).measure,
            },
            cycles,
        )
        model = f"d {width}, {layers} layers, {heads} heads, {sequences} x {context} tokens"
        yield [model, f"{taken['eager'] / taken['forward']:.2f}", f"{taken['sdpa'] / taken['forward']:.2f}"]


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
            steps = {each: stepper(attention, method, context) for each, method in METHODS.items()}
            taken = medians(steps, cycles)
            ratios = [f"{taken[each] / taken['default']:.2f}" for each in METHODS if each != "default"]
            yield [name, str(context), *ratios]


def table(head: list[str], rows: Iterator[list[str]]) -> list[str]:
    """A table of Markdown, printed as it grows."""
    lines = []
    for row in chain([head, ["---"] * len(head)], rows):
        lines.append(f"| {' | '.join(row)} |")
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=9)
    parser.add_argument("--out", type=File, help="write the tables to this file too")
    given = parser.parse_args()
    watching = table(["probe", "eager", "sdpa"], measuring(given.cycles))
    print()
    clipping = table(["attention", "context", "QuacK", "QK norm", "QK clip"], stepping(given.cycles))
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
