"""What a model is: its sizes, and one of two kinds of attention. Plain data, and the options of the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from quacklr.lab.errors import UserError, validate_at_most, validate_positive


@dataclass(frozen=True)
class Shape:
    """The decoder around the attention."""

    d_model: int = 128
    """Width of the residual stream."""
    layers: int = 4
    """Number of blocks."""
    d_ff: int = 512
    """Width of the feed-forward layer."""
    context: int = 128
    """Tokens of a sequence."""
    vocab: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Rows of the embedding; as many as the corpus's tokenizer has, unless given."""
    rope_theta: float = 1e6
    """Longest wavelength of the rotary positions, over 2 pi."""
    norm_eps: float = 1e-6
    """Added to the mean square in every norm."""
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
            raise UserError(f"--head-dim {self.head_dim} is odd, but rotary positions turn pairs")

    @property
    def attended(self) -> int:
        """Numbers of a query and of a value, over all heads: what one position costs to attend to."""
        return self.heads * 2 * self.head_dim


@dataclass(frozen=True)
class MLA:
    """Multi-head latent attention: queries, and keys with values, go through small latents; positions around them."""

    heads: int = 4
    """Heads."""
    nope_dim: int = 32
    """Size of a head's part without positions, made from the latents."""
    rope_dim: int = 32
    """Size of a head's part with rotary positions; its key is shared by all heads."""
    v_head_dim: int = 32
    """Size of a head's value."""
    d_cq: int = 64
    """Size of the queries' latent."""
    d_ckv: int = 32
    """Size of the latent of keys and values, which a decoder caches."""
    latent_norm: bool = False
    """RMS norm on both latents, as DeepSeek has; the paper has none."""

    def __post_init__(self) -> None:
        validate_positive(**{name: value for name, value in vars(self).items() if name != "latent_norm"})
        if self.rope_dim % 2:
            raise UserError(f"--rope-dim {self.rope_dim} is odd, but rotary positions turn pairs")

    @property
    def attended(self) -> int:
        """Numbers of a query and of a value, over all heads: what one position costs to attend to."""
        return self.heads * (self.nope_dim + self.rope_dim + self.v_head_dim)
