"""Sampling from a model token by token, with caches.

Shapes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quacklr.lab.errors import UserError, validate, validate_non_negative
from quacklr.lab.model import Decoder
from quacklr.lab.train.trained import Trained


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is sampled from the logits."""

    temperature: float = 1.0
    """Logits are divided by it: values below 1 favour likely tokens; 0 always takes the likeliest."""
    top_p: float = 1.0
    """Sample among the likeliest tokens whose probabilities add up to this; 1 for all."""
    seed: int = 0
    """Seed of the random numbers; the same seed gives the same text."""

    def __post_init__(self) -> None:
        validate_non_negative(temperature=self.temperature)
        validate(lambda share: 0 < share <= 1, "above 0 and at most 1", {"top_p": self.top_p})
        validate(lambda seed: 0 <= seed < 2**63, "from 0 to 2^63 - 1", {"seed": self.seed})

    def sampler(self) -> Callable[[Tensor], int]:
        """A function that samples a token from (V,) logits, with its own random generator on the CPU."""
        generator = torch.Generator().manual_seed(self.seed)

        def choose(logits_V: Tensor) -> int:
            if not logits_V.isfinite().all():
                raise UserError("the model's logits are NaN or inf, so there is no next token: its run has diverged")
            if self.temperature == 0:
                return int(logits_V.argmax())
            probability_V = self.probabilities(logits_V.cpu())
            return int(torch.multinomial(probability_V, 1, generator=generator))

        return choose

    def probabilities(self, logits_V: Tensor) -> Tensor:
        """(V,) float64: softmax at the temperature, restricted to the smallest nucleus with probability `top_p`."""
        shifted_V = logits_V.double() - logits_V.max()  # so that dividing by a small temperature cannot overflow
        probability_V, order_V = (shifted_V / self.temperature).softmax(dim=0).sort(descending=True, stable=True)
        before_V = probability_V.cumsum(dim=0) - probability_V
        nucleus_V = probability_V.where(before_V < self.top_p, 0)
        return torch.zeros_like(nucleus_V).scatter(0, order_V, nucleus_V / nucleus_V.sum())


@torch.inference_mode()
def sample_tokens(model: Decoder, prompt: Sequence[int], count: int, choose: Callable[[Tensor], int]) -> Iterator[int]:
    """Yield `count` tokens that follow a prompt. Runs one forward pass for the prompt, then one for each token."""
    if (end := len(prompt) + count) > model.shape.context:
        raise UserError(f"a sequence of {end} tokens, but the model's context is {model.shape.context}")
    caches = model.caches(positions=end)
    device = model.embedding.weight.device
    tokens = list(prompt)
    for _ in range(count):
        tokens = [choose(model.decode_step(torch.tensor([tokens], device=device), caches)[0])]
        yield tokens[0]


def continuation(run: Trained, prompt: Sequence[int], count: int, params: SamplingParams) -> Iterator[int]:
    """Yield at most `count` tokens of the run's vocabulary that follow a prompt, up to the end of the document."""
    choose, vocab = params.sampler(), run.tokenizer.vocab  # the embedding can have more rows
    for token in sample_tokens(run.model, prompt, count, lambda logits_V: choose(logits_V[:vocab])):
        if token == run.tokenizer.end:
            return
        yield token
