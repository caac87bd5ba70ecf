"""Complete configurations by name: one that shows the paper's effects on a laptop, and the paper's own.

docs/lab.md lists the settings that the paper does not state.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quacklr.lab.config import KINDS, Config, Machine, Training, Watch, kind_of
from quacklr.lab.methods import Default
from quacklr.lab.model import MHA, MLA, Shape
from quacklr.lab.optim import WSD, Constant, MuonRecipe

CPU = Config(
    shape=Shape(),
    attention=MHA(),
    method=Default(),
    optimizer=MuonRecipe(lr=0.1, rest_lr=3e-3),
    schedule=Constant(warmup=30),
    training=Training(),
    machine=Machine(),
    watch=Watch(),
)

PAPER = Config(
    shape=Shape(d_model=2048, layers=14, d_ff=8192, context=2048, vocab=49152),
    attention=MHA(heads=32, kv_heads=32, head_dim=64),
    method=Default(),
    optimizer=MuonRecipe(lr=3e-3),
    schedule=Constant(warmup=500),
    training=Training(corpus="data/cosmopedia-v2", steps=5000, batch_tokens=96 * 2048, micro_batch=8),
    machine=Machine(precision="bf16"),
    watch=Watch(eval_every=250, eval_sequences=96, probe_every=100, probe_sequences=2, checkpoint_every=500),
)

SMALL = replace(
    PAPER,
    shape=replace(PAPER.shape, d_model=576, d_ff=2304),
    attention=MHA(heads=9, kv_heads=9, head_dim=64),
    optimizer=MuonRecipe(lr=3e-2),
)

ATTENTIONS: dict[str, dict[str, MHA | MLA]] = {  # by preset: the values of --attention
    "cpu": {"mha": CPU.attention, "mla": MLA()},
    "100m": {"mha": SMALL.attention, "mla": MLA(9, 64, 64, 64, d_cq=144, d_ckv=72)},
    "paper-mha": {"mha": PAPER.attention, "mla": MLA(32, 64, 64, 64, d_cq=512, d_ckv=256)},
}
ATTENTIONS["paper-mla"] = ATTENTIONS["paper-mha"]

PRESETS: dict[str, Config] = {
    "cpu": CPU,
    "100m": SMALL,
    "paper-mha": PAPER,
    "paper-mla": replace(PAPER, attention=ATTENTIONS["paper-mla"]["mla"]),
}


def with_kinds(config: Config, attentions: dict[str, MHA | MLA], **kinds: str | None) -> Config:
    """Replace the attention, method, optimizer or schedule by another kind with its defaults; None keeps the part."""
    for field, kind in kinds.items():
        if kind is not None and kind != kind_of(field, getattr(config, field)):
            config = replace(config, **{field: _default(config, attentions, field, kind)})
    return config


def _default(config: Config, attentions: dict[str, MHA | MLA], field: str, kind: str) -> Any:
    if field == "attention":
        return attentions[kind]
    if field == "schedule":  # same warmup; a decay takes the last fifth of the steps
        decay = {"decay": config.training.steps // 5} if KINDS[field][kind] is WSD else {}
        return KINDS[field][kind](warmup=config.schedule.warmup, **decay)
    return KINDS[field][kind]()
