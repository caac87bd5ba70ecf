"""Rules read the source: they decline rows that are not consecutive, and softmaxes that are not over logits.

The classes have names and parts that rules know, and each its own forward. The judge is the measurement.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quacklr import logit_paths
from quacklr.core.weight import Weight
from quacklr.find.finding import Finding
from quacklr.find.tables import by_rule
from stand_ins_kit import called

H, D, W = 4, 3, 12


class Separate(nn.Module):
    """Four heads of three rows; `split` is what the classes below differ in."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = H, D
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(W, W, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.q_proj(x)), self.split(self.k_proj(x)), self.split(self.v_proj(x))
        y = F.scaled_dot_product_attention(q, k, v)
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def split(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class ViewHeadsFirst(Separate):
    def split(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        return x.view(B, T, self.num_heads, C // self.num_heads).transpose(1, 2)


class ViewMinusOne(Separate):
    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.num_heads, -1).permute(0, 2, 1, 3)


class ShapeInATuple(Separate):
    def split(self, x: Tensor) -> Tensor:
        shape = x.size()[:-1] + (self.num_heads, self.head_dim)  # noqa: RUF005
        return x.view(shape).permute(0, 2, 1, 3)


class Unflattened(Separate):
    def split(self, x: Tensor) -> Tensor:
        h, d = self.num_heads, self.head_dim
        return x.unflatten(-1, (h, d)).transpose(1, 2)


class ViewHeadsLast(Separate):
    def split(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        return x.view(B, T, self.head_dim, self.num_heads).permute(0, 3, 1, 2)


class ViewMinusOneHeads(Separate):
    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.num_heads).permute(0, 3, 1, 2)


class UnflattenedHeadsLast(Separate):
    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (self.head_dim, self.num_heads)).movedim(3, 1)


ORDER = (0, 2, 3, 1)


class PermutedByATuple(Separate):
    """(batch, tokens, 4, 3) is read as 3 heads... by an order that is not written out."""

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.num_heads, self.head_dim).permute(*ORDER)


class Strided(Separate):
    def split(self, x: Tensor) -> Tensor:
        return torch.stack([x[..., h :: self.num_heads] for h in range(self.num_heads)], 1)


class Chunked(Separate):
    def split(self, x: Tensor) -> Tensor:
        return torch.stack(x.chunk(self.head_dim, dim=-1), -1).transpose(1, 2)


def rearrange(x: Tensor, pattern: str, **sizes: int) -> Tensor:
    """einops' function, for two patterns."""
    h = sizes["h"]
    if "(h d)" in pattern.split("->")[0]:
        return x.unflatten(-1, (h, -1)).transpose(1, 2)
    return x.unflatten(-1, (-1, h)).permute(0, 3, 1, 2)


class Rearrange(nn.Module):
    """einops' layer."""

    def __init__(self, pattern: str, **sizes: int) -> None:
        super().__init__()
        self.pattern, self.sizes = pattern, sizes

    def forward(self, x: Tensor) -> Tensor:
        return rearrange(x, self.pattern, **self.sizes)


class PatternHeadsFirst(Separate):
    def split(self, x: Tensor) -> Tensor:
        return rearrange(x, "b n (h d) -> b h n d", h=self.num_heads)


class PatternHeadsLast(Separate):
    def split(self, x: Tensor) -> Tensor:
        return rearrange(x, "b n (d h) -> b h n d", h=self.num_heads)


class LayerHeadsLast(nn.Module):
    """As in the issue: W_q, W_k, head_num, and an einops layer."""

    def __init__(self) -> None:
        super().__init__()
        self.head_num, self.num_heads = H, H
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(W, W, bias=False) for _ in range(4))
        self.split = Rearrange("b n (d h) -> b h n d", h=H)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(w(x)) for w in (self.W_q, self.W_k, self.W_v))
        return self.W_o(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))


class SquareHeads(Separate):
    """As many heads as rows of a head, so that sizes alone do not show the order."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 4, 4
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(16, 16, bias=False) for _ in range(4))


class SquareHeadsFirst(SquareHeads):
    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)


class SquareHeadsLast(SquareHeads):
    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.head_dim, self.num_heads).permute(0, 3, 1, 2)


class SquarePermuted(SquareHeads):
    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.num_heads, self.head_dim).permute(0, 3, 1, 2)


READ = (ViewHeadsFirst, ViewMinusOne, ShapeInATuple, Unflattened, PatternHeadsFirst, SquareHeadsFirst)
NOT_CONSECUTIVE = (
    *(ViewHeadsLast, ViewMinusOneHeads, UnflattenedHeadsLast, Strided, Chunked, PatternHeadsLast, LayerHeadsLast),
    *(SquareHeadsLast, SquarePermuted),
)


def ruled(module: nn.Module) -> Finding:
    found = by_rule(module)
    assert found is not None
    return found


def rows(weight: Weight) -> list[int]:
    return weight.block_of_row.tolist()


@pytest.mark.parametrize("cls", READ)
def test_consecutive_rows_are_read_off_the_source(cls: type[Separate]) -> None:
    module = cls()
    (path,) = ruled(module).paths
    (measured,) = logit_paths(module, torch.randn(2, 5, module.q_proj.in_features), rules=False)
    assert [rows(weight) for weight in path.weights] == [rows(weight) for weight in measured.weights]


@pytest.mark.parametrize("cls", NOT_CONSECUTIVE)
def test_rows_that_are_not_consecutive_are_declined_and_measured(cls: Any) -> None:
    module = cls()
    found = ruled(module)
    assert found.unknown
    assert "pass a batch to measure it" in found.reason
    width = next(module.parameters()).shape[1]
    paths = logit_paths(module, torch.randn(2, 5, width))
    assert rows(paths[0].weights[0]) == [row % 4 for row in range(width)]


class QueryAndGate(Separate):
    """Rows of a head's queries are [q, gate], and it does not say how many heads there are."""

    def __init__(self) -> None:
        super().__init__()
        del self.num_heads
        self.q_proj = nn.Linear(W, 2 * W, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, gate = self.q_proj(x).view(*x.shape[:2], -1, 2 * self.head_dim).transpose(1, 2).chunk(2, -1)
        y = F.scaled_dot_product_attention(q, self.split(self.k_proj(x)), self.split(self.v_proj(x))) * gate
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)


def test_queries_with_gates_are_not_taken_for_twice_as_many_heads() -> None:
    assert ruled(QueryAndGate()).unknown


def test_a_forward_without_source_is_declined() -> None:
    names: dict[str, Any] = {"nn": nn, "F": F, "Separate": Separate}
    exec(
        "class Hidden(Separate):\n"
        "    def split(self, x):\n"
        "        return x.view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)\n",
        names,
    )
    assert ruled(names["Hidden"]()).unknown


class MptAttention(nn.Module):
    """A user's class of that name: rows of Wqkv are per head."""

    def __init__(self) -> None:
        super().__init__()
        self.n_heads, self.num_heads, self.head_dim = H, H, D
        self.Wqkv, self.out_proj = nn.Linear(W, 3 * W, bias=False), nn.Linear(W, W, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.Wqkv(x).view(*x.shape[:2], H, 3 * D).transpose(1, 2).chunk(3, -1)
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class CausalSelfAttention(nn.Module):
    """Not nanoGPT's: each head's rows lie together, though `split` and `n_embd` are there."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head, self.n_embd = H, W
        self.c_attn, self.c_proj = nn.Linear(W, 3 * W, bias=False), nn.Linear(W, W, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.size()
        hs = self.n_embd // self.n_head
        q, k, v = self.c_attn(x).view(B, T, self.n_head, 3 * hs).transpose(1, 2).split(hs, dim=-1)
        return self.c_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, T, self.n_embd))


class GPTNeoXAttention(nn.Module):
    """A user's class of that name: rows are [q | k | v]."""

    def __init__(self) -> None:
        super().__init__()
        self.num_attention_heads, self.head_size = H, D
        self.query_key_value, self.dense = nn.Linear(W, 3 * W, bias=False), nn.Linear(W, W, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (H, D)).transpose(1, 2) for t in self.query_key_value(x).chunk(3, -1))
        return self.dense(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class GQAttention(GPTNeoXAttention):
    """A user's class with the name of torchtitan's."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_linear = nn.ModuleDict({"wqkv": nn.Linear(W, 3 * W, bias=False)})
        self.n_heads = H

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (H, D)).transpose(1, 2) for t in self.qkv_linear["wqkv"](x).chunk(3, -1))
        return self.dense(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("cls", [MptAttention, CausalSelfAttention, GPTNeoXAttention, GQAttention])
def test_a_table_of_classes_holds_for_that_projects_class_only(cls: type[nn.Module]) -> None:
    module = cls()
    found = by_rule(module)
    assert found is None or not found.paths
    paths = logit_paths(module, torch.randn(2, 5, W))
    assert paths[0].heads == H


class SoftmaxOfEach(Separate):
    """Linear attention with two softmaxes, none over a product."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.q_proj(x)), self.split(self.k_proj(x)), self.split(self.v_proj(x))
        q, k = q.softmax(dim=-1), k.softmax(dim=-2)
        return self.o_proj((q @ (k.mT @ v)).transpose(1, 2).flatten(2))

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)


class FeatureMap(SoftmaxOfEach):
    """elu + 1, and a softmax that is a gate's."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.q_proj(x)), self.split(self.k_proj(x)), self.split(self.v_proj(x))
        gate = torch.softmax(x, dim=-1)
        y = (F.elu(q) + 1) @ ((F.elu(k) + 1).mT @ v)
        return self.o_proj(y.transpose(1, 2).flatten(2)) * gate


class SoftmaxLayer(SoftmaxOfEach):
    """The softmax is a layer, over the queries."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.Softmax(dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.q_proj(x)), self.split(self.k_proj(x)), self.split(self.v_proj(x))
        return self.o_proj((self.attend(q) @ (k.mT @ v)).transpose(1, 2).flatten(2))


class Sigmoid(SoftmaxOfEach):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.q_proj(x)), self.split(self.k_proj(x)), self.split(self.v_proj(x))
        return self.o_proj(((q @ k.mT).sigmoid() @ v).transpose(1, 2).flatten(2))


class OverHeads(SoftmaxOfEach):
    """A softmax of a product, but over the heads."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.q_proj(x)), self.split(self.k_proj(x)), self.split(self.v_proj(x))
        return self.o_proj(((q @ k.mT).softmax(1) @ v).transpose(1, 2).flatten(2))


class OverQueries(SoftmaxOfEach):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.q_proj(x)), self.split(self.k_proj(x)), self.split(self.v_proj(x))
        return self.o_proj((torch.softmax(q @ k.mT, dim=-2) @ v).transpose(1, 2).flatten(2))


class OfChannels(SoftmaxOfEach):
    """XCA: the product sums over tokens."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.q_proj(x)), self.split(self.k_proj(x)), self.split(self.v_proj(x))
        return self.o_proj((v @ (q.mT @ k).softmax(-1)).transpose(1, 2).flatten(2))


class Helped(SoftmaxOfEach):
    """Two softmaxes in a method that also has a product, as Performer's."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.q_proj(x)), self.split(self.k_proj(x)), self.split(self.v_proj(x))
        return self.o_proj(self.linear(q, k, v).transpose(1, 2).flatten(2))

    def linear(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = q.softmax(dim=-1), k.softmax(dim=-2)
        return q @ (k.mT @ v)


class Mapped(SoftmaxOfEach):
    """A feature map before a kernel."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.q_proj(x)), self.split(self.k_proj(x)), self.split(self.v_proj(x))
        y = F.scaled_dot_product_attention(F.softplus(q), F.softplus(k), v)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class WrittenInto(SoftmaxOfEach):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.q_proj(x)), self.split(self.k_proj(x)), self.split(self.v_proj(x))
        swapped = torch.empty_like(q)
        swapped[:, 0], swapped[:, 1:] = q[:, -1], q[:, :-1]
        return self.o_proj(F.scaled_dot_product_attention(swapped, k, v).transpose(1, 2).flatten(2))


def flips(function: Any) -> Any:
    @functools.wraps(function)
    def flipped(self: Any, x: Tensor) -> Tensor:
        result: Tensor = function(self, x)
        return result.flip(1)

    return flipped


class Decorated(SoftmaxOfEach):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split_flipped(self.q_proj(x)), self.split(self.k_proj(x)), self.split(self.v_proj(x))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    @flips
    def split_flipped(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)


NO_LOGITS = [SoftmaxOfEach, FeatureMap, SoftmaxLayer, Sigmoid, OverHeads, OverQueries, OfChannels, Helped]
UNCLEAR: dict[type[nn.Module], str] = {
    Mapped: "forward calls softplus,",
    WrittenInto: "forward writes into a part of swapped,",
    Decorated: "split_flipped has the decorator flips,",
}


@pytest.mark.parametrize("cls", UNCLEAR)
def test_the_reason_names_what_makes_a_source_unclear(cls: type[nn.Module]) -> None:
    assert UNCLEAR[cls] in ruled(cls()).reason


@pytest.mark.parametrize("cls", [*NO_LOGITS, *UNCLEAR])
def test_a_softmax_that_is_not_over_a_product_is_no_attention(cls: type[nn.Module]) -> None:
    found = by_rule(cls())
    assert found is None or not found.paths


class OverAProduct(SoftmaxOfEach):
    """A product that goes through names, a mask, a function and a layer before its softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.soft = nn.Softmax(dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.q_proj(x)), self.split(self.k_proj(x)), self.split(self.v_proj(x))
        dots = torch.einsum("bhid,bhjd->bhij", q, k) * self.head_dim**-0.5
        dots = dots.masked_fill(torch.ones(1).bool().logical_not(), -1e9)
        return self.o_proj((self.shares(dots) @ v).transpose(1, 2).flatten(2))

    def shares(self, scores: Tensor) -> Tensor:
        shifted = scores - scores.amax(-1, keepdim=True)
        return self.soft(shifted)


def test_a_softmax_over_a_product_is_found_through_names_and_functions() -> None:
    assert ruled(OverAProduct()).paths


class Latent(nn.Module):
    """MLA under DeepSeek's names, without norms."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim = H, 3, 2, 3
        self.q_proj, self.kv_b_proj = nn.Linear(W, H * 5, bias=False), nn.Linear(4, H * 6, bias=False)
        self.kv_a_proj_with_mqa, self.o_proj = nn.Linear(W, 6, bias=False), nn.Linear(H * 3, W, bias=False)

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class RopeLast(Latent):
    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q = self.q_proj(x).view(B, T, self.num_heads, self.qk_nope_head_dim + self.qk_rope_head_dim)
        nope, rope = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        c, kr = self.kv_a_proj_with_mqa(x).split([4, self.qk_rope_head_dim], dim=-1)
        kv = self.kv_b_proj(c).view(B, T, self.num_heads, self.qk_nope_head_dim + self.v_head_dim)
        k, v = kv.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        k = torch.cat([k, kr[:, :, None].expand(-1, -1, self.num_heads, -1)], -1)
        return self.attended(torch.cat([nope, rope], -1), k, v)


class RopeFirst(Latent):
    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q = self.q_proj(x).view(B, T, self.num_heads, self.qk_nope_head_dim + self.qk_rope_head_dim)
        rope, nope = q.split([self.qk_rope_head_dim, self.qk_nope_head_dim], dim=-1)
        c, kr = self.kv_a_proj_with_mqa(x).split([4, self.qk_rope_head_dim], dim=-1)
        kv = self.kv_b_proj(c).view(B, T, self.num_heads, self.qk_nope_head_dim + self.v_head_dim)
        k, v = kv.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        k = torch.cat([k, kr[:, :, None].expand(-1, -1, self.num_heads, -1)], -1)
        return self.attended(torch.cat([nope, rope], -1), k, v)


def test_mla_with_its_rope_last_is_read_and_with_its_rope_first_declined() -> None:
    x = torch.randn(2, 6, W)
    assert ruled(RopeLast()).paths
    logit_paths(RopeLast(), x)  # would raise if what was read contradicted what is measured
    declined = by_rule(RopeFirst())
    assert declined is not None
    assert "rows of rope come last" in declined.reason
    assert logit_paths(RopeFirst(), x)


class IdentityOp(nn.Module):
    """Megatron's: takes anything and does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return x


class Kernel(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)


@called("SelfAttention", "megatron.core.transformer.attention")
class MegatronAttention(nn.Module):
    """Megatron-core's: grouped rows; without QK norm its norms are identities, or None."""

    def __init__(self, norm: nn.Module | None) -> None:
        super().__init__()
        self.num_attention_heads_per_partition, self.num_query_groups_per_partition = H, 2
        self.hidden_size_per_attention_head = D
        self.linear_qkv, self.linear_proj = nn.Linear(W, 8 * D, bias=False), nn.Linear(W, W, bias=False)
        self.q_layernorm, self.k_layernorm, self.core_attention = norm, norm, Kernel()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.linear_qkv(x).view(*x.shape[:2], 2, 4 * D).split([2 * D, D, D], -1)
        q = q.reshape(*x.shape[:2], H, D)
        if self.q_layernorm is not None and self.k_layernorm is not None:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
        return self.linear_proj(self.core_attention(q, *(t.repeat_interleave(2, 2) for t in (k, v))).flatten(2))

    def run_realtime_tests(self) -> Tensor:
        return torch.norm(self.linear_qkv.weight)


@pytest.mark.parametrize("norm", [None, IdentityOp(), nn.Identity()])
def test_a_norm_that_does_nothing_is_no_qk_norm(norm: nn.Module | None) -> None:
    module = MegatronAttention(norm)
    (path,) = ruled(module).paths
    (measured,) = logit_paths(module, torch.randn(2, 5, W), rules=False)
    assert [rows(weight) for weight in path.weights] == [rows(weight) for weight in measured.weights]
    assert "QK norm" in ruled(MegatronAttention(nn.RMSNorm(D))).reason


@called("Attention", "torchtitan.models.gpt_oss.model")
class TitanAttention(nn.Module):
    """torchtitan's since 0.3: a part of it has the projections, separate or fused; GPT-OSS has sinks."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim, self.fused = H, 2, D, fused
        parts = {"wqkv": 8 * D} if fused else {"wq": W, "wk": 2 * D, "wv": 2 * D}
        self.qkv_linear = nn.Module()
        for name, width in parts.items():
            self.qkv_linear.add_module(name, nn.Linear(W, width, bias=False))
        self.wo, self.sinks, self.inner_attention = nn.Linear(W, W, bias=False), nn.Parameter(torch.zeros(H)), Kernel()

    def forward(self, x: Tensor) -> Tensor:
        held: Any = self.qkv_linear
        if self.fused:
            q, k, v = held.wqkv(x).view(*x.shape[:2], 2, 4, D).split([2, 1, 1], 3)
            q, k, v = (t.reshape(*x.shape[:2], -1, D) for t in (q, k, v))
        else:
            q, k, v = (w(x).view(*x.shape[:2], -1, D) for w in (held.wq, held.wk, held.wv))
        return self.wo(self.inner_attention(q, k, v).flatten(2))


@pytest.mark.parametrize("fused", [True, False])
def test_torchtitans_projections_are_found_in_the_part_that_has_them(fused: bool) -> None:
    module = TitanAttention(fused)
    (path,) = ruled(module).paths
    (measured,) = logit_paths(module, torch.randn(2, 5, W), rules=False)
    assert [rows(weight) for weight in path.weights] == [rows(weight) for weight in measured.weights]


class Processor:
    """An object that is no module and does the attention, as in diffusers."""

    def __call__(self, attn: Any, x: Tensor) -> Tensor:
        q, k, v = (to(x).view(*x.shape[:2], -1, D).transpose(1, 2) for to in (attn.to_q, attn.to_k, attn.to_v))
        return attn.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class ByProcessor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.dim_head = H, D
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(W, W, bias=False) for _ in range(4))
        self.processor = Processor()

    def forward(self, x: Tensor) -> Tensor:
        return self.processor(self, x)


def test_what_an_object_that_is_called_does_is_read_too() -> None:
    assert ruled(ByProcessor()).paths


def test_more_heads_than_rows_are_declined() -> None:
    module = ViewHeadsFirst()
    del module.head_dim
    module.num_heads = 100
    assert "100] heads, and its queries have 12 rows" in ruled(module).reason


class Parameters(nn.Module):
    """x @ W: the outputs are columns of the parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = H, D
        self.W_q, self.W_k, self.W_v = (nn.Parameter(torch.randn(W, W)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(x @ w) for w in (self.W_q, self.W_k, self.W_v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)


def test_rows_of_bare_parameters_are_not_guessed() -> None:
    module = Parameters()
    assert ruled(module).unknown
    assert logit_paths(module, torch.randn(2, 5, W))[0].weights[0].dim == 1


class ColumnParallelLinear(nn.Module):
    """A user's class with the name of Megatron's: its weight is (in, out)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(W, W))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class OwnLinear(ViewHeadsFirst):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = ColumnParallelLinear(), ColumnParallelLinear()  # type: ignore[assignment]


def test_a_users_projection_class_with_megatrons_name_is_not_read() -> None:
    assert ruled(OwnLinear()).unknown
