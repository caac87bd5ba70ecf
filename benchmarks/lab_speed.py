"""Measures the speed of the lab on the CPU, with the `cpu` preset: ratios from interleaved runs in one process.

    python benchmarks/lab_speed.py                about six minutes on 2 cores
    python benchmarks/lab_speed.py --cycles 5     faster, with more noise

transformers      time of forward and backward, with the loss, of transformers' Qwen3ForCausalLM / of the lab's model,
                  with the same sizes, QK norm and batch; the target is 1.1 or more
a step            time of a training step with each method / with the default, for MHA and MLA: data, forward, backward,
                  clipping, optimizers. In the paper a step with QuacK is about 10 % faster than with QK norm
statistics        time of the logit statistics in a run / time of its steps, at the default interval; the target is 2 %
                  or less
cold start        time from the command `quacklr train` to its first step / time of `python -c "import torch"`; also in
                  seconds, because the target is in seconds: 5
a default run     time of 300 steps with the cold start, in seconds; the target is 90
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as `quacklr train` does, before torch is loaded

import torch

from quacklr.lab.data import batch, open_corpus
from quacklr.lab.methods import Default, Method, QKClipping, QKNorm, Quack
from quacklr.lab.model import build
from quacklr.lab.presets import ATTENTIONS, PRESETS
from quacklr.lab.train.device import reuse_freed_memory
from quacklr.lab.train.session import Session
from quacklr.lab.train.statistics import weight_row

METHODS: dict[str, Method] = {"default": Default(), "QuacK": Quack(), "QK norm": QKNorm(), "QK clip": QKClipping()}


def timed(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def interleaved(functions: dict[str, Callable[[], Any]], cycles: int) -> dict[str, list[float]]:
    """Times of each function, taken in turn."""
    for function in functions.values():
        for _ in range(3):
            function()
    found: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(cycles):
        for name, function in functions.items():
            found[name].append(timed(function))
    return found


def ratio(above: list[float], below: list[float]) -> float:
    return median(one / other for one, other in zip(above, below, strict=True))


def forward_and_backward(cycles: int) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = replace(PRESETS["cpu"].shape, vocab=256)
    ours = build(shape, PRESETS["cpu"].attention, seed=0)
    for attention in ours.attentions().values():
        attention.add_qk_norm(shape.norm_eps)
    twin: Any = Qwen3ForCausalLM
    theirs = twin(
        Qwen3Config(
            vocab_size=256,
            hidden_size=shape.d_model,
            intermediate_size=shape.d_ff,
            num_hidden_layers=shape.layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=32,
            tie_word_embeddings=True,
            use_cache=False,
            rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        )
    )
    tokens = torch.randint(0, 256, (8, 129), generator=torch.Generator().manual_seed(0))
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())

    def step(model: Any, loss: Callable[[], torch.Tensor]) -> None:
        loss().backward()
        model.zero_grad()

    def their_loss() -> torch.Tensor:
        logits = theirs(input_ids=tokens[:, :-1]).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    found = interleaved(
        {
            "ours": lambda: step(ours, lambda: ours(tokens[:, :-1], tokens[:, 1:])),
            "theirs": lambda: step(theirs, their_loss),
        },
        cycles,
    )
    print(f"forward and backward, transformers' Qwen3ForCausalLM / ours   {ratio(found['theirs'], found['ours']):.2f}")


def steps(cycles: int) -> None:
    corpus = open_corpus("stdlib")
    for kind, spec in ATTENTIONS["cpu"].items():
        sessions = {
            name: Session(replace(PRESETS["cpu"], attention=spec, method=method), corpus)
            for name, method in METHODS.items()
        }
        found = interleaved({name: each._update for name, each in sessions.items()}, cycles)
        for name in list(METHODS)[1:]:
            print(f"a step, {kind.upper()}, {name} / default   {ratio(found[name], found['default']):.3f}")
        for name in ("QK norm", "QK clip"):
            print(f"a step, {kind.upper()}, {name} / QuacK   {ratio(found[name], found['QuacK']):.3f}")
        if kind == "mha":
            statistics(sessions["QuacK"], found["QuacK"], cycles)


def statistics(session: Session, step: list[float], cycles: int) -> None:
    """What is done around one step in `probe_every`."""

    def measure() -> None:
        session.probe.before_step(0)
        session.probe.after_step()
        weight_row(session.model, session.attached)

    each = interleaved({"measure": measure}, cycles)["measure"]
    share = median(each) / median(step) / session.config.watch.probe_every
    print(f"statistics / steps, every {session.config.watch.probe_every} steps   {share:.4f}")


def cold() -> None:
    torch_alone = min(
        timed(lambda: subprocess.run([sys.executable, "-c", "import torch"], check=True)) for _ in range(3)
    )
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "quacklr", "train", "--method", "quack", "--out", str(out)]
        began = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            while not (out / "metrics.jsonl").exists() or len((out / "metrics.jsonl").read_text().splitlines()) < 2:
                assert process.poll() is None, "the run ended before its first step"
                time.sleep(0.01)
            first = time.perf_counter() - began
            process.wait()
        whole = time.perf_counter() - began
        result = json.loads((out / "result.json").read_text())
    print(f"cold start to the first step / import torch   {first / torch_alone:.1f}   ({first:.1f} s)")
    print(f"a default run with QuacK, 300 steps, {whole:.0f} s, validation loss {result['val_loss']:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=40, help="number of interleaved runs (default: %(default)s)")
    cycles = parser.parse_args().cycles
    reuse_freed_memory()
    batch(open_corpus("stdlib").tokens("train"), 0, 0, 8, 128)  # made on first use: not part of a cold start
    print(f"{torch.get_num_threads()} threads of {os.cpu_count()} cores")
    forward_and_backward(cycles)
    steps(cycles)
    cold()


if __name__ == "__main__":
    main()
