"""Measures what measuring the attention costs: a Llama with 32 layers of 32 heads and tiny widths, on the CPU.

    python benchmarks/measure_attention.py

QuacK measures the attention of a model once, on 2 x 8 tokens of the first batch. Here the same slice is measured by
`logit_paths(model, slice)`, and compared with three forward-backward passes of it. Both are run in turn, and the ratio
is of the medians, in CPU time of one thread. The aim is at most the time of these passes plus one second.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quacklr import logit_paths

TOKENS = (2, 8)  # those that find/first_batch.py keeps


def seconds(function: Callable[[], object]) -> float:
    """Of CPU time, which other programs on the machine change little."""
    start = time.process_time()
    function()
    return time.process_time() - start


def three_passes(model: Any, sample: dict[str, torch.Tensor]) -> None:
    for _ in range(3):
        model(**sample, labels=sample["input_ids"]).loss.backward()
        model.zero_grad()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--layers", type=int, default=32)
    options.add_argument("--heads", type=int, default=32)
    options.add_argument("--rounds", type=int, default=5)
    given = options.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    width = 4 * given.heads
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=given.layers,
        num_attention_heads=given.heads,
    )
    model: Any = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    sample = {"input_ids": torch.randint(config.vocab_size, TOKENS)}
    three_passes(model, sample)  # not counted: torch and transformers load code in their first pass
    passes, measured = [], []
    for _ in range(given.rounds):
        passes.append(seconds(lambda: three_passes(model, sample)))
        measured.append(seconds(lambda: logit_paths(model, sample)))
    found = logit_paths(model, sample)
    assert len(found) == given.layers
    assert all(path.heads == given.heads for path in found)
    of_passes, of_measured = statistics.median(passes), statistics.median(measured)
    print(f"{given.layers} layers x {given.heads} heads, width {width}, {TOKENS[0]} x {TOKENS[1]} tokens")
    print(f"measuring / three forward-backward passes: {of_measured / of_passes:.1f}")
    print(f"measuring - three forward-backward passes: {of_measured - of_passes:.2f} s on this machine")


if __name__ == "__main__":
    main()
