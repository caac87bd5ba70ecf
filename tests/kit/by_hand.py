"""Attention logits written out by hand from weights and hidden states, and what the monitor should say of them.

Nothing here calls quacklr or a model's attention. Each `by hand` function takes an attention module of transformers
and what went into it, and gives a Written: logits in float64, values, and the output matrix, so that every use can
check that the attention so written gives what the model's own gave (`check`): the judge is judged first.

Shapes: B batch, H heads, I queries, J keys, T tokens, D width, K head size.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Call = tuple[dict[str, Any], Tensor]  # what went into an attention, by name, and what came out
STATISTICS = ("max", "entropy", "mean_change", "sink")


@dataclass(frozen=True)
class Written:
    """One attention, written out. `extra` is a learned logit a head that is no key."""

    logits_BHIJ: Tensor
    values_BHJK: Tensor
    out_DD: Tensor
    out_bias_D: Tensor | None = None
    extra_H: Tensor | None = None

    def check(self, allowed_BHIJ: Tensor, given_BID: Tensor) -> None:
        """What the attention so written gives is what the model's own gave, for queries that look at something."""
        masked = self.logits_BHIJ.masked_fill(~allowed_BHIJ, -torch.inf)
        if self.extra_H is not None:
            masked = torch.cat([masked, self.extra_H[:, None, None].expand(*masked.shape[:3], 1)], dim=3)
        shares = masked.softmax(3)[..., : self.logits_BHIJ.shape[3]]
        out = (shares @ self.values_BHJK).transpose(1, 2).flatten(2) @ self.out_DD.T
        out = out if self.out_bias_D is None else out + self.out_bias_D
        looks_BI = allowed_BHIJ.any(3).any(1)
        assert looks_BI.any()
        torch.testing.assert_close(out[looks_BI], given_BID.double()[looks_BI], rtol=1e-4, atol=1e-4)


def statistics(now: Written, allowed_BHIJ: Tensor, before: Written | None = None) -> dict[str, Tensor]:
    """The four, one query at a time, in float32."""
    B, H, queries, _ = now.logits_BHIJ.shape
    seen = allowed_BHIJ.expand_as(now.logits_BHIJ)
    found: dict[str, list[float]] = {"max": [], "entropy": [], "mean_change": [], "sink": []}
    for h in range(H):
        extra = now.logits_BHIJ.new_empty(0) if now.extra_H is None else now.extra_H[h : h + 1]
        largest, entropies, changes, sinks = -torch.inf, [], [], []
        for b in range(B):
            first = int(seen[b, h].any(0).nonzero()[0])
            for i in range(queries):
                keys = seen[b, h, i].nonzero().flatten()
                if not len(keys):
                    continue
                logits = now.logits_BHIJ[b, h, i, keys]
                largest = max(largest, float(logits.max()))
                shares = torch.cat([logits, extra]).softmax(0)
                entropies.append(float(torch.special.entr(shares).sum()))
                if before is not None:
                    changes += (logits - before.logits_BHIJ[b, h, i, keys]).abs().tolist()
                if len(keys) > 1:
                    sinks.append(float(shares[: len(keys)][keys == first].sum() + shares[len(keys) :].sum()))
        found["max"].append(largest)
        found["entropy"].append(sum(entropies) / len(entropies))
        found["mean_change"].append(sum(changes) / len(changes) if changes else torch.nan)
        found["sink"].append(sum(sinks) / len(sinks) if sinks else torch.nan)
    return {name: torch.tensor(values) for name, values in found.items()}


def assert_measured(stats: Any, expected: dict[str, Tensor], where: str) -> None:
    for name in STATISTICS:
        measured, wanted = getattr(stats, name), expected[name]
        same = torch.allclose(measured, wanted, rtol=1e-4, atol=1e-5, equal_nan=True)
        assert same, f"{where} {name}: {measured.tolist()}, by hand {wanted.tolist()}"


def allowed(mask_BT: Tensor, *, causal: bool = True, window: int | None = None) -> Tensor:
    """(B, 1, T, T): the pairs a query may look at, out of the padding mask of a batch (1: a real token)."""
    T = mask_BT.shape[1]
    i, j = torch.arange(T)[:, None], torch.arange(T)[None]
    pairs = (j <= i) if causal else torch.ones(T, T, dtype=torch.bool)
    if window is not None:
        pairs = pairs & (i - j < window)
    return pairs[None, None] & mask_BT.bool()[:, None, None]


def calls(model: nn.Module, names: list[str], run: Callable[[], object]) -> dict[str, list[Call]]:
    """What goes into each of these modules while `run` runs, and the first thing that comes out."""
    seen: dict[str, list[Call]] = {name: [] for name in names}

    def listen(name: str) -> Callable[..., None]:
        def heard(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            given = dict(kwargs) | ({"hidden_states": args[0]} if args else {})
            seen[name].append((given, (out[0] if isinstance(out, tuple) else out).detach()))

        return heard

    with ExitStack() as stack:
        for name in names:
            handle = model.get_submodule(name).register_forward_hook(listen(name), with_kwargs=True)
            stack.callback(handle.remove)
        run()
    return seen


def linear(module: nn.Module, x: Tensor) -> Tensor:
    """nn.Linear, or GPT-2's Conv1D, whose weight lies on its side."""
    weight, bias = _double(module.weight), _double(module.bias)
    assert weight is not None
    y = x @ (weight.T if isinstance(module, nn.Linear) else weight)
    return y if bias is None else y + bias


def _double(value: object) -> Tensor | None:
    assert value is None or isinstance(value, Tensor)
    return None if value is None else value.detach().double()


def heads(x_BTD: Tensor, count: int) -> Tensor:
    return x_BTD.unflatten(2, (count, -1)).transpose(1, 2)


def turned(x_BHTK: Tensor, cos_BTK: Tensor, sin_BTK: Tensor) -> Tensor:
    """Each pair (n, n + K/2) turned by the angle n; cos and sin of K/2 angles, or of those twice."""
    half = x_BHTK.shape[3] // 2
    cos, sin = (each.double()[:, None, :, :half] for each in (cos_BTK, sin_BTK))
    one, other = x_BHTK[..., :half], x_BHTK[..., half:]
    return torch.cat([one * cos - other * sin, other * cos + one * sin], dim=3)


def rms(x: Tensor, norm: Any) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt() * norm.weight.detach().double()


def grouped(a: Any, given: dict[str, Any]) -> Written:
    """Llama, Gemma 2 (scale and soft-cap of its own) and GPT-OSS (a learned sink a head): q, k, v; rotary; groups."""
    x, (cos, sin), config = given["hidden_states"].detach().double(), given["position_embeddings"], a.config
    q = turned(heads(linear(a.q_proj, x), config.num_attention_heads), cos, sin)
    k = turned(heads(linear(a.k_proj, x), config.num_key_value_heads), cos, sin)
    v = heads(linear(a.v_proj, x), config.num_key_value_heads)
    size = config.num_attention_heads // config.num_key_value_heads
    logits = torch.stack([q[:, h] @ k[:, h // size].mT for h in range(q.shape[1])], dim=1)
    logits = logits / getattr(config, "query_pre_attn_scalar", config.head_dim) ** 0.5
    cap, sinks = getattr(config, "attn_logit_softcapping", None), getattr(a, "sinks", None)
    logits = logits if cap is None else cap * (logits / cap).tanh()
    return Written(
        logits, v.repeat_interleave(size, 1), a.o_proj.weight.detach().double(), _double(a.o_proj.bias), _double(sinks)
    )


def fused(a: Any, given: dict[str, Any]) -> Written:
    """GPT-2: one matrix for q, k and v, with biases."""
    x = given["hidden_states"].detach().double()
    q, k, v = (heads(part, a.num_heads) for part in linear(a.c_attn, x).chunk(3, dim=2))
    out: Tensor = a.c_proj.weight.detach().double().T
    return Written(q @ k.mT / q.shape[3] ** 0.5, v, out, a.c_proj.bias.detach().double())


def latent(a: Any, given: dict[str, Any]) -> Written:
    """DeepSeek-V3: q and k from latents with norms; part of each turned, in pairs (2n, 2n + 1), its key shared."""
    x, (cos, sin), c = given["hidden_states"].detach().double(), given["position_embeddings"], a.config
    assert c.rope_interleave
    assert c.rope_parameters["rope_type"] == "default"
    q = heads(linear(a.q_b_proj, rms(linear(a.q_a_proj, x), a.q_a_layernorm)), c.num_attention_heads)
    down = linear(a.kv_a_proj_with_mqa, x)
    kv = heads(linear(a.kv_b_proj, rms(down[..., : c.kv_lora_rank], a.kv_a_layernorm)), c.num_attention_heads)
    nope, order = c.qk_nope_head_dim, [*range(0, c.qk_rope_head_dim, 2), *range(1, c.qk_rope_head_dim, 2)]
    q_rope = turned(q[..., nope:][..., order], cos, sin)
    k_rope = turned(down[:, None, :, c.kv_lora_rank :][..., order], cos, sin)
    logits = q[..., :nope] @ kv[..., :nope].mT + q_rope @ k_rope.mT
    return Written(logits / (nope + c.qk_rope_head_dim) ** 0.5, kv[..., nope:], a.o_proj.weight.detach().double(), None)


def shared(a: Any, given: dict[str, Any]) -> Written:
    """ALBERT; what comes out of it is also added to its input and normed."""
    x = given["hidden_states"].detach().double()
    q, k, v = (heads(linear(each, x), a.num_attention_heads) for each in (a.query, a.key, a.value))
    return Written(q @ k.mT / q.shape[3] ** 0.5, v, a.dense.weight.detach().double(), _double(a.dense.bias))


def multihead(a: Any, x_BTD: Tensor, keys_BTD: Tensor | None = None) -> Written:
    """nn.MultiheadAttention, its inputs batch first whatever it takes."""
    x = x_BTD.detach().double()
    keys = x if keys_BTD is None else keys_BTD.detach().double()
    if a.in_proj_weight is not None:
        weights: list[Tensor] = [each.detach().double() for each in a.in_proj_weight.chunk(3)]
    else:
        weights = [each.detach().double() for each in (a.q_proj_weight, a.k_proj_weight, a.v_proj_weight)]
    biases = [0, 0, 0] if a.in_proj_bias is None else [each.detach().double() for each in a.in_proj_bias.chunk(3)]
    q, k, v = (y @ w.T + b for y, w, b in zip((x, keys, keys), weights, biases, strict=True))
    if a.bias_k is not None and a.bias_v is not None:
        k, v = (
            torch.cat([y, b.detach().double().expand(len(y), 1, a.embed_dim)], 1)
            for y, b in ((k, a.bias_k), (v, a.bias_v))
        )
    if a.add_zero_attn:
        k, v = (torch.cat([y, y.new_zeros(len(y), 1, a.embed_dim)], 1) for y in (k, v))
    q, k, v = (heads(y, a.num_heads) for y in (q, k, v))
    bias = None if a.out_proj.bias is None else a.out_proj.bias.detach().double()
    return Written(q @ k.mT / a.head_dim**0.5, v, a.out_proj.weight.detach().double(), bias)
