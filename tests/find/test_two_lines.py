"""QuacK in two lines on anybody's own attention: found on the first batch, compared row by row with the author's truth.

Each class is written as in a public tutorial or repository. Its truth is a table, written by hand: for each head, the
rows of the parameter that make its query, and those that make its key.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from einops import einsum, rearrange, repeat
from einops.layers.torch import Rearrange
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import reference
from quacklr import QuacK
from quacklr.find.finding import MEASURED, chains
from quacklr.util.modules import named_parameters

H, D, W = 4, 6, 24  # heads, head size, width
Rows = tuple[str, Sequence[Sequence[int]]]  # a parameter, and for each head the rows (or columns) that it reads


class Truth(NamedTuple):
    """The rows of each head's query and key; `dim` is the dimension of the rows."""

    q: Rows
    k: Rows
    dim: int = 0
    bias: bool = False


def heads(first: int = 0, of: Sequence[int] = range(H), size: int = D) -> list[range]:
    """Consecutive rows from `first` on: head h reads block of[h]."""
    return [range(first + block * size, first + block * size + size) for block in of]


def strided() -> list[range]:
    """Head h has every fourth row, from row h on."""
    return [range(h, W, H) for h in range(H)]


def per_head(part: int, parts: int = 3) -> list[range]:
    """Each head's query, key and value lie together."""
    return [range((h * parts + part) * D, (h * parts + part + 1) * D) for h in range(H)]


def linear(rows: int, columns: int = W, bias: bool = False) -> nn.Linear:
    return nn.Linear(columns, rows, bias=bias)


class NanoGPT(nn.Module):
    """nanoGPT: c_attn with a bias, split in three."""

    truth = Truth(("c_attn.weight", heads()), ("c_attn.weight", heads(W)), bias=True)

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj, self.n_head, self.n_embd = linear(3 * W, bias=True), linear(W), H, W

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class MinGPT(nn.Module):
    """minGPT: query, key, value, and a masked softmax by hand."""

    truth = Truth(("query.weight", heads()), ("key.weight", heads()), bias=True)

    def __init__(self) -> None:
        super().__init__()
        self.key, self.query, self.value = (linear(W, bias=True) for _ in range(3))
        self.proj, self.n_head = linear(W), H
        self.register_buffer("mask", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = (p(x).view(B, T, H, C // H).transpose(1, 2) for p in (self.query, self.key, self.value))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.get_buffer("mask")[:, :, :T, :T] == 0, float("-inf"))
        return self.proj((F.softmax(att, dim=-1) @ v).transpose(1, 2).contiguous().view(B, T, C))


class EinopsFunction(nn.Module):
    """lucidrains: to_qkv, chunk, rearrange, einsum, softmax by hand."""

    truth = Truth(("to_qkv.weight", heads()), ("to_qkv.weight", heads(W)))

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.scale = H, D**-0.5
        self.to_qkv, self.to_out, self.attend = linear(3 * W), nn.Sequential(linear(W)), nn.Softmax(dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (rearrange(t, "b n (h d) -> b h n d", h=self.heads) for t in self.to_qkv(x).chunk(3, dim=-1))
        dots = einsum(q, k, "b h i d, b h j d -> b h i j") * self.scale
        return self.to_out(rearrange(self.attend(dots) @ v, "b h n d -> b n (h d)"))


class EinopsHeadsLast(EinopsFunction):
    """Rows (d h): not consecutive."""

    truth = Truth(("to_qkv.weight", strided()), ("to_qkv.weight", [range(W + h, 2 * W, H) for h in range(H)]))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (rearrange(t, "b n (d h) -> b h n d", h=self.heads) for t in self.to_qkv(x).chunk(3, dim=-1))
        return self.to_out(rearrange(F.scaled_dot_product_attention(q, k, v), "b h n d -> b n (h d)"))


class EinopsOnePattern(EinopsFunction):
    """(h qkv d): each head's query, key and value together."""

    truth = Truth(("to_qkv.weight", per_head(0)), ("to_qkv.weight", per_head(1)))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = rearrange(self.to_qkv(x), "b n (h qkv d) -> qkv b h n d", qkv=3, h=self.heads)
        return self.to_out(rearrange(F.scaled_dot_product_attention(q, k, v), "b h n d -> b n (h d)"))


class EinopsLayer(nn.Module):
    """Rearrange as a layer, in a Sequential with the projection."""

    truth = Truth(("make_q.0.weight", strided()), ("make_k.0.weight", heads()))

    def __init__(self) -> None:
        super().__init__()
        self.make_q = nn.Sequential(linear(W), Rearrange("b n (d h) -> b h n d", h=H))
        self.make_k = nn.Sequential(linear(W), Rearrange("b n (h d) -> b h n d", h=H))
        self.make_v = nn.Sequential(linear(W), Rearrange("b n (h d) -> b h n d", h=H))
        self.join = nn.Sequential(Rearrange("b h n d -> b n (h d)"), linear(W))

    def forward(self, x: Tensor) -> Tensor:
        return self.join(F.scaled_dot_product_attention(self.make_q(x), self.make_k(x), self.make_v(x)))


class ToQToKV(nn.Module):
    """lucidrains: to_q, and keys and values in to_kv; cross attention to a context."""

    truth = Truth(("to_q.weight", heads()), ("to_kv.weight", heads()))

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_kv, self.to_out = linear(W), linear(2 * W), linear(W)

    def forward(self, x: Tensor) -> Tensor:
        context = torch.cat([x, x.flip(1)], 1)
        q, (k, v) = self.to_q(x), self.to_kv(context).chunk(2, dim=-1)
        q, k, v = (rearrange(t, "b n (h d) -> b h n d", h=H) for t in (q, k, v))
        return self.to_out(rearrange(F.scaled_dot_product_attention(q, k, v), "b h n d -> b n (h d)"))


class NotCalledSelf(nn.Module):
    """The first argument of its forward is `this`."""

    truth = Truth(("q_proj.weight", heads()), ("k_proj.weight", heads()))

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = H
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (linear(W) for _ in range(4))

    def forward(this, x: Tensor) -> Tensor:  # noqa: N805
        q, k, v = (p(x).unflatten(-1, (H, -1)).transpose(1, 2) for p in (this.q_proj, this.k_proj, this.v_proj))
        return this.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class ByLambda(nn.Module):
    """A lambda splits the heads, in the order (d, heads)."""

    truth = Truth(("q_proj.weight", strided()), ("k_proj.weight", strided()))

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = H, D
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (linear(W) for _ in range(4))
        self.split = lambda x: x.view(*x.shape[:2], D, H).permute(0, 3, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(p(x)) for p in (self.q_proj, self.k_proj, self.v_proj))  # type: ignore[no-untyped-call]
        return self.o_proj((torch.softmax(q @ k.mT, -1) @ v).transpose(1, 2).flatten(2))


class ArbitraryNames(nn.Module):
    """No name tells what it is."""

    truth = Truth(("alpha.weight", heads()), ("beta.weight", heads()))

    def __init__(self) -> None:
        super().__init__()
        self.alpha, self.beta, self.gamma, self.delta = (linear(W) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = (p(x).reshape(len(x), -1, H, D).transpose(1, 2) for p in (self.alpha, self.beta, self.gamma))
        return self.delta(((a @ b.mT).softmax(-1) @ c).transpose(1, 2).flatten(2))


class Repeated(nn.Module):
    """GQA by repeat_interleave: heads 0 and 1 read the first key."""

    truth = Truth(("wq.weight", heads()), ("wk.weight", heads(of=[0, 0, 1, 1])))

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = linear(W), linear(2 * D), linear(2 * D), linear(W)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, D)).transpose(1, 2) for p in (self.wq, self.wk, self.wv))
        k, v = self.for_all_heads(k), self.for_all_heads(v)
        return self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    def for_all_heads(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(2, dim=1)


class Expanded(Repeated):
    """GQA by expand, as Llama's repeat_kv."""

    def for_all_heads(self, x: Tensor) -> Tensor:
        B, G, T, K = x.shape
        return x[:, :, None].expand(B, G, 2, T, K).reshape(B, 2 * G, T, K)


class Tiled(Repeated):
    """GQA by einops.repeat, all keys one after another: heads 0 and 2 read the first key."""

    truth = Truth(("wq.weight", heads()), ("wk.weight", heads(of=[0, 1, 0, 1])))

    def for_all_heads(self, x: Tensor) -> Tensor:
        return repeat(x, "b g n d -> b (r g) n d", r=2)


class MultiQuery(nn.Module):
    """One key for all heads, in one projection with queries and value."""

    truth = Truth(("Wqkv.weight", heads()), ("Wqkv.weight", heads(W, of=[0] * H)))

    def __init__(self) -> None:
        super().__init__()
        self.Wqkv, self.out = linear(W + 2 * D), linear(W)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.Wqkv(x).split([W, D, D], dim=-1)
        q, k, v = q.unflatten(-1, (H, D)).transpose(1, 2), k.unsqueeze(1), v.unsqueeze(1)
        return self.out((torch.softmax(q @ k.mT / D**0.5, -1) @ v).transpose(1, 2).flatten(2))


class ViT(nn.Module):
    """timm's: qkv.reshape(B, N, 3, heads, d).permute(2, 0, 3, 1, 4)."""

    truth = Truth(("qkv.weight", heads()), ("qkv.weight", heads(W)), bias=True)

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.qkv, self.proj = H, linear(3 * W, bias=True), linear(W)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        attn = ((q * D**-0.5) @ k.transpose(-2, -1)).softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(B, N, C))


class Functional(nn.Module):
    """Calls F.multi_head_attention_forward with parameters of its own."""

    truth = Truth(("packed", heads()), ("packed", heads(W)))

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Parameter(torch.randn(3 * W, W) * W**-0.5)
        self.last = linear(W)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        options: dict[str, Any] = {"need_weights": False, "training": self.training}
        args = (W, H, self.packed, None, None, None, False, 0.0, self.last.weight, None)
        y, _ = F.multi_head_attention_forward(x, x, x, *args, **options)
        return y.transpose(0, 1)


class Transposed(nn.Module):
    """GPT-2's Conv1D: heads are columns of the weight."""

    truth = Truth(("c_attn.weight", heads()), ("c_attn.weight", heads(W)), dim=1, bias=True)

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = Conv1D(3 * W, W), Conv1D(W, W)  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (H, D)).transpose(1, 2) for t in self.c_attn(x).split(W, dim=2))
        out: Tensor = self.c_proj((torch.softmax(q @ k.mT, dim=-1) @ v).transpose(1, 2).flatten(2))
        return out


class ALiBi(nn.Module):
    """A bias for the distance is added to the logits; matrices are bare parameters (columns are heads)."""

    truth = Truth(("w_q", heads()), ("w_k", heads()), dim=1)

    def __init__(self) -> None:
        super().__init__()
        self.w_q, self.w_k, self.w_v, self.w_o = (nn.Parameter(torch.randn(W, W) * W**-0.5) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = ((x @ w).unflatten(-1, (H, D)).transpose(1, 2) for w in (self.w_q, self.w_k, self.w_v))
        place = torch.arange(x.shape[1])
        slopes = 2.0 ** -torch.arange(1, H + 1)
        logits = q @ k.mT * D**-0.5 - slopes[:, None, None] * (place[:, None] - place).abs()
        return (logits.softmax(-1) @ v).transpose(1, 2).flatten(2) @ self.w_o


class OneHeadEach(nn.Module):
    """Karpathy's lecture: a module for a head, here with all heads in one ModuleList of projections."""

    truth = Truth(("stacked_q", heads()), ("stacked_k", heads()))

    def __init__(self) -> None:
        super().__init__()
        self.stacked_q, self.stacked_k, self.stacked_v = (nn.Parameter(torch.randn(W, W) / 5) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        outs = []
        for h in range(H):
            rows = slice(h * D, (h + 1) * D)
            q, k, v = (F.linear(x, w[rows]) for w in (self.stacked_q, self.stacked_k, self.stacked_v))
            outs.append((q @ k.transpose(-2, -1) * D**-0.5).softmax(-1) @ v)
        return torch.cat(outs, -1)


OWN = (
    *(NanoGPT, MinGPT, EinopsFunction, EinopsHeadsLast, EinopsOnePattern, EinopsLayer, ToQToKV, NotCalledSelf),
    *(ByLambda, ArbitraryNames, Repeated, Expanded, Tiled, MultiQuery, ViT, Functional, Transposed, ALiBi, OneHeadEach),
)


class GPT(nn.Module):
    """Two blocks of an attention, between an embedding and a head."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, W), linear(50)
        self.blocks = nn.ModuleList(kind() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def expected(truth: Truth, block: str) -> set[Any]:
    """The truth in the form of `chains`."""

    def parts(rows: Rows, head: int) -> list[tuple[str, object, tuple[int, ...]]]:
        name, of_head = f"{block}.{rows[0]}", tuple(rows[1][head])
        biases = [(name.removesuffix("weight") + "bias", 0, of_head)] if truth.bias else []
        return [(name, truth.dim, of_head), *biases]

    return {frozenset([*parts(truth.q, head), *parts(truth.k, head)]) for head in range(H)}


@pytest.mark.parametrize("kind", OWN, ids=lambda kind: kind.__name__)
def test_two_lines_are_enough_for_an_own_attention_and_it_is_found_row_by_row(kind: Any) -> None:
    torch.manual_seed(0)
    model = GPT(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    quack = QuacK(model, optimizer)
    model(torch.randint(50, (4, 16))).square().mean().backward()
    optimizer.step()
    names = {id(parameter): name for name, parameter in named_parameters(model)}
    found = quack._attachment.found
    assert all(finding.origin == MEASURED for finding in found.values())
    assert not any(module._forward_pre_hooks for module in model.modules())
    wanted = {f"blocks.{i}": expected(kind.truth, f"blocks.{i}") for i in range(2)}
    assert {name: chains(finding.paths, names) for name, finding in found.items()} == wanted
    for name, _ in (kind.truth.q, kind.truth.k):
        assert all(quack.rate_of(model.get_parameter(f"blocks.{i}.{name}")) is not None for i in range(2))


class RotaryMLA(nn.Module):
    """Latent attention with a rotary part: one projection reads x, and each head has [nope, rope] and [k, v]."""

    rows: ClassVar[dict[str, tuple[str, list[range]]]] = {
        "dq": ("down.weight", [range(10)]),
        "dkv": ("down.weight", [range(10, 18)]),
        "kr": ("down.weight", [range(18, 22)]),
        "uq": ("up_q.weight", [range(10 * h, 10 * h + D) for h in range(H)]),
        "qr": ("up_q.weight", [range(10 * h + D, 10 * h + 10) for h in range(H)]),
        "uk": ("up_kv.weight", [range(12 * h, 12 * h + D) for h in range(H)]),
    }

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up_q, self.up_kv, self.out = linear(22), linear(40, 10), linear(48, 8), linear(W)

    def forward(self, x: Tensor) -> Tensor:
        c_q, c_kv, shared = self.down(x).split([10, 8, 4], -1)
        q, q_rope = rearrange(self.up_q(c_q), "b n (h d) -> b h n d", h=H).split([D, 4], -1)
        k, v = rearrange(self.up_kv(c_kv), "b n (h d) -> b h n d", h=H).chunk(2, -1)
        k_rope = self.turned(shared[:, None]).expand(-1, H, -1, -1)
        y = F.scaled_dot_product_attention(
            torch.cat([q, self.turned(q_rope)], -1), torch.cat([k, k_rope], -1), v, is_causal=True
        )
        return self.out(rearrange(y, "b h n d -> b n (h d)"))

    @staticmethod
    def turned(x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[-2]).to(x)[:, None] * torch.tensor([1.0, 0.1]).to(x)
        one, other = x.chunk(2, -1)
        return torch.cat([one * angle.cos() - other * angle.sin(), one * angle.sin() + other * angle.cos()], -1)


def test_an_own_mla_with_two_lines_steps_by_the_papers_algorithm_2() -> None:
    torch.manual_seed(0)
    model = GPT(RotaryMLA).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    QuacK(model, optimizer, tau=0.7)
    heads = {(i, role): of for i in range(2) for role, of in RotaryMLA.rows.items()}

    def matrices() -> list[reference.Layer]:
        found: list[reference.Layer] = [{}, {}]
        for (i, role), (name, rows) in heads.items():
            blocks = [model.get_parameter(f"blocks.{i}.{name}")[list(of_head)].tolist() for of_head in rows]
            found[i][role] = blocks if role in ("uq", "uk", "qr") else blocks[0]
        return found

    at_start = reference.mla_factors(matrices())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randint(50, (4, 16))).square().mean().backward()
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        lrs = reference.mla_lrs(matrices(), at_start, tau=0.7, eta=0.1)
        expected = {name: torch.full_like(parameter, 0.1) for name, parameter in before.items()}  # lr of each entry
        for (i, role), (name, rows) in heads.items():
            for h, of_head in enumerate(rows):
                lr = lrs[i][role]
                expected[f"blocks.{i}.{name}"][list(of_head)] = lr[h] if isinstance(lr, list) else lr
        optimizer.step()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            moved = before[name] - parameter
            torch.testing.assert_close(moved, expected[name] * parameter.grad, rtol=1e-5, atol=1e-12)
            parameter.data *= torch.rand(len(parameter), 1) + 1  # each row grows by an amount of its own


def test_a_limit_is_relative_to_the_lr_when_quack_was_attached_though_it_is_measured_later() -> None:
    """The loop of nanoGPT: lr is set by hand in each step, and is small in the first one."""
    torch.manual_seed(0)
    model = GPT(NanoGPT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with QuacK(model, optimizer) as quack:
        for warmup in (0.0, 0.25, 1.0):
            optimizer.param_groups[0]["lr"] = 0.1 * warmup
            model(torch.randint(50, (4, 16))).square().mean().backward()
            optimizer.step()
            changes = [float(change.given.max()) for change in quack.changes().values()]
            assert changes == pytest.approx([0.02 * warmup] * 2 if warmup else [], rel=1e-2)


def test_a_first_step_with_lr_0_is_no_sign_that_quack_was_attached_late() -> None:
    torch.manual_seed(0)
    model = GPT(NanoGPT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    with QuacK(model, optimizer, tau=1.0):
        for lr in (0.0, 0.1):  # filterwarnings makes a warning an error
            optimizer.param_groups[0]["lr"] = lr
            model(torch.randint(50, (4, 16))).square().mean().backward()
            optimizer.step()
