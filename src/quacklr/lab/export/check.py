"""Whether what was written is the run: transformers reads it, and its logits and ids are compared with ours.

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
"""How many tokens are compared, at most: a part of the context that a large model reads in a minute on a CPU."""
ROUNDINGS = 10
"""How many times what rounding does to our own logits theirs may differ. Where they are the same, it is about once."""
TEXT = "Two  spaces,\ttabs\n\nand lines; it's 3.14 \u00fc\u00df\u0101 \u65e5\u672c \U0001f986 <s></s> <|endoftext|>\n"


@dataclass(frozen=True)
class Agreement:
    """How far their logits are from ours at most, and how large ours are."""

    name: str
    difference: float
    largest: float


def agreement(run: Trained, folder: Path) -> Agreement:
    """Compare; RuntimeError, for it would be a bug, if they are not the same. It leaves the run's weights nudged."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in (TEXT, f" {TEXT}"):
        ids, ours = tokenizer(text)["input_ids"], run.tokenizer.encode(text)
        if ids != ours:
            raise RuntimeError(f"transformers reads {text!r} as {ids}, and the run as {ours}")
    twin = AutoModelForCausalLM.from_pretrained(folder)
    shape, generator = run.config.shape, torch.Generator().manual_seed(0)
    size = (SEQUENCES, min(POSITIONS, shape.context))
    tokens_BT = torch.randint(run.model.embedding.num_embeddings, size, generator=generator)
    with torch.inference_mode():
        logits_BTV, theirs_BTV = run.model(tokens_BT), twin(tokens_BT, use_cache=False).logits
        if not logits_BTV.isfinite().all():
            raise UserError("the model's logits are no numbers, so there is nothing to export: its run has diverged")
        nudge(run.model, generator)
        rounding = largest(run.model(tokens_BT) - logits_BTV)
    found = Agreement(type(twin).__name__, largest(theirs_BTV - logits_BTV), largest(logits_BTV))
    if not found.difference <= ROUNDINGS * rounding:
        raise RuntimeError(f"{found.name} differs by {found.difference:.1e}, and rounding makes {rounding:.1e} of that")
    return found


def nudge(model: Decoder, generator: torch.Generator) -> None:
    """Move every weight by about half of its last bit, which says what rounding does to this very model.

    No fixed tolerance would: where attention logits are large, the last bits of weights move its logits a thousandth.
    """
    for weight in model.parameters():
        weight.mul_(torch.randn(weight.shape, generator=generator).mul_(2**-24).add_(1))


def largest(x_BTV: Tensor) -> float:
    """Its largest absolute value."""
    return float(x_BTV.abs().max())
