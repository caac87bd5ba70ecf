"""Check an export: transformers loads it, and its logits and token ids are compared with ours.

Shapes: B batch, T position, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quacklr.lab.errors import UserError
from quacklr.lab.model import Decoder
from quacklr.lab.train.trained import Trained

SEQUENCES, POSITIONS = 2, 512
"""Most sequences and positions to compare: a large model takes about a minute for them on a CPU."""
TOLERANCE = 10
"""Largest difference, in units of the effect of rounding on our own logits. Equal models differ by about 1."""
TEXT = "Two  spaces,\ttabs\n\nand lines; it's 3.14 \u00fc\u00df\u0101 \u65e5\u672c \U0001f986 <s></s> <|endoftext|>\n"


@dataclass(frozen=True)
class Agreement:
    """The largest difference between transformers' logits and ours, and our largest logit."""

    name: str
    difference: float
    largest: float


def agreement(run: Trained, folder: Path) -> Agreement:
    """Compare logits and token ids; RuntimeError if they differ: that is a bug. Perturbs the run's weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in (TEXT, f" {TEXT}"):
        ids, ours = tokenizer(text)["input_ids"], run.tokenizer.encode(text)
        if ids != ours:
            raise RuntimeError(f"transformers reads {text!r} as {ids}, and the run as {ours}")
    model = AutoModelForCausalLM.from_pretrained(folder)
    shape, generator = run.config.shape, torch.Generator().manual_seed(0)
    size = (SEQUENCES, min(POSITIONS, shape.context))
    tokens_BT = torch.randint(run.model.embedding.num_embeddings, size, generator=generator)
    with torch.inference_mode():
        logits_BTV, theirs_BTV = run.model(tokens_BT), model(tokens_BT, use_cache=False).logits
        if not logits_BTV.isfinite().all():
            raise UserError("the model's logits are NaN or inf, so there is nothing to export: its run has diverged")
        perturb(run.model, generator)
        rounding = max_abs(run.model(tokens_BT) - logits_BTV)
    found = Agreement(type(model).__name__, max_abs(theirs_BTV - logits_BTV), max_abs(logits_BTV))
    if not found.difference <= TOLERANCE * rounding:
        raise RuntimeError(f"{found.name} differs by {found.difference:.1e}, but rounding changes only {rounding:.1e}")
    return found


def perturb(model: Decoder, generator: torch.Generator) -> None:
    """Change every weight by about half of its last bit, to measure the effect of rounding on this model.

    A fixed tolerance is not enough: with large attention logits, the last bits change the output by a thousandth.
    """
    for weight in model.parameters():
        weight.mul_(torch.randn(weight.shape, generator=generator).mul_(2**-24).add_(1))


def max_abs(x_BTV: Tensor) -> float:
    """The largest absolute value."""
    return float(x_BTV.abs().max())
