"""Computes how many bytes each process sends in a training step: the paper's 1B models, and MLA at 100B.

    python benchmarks/communication.py [--ranks 8 64 512] [--out results/communication.md]

Nothing is measured: the time depends on the network. The numbers of elements come from the shapes of the models (on the
meta device) and from the collectives in the code. Bytes are those that each process sends in a ring of n processes:
(n - 1) / n of the data for a reduce-scatter or an all-gather, and twice that for an all-reduce.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from quacklr import logit_paths
from quacklr.core.sensitivity import CompiledPaths
from quacklr.lab.model import MLA, Decoder, Shape
from quacklr.lab.presets import PRESETS
from quacklr.sharded.blocks import blocks_of

SHAPES = {
    "paper-mha": (PRESETS["paper-mha"].shape, PRESETS["paper-mha"].attention),
    "paper-mla": (PRESETS["paper-mla"].shape, PRESETS["paper-mla"].attention),
    "100B MLA": (
        Shape(d_model=10240, layers=80, d_ff=32768, context=4096, vocab=128 * 1024),
        MLA(heads=128, nope_dim=128, rope_dim=64, v_head_dim=128, d_cq=1536, d_ckv=512),
    ),
}
FP32, BF16 = 4, 2


@cache
def counted(name: str) -> dict[str, int]:
    """Of a model: its parameters, those of matrices, the blocks that have norms, and the entries of their weights."""
    shape, attention = SHAPES[name]
    with torch.device("meta"):
        model = Decoder(replace(shape), attention)
        compiled = CompiledPaths(logit_paths(model), blocks_of)
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    entries = sum(len(weight.block_of_row) * weight.columns for weight in compiled.weights)
    heads = sum({path.weights[0].name.rpartition(".")[0]: path.heads for path in compiled.paths}.values())
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "matrices": sum(p.numel() for p in matrices),
        "shapes": len({p.shape for p in matrices}),
        "blocks": compiled.blocks.total,
        "entries": entries,
        "heads": heads,
        "layers": shape.layers,
    }


def rows(name: str, ranks: int) -> list[tuple[str, int, float]]:
    """(what, collectives a step, bytes that a process sends a step), with FSDP2 over all ranks."""
    of, part = counted(name), (ranks - 1) / ranks
    return [
        ("FSDP2: weights in bf16 twice, gradients in fp32 once", 3 * (of["layers"] + 1), _fsdp(of) * part),
        ("Muon: every matrix to its owner and back, bf16", 2 * of["shapes"], 2 * BF16 * of["matrices"] / ranks * part),
        ("QuacK, frobenius: a number a block", 1, 2 * FP32 * of["blocks"] * part),
        ("QuacK, spectral: every cut block to its owner", 2, FP32 * (of["entries"] / ranks + 2 * of["blocks"]) * part),
        ("QK clip: a number a head", 1, 2 * FP32 * of["heads"] * part),
    ]


def _fsdp(of: dict[str, int]) -> float:
    return (2 * BF16 + FP32) * of["parameters"]


def size(number: float) -> str:
    """Bytes for people."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:.0f} B"


def share(part: float) -> str:
    """A part of a whole, for people."""
    return f"1 / {1 / part:,.0f}" if part < 1e-3 else f"{100 * part:.2g} %"


def table(name: str, ranks: list[int]) -> str:
    """Markdown for one model."""
    of = counted(name)
    head = f"{of['parameters'] / 1e9:.3g}B parameters, {of['layers']} layers, {of['blocks']:,} blocks that have norms"
    lines = [
        f"**{name}**: {head}",
        "",
        f"| sent by each process | collectives | {' | '.join(f'{n} ranks' for n in ranks)} |",
    ]
    lines.append("|---|---|" + "---|" * len(ranks))
    for what, collectives, _ in rows(name, 2):
        sent = [next(each for each in rows(name, n) if each[0] == what)[2] for n in ranks]
        whole = [rows(name, n)[0][2] for n in ranks]
        cells = [size(s) if s == w else f"{size(s)} ({share(s / w)})" for s, w in zip(sent, whole, strict=True)]
        lines.append(f"| {what} | {collectives} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Print the tables, and write them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512], help="world sizes (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="also write the tables to this file")
    given = parser.parse_args()
    command = f"python benchmarks/communication.py --ranks {' '.join(map(str, given.ranks))}"
    head = f"Computed, not measured, by `{command}`: bytes a step, and how much that is of what FSDP2 sends itself."
    text = (
        "\n\n".join(["# What a step sends between processes", head, *(table(name, given.ranks) for name in SHAPES)])
        + "\n"
    )
    print(text)
    if given.out:
        given.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
