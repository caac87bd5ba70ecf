"""The next token, from the logits; and the one after that, from the caches.

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
    """How the next token is chosen from what the model thinks likely."""

    temperature: float = 1.0
    """Logits are divided by it: below 1 likely tokens become likelier; 0 always takes the likeliest."""
    top_p: float = 1.0
    """Choose among the likeliest tokens that have this much of the probability together; 1 for all."""
    seed: int = 0
    """The same seed gives the same text."""

    def __post_init__(self) -> None:
        validate_non_negative(temperature=self.temperature)
        validate(lambda share: 0 < share <= 1, "above 0 and at most 1", {"top_p": self.top_p})
        validate(lambda seed: 0 <= seed < 2**63, "from 0 to 2^63 - 1", {"seed": self.seed})

    def sampler(self) -> Callable[[Tensor], int]:
        """A function that chooses a token from (V,) logits, and another one the next time. Drawn on the CPU."""
        generator = torch.Generator().manual_seed(self.seed)

        def choose(logits_V: Tensor) -> int:
            if not logits_V.isfinite().all():
                raise UserError("the model's logits are no numbers, so there is no next token: its run has diverged")
            if self.temperature == 0:
                return int(logits_V.argmax())
            probability_V = self.probabilities(logits_V.cpu())
            return int(torch.multinomial(probability_V, 1, generator=generator))

        return choose

    def probabilities(self, logits_V: Tensor) -> Tensor:
        """(V,) float64: softmax at the temperature, and of that the smallest nucleus with a share of `top_p`."""
        shifted_V = logits_V.double() - logits_V.max()  # so that no temperature is too small to divide by
        probability_V, order_V = (shifted_V / self.temperature).softmax(dim=0).sort(descending=True, stable=True)
        before_V = probability_V.cumsum(dim=0) - probability_V
        nucleus_V = probability_V.where(before_V < self.top_p, 0)
        return torch.zeros_like(nucleus_V).scatter(0, order_V, nucleus_V / nucleus_V.sum())


@torch.inference_mode()
def continued(model: Decoder, prompt: Sequence[int], most: int, choose: Callable[[Tensor], int]) -> Iterator[int]:
    """That many tokens after a prompt. The prompt is read at once, then each token by itself."""
    if (end := len(prompt) + most) > model.shape.context:
        raise UserError(f"a sequence of {end} tokens, but the model's context is {model.shape.context}")
    caches = model.caches(positions=len(prompt) + most)
    device = model.embedding.weight.device
    tokens = list(prompt)
    for _ in range(most):
        tokens = [choose(model.decode_step(torch.tensor([tokens], device=device), caches)[0])]
        yield tokens[0]


def written(run: Trained, prompt: Sequence[int], most: int, choice: SamplingParams) -> Iterator[int]:
    """What a run goes on with: at most that many tokens, only such as its tokenizer has, and none after the end."""
    choose, vocab = choice.sampler(), run.tokenizer.vocab  # the model may have more
    for token in continued(run.model, prompt, most, lambda logits_V: choose(logits_V[:vocab])):
        if token == run.tokenizer.end:
            return
        yield token
