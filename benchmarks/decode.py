"""What a token costs at inference: memory of the cache, and time of its attention against the length of the context.

    python benchmarks/decode.py                                 two minutes or so on 2 cores
    python benchmarks/decode.py --out results/decode.md         the tables as a file, too

Measured: one attention layer at the paper's size (width 2048, 32 heads of 64, latents of 512 and 256), one sequence,
fp32 on the CPU, a cache that holds all but the last position of the context. A round decodes one token with each layer
in turn and at each length; times are medians over rounds of the ratio to MHA's within a round. The feed-forward layers
and the vocabulary, the same for all, are not in it.

Computed: how many numbers each remembers of a token, and what that is for the paper's 14 layers in bf16.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from quacklr.lab.model import Attention, Shape
from quacklr.lab.model.cache import Cache
from quacklr.lab.model.mha import MultiHead
from quacklr.lab.model.mla import Latent
from quacklr.lab.model.rope import Rotary
from quacklr.lab.presets import ATTENTIONS, PRESETS

SHAPE: Shape = PRESETS["paper-mha"].shape
SPECS = ATTENTIONS["paper-mha"]
EPS, LAYERS, BF16 = SHAPE.norm_eps, SHAPE.layers, 2


def latent() -> Latent:
    return Latent(SHAPE, SPECS["mla"])  # type: ignore[arg-type]


def normed(apart: bool) -> Latent:
    attention = latent()
    attention.add_qk_norm(EPS, apart)
    return attention


LAYER: dict[str, Callable[[], Attention]] = {
    "MHA": lambda: MultiHead(SHAPE, SPECS["mha"]),  # type: ignore[arg-type]
    "MLA + QuacK": latent,  # which changes nothing at inference
    "MLA + QK norm": lambda: normed(apart=False),
    "MLA + absorbed QK norm": lambda: normed(apart=True),
}


class Decoding:
    """A layer about to read the last position of a context."""

    def __init__(self, attention: Attention, context: int) -> None:
        self.attention, self.rooms = attention, attention.cached()
        rotated = SPECS["mha"].head_dim if isinstance(attention, MultiHead) else attention.parts[1]  # type: ignore[union-attr]
        self.rotary = Rotary(rotated, context, SHAPE.rope_theta)
        self.cache = Cache(self.rooms, 1, context)
        self.cache.add(**{name: torch.randn(1, heads, context - 1, x) for name, (heads, x) in self.rooms.items()})

    def seconds(self, x_B1C: Tensor) -> float:
        began = time.perf_counter()
        self.attention(x_B1C, self.rotary, self.cache)
        taken = time.perf_counter() - began
        self.cache.length -= 1  # the next round reads it again
        return taken


def numbers(attention: Attention) -> int:
    """How many are remembered of a token."""
    return sum(heads * x for heads, x in attention.cached().values())


@torch.inference_mode()
def measured(contexts: list[int], rounds: int) -> list[str]:
    """Lines of a table: time to MHA's, by layer and context; and MHA's own to that of the shortest context."""
    torch.manual_seed(0)
    attentions = {name: make() for name, make in LAYER.items()}
    found: dict[str, list[float]] = {name: [] for name in LAYER}
    base = []
    x_B1C = torch.randn(1, 1, SHAPE.d_model)
    for context in contexts:
        decoding = {name: Decoding(attention, context) for name, attention in attentions.items()}
        times = [{name: each.seconds(x_B1C) for name, each in decoding.items()} for _ in range(rounds + 2)][2:]
        for name in LAYER:
            found[name].append(median(row[name] / row["MHA"] for row in times))
        base.append(median(row["MHA"] for row in times))
    first = attentions["MHA"]
    lines = []
    for name, attention in attentions.items():
        share = numbers(attention) / numbers(first)
        cells = " | ".join(f"{ratio:.2f}" for ratio in found[name])
        lines.append(f"| {name} | {4 * numbers(attention):,} | {share:.3f} | {cells} |")
    grown = " | ".join(f"{each / base[0]:.1f}" for each in base)
    return [*lines, f"| *MHA, to its shortest context* | | | {grown} |"]


def computed() -> list[str]:
    """Lines of a table: the cache of the paper's whole model."""
    lines = []
    for name, make in LAYER.items():
        with torch.device("meta"):
            each = numbers(make())
        sizes = [each * LAYERS * BF16 * context / 2**20 for context in (SHAPE.context, 131_072)]
        lines.append(
            f"| {name} | {each:,} | {each * LAYERS * BF16:,} | " + " | ".join(f"{s:,.0f}" for s in sizes) + " |"
        )
    return lines


def main() -> None:
    """Print the tables, and write them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 1024, 4096, 16384], help="lengths")
    parser.add_argument("--rounds", type=int, default=30, help="tokens of each layer at each length")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--out", type=Path, help="also write the tables to this file")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
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
            *measured(given.contexts, given.rounds),
            "",
            f"Computed: the paper's {LAYERS} layers in bf16.",
            "",
            "| model | numbers a token and layer | bytes a token | MB at 2,048 tokens | MB at 131,072 |",
            "|---|---|---|---|---|",
            *computed(),
        ]
    )
    print(text)
    if given.out:
        given.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
