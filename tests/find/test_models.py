"""Attention of models of transformers and torch: rules, measurements and perturbations of the weights agree.

A part of `benchmarks/catalogue.py`, which does the same for all types; and the page that it writes holds together.
"""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from perturbation import judged, rated
from quacklr.core.path import LogitPath
from quacklr.find.discover import found_by_table
from quacklr.quack import QuacK
from tiny_models import CAUSAL, OTHERS, TORCH, VARIANTS, build, sections

ROOT = Path(__file__).parents[2]
catalogue: Any = SimpleNamespace(**runpy.run_path(str(ROOT / "benchmarks/catalogue.py")))
PAGE = catalogue.read_page(catalogue.PAGE.read_text())

SOME = {
    CAUSAL: [
        *("llama", "qwen2", "gemma2", "gpt_oss"),  # separate; with biases; capped; with sinks
        *("gpt2", "falcon", "phi3", "dbrx", "gpt_neox", "bloom", "codegen"),  # fused
        *("deepseek_v3", "deepseek_v32", "axk2", "kimi_linear"),  # MLA
        *("qwen3", "olmo2", "llama4_text", "qwen3_next", "deepseek_v4", "gemma3n_text"),  # QK norm
        *("zamba2", "jamba", "blt", "mamba"),  # shared weights; hybrids; frozen in part; no attention
        *("jetmoe", "reformer", "xlnet"),  # have to be measured
    ],
    OTHERS: ["albert", "deberta", "funnel", "squeezebert", "t5", "wavlm", "whisper", "swinv2", "vit"],
    VARIANTS: ["deepseek_v3 (q_lora_rank=None)", "falcon (multi_query=False)", "stablelm (qk_layernorm=True)"],
    TORCH: ["nn.MultiheadAttention (kdim, vdim)", "nn.MultiheadAttention (add_bias_kv)", "nn.TransformerEncoder"],
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # DeBERTa's
@pytest.mark.parametrize(
    ("section", "name"), [pytest.param(section, name, id=name) for section, names in SOME.items() for name in names]
)
def test_the_rates_of_a_model_are_those_that_its_logits_imply(section: str, name: str) -> None:
    row = catalogue.examined(name, section)
    assert catalogue.WRONG not in row.judged
    assert row in PAGE[section], "make the page again: make models"


def without_torch(page: str) -> str:
    """The page without the version of torch that it was made with: `make oldest` runs this file with another."""
    return re.sub(r"\btorch \d\S*", "torch", page)


def test_the_page_has_every_model_and_its_counts_are_those_of_its_lines() -> None:
    assert {section: [row.type for row in rows] for section, rows in PAGE.items()} == sections()
    assert without_torch(catalogue.PAGE.read_text()) == without_torch(catalogue.page(PAGE))
    assert catalogue.below_the_goal(PAGE) == []


def shifted(path: LogitPath) -> LogitPath:
    """The key's rows begin a row later."""
    key = replace(path.weights[-1], block_of_row=path.weights[-1].block_of_row.roll(1))
    return replace(path, weights=(*path.weights[:-1], key))


def crossed(path: LogitPath) -> LogitPath:
    """Heads read one another's keys."""
    return replace(path, block_of_head=[*path.reads[:-1], path.reads[-1].flip(0)])


def without_the_key(path: LogitPath) -> LogitPath:
    return LogitPath(path.weights[:-1], path.heads)


WRONG: list[tuple[str, str, Callable[[Sequence[LogitPath]], list[LogitPath]]]] = [
    ("rows shifted by one", "gpt2", lambda paths: [shifted(path) for path in paths]),
    ("heads crossed", "llama", lambda paths: [*map(crossed, paths[:1]), *paths[1:]]),
    ("a path without its key", "deepseek_v3", lambda paths: [*map(without_the_key, paths[:1]), *paths[1:]]),
    ("a path missing", "deepseek_v3", lambda paths: list(paths[1:])),
    ("called normed", "llama", lambda _: []),
]


@pytest.mark.parametrize(("name", "change"), [pytest.param(name, change, id=way) for way, name, change in WRONG])
def test_the_judge_sees_what_is_wrong(name: str, change: Callable[[Sequence[LogitPath]], list[LogitPath]]) -> None:
    model, sample = build(name)
    claims = {module: change(finding.paths) for module, finding in found_by_table(model).items()}
    assert judged(model, sample, claims).problems


def test_the_judge_sees_an_attention_that_nothing_is_said_of() -> None:
    model, sample = build("llama")
    first, *_ = found_by_table(model).items()
    assert judged(model, sample, {first[0]: first[1].paths}).problems


def test_the_judge_sees_a_wrong_rate() -> None:
    """Without the bias of its weights, all rates of a model are wrong."""
    model, sample = build("qwen2")
    found = {name: finding.paths for name, finding in found_by_table(model).items()}
    verdict = judged(model, sample, found)
    bare = [
        replace(path, weights=tuple(replace(w, bias=None, name=f"{name}.{w.name}") for w in path.weights))
        for name, paths in found.items()
        for path in paths
    ]
    with QuacK(bare, torch.optim.SGD(model.parameters(), lr=1.0), tau=1.0) as quack:
        assert rated(model, quack, verdict)[1]


def test_what_a_projection_reads_beside_its_latent_is_a_path_of_its_own() -> None:
    """AXK2's queries read their latent with its norm and without, so a small latent does not raise their rates."""
    model, _ = build("axk2")
    quack = QuacK(model, torch.optim.SGD(model.parameters(), lr=1.0), tau=1.0)
    name = "model.layers.0.self_attn"
    with torch.no_grad():
        model.get_parameter(f"{name}.q_a_proj.weight").mul_(1e-3)
    rates = quack.rates()
    assert rates[f"{name}.uq"].max() <= 1
    assert rates[f"{name}.dq"].tolist() == pytest.approx([1])
