"""Small runs to export, of every kind that has a twin, and the comparison with what transformers makes of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from lab_runs import small
from quacklr.lab.config import Config
from quacklr.lab.methods import Method
from quacklr.lab.model import MHA, MLA, Shape
from quacklr.lab.optim import MuonRecipe
from quacklr.lab.train.trained import open_run

ROUND = MHA(heads=2, kv_heads=2, head_dim=8)
GROUPED = MHA(heads=4, kv_heads=2, head_dim=6)
PLAIN = MLA(heads=2, nope_dim=8, rope_dim=6, v_head_dim=4, d_cq=12, d_ckv=10)
LATENT = replace(PLAIN, latent_norm=True)
ODD = Shape(d_model=16, layers=2, d_ff=24, context=32, rope_theta=50.0, norm_eps=1e-2, init_std=0.2)
NEAR = replace(ODD, norm_eps=1e-6, vocab=259)


def config_of(corpus: Path, shape: Shape, attention: MHA | MLA, method: Method, **training: Any) -> Config:
    made = small(corpus, method, attention, **({"steps": 12, "batch_tokens": 256} | training))
    return replace(made, shape=shape, optimizer=MuonRecipe(lr=0.05, rest_lr=0.03))


def assert_same_logits(folder: Path, path: Path, step: int | None = None) -> Any:
    ours, twin = open_run(path, step).model, AutoModelForCausalLM.from_pretrained(folder)
    vocab, context = ours.embedding.num_embeddings, ours.shape.context
    tokens = torch.randint(0, vocab, (3, context), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        logits, expected = ours(tokens), twin(tokens).logits
    assert expected.abs().max() > 2
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=2e-5)
    return twin
