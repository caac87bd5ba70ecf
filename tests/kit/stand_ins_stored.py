"""Stand-ins whose query and key weights are stored in unusual ways: fused, strided, transposed, factored."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from stand_ins_kit import HF, PLAIN, WIDTH, Case, Model, Plain, Rows, Truth, at, causal, layers, linear, qk, rope

HEADS, SIZE = 4, 8


class MptAttention(nn.Module):
    """MPT's: [q|k|v] in one; clipped, here in place."""

    def __init__(self, name: str = "Wqkv", projection: nn.Module | None = None) -> None:
        super().__init__()
        self.name, self.clip_qkv, self.out_proj = name, 1.0, linear(WIDTH)
        self.add_module(name, projection or linear(96))

    def project(self, hidden_states: Tensor) -> Tensor:
        return self.get_submodule(self.name)(hidden_states)

    def split(self, mixed_qkv: Tensor) -> tuple[Tensor, ...]:
        mixed_qkv.clamp_(min=-self.clip_qkv, max=self.clip_qkv)
        return tuple(t.unflatten(2, (HEADS, SIZE)).transpose(1, 2) for t in mixed_qkv.chunk(3, dim=2))

    def forward(self, hidden_states: Tensor) -> Tensor:
        query, key, value = self.split(self.project(hidden_states))
        scores = causal(torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(SIZE))
        return self.out_proj(torch.matmul(scores.float().softmax(-1), value).transpose(1, 2).flatten(2))


class GPTNeoXAttention(MptAttention):
    """GPT-NeoX's: rows of a head are [q, k, v]; a quarter of it is rotated."""

    def __init__(self) -> None:
        super().__init__("query_key_value", nn.Linear(WIDTH, 96))

    def split(self, mixed_qkv: Tensor) -> tuple[Tensor, ...]:
        query, key, value = mixed_qkv.unflatten(2, (HEADS, 3 * SIZE)).chunk(3, dim=-1)
        query, key = (torch.cat([rope(t[..., :2]), t[..., 2:]], dim=-1) for t in (query, key))
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


class CodeGenAttention(MptAttention):
    """CodeGen's, with two parts instead of four: rows of a part are [q|v|k] of its two heads."""

    def __init__(self) -> None:
        super().__init__("qkv_proj")

    def split(self, mixed_qkv: Tensor) -> tuple[Tensor, ...]:
        query, value, key = mixed_qkv.unflatten(2, (2, -1)).split(2 * SIZE, dim=-1)
        return tuple(t.unflatten(3, (2, SIZE)).flatten(2, 3).transpose(1, 2) for t in (query, key, value))


class Strided(MptAttention):
    """The rows of a head are every fourth row."""

    def split(self, mixed_qkv: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.unflatten(2, (SIZE, HEADS)).permute(0, 3, 1, 2) for t in mixed_qkv.chunk(3, dim=2))


class Conv1D(nn.Module):
    """GPT-2's linear: its weight is transposed, so rows lie along dim 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, 96) * 0.2), nn.Parameter(torch.randn(96) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)


class GPT2Attention(MptAttention):
    """GPT-2's: [q|k|v]."""

    def __init__(self) -> None:
        super().__init__("c_attn", Conv1D())

    def split(self, mixed_qkv: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.unflatten(2, (HEADS, SIZE)).transpose(1, 2) for t in mixed_qkv.split(WIDTH, dim=2))


class SqueezeBertSelfAttention(nn.Module):
    """SqueezeBERT's: convolutions of width 1, channels before tokens; in groups, each sees a part of the channels."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Conv1d(WIDTH, 32, 1, groups=groups) for _ in range(3))
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, hidden_states: Tensor) -> Tensor:
        x_BDT = hidden_states.transpose(1, 2)
        q, k, v = (conv(x_BDT).unflatten(1, (HEADS, SIZE)) for conv in (self.query, self.key, self.value))
        probs = self.softmax(torch.matmul(q.permute(0, 1, 3, 2), k) / math.sqrt(SIZE))
        return torch.matmul(probs, v.permute(0, 1, 3, 2)).transpose(1, 2).flatten(2)


class OneMatrix(Plain):
    """As Reformer: the query is the key."""

    def __init__(self) -> None:
        super().__init__(groups=4)
        del self.q_proj, self.k_proj
        self.query_key = linear(32)

    def forward(self, hidden_states: Tensor) -> Tensor:
        query_key = self.split(self.query_key(hidden_states))
        out = self.attend(query_key, query_key, self.split(self.v_proj(hidden_states)))
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Factored(Plain):
    """A query made by two matrices with biases, without a norm between. The second bias is a term of its own."""

    def __init__(self) -> None:
        super().__init__(k_bias=True)
        self.q_proj = nn.Sequential(nn.Linear(WIDTH, 12), nn.Linear(12, 32))


class LoraLinear(nn.Module):
    """peft's: a frozen matrix, and the product of two small ones, the second of which begins at zero."""

    def __init__(self, base_layer: nn.Module, fresh: bool) -> None:
        super().__init__()
        rows, columns = base_layer.get_parameter("weight").shape
        self.base_layer, self.lora_A, self.lora_B = base_layer, linear(3, columns), linear(rows, 3)
        self.scaling, _ = 2.0, base_layer.requires_grad_(False)
        if fresh:
            nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x)) * self.scaling


def lora(*names: str, fresh: bool = False) -> nn.Module:
    attention = Plain().requires_grad_(False)
    for name in names:
        attention.add_module(name, LoraLinear(attention.get_submodule(name), fresh))
    return attention


def weight_normed() -> Plain:
    attention = Plain()
    attention.q_proj = weight_norm(attention.q_proj)
    return attention


def spectral_normed(key: bool) -> Plain:
    attention = Plain()
    attention.q_proj = spectral_norm(attention.q_proj)
    if key:
        attention.k_proj = spectral_norm(attention.k_proj)
    return attention


Q, K = at(8, 0, 8, 16, 24), at(8, 0, 0, 8, 8)
CONCAT_K, ALL = at(8, 32, 40, 48, 56), at(3, 0, 0, 0, 0)
MPT = qk(Rows("Wqkv.weight", Q), Rows("Wqkv.weight", CONCAT_K))
NEOX = qk(
    Rows("query_key_value.weight", at(8, 0, 24, 48, 72), bias="query_key_value.bias"),
    Rows("query_key_value.weight", at(8, 8, 32, 56, 80), bias="query_key_value.bias"),
)
CODEGEN = qk(Rows("qkv_proj.weight", at(8, 0, 8, 48, 56)), Rows("qkv_proj.weight", at(8, 32, 40, 80, 88)))
STRIDED = qk(
    Rows("Wqkv.weight", [range(0, 32, 4), range(1, 32, 4), range(2, 32, 4), range(3, 32, 4)]),
    Rows("Wqkv.weight", [range(32, 64, 4), range(33, 64, 4), range(34, 64, 4), range(35, 64, 4)]),
)
GPT2 = qk(Rows("c_attn.weight", Q, 1, "c_attn.bias"), Rows("c_attn.weight", CONCAT_K, 1, "c_attn.bias"))
SQUEEZE = qk(Rows("query.weight", Q, bias="query.bias"), Rows("key.weight", Q, bias="key.bias"))
GAINS = qk(Rows("q_proj.parametrizations.weight.original0", Q), Rows("k_proj.weight", K))
KEY_ALONE = Truth({"k": Rows("k_proj.weight", K)}, [("k",)])
ONE_MATRIX = qk(Rows("query_key.weight", Q), Rows("query_key.weight", Q))
FACTORED = Truth(
    {
        "dq": Rows("q_proj.0.weight", at(12, 0, 0, 0, 0), bias="q_proj.0.bias"),
        "uq": Rows("q_proj.1.weight", Q),
        "uq_bias": Rows("q_proj.1.bias", Q),
        "k": Rows("k_proj.weight", K, bias="k_proj.bias"),
    },
    [("dq", "uq", "k"), ("uq_bias", "k")],
)
LORA = {
    "q": Rows("q_proj.base_layer.weight", Q),
    "q_a": Rows("q_proj.lora_A.weight", ALL),
    "q_b": Rows("q_proj.lora_B.weight", Q),
}
LORA_QV = Truth(LORA | {"k": Rows("k_proj.weight", K)}, [("q", "k"), ("q_a", "q_b", "k")])
LORA_K = {
    "k": Rows("k_proj.base_layer.weight", K),
    "k_a": Rows("k_proj.lora_A.weight", ALL),
    "k_b": Rows("k_proj.lora_B.weight", K),
}
LORA_QK = Truth(LORA | LORA_K, [("q", "k"), ("q_a", "q_b", "k"), ("q", "k_b", "k_a"), ("q_a", "q_b", "k_b", "k_a")])

CASES = [
    Case("MPT, clipped", lambda: Model(HF, MptAttention(), MptAttention()), layers(HF, MPT, MPT)),
    Case("GPT-NeoX", lambda: Model(HF, GPTNeoXAttention(), GPTNeoXAttention()), layers(HF, NEOX, NEOX)),
    Case("CodeGen", lambda: Model(HF, CodeGenAttention(), CodeGenAttention()), layers(HF, CODEGEN, CODEGEN)),
    Case("every fourth row", lambda: Model(HF, Strided(), Strided()), layers(HF, STRIDED, STRIDED)),
    Case("GPT-2", lambda: Model(HF, GPT2Attention(), GPT2Attention()), layers(HF, GPT2, GPT2)),
    Case(
        "SqueezeBERT, convolutions, in groups in the second layer",
        lambda: Model(HF, SqueezeBertSelfAttention(groups=1), SqueezeBertSelfAttention(groups=4)),
        layers(HF, SQUEEZE, SQUEEZE),
    ),
    Case("weight norm of the query", lambda: Model(HF, weight_normed(), Plain()), layers(HF, GAINS, PLAIN)),
    Case(
        "spectral norm of query and key, and of the query",
        lambda: Model(HF, spectral_normed(key=True), spectral_normed(key=False)),
        {"model.layers.1.self_attn": KEY_ALONE},
        {"model.layers.0.self_attn": "norm"},
    ),
    Case("one matrix for query and key", lambda: Model(HF, OneMatrix(), Plain()), layers(HF, ONE_MATRIX, PLAIN)),
    Case("factored query with biases", lambda: Model(HF, Factored(), Plain()), layers(HF, FACTORED, PLAIN)),
    Case(
        "LoRA, of query and value, of query and key",
        lambda: Model(HF, lora("q_proj", "v_proj"), lora("q_proj", "k_proj")),
        layers(HF, LORA_QV, LORA_QK),
    ),
    Case(
        "LoRA, fresh",
        lambda: Model(HF, lora("q_proj", "v_proj", fresh=True), lora("q_proj", "k_proj", fresh=True)),
        layers(HF, LORA_QV, LORA_QK),
    ),
]
