"""The sizes of a model and of its attention, MHA or MLA: plain data, which is also the command line's options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from quacklr.lab.errors import UserError, validate_at_most, validate_positive


@dataclass(frozen=True)
class Shape:
    """Sizes of the decoder, apart from its attention."""

    d_model: int = 128
    """Width of the residual stream."""
    layers: int = 4
    """Number of blocks."""
    d_ff: int = 512
    """Width of the feed-forward layer."""
    context: int = 128
    """Tokens in a sequence."""
    vocab: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Rows of the embedding; the size of the corpus's tokenizer unless given."""
    rope_theta: float = 1e6
    """Base of the rotary frequencies."""
    norm_eps: float = 1e-6
    """Epsilon of every RMS norm."""
    init_std: float = 0.02
    """Standard deviation of the initial weights."""

    def __post_init__(self) -> None:
        validate_positive(**{name: value for name, value in vars(self).items() if value is not None})
        validate_at_most(10_000, layers=self.layers)


@dataclass(frozen=True)
class MHA:
    """Multi-head attention; grouped- or multi-query when there are fewer key heads than heads."""

    heads: int = 4
    """Query heads."""
    kv_heads: int = 4
    """Key and value heads; must divide the query heads."""
    head_dim: int = 32
    """Size of a head."""

    def __post_init__(self) -> None:
        validate_positive(**vars(self))
        if self.heads % self.kv_heads:
            raise UserError(f"--kv-heads {self.kv_heads} does not divide --heads {self.heads}")
        if self.head_dim % 2:
            raise UserError(f"--head-dim {self.head_dim} is odd, but rotary embeddings rotate pairs of elements")

    @property
    def attended(self) -> int:
        """Elements of a query and a value, over all heads; the cost of attention is proportional to it."""
        return self.heads * 2 * self.head_dim


@dataclass(frozen=True)
class MLA:
    """Multi-head latent attention: queries come from one latent, keys and values from another."""

    heads: int = 4
    """Heads."""
    nope_dim: int = 32
    """Size of a head's part without rotary positions, which is computed from the latents."""
    rope_dim: int = 32
    """Size of a head's part with rotary positions; all heads share its key."""
    v_head_dim: int = 32
    """Size of a head's value."""
    d_cq: int = 64
    """Size of the queries' latent."""
    d_ckv: int = 32
    """Size of the latent of keys and values, which is cached in decoding."""
    latent_norm: bool = False
    """RMS norm on both latents, as in DeepSeek; the paper has none."""

    def __post_init__(self) -> None:
        validate_positive(**{name: value for name, value in vars(self).items() if name != "latent_norm"})
        if self.rope_dim % 2:
            raise UserError(f"--rope-dim {self.rope_dim} is odd, but rotary embeddings rotate pairs of elements")

    @property
    def attended(self) -> int:
        """Elements of a query and a value, over all heads; the cost of attention is proportional to it."""
        return self.heads * (self.nope_dim + self.rope_dim + self.v_head_dim)
