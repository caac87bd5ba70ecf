"""The paper's language model: a Qwen3 decoder (RMS norms, SwiGLU, rotary positions, tied embeddings, no biases).

Shapes: B batch, T position, C width, F feed-forward, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from quacklr import LogitPath, Weight
from quacklr.lab.errors import UserError
from quacklr.lab.model.attention import Attention
from quacklr.lab.model.cache import Cache
from quacklr.lab.model.mha import MultiHead
from quacklr.lab.model.mla import Latent
from quacklr.lab.model.norm import RMSNorm
from quacklr.lab.model.rope import Rotary
from quacklr.lab.model.sigma import checkpoint_contexts
from quacklr.lab.model.spec import MHA, MLA, Shape


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate x) * up x)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.d_model, shape.d_ff, bias=False)
        self.up = nn.Linear(shape.d_model, shape.d_ff, bias=False)
        self.down = nn.Linear(shape.d_ff, shape.d_model, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Transform each position independently."""
        return self.down(F.silu(self.gate(x_BTC)) * self.up(x_BTC))

    def product_paths(self, name: str) -> list[LogitPath]:
        """down . up and down . gate, with weights named `<name>.<role>`: for rates by the same rule as a logit's."""
        block_of_feature = torch.zeros(self.up.out_features, dtype=torch.long, device="cpu")
        down = Weight(f"{name}.down", self.down.weight, block_of_feature, dim=1)
        others = [Weight(f"{name}.{role}", getattr(self, role).weight, block_of_feature) for role in ("up", "gate")]
        return [LogitPath((down, other), heads=1) for other in others]


class Block(nn.Module):
    """Pre-norm block: attention and feed-forward, each with an RMS norm before it and a residual connection."""

    def __init__(self, shape: Shape, spec: MHA | MLA) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.d_model, shape.norm_eps)
        self.attention: Attention = MultiHead(shape, spec) if isinstance(spec, MHA) else Latent(shape, spec)
        self.feed_forward_norm = RMSNorm(shape.d_model, shape.norm_eps)
        self.feed_forward = FeedForward(shape)

    def forward(self, x_BTC: Tensor, rotary: Rotary, cache: Cache | None = None) -> Tensor:
        """(B, T, C): the residual stream after this block."""
        x_BTC = x_BTC + self.attention(self.attention_norm(x_BTC), rotary, cache)
        return x_BTC + self.feed_forward(self.feed_forward_norm(x_BTC))


class Decoder(nn.Module):
    """The language model: logits of the next tokens, or the mean loss if targets are given."""

    def __init__(self, shape: Shape, spec: MHA | MLA) -> None:
        super().__init__()
        if shape.vocab is None:
            raise UserError("--vocab is needed to build a model without a corpus")
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab, shape.d_model)
        self.rotary = Rotary(spec.head_dim if isinstance(spec, MHA) else spec.rope_dim, shape.context, shape.rope_theta)
        self.blocks = nn.ModuleList([Block(shape, spec) for _ in range(shape.layers)])
        self.norm = RMSNorm(shape.d_model, shape.norm_eps)
        self.recompute = False  # activation checkpointing: the backward pass recomputes the inside of each block

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """(B, T, V) logits, or the mean cross-entropy in float32."""
        logits_BTV = F.linear(self._hidden_states(tokens_BT), self.embedding.weight)
        if targets_BT is None:
            return logits_BTV
        return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())

    def caches(self, batch: int = 1, positions: int | None = None) -> list[Cache]:
        """An empty cache for each block, for at most that many positions (default: the context)."""
        options = {"device": self.embedding.weight.device, "dtype": self.embedding.weight.dtype}
        positions = self.shape.context if positions is None else positions
        layouts = [attention.cache_layout() for attention in self.attentions().values()]
        return [Cache(layout, batch, positions, **options) for layout in layouts]

    def decode_step(self, tokens_BT: Tensor, caches: Sequence[Cache]) -> Tensor:
        """(B, V) logits of the next token, after tokens that follow those in the caches. Appends to the caches."""
        return F.linear(self._hidden_states(tokens_BT, caches)[:, -1], self.embedding.weight)

    def _hidden_states(self, tokens_BT: Tensor, caches: Sequence[Cache] = ()) -> Tensor:
        """(B, T, C): the residual stream after the last block and norm."""
        end = tokens_BT.shape[1] + (caches[0].length if caches else 0)
        if end > self.shape.context:
            raise UserError(f"a sequence of {end} tokens, but the model's context is {self.shape.context}")
        x_BTC = self.embedding(tokens_BT)
        cache_of_block: Sequence[Cache | None] = caches or [None] * len(self.blocks)
        for block, cache in zip(self.blocks, cache_of_block, strict=True):
            if self.recompute and torch.is_grad_enabled() and cache is None:
                x_BTC = checkpoint(block, x_BTC, self.rotary, use_reentrant=False, context_fn=checkpoint_contexts)
            else:
                x_BTC = block(x_BTC, self.rotary, cache)
        return self.norm(x_BTC)

    def attentions(self) -> dict[str, Attention]:
        """The attention of every block, by its module's name."""
        return {name: module for name, module in self.named_modules() if isinstance(module, Attention)}

    def initialise(self, seed: int) -> None:
        """Draw matrices from N(0, init_std) and set gains to 1. Same on every device: it draws on the CPU."""
        generator = torch.Generator().manual_seed(seed)
        for param in self.parameters():
            with torch.no_grad():
                if param.ndim > 1:
                    param.copy_(torch.empty(param.shape).normal_(0, self.shape.init_std, generator=generator))
                else:
                    param.fill_(1.0)


def build_empty(shape: Shape, spec: MHA | MLA, device: Any = "cpu") -> Decoder:
    """A model with uninitialised weights, allocated directly on the device."""
    size = "of these sizes"
    try:
        with torch.device("meta"):
            model = Decoder(shape, spec)
        size = f"of {sum(param.numel() for param in model.parameters()):,} parameters"
        model.to_empty(device=device)
        model.rotary.reset()
    except RuntimeError as error:
        raise UserError(
            f"a model {size} with a context of {shape.context:,} does not fit into the memory of {device}"
        ) from error
    return model


def build(shape: Shape, spec: MHA | MLA, seed: int, device: Any = "cpu") -> Decoder:
    """A model with its initial weights."""
    model = build_empty(shape, spec, device)
    model.initialise(seed)
    return model
