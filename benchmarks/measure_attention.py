"""Measures the cost of `logit_paths(model, sample)` for a Llama of 1.2 billion parameters, on the CPU.

    python benchmarks/measure_attention.py

It needs 6 GB of memory. The result is the time relative to one forward of the same sample, in the same process. The
output also has the time in seconds, which depends on the machine and on its load.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quacklr import logit_paths


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def main() -> None:
    config = LlamaConfig(
        hidden_size=1792,
        num_hidden_layers=28,
        num_attention_heads=14,
        num_key_value_heads=14,
        intermediate_size=4864,
        vocab_size=49152,
        tie_word_embeddings=True,
    )
    model: Any = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    sample = {"input_ids": torch.randint(config.vocab_size, (1, 16))}
    parameters = sum(parameter.numel() for parameter in model.parameters())
    forward, measured = [], []
    for _ in range(3):
        with torch.no_grad():
            forward.append(seconds(lambda: model(**sample)))
        measured.append(seconds(lambda: logit_paths(model, sample)))
    ratio = statistics.median(measured) / statistics.median(forward)
    print(f"{parameters / 1e9:.2f} billion parameters, {config.num_hidden_layers} layers, 16 tokens")
    print(f"reading by rule: {seconds(lambda: logit_paths(model)) / statistics.median(forward):.2f} forwards")
    print(f"measuring: {ratio:.1f} forwards ({statistics.median(measured):.0f} s here)")


if __name__ == "__main__":
    main()
