"""Measures the cost of decoding one token: the size of the cache, and the time of attention by context length.

    python benchmarks/decode.py                                 half a minute
    python benchmarks/decode.py --out results/decode.md         also writes the tables, and a figure next to them

Measured: one attention layer of the paper's size (width 2048, 32 heads of 64, latents of 512 and 256), one sequence,
fp32 on the CPU, with a cache that holds all but the last position of the context. A round decodes one token with each
layer at each length. Times are ratios to the time of MHA in the same round; the table has medians over the rounds. The
feed-forward layers and the vocabulary are not included, because they are the same for all.

Computed: how many numbers each layer caches per token, and how many bytes that is for the paper's 14 layers in bf16.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median

import torch
from matplotlib.ticker import NullLocator, StrMethodFormatter
from torch import Tensor

from quacklr.lab.figures import drawn
from quacklr.lab.methods import AbsorbedQKNorm, Default, Method, QKNorm, Quack, alter
from quacklr.lab.model import Attention, Decoder, Shape
from quacklr.lab.model.cache import Cache
from quacklr.lab.model.rope import Rotary
from quacklr.lab.presets import ATTENTIONS, PRESETS
from quacklr.lab.report.style import panels

SHAPE: Shape = PRESETS["paper-mha"].shape
SPECS = ATTENTIONS["paper-mha"]
Times = dict[int, list[dict[str, float]]]
LAYERS, BF16 = SHAPE.layers, 2


LAYER: dict[str, tuple[str, Method]] = {
    "MHA": ("mha", Default()),
    "MLA + QuacK": ("mla", Quack()),
    "MLA + QK norm": ("mla", QKNorm()),
    "MLA + absorbed QK norm": ("mla", AbsorbedQKNorm()),
}


def layer(name: str) -> Attention:
    """The attention of a decoder that has hardly anything else."""
    kind, method = LAYER[name]
    model = Decoder(replace(SHAPE, layers=1, d_ff=1, vocab=1), SPECS[kind])
    alter(method, model)
    return next(iter(model.attentions().values()))


class Decoding:
    """A layer about to read the last position of a context."""

    def __init__(self, attention: Attention, context: int) -> None:
        self.attention, self.rooms = attention, attention.cache_layout()
        self.rotary = Rotary(attention.parts[-1], context, SHAPE.rope_theta)
        self.cache = Cache(self.rooms, 1, context)
        self.cache.append(**{name: torch.randn(1, heads, context - 1, x) for name, (heads, x) in self.rooms.items()})

    def seconds(self, x_B1C: Tensor) -> float:
        began = time.perf_counter()
        self.attention(x_B1C, self.rotary, self.cache)
        taken = time.perf_counter() - began
        self.cache.length -= 1  # the next round reads it again
        return taken


@cache
def count(name: str) -> int:
    """How many numbers a layer remembers of a token."""
    with torch.device("meta"):
        return sum(heads * x for heads, x in layer(name).cache_layout().values())


def stored(name: str) -> float:
    """The bytes that these take in its cache."""
    with torch.device("meta"):
        return Cache(layer(name).cache_layout(), 1, 1).bytes_per_position


@torch.inference_mode()
def measured(contexts: list[int], rounds: int) -> Times:
    """By context: for every round, the seconds of each layer."""
    torch.manual_seed(0)
    attentions = {name: layer(name) for name in LAYER}
    layers = {c: {name: Decoding(attention, c) for name, attention in attentions.items()} for c in contexts}
    x_B1C = torch.randn(1, 1, SHAPE.d_model)
    found: Times = {context: [] for context in contexts}
    for _ in range(rounds + 1):
        for context, decoding in layers.items():
            found[context].append({name: each.seconds(x_B1C) for name, each in decoding.items()})
    return {context: rows[1:] for context, rows in found.items()}


def lines_of(times: Times) -> list[str]:
    """Of a table: time to MHA's, by layer and context; and MHA's own to that of the shortest context."""
    base = [median(row["MHA"] for row in rows) for rows in times.values()]
    lines, first = [], count("MHA")
    for name in LAYER:
        ratios = (median(row[name] / row["MHA"] for row in rows) for rows in times.values())
        cells = " | ".join(f"{ratio:.2f}" for ratio in ratios)
        lines.append(f"| {name} | {stored(name):,.0f} | {count(name) / first:.3f} | {cells} |")
    grown = " | ".join(f"{each / base[0]:.1f}" for each in base)
    return [*lines, f"| *MHA, to its shortest context* | | | {grown} |"]


def draw(times: Times, path: Path) -> None:
    """Both against the length of the context: time, to MHA's at the shortest; and the cache of the whole model."""
    figure, ((left, right),) = panels(1, 2, width=3.8, height=2.9)
    unit = median(row["MHA"] for row in next(iter(times.values())))
    contexts = list(times)
    for name, colour in zip(LAYER, ("#666666", "#0b6e4f", "#e69f00", "#0072b2"), strict=True):
        took = [median(row[name] for row in rows) / unit for rows in times.values()]
        left.plot(contexts, took, color=colour, marker=".", label=name)
        right.plot(contexts, [count(name) * LAYERS * BF16 * each / 2**20 for each in contexts], color=colour)
    for axes, title in (
        (left, "time of a token, attention only"),
        (right, "cache of the paper's model, MiB"),
    ):
        axes.set(xscale="log", xlabel="tokens in the context", title=title)
        axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
        axes.xaxis.set_minor_locator(NullLocator())
    left.set(ylim=(0, None), ylabel=f"MHA at {contexts[0]} tokens = 1")
    right.set_yscale("log")
    right.yaxis.set_major_formatter(StrMethodFormatter("{x:,.4g}"))
    figure.legend(loc="outside lower center", ncols=2)
    path.write_bytes(drawn(figure, "png"))


def computed() -> list[str]:
    """Lines of a table: the cache of the paper's whole model."""
    lines = []
    for name in LAYER:
        each = count(name)
        sizes = [each * LAYERS * BF16 * context / 2**20 for context in (SHAPE.context, 131_072)]
        lines.append(
            f"| {name} | {each:,} | {each * LAYERS * BF16:,} | " + " | ".join(f"{s:,.0f}" for s in sizes) + " |"
        )
    return lines


def main() -> None:
    """Print the tables, and write them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 1024, 4096, 16384], help="context lengths")
    parser.add_argument("--rounds", type=int, default=30, help="tokens to decode, for each layer and length")
    parser.add_argument("--threads", type=int, default=1, help="number of CPU threads")
    parser.add_argument("--out", type=Path, help="also write the tables to this file, and a figure next to it")
    given = parser.parse_args()
    if given.rounds < 1 or min(given.contexts) < 2:
        parser.error("--rounds must be at least 1, and every one of --contexts at least 2")
    torch.set_num_threads(given.threads)
    times = measured(given.contexts, given.rounds)
    lengths = " | ".join(f"{context:,}" for context in given.contexts)
    options = f"--contexts {' '.join(map(str, given.contexts))} --rounds {given.rounds} --threads {given.threads}"
    text = "\n".join(
        [
            "# What a token costs at inference",
            "",
            f"Measured by `python benchmarks/decode.py {options}`: one attention layer of",
            "the paper's size, fp32 on the CPU; the time of a token to that of MHA, by the length of the context.",
            "",
            f"| layer | bytes of cache a token | to MHA | {lengths} |",
            "|---|---|---|" + "---|" * len(given.contexts),
            *lines_of(times),
            "",
            f"Computed: the paper's {LAYERS} layers in bf16.",
            "",
            "| model | numbers a token and layer | bytes a token | MiB at 2,048 tokens | MiB at 131,072 |",
            "|---|---|---|---|---|",
            *computed(),
        ]
    )
    print(text)
    if given.out:
        given.out.write_text(text + "\n", encoding="utf-8")
        draw(times, given.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
