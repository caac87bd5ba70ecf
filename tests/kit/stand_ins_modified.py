"""Stand-ins with an operation between the weights and the logits: gates, caps, sinks, norms, biases."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stand_ins_kit import (
    HF,
    PLAIN,
    WIDTH,
    Case,
    Model,
    Plain,
    Rows,
    Truth,
    at,
    called,
    causal,
    layers,
    linear,
    qk,
    rms,
    sequence_first,
)

HEADS, SIZE = 4, 8


class WhisperAttention(Plain):
    """Whisper's: a bias on the query, none on the key; scaled before it is split."""

    def __init__(self) -> None:
        super().__init__(groups=4, q_bias=True)

    def forward(self, hidden_states: Tensor) -> Tensor:
        query = self.split(self.q_proj(hidden_states) * self.scaling).contiguous()
        key, value = self.split(self.k_proj(hidden_states)), self.split(self.v_proj(hidden_states))
        probs = F.softmax(torch.matmul(query, key.transpose(2, 3)), dim=-1)
        return self.o_proj(torch.matmul(probs, value).transpose(1, 2).flatten(2))


class XLNetRelativeAttention(nn.Module):
    """XLNet's: (q + r_w_bias) . k + (q + r_r_bias) . r; parameters [d, h, k]; no segments, so r_s_bias is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head, self.d_head, self.scale = HEADS, SIZE, 1 / SIZE**0.5
        self.q, self.k, self.v, self.o, self.r = (nn.Parameter(torch.randn(WIDTH, HEADS, SIZE) * 0.2) for _ in range(5))
        self.r_r_bias, self.r_s_bias, self.r_w_bias = (nn.Parameter(torch.randn(HEADS, SIZE)) for _ in range(3))
        self.layer_norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.0)

    def forward(self, h: Tensor) -> Tensor:
        place = torch.outer(torch.arange(h.shape[0], -h.shape[0], -1.0), 10.0 ** -torch.linspace(0, 2, WIDTH // 2))
        r = torch.cat([place.sin(), place.cos()], dim=-1)[:, None].expand(-1, h.shape[1], -1)
        q_head_h, k_head_h, v_head_h = (torch.einsum("ibh,hnd->ibnd", h, w) for w in (self.q, self.k, self.v))
        k_head_r = torch.einsum("ibh,hnd->ibnd", r, self.r)
        ac = torch.einsum("ibnd,jbnd->bnij", q_head_h + self.r_w_bias, k_head_h)
        bd = torch.einsum("ibnd,jbnd->bnij", q_head_h + self.r_r_bias, k_head_r)
        b, n, i, j = bd.shape
        bd = bd.reshape(b, n, j, i)[:, :, 1:].reshape(b, n, i, j - 1).index_select(3, torch.arange(ac.shape[3]))
        attn_prob = self.dropout(F.softmax((ac + bd) * self.scale, dim=3))
        attn_vec = torch.einsum("bnij,jbnd->ibnd", attn_prob, v_head_h)
        return self.layer_norm(torch.einsum("ibnd,hnd->ibh", attn_vec, self.o) + h)


class GptOssAttention(Plain):
    """GPT-OSS's: a learned sink for each head beside the keys; the largest logit is subtracted before the softmax."""

    def __init__(self) -> None:
        super().__init__(q_bias=True, k_bias=True)
        self.sinks = nn.Parameter(torch.randn(HEADS))

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (t.repeat_interleave(self.num_key_value_groups, dim=1) for t in (key, value))
        attn_weights = causal(torch.matmul(query, key.transpose(2, 3)) * self.scaling)
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(query.shape[0], -1, query.shape[-2], -1)
        combined_logits = torch.cat([attn_weights, sinks], dim=-1)
        combined_logits = combined_logits - combined_logits.max(dim=-1, keepdim=True).values
        return torch.matmul(F.softmax(combined_logits, dim=-1)[..., :-1], value)


class Gemma2Attention(Plain):
    """Gemma 2's: logits are capped by a tanh."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (t.repeat_interleave(self.num_key_value_groups, dim=1) for t in (key, value))
        attn_weights = torch.tanh(torch.matmul(query, key.transpose(2, 3)) * self.scaling / 3.0) * 3.0
        return torch.matmul(F.softmax(causal(attn_weights), dim=-1, dtype=torch.float32).to(query.dtype), value)


@called("Qwen3NextAttention")
class Gated(Plain):
    """Qwen3-Next's without its norms: rows of a head are [q, gate]."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = linear(HEADS * 2 * SIZE)

    def forward(self, hidden_states: Tensor) -> Tensor:
        q_and_gate = self.q_proj(hidden_states).view(*hidden_states.shape[:-1], -1, 2 * SIZE)
        query, gate = torch.chunk(q_and_gate, 2, dim=-1)
        key, value = self.split(self.k_proj(hidden_states)), self.split(self.v_proj(hidden_states))
        out = self.attend(query.transpose(1, 2), key, value).transpose(1, 2).flatten(2)
        return self.o_proj(out * torch.sigmoid(gate.flatten(2)))


class CosineAttention(Plain):
    """Swin v2's: the cosine of query and key, times a learned number for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.log(10 * torch.ones(HEADS, 1, 1)))

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (t.repeat_interleave(self.num_key_value_groups, dim=1) for t in (key, value))
        scores = F.normalize(query, dim=-1) @ F.normalize(key, dim=-1).transpose(-2, -1)
        scores = scores * torch.clamp(self.logit_scale, max=math.log(100)).exp()
        return torch.matmul(F.softmax(scores, dim=-1), value)


class QueryNorm(Plain):
    """A norm on the query alone: the logit still grows with the key."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return super().attend(rms(query), key, value)


class IPAttnProcessor2_0(nn.Module):  # noqa: N801
    """IP-Adapter's: keys and values of an image, beside those of the text."""

    def __init__(self) -> None:
        super().__init__()
        self.to_k_ip, self.to_v_ip, self.scale = nn.ModuleList([linear(32)]), nn.ModuleList([linear(32)]), 0.6


@called("Attention")
class TwoSetsOfKeys(Plain):
    """IP-Adapter's: the same query attends twice, each time with keys of its own. The image is the first two tokens."""

    def __init__(self) -> None:
        super().__init__(groups=4)
        self.processor = IPAttnProcessor2_0()

    def forward(self, hidden_states: Tensor) -> Tensor:
        query, key, value = (self.split(proj(hidden_states)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        image, ip = hidden_states[:, :2], self.processor
        ip_key, ip_value = self.split(ip.to_k_ip[0](image)), self.split(ip.to_v_ip[0](image))
        out = self.attend(query, key, value) + ip.scale * F.scaled_dot_product_attention(query, ip_key, ip_value)
        return self.o_proj(out.transpose(1, 2).flatten(2))


@called("Attention")
class JointAttention(nn.Module):
    """Stable Diffusion 3's: two streams, each with its weights, in one attention. The text is the first two tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(WIDTH, 32) for _ in range(3))
        self.add_q_proj, self.add_k_proj, self.add_v_proj = (nn.Linear(WIDTH, 32) for _ in range(3))
        self.to_out, self.to_add_out = nn.ModuleList([linear(WIDTH), nn.Dropout(0.0)]), linear(WIDTH)

    def forward(self, hidden_states: Tensor) -> Tensor:
        text, image = hidden_states[:, :2], hidden_states[:, 2:]
        streams = ((self.to_q, self.add_q_proj), (self.to_k, self.add_k_proj), (self.to_v, self.add_v_proj))
        query, key, value = (
            torch.cat([to(image), add(text)], dim=1).unflatten(2, (HEADS, SIZE)).transpose(1, 2) for to, add in streams
        )
        out = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        image, text = out.split([image.shape[1], 2], dim=1)
        return torch.cat([self.to_add_out(text), self.to_out[0](image)], dim=1)


Q, K = at(8, 0, 8, 16, 24), at(8, 0, 0, 8, 8)
EACH = [[0], [1], [2], [3]]
WHISPER = qk(Rows("q_proj.weight", Q, bias="q_proj.bias"), Rows("k_proj.weight", Q))
XLNET = Truth(
    {
        "q": Rows("q", EACH, dim=1),
        "k": Rows("k", EACH, dim=1),
        "r": Rows("r", EACH, dim=1),
        "r_w_bias": Rows("r_w_bias", EACH),
        "r_r_bias": Rows("r_r_bias", EACH),
    },
    [("q", "k"), ("r_w_bias", "k"), ("q", "r"), ("r_r_bias", "r")],
)
BIASED = qk(Rows("q_proj.weight", Q, bias="q_proj.bias"), Rows("k_proj.weight", K, bias="k_proj.bias"))
GATED = qk(Rows("q_proj.weight", at(8, 0, 16, 32, 48)), Rows("k_proj.weight", K))
KEY_ALONE = Truth({"k": Rows("k_proj.weight", K)}, [("k",)])
IP = Truth(
    {
        "q": Rows("q_proj.weight", Q),
        "k": Rows("k_proj.weight", Q),
        "k_ip": Rows("processor.to_k_ip.0.weight", Q),
    },
    [("q", "k"), ("q", "k_ip")],
)
JOINT = Truth(
    {
        "q": Rows("to_q.weight", Q, bias="to_q.bias"),
        "k": Rows("to_k.weight", Q, bias="to_k.bias"),
        "add_q": Rows("add_q_proj.weight", Q, bias="add_q_proj.bias"),
        "add_k": Rows("add_k_proj.weight", Q, bias="add_k_proj.bias"),
    },
    [("q", "k"), ("q", "add_k"), ("add_q", "k"), ("add_q", "add_k")],
)
XL = "layer.{}.rel_attn"

CASES = [
    Case(
        "Whisper, a bias on the query only",
        lambda: Model(HF, WhisperAttention(), WhisperAttention()),
        layers(HF, WHISPER, WHISPER),
    ),
    Case(
        "XLNet, additive biases and a term of positions",
        lambda: Model(XL, XLNetRelativeAttention(), XLNetRelativeAttention(), arrange=sequence_first),
        layers(XL, XLNET, XLNET),
    ),
    Case(
        "GPT-OSS, sinks",
        lambda: Model(HF, GptOssAttention(), GptOssAttention()),
        layers(HF, BIASED, BIASED),
    ),
    Case(
        "Gemma 2, soft cap",
        lambda: Model(HF, Gemma2Attention(), Gemma2Attention()),
        layers(HF, PLAIN, PLAIN),
    ),
    Case("Qwen3-Next, gates, no norm", lambda: Model(HF, Gated(), Gated()), layers(HF, GATED, GATED)),
    Case(
        "Swin v2, cosine",
        lambda: Model(HF, CosineAttention(), Plain()),
        {"model.layers.1.self_attn": PLAIN},
        {"model.layers.0.self_attn": "norm"},
    ),
    Case("norm of the query alone", lambda: Model(HF, QueryNorm(), Plain()), layers(HF, KEY_ALONE, PLAIN)),
    Case("IP-Adapter, two sets of keys", lambda: Model(HF, TwoSetsOfKeys(), Plain()), layers(HF, IP, PLAIN)),
    Case(
        "Stable Diffusion 3, two streams",
        lambda: Model(HF, JointAttention(), JointAttention()),
        layers(HF, JOINT, JOINT),
    ),
]
