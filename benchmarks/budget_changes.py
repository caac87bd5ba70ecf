"""Measures how much one step with a budget changes the logits of real text: root mean square, relative to the budget.

    python benchmarks/budget_changes.py                                     about two minutes
    python benchmarks/budget_changes.py --out results/budget_changes.md     also writes the table of docs/theory.md

The models are transformers' Llama with two layers and heads of 16, untrained or after some steps of AdamW; the text is
the source of this repository, in bytes. `check` takes a step with a budget of 0.02 and measures the logits before and
after it. The table has the layer with the smallest and that with the largest change, mean over heads.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quacklr import Budget, check

BUDGET, LENGTH, HEAD_SIZE, LR = 0.02, 64, 16, 1e-3
HEAD = "| heads | steps of training before | AdamW | Muon |"
CASES = [(heads, steps) for steps in (0, 100) for heads in (4, 16, 32)]
TEXT = torch.tensor(list((Path(__file__).parent.parent / "src/quacklr/quack.py").read_bytes()))


def muon(model: Any) -> list[torch.optim.Optimizer]:
    """Muon for matrices, AdamW for embeddings and all other parameters."""
    embeddings = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    matrices = {id(p): p for p in model.parameters() if p.ndim == 2 and id(p) not in embeddings}
    others = [p for p in model.parameters() if id(p) not in matrices]
    return [torch.optim.Muon(matrices.values(), LR), torch.optim.AdamW(others, LR)]


OPTIMIZERS: dict[str, Any] = {"adamw": lambda model: torch.optim.AdamW(model.parameters(), LR), "muon": muon}


def batch() -> dict[str, Any]:
    starts = torch.randint(0, len(TEXT) - LENGTH, (8,)).tolist()
    ids = torch.stack([TEXT[start : start + LENGTH] for start in starts])
    return {"input_ids": ids, "labels": ids}


def trained(heads: int, steps: int) -> Any:
    width = heads * HEAD_SIZE
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "vocab_size": 256, "max_position_embeddings": LENGTH}
    config = LlamaConfig(hidden_size=width, intermediate_size=2 * width, num_attention_heads=heads, **sizes)
    model = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    optimizer = torch.optim.AdamW(model.parameters(), LR)
    for _ in range(steps):
        model(**batch()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def changes(heads: int, steps: int, optimizer: str) -> str:
    torch.manual_seed(0)
    model = trained(heads, steps)
    report = check(model, OPTIMIZERS[optimizer](model), batch(), rule=Budget(BUDGET), growth=1.0, steps=2)
    ratios = sorted(float(layer.measured.mean()) / BUDGET for layer in report.layers)
    return f"{ratios[0]:.1f} to {ratios[-1]:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    given = parser.parse_args()
    lines = [HEAD, "|---|---|---|---|"]
    print("\n".join(lines), flush=True)
    for heads, steps in CASES:
        found = (changes(heads, steps, optimizer) for optimizer in ("adamw", "muon"))
        lines.append(f"| {heads} | {steps} | {' | '.join(found)} |")
        print(lines[-1], flush=True)
    if given.out is not None:
        title = "# Change of the logits of real text by a step with a budget, relative to the budget"
        given.out.write_text("\n".join([title, "", *lines, ""]))


if __name__ == "__main__":
    main()
