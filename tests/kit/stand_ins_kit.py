"""The parts of a stand-in: a small model around a published attention module, and its true paths, written by hand.

A truth is plain data, independent of quacklr. It has, for each head, the rows of the parameters that make its query
and its key, and which of these are multiplied with each other:

    Truth({"q": Rows("wq.weight", at(8, 0, 8, 16, 24)), "k": Rows("wk.weight", at(8, 0, 0, 8, 8))}, [("q", "k")])

is an attention of four heads of size 8, where the first two heads read rows 0 to 7 of wk, the other two rows 8 to 15.

A weight is on a path if the logit grows with its scale, so a weight that a norm follows is on none. The gain of a norm
is not counted as a weight. A learned number that is added to a logit (a position's bias, a sink) is on no path.

Shapes: B batch, T tokens, D width, H heads, K head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Sample = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
Part = tuple[str, int | tuple[int, ...], tuple[int, ...]]  # a parameter, the dim its rows lie along, the rows
M = TypeVar("M", bound=nn.Module)
WIDTH, VOCAB = 32, 61
HF = "model.layers.{}.self_attn"  # where transformers has its attentions


@dataclass(frozen=True)
class Rows:
    """For each head, the rows it reads of a parameter.

    Rows lie along `dim`, or along several dims flattened into one. `param` is named from the attention module, or, if
    it begins with a slash, from the model. A bias is at the end of a path and has the same rows, along its dim 0.
    """

    param: str
    of_head: Sequence[Sequence[int]]
    dim: int | tuple[int, ...] = 0
    bias: str | None = None

    def parts(self, module: str, head: int) -> list[Part]:
        rows = tuple(self.of_head[head])
        named = [(self.param, self.dim), *([(self.bias, 0)] if self.bias else [])]
        return [(name[1:] if name[0] == "/" else f"{module}.{name}", dim, rows) for name, dim in named]


@dataclass(frozen=True)
class Truth:
    """One attention: its weights by role, and the paths, each a chain of roles from the query's input to the key's."""

    roles: dict[str, Rows]
    paths: Sequence[Sequence[str]]

    def chains(self, module: str) -> list[set[frozenset[Part]]]:
        """For each head, its paths; a path is the set of parameter rows that are multiplied, with their biases."""
        (heads,) = {len(rows.of_head) for rows in self.roles.values()}
        return [
            {frozenset(p for role in path for p in self.roles[role].parts(module, head)) for path in self.paths}
            for head in range(heads)
        ]


@dataclass(frozen=True)
class Case:
    """A model, a sample to call it with, the truth of each attention, and why other attentions are on no path.

    The reasons are "norm" (the logit does not depend on the scale of the weights), "no softmax" and "no weights".
    """

    name: str
    make: Callable[[], nn.Module]
    truth: dict[str, Truth]
    left_alone: dict[str, str] = field(default_factory=dict)
    sample: Callable[[], Sample] = lambda: torch.randint(VOCAB, (2, 5))

    def build(self) -> tuple[nn.Module, Sample]:
        """The model and the sample, always with the same random numbers."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return self.make(), self.sample()

    def chains(self) -> dict[str, list[set[frozenset[Part]]]]:
        """For each attention and each head, the set of its paths."""
        return {module: truth.chains(module) for module, truth in self.truth.items()}


def call(model: nn.Module, sample: Sample) -> object:
    """The model on its sample."""
    if isinstance(sample, dict):
        return model(**sample)
    return model(*sample) if isinstance(sample, tuple) else model(sample)


def at(size: int, *starts: int) -> list[range]:
    """For each head, the `size` rows that begin at its start."""
    return [range(start, start + size) for start in starts]


def qk(q: Rows, k: Rows) -> Truth:
    """q[h] . k[h]"""
    return Truth({"q": q, "k": k}, [("q", "k")])


def latent(**roles: Rows) -> Truth:
    """dq uq[h] . uk[h] dkv + dq qr[h] . kr, without the roles that are not given."""
    paths = [("dq", "uq", "uk", "dkv"), ("dq", "qr", "kr")]
    return Truth(roles, [[role for role in path if role in roles] for path in paths])


def layers(place: str, *truths: Truth) -> dict[str, Truth]:
    """The truth of the first layer's attention, of the second's, ...; `place` has {} for the layer's number."""
    return {place.format(layer): truth for layer, truth in enumerate(truths)}


def called(name: str, package: str = "") -> Callable[[type[M]], type[M]]:
    """Give a class and its forward the name and package of the original: tables apply to classes of some packages."""

    def rename(kind: type[M]) -> type[M]:
        kind.__name__ = kind.__qualname__ = name
        kind.__module__ = package or kind.__module__
        inherited: Any = kind.forward
        forward: Any = FunctionType(inherited.__code__, inherited.__globals__, "forward", closure=inherited.__closure__)
        forward.__defaults__, forward.__module__ = inherited.__defaults__, kind.__module__
        kind.forward = forward
        return kind

    return rename


class Block(nn.Module):
    """Pre-norm, with the attention under a name of its own; its mlp is as tall as a fused qkv."""

    def __init__(self, name: str, attention: nn.Module, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.name = name
        self.norm_1, self.norm_2 = norm(WIDTH), norm(WIDTH)
        self.add_module(name, attention)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH))

    def forward(self, x: Tensor, **extra: object) -> Tensor:
        y = self.get_submodule(self.name)(self.norm_1(x), **extra)
        x = x + (y[0] if isinstance(y, tuple) else y)
        return x + self.mlp(self.norm_2(x))


class Model(nn.Module):
    """A language model of these attentions, at a place such as `transformer.h.{}.attn`.

    `arrange` permutes the embeddings (B, T, D) into the order that the attentions take. `extra` makes keyword arguments
    for them in each forward pass.
    """

    def __init__(
        self,
        place: str,
        *attentions: nn.Module,
        norm: Callable[[int], nn.Module] = nn.RMSNorm,
        embed: nn.Module | None = None,
        arrange: Callable[[Tensor], Tensor] = lambda x_BTD: x_BTD,
        extra: Callable[[], dict[str, object]] = dict,
    ) -> None:
        super().__init__()
        self.embed = embed or nn.Embedding(VOCAB, WIDTH)
        self.stack, name = place.split(".{}.")
        owner: nn.Module = self
        *outer, last = self.stack.split(".")
        for part in outer:
            owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.add_module(last, nn.ModuleList(Block(name, attention, norm) for attention in attentions))
        self.norm, self.output = norm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.arrange, self.extra = arrange, extra

    def forward(self, tokens: Tensor) -> Tensor:
        x, extra = self.arrange(self.embed(tokens)), self.extra()
        for block in self.get_submodule(self.stack).children():
            x = block(x, **extra)
        return self.output(self.norm(x))


class Plain(nn.Module):
    """Attention as in transformers, for subclasses to modify: separate q, k, v, heads in two groups."""

    def __init__(
        self, heads: int = 4, groups: int = 2, head_dim: int = 8, q_bias: bool = False, k_bias: bool = False
    ) -> None:
        super().__init__()
        self.head_dim, self.num_key_value_groups, self.scaling = head_dim, heads // groups, head_dim**-0.5
        self.q_proj: nn.Module = nn.Linear(WIDTH, heads * head_dim, bias=q_bias)
        self.k_proj: nn.Module = nn.Linear(WIDTH, groups * head_dim, bias=k_bias)
        self.v_proj: nn.Module = linear(groups * head_dim)
        self.o_proj = linear(WIDTH, heads * head_dim)

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (t.repeat_interleave(self.num_key_value_groups, dim=1) for t in (key, value))
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scaling)

    def forward(self, hidden_states: Tensor) -> Tensor:
        query, key, value = (self.split(proj(hidden_states)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(self.attend(query, key, value).transpose(1, 2).flatten(2))


@called("LlamaAttention", "transformers.models.llama")
class Known(Plain):
    """As if it were a class of transformers, which a table has."""


PLAIN = qk(Rows("q_proj.weight", at(8, 0, 8, 16, 24)), Rows("k_proj.weight", at(8, 0, 0, 8, 8)))


def one_row(x_BTD: Tensor) -> Tensor:
    """All documents one after another: (B * T, D)."""
    return x_BTD.flatten(0, 1)


def sequence_first(x_BTD: Tensor) -> Tensor:
    """(T, B, D)"""
    return x_BTD.transpose(0, 1)


def angles(tokens: int, size: int) -> Tensor:
    """(T, size / 2)"""
    return torch.outer(torch.arange(tokens).float(), 100.0 ** -torch.linspace(0, 1, size // 2))


def rope(x_BTHK: Tensor) -> Tensor:
    """Rotary embedding of the two halves of a head."""
    turn = angles(x_BTHK.shape[1], x_BTHK.shape[3])[:, None]
    one, two = x_BTHK.chunk(2, dim=-1)
    return torch.cat([one * turn.cos() - two * turn.sin(), one * turn.sin() + two * turn.cos()], dim=-1)


def rope_sequence_first(x_TBHK: Tensor) -> Tensor:
    """The same, of (T, B, H, K)."""
    return rope(x_TBHK.transpose(0, 1)).transpose(0, 1)


def complex_rope(x_BTHK: Tensor) -> Tensor:
    """Rotary embedding of neighbours in a head, by complex numbers."""
    turn = angles(x_BTHK.shape[1], x_BTHK.shape[3])[:, None]
    x = torch.view_as_complex(x_BTHK.float().reshape(*x_BTHK.shape[:-1], -1, 2))
    return torch.view_as_real(x * torch.polar(torch.ones_like(turn), turn)).flatten(3).type_as(x_BTHK)


def causal(scores: Tensor) -> Tensor:
    """-inf above the diagonal of the last two dims."""
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(future, float("-inf"))


def rms(x: Tensor) -> Tensor:
    """A norm without parameters."""
    return F.rms_norm(x, (x.shape[-1],))


def linear(rows: int, columns: int = WIDTH) -> nn.Linear:
    """Without bias."""
    return nn.Linear(columns, rows, bias=False)
