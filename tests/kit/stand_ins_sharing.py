"""Stand-ins whose query and key weights are in another module, in several modules, or in no attention at all."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stand_ins_kit import (
    HF,
    PLAIN,
    VOCAB,
    WIDTH,
    Case,
    Model,
    Plain,
    Rows,
    Sample,
    Truth,
    at,
    called,
    layers,
    linear,
    qk,
)

HEADS, SIZE = 4, 8


class T5Attention(nn.Module):
    """T5's: no scale, and a learned number for each distance and head added to the logits."""

    def __init__(self, has_relative_attention_bias: bool) -> None:
        super().__init__()
        self.n_heads, self.key_value_proj_dim = HEADS, SIZE
        self.q, self.k, self.v, self.o = linear(32), linear(32), linear(32), linear(WIDTH)
        self.relative_attention_bias = nn.Embedding(9, HEADS) if has_relative_attention_bias else None

    def forward(self, hidden_states: Tensor, key_value_states: Tensor | None = None) -> Tensor:
        states = hidden_states if key_value_states is None else key_value_states
        q, k, v = (
            p(x).unflatten(2, (self.n_heads, -1)).transpose(1, 2)
            for p, x in ((self.q, hidden_states), (self.k, states), (self.v, states))
        )
        scores = torch.matmul(q, k.transpose(3, 2))
        if self.relative_attention_bias is not None:
            distance = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None]
            scores += self.relative_attention_bias(distance.clamp(-4, 4) + 4).permute(2, 0, 1)
        probs = F.softmax(scores.float(), dim=-1).type_as(scores)
        return self.o(torch.matmul(probs, v).transpose(1, 2).flatten(2))


class T5Block(nn.Module):
    """Self attention; cross attention if it is the decoder's; a feed forward."""

    def __init__(self, is_decoder: bool) -> None:
        super().__init__()
        self.SelfAttention = T5Attention(has_relative_attention_bias=True)
        self.EncDecAttention = T5Attention(has_relative_attention_bias=False) if is_decoder else None
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(3))
        self.ff = nn.Sequential(linear(64), nn.ReLU(), linear(WIDTH, 64))

    def forward(self, x: Tensor, encoded: Tensor | None = None) -> Tensor:
        x = x + self.SelfAttention(self.norms[0](x))
        if self.EncDecAttention is not None:
            x = x + self.EncDecAttention(self.norms[1](x), key_value_states=encoded)
        return x + self.ff(self.norms[2](x))


class T5(nn.Module):
    """An encoder and a decoder of one block each."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.encoder, self.decoder = nn.Embedding(VOCAB, WIDTH), T5Block(False), T5Block(True)
        self.norm, self.lm_head = nn.RMSNorm(WIDTH), linear(VOCAB)

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> Tensor:
        encoded = self.norm(self.encoder(self.shared(input_ids)))
        return self.lm_head(self.decoder(self.shared(decoder_input_ids), encoded))


def question_and_answer() -> Sample:
    return {"input_ids": torch.randint(VOCAB, (2, 7)), "decoder_input_ids": torch.randint(VOCAB, (2, 5))}


class AttnProcessor:
    """diffusers': attends for the module that it is given; heads are folded into the batch."""

    def __call__(self, attn: DiffusersAttention, hidden_states: Tensor, context: Tensor | None) -> Tensor:
        context = hidden_states if context is None else context
        query, key, value = attn.to_q(hidden_states), attn.to_k(context), attn.to_v(context)
        query, key, value = (attn.head_to_batch_dim(t) for t in (query, key, value))
        empty = torch.empty(query.shape[0], query.shape[1], key.shape[1])
        scores = torch.baddbmm(empty, query, key.transpose(-1, -2), beta=0, alpha=attn.scale)
        return attn.to_out[0](attn.batch_to_head_dim(torch.bmm(scores.softmax(dim=-1), value)))


class AttnProcessor2_0(AttnProcessor):  # noqa: N801
    """diffusers', with torch's kernel."""

    def __call__(self, attn: DiffusersAttention, hidden_states: Tensor, context: Tensor | None) -> Tensor:
        context = hidden_states if context is None else context
        inputs = ((attn.to_q, hidden_states), (attn.to_k, context), (attn.to_v, context))
        query, key, value = (to(x).view(len(x), -1, attn.heads, SIZE).transpose(1, 2) for to, x in inputs)
        hidden_states = F.scaled_dot_product_attention(query, key, value, dropout_p=0.0, is_causal=False)
        return attn.to_out[0](hidden_states.transpose(1, 2).reshape(len(context), -1, attn.heads * SIZE))


@called("Attention")
class DiffusersAttention(nn.Module):
    """diffusers': keys may come from a context of another width. A processor that is no module attends."""

    def __init__(self, processor: AttnProcessor, cross_attention_dim: int = WIDTH) -> None:
        super().__init__()
        self.heads, self.scale, self.processor = HEADS, SIZE**-0.5, processor
        self.to_q, self.to_k, self.to_v = linear(32), linear(32, cross_attention_dim), linear(32, cross_attention_dim)
        self.to_out = nn.ModuleList([nn.Linear(32, WIDTH), nn.Dropout(0.0)])

    def head_to_batch_dim(self, tensor: Tensor) -> Tensor:
        return tensor.unflatten(2, (self.heads, -1)).permute(0, 2, 1, 3).flatten(0, 1)

    def batch_to_head_dim(self, tensor: Tensor) -> Tensor:
        return tensor.unflatten(0, (-1, self.heads)).permute(0, 2, 1, 3).flatten(2)

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None) -> Tensor:
        return self.processor(self, hidden_states, encoder_hidden_states)


class BasicTransformerBlock(nn.Module):
    """diffusers': attends to itself, then to a context of width 20."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.attn1, self.attn2 = DiffusersAttention(AttnProcessor2_0()), DiffusersAttention(AttnProcessor(), 20)
        self.ff = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        hidden_states = hidden_states + self.attn1(self.norm1(hidden_states))
        hidden_states = hidden_states + self.attn2(self.norm2(hidden_states), encoder_hidden_states)
        return hidden_states + self.ff(self.norm3(hidden_states))


def noise_and_prompt() -> Sample:
    return torch.randn(2, 5, WIDTH), torch.randn(2, 7, 20)


@called("Gemma3nTextAttention")
class KVSharing(Plain):
    """Gemma 3n's without its norms: the first layer makes keys and values, later ones have queries only."""

    def __init__(self, is_kv_shared_layer: bool) -> None:
        super().__init__()
        self.is_kv_shared_layer = is_kv_shared_layer
        if is_kv_shared_layer:
            del self.k_proj, self.v_proj

    def forward(self, hidden_states: Tensor, shared_kv_states: dict[int, tuple[Tensor, Tensor]]) -> Tensor:  # type: ignore[override]
        if not self.is_kv_shared_layer:
            shared_kv_states[0] = self.split(self.k_proj(hidden_states)), self.split(self.v_proj(hidden_states))
        out = self.attend(self.split(self.q_proj(hidden_states)), *shared_kv_states[0])
        return self.o_proj(out.transpose(1, 2).flatten(2))


class AlbertTransformer(nn.Module):
    """ALBERT's: one layer that runs three times; residual and norm are inside."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention = nn.Embedding(VOCAB, WIDTH), Plain(groups=4, q_bias=True, k_bias=True)
        self.LayerNorm, self.ffn, self.ffn_output = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for _ in range(3):
            x = self.LayerNorm(x + self.attention(x))
            x = self.LayerNorm(x + self.ffn_output(F.gelu(self.ffn(x))))
        return x


class Tiled(Plain):
    """JetMoe's order: [k|v] in one, and head h reads group h % groups."""

    def __init__(self) -> None:
        super().__init__()
        del self.k_proj, self.v_proj
        self.kv_proj = linear(32)

    def forward(self, hidden_states: Tensor) -> Tensor:
        key, value = (self.split(t).repeat(1, 2, 1, 1) for t in self.kv_proj(hidden_states).chunk(2, dim=-1))
        query = self.split(self.q_proj(hidden_states))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class LinearAttention(Plain):
    """Has the usual names of projections, but no softmax."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key = F.elu(query) + 1, (F.elu(key) + 1).repeat_interleave(2, dim=1)
        return query @ (key.transpose(-1, -2) @ value.repeat_interleave(2, dim=1)) / key.shape[2]


class Checkpointed(Plain):
    """Computed anew in the backward pass."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        out = checkpoint(super().forward, hidden_states, use_reentrant=False)
        assert isinstance(out, Tensor)
        return out


class Router(nn.Module):
    """A mixture of experts: its softmax is over experts, not over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = linear(4), nn.ModuleList(linear(WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights = F.softmax(self.gate(x), dim=-1, dtype=torch.float)
        return torch.einsum("bte,btde->btd", weights, torch.stack([expert(x) for expert in self.experts], dim=-1))


class WithoutWeights(nn.Module):
    """Attends with the input itself as query and key."""

    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(2, (HEADS, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)


def tied() -> Model:
    first, second = Plain(), Plain()
    second.q_proj.weight = first.q_proj.weight
    return Model(HF, first, second)


def with_probabilities(*mixers: nn.Module) -> nn.Module:
    return nn.Sequential(Model("layers.{}.block_sparse_moe", *mixers), nn.Softmax(dim=-1))


Q = at(8, 0, 8, 16, 24)
T5_TRUTH, TO = qk(Rows("q.weight", Q), Rows("k.weight", Q)), qk(Rows("to_q.weight", Q), Rows("to_k.weight", Q))
FIRST_K = Rows("/model.layers.0.self_attn.k_proj.weight", at(8, 0, 0, 8, 8))
ALBERT = qk(Rows("q_proj.weight", Q, bias="q_proj.bias"), Rows("k_proj.weight", Q, bias="k_proj.bias"))
JETMOE = qk(Rows("q_proj.weight", Q), Rows("kv_proj.weight", at(8, 0, 8, 0, 8)))
TWO_HEADS: Truth = qk(Rows("q_proj.weight", at(12, 0, 12)), Rows("k_proj.weight", at(12, 0, 0)))
FIRST_Q = Rows("/model.layers.0.self_attn.q_proj.weight", Q)

CASES = [
    Case(
        "T5, cross attention",
        T5,
        dict.fromkeys(["encoder.SelfAttention", "decoder.SelfAttention", "decoder.EncDecAttention"], T5_TRUTH),
        sample=question_and_answer,
    ),
    Case("diffusers", BasicTransformerBlock, {"attn1": TO, "attn2": TO}, sample=noise_and_prompt),
    Case(
        "Gemma 3n, keys of an earlier layer",
        lambda: Model(HF, KVSharing(False), KVSharing(True), extra=lambda: {"shared_kv_states": {}}),
        layers(HF, PLAIN, qk(Rows("q_proj.weight", Q), FIRST_K)),
    ),
    Case("ALBERT, one attention for all layers", AlbertTransformer, {"attention": ALBERT}),
    Case(
        "tied, one query matrix for two layers",
        tied,
        layers(HF, PLAIN, qk(FIRST_Q, Rows("k_proj.weight", at(8, 0, 0, 8, 8)))),
    ),
    Case("JetMoe, tiled", lambda: Model(HF, Tiled(), Tiled()), layers(HF, JETMOE, JETMOE)),
    Case(
        "another number and size of heads in each layer",
        lambda: Model(HF, Plain(), Plain(heads=2, groups=1, head_dim=12)),
        layers(HF, PLAIN, TWO_HEADS),
    ),
    Case(
        "hybrid with linear attention",
        lambda: Model(HF, Plain(), LinearAttention()),
        layers(HF, PLAIN),
        {"model.layers.1.self_attn": "no softmax"},
    ),
    Case("checkpointed", lambda: Model(HF, Checkpointed(), Checkpointed()), layers(HF, PLAIN, PLAIN)),
    Case("softmax of a router and of the output only", lambda: with_probabilities(Router(), Router()), {}),
    Case(
        "attention without weights",
        lambda: Model(HF, WithoutWeights(), WithoutWeights()),
        {},
        {"model.layers.0.self_attn": "no weights", "model.layers.1.self_attn": "no weights"},
    ),
]
