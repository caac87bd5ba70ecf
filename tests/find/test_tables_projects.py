"""Table entries for the classes of single projects, on stand-ins with their names and parts; the measurement judges."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quacklr import logit_paths
from quacklr.find.finding import differences
from quacklr.find.tables import by_table
from stand_ins_kit import called, linear

H, D, W = 4, 8, 32
NOPE, ROPE, VALUE, LATENT = 6, 4, 5, 10


def attended(q: Tensor, k: Tensor, v: Tensor, d: int = D) -> Tensor:
    q, k, v = (x.unflatten(-1, (-1, d)).transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@called("MultiheadLatentAttention", "litgpt.model")
class LitGPTLatent(nn.Module):
    """litgpt's MLA: transformers' names but for the norms on the latents."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(n_head=H, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, v_head_dim=VALUE)
        self.q_a_proj, self.q_a_norm, self.q_b_proj = linear(12), nn.RMSNorm(12), linear(H * (NOPE + ROPE), 12)
        self.kv_a_proj_with_mqa, self.kv_a_norm = linear(LATENT + ROPE), nn.RMSNorm(LATENT)
        self.kv_b_proj, self.proj = linear(H * (NOPE + VALUE), LATENT), linear(W, H * VALUE)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_b_proj(self.q_a_norm(self.q_a_proj(x))).unflatten(-1, (H, -1)).transpose(1, 2)
        latent, rope = self.kv_a_proj_with_mqa(x).split([LATENT, ROPE], -1)
        kv = self.kv_b_proj(self.kv_a_norm(latent)).unflatten(-1, (H, -1)).transpose(1, 2)
        k, v = kv.split([NOPE, VALUE], -1)
        k = torch.cat([k, rope[:, None].expand(-1, H, -1, -1)], -1)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@called("OLMoSequentialBlock", "olmo.model")
class OLMoBlock(nn.Module):
    """OLMo's: [q|k|v] in a block that has the mlp too; how many keys there are is a property of its config."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(n_heads=H, n_kv_heads=None, effective_n_kv_heads=groups)
        self.sizes = [H * D, groups * D, groups * D]
        self.att_proj, self.attn_out = nn.Linear(W, sum(self.sizes)), linear(W)
        self.attn_norm, self.ff_norm, self.ff_proj, self.ff_out = nn.RMSNorm(W), nn.RMSNorm(W), linear(W), linear(W)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn_out(attended(*self.att_proj(self.attn_norm(x)).split(self.sizes, -1)))
        return x + self.ff_out(self.ff_proj(self.ff_norm(x)).relu())


@called("GroupedQueryAttention", "llmfoundry.models.layers.attention")
class LLMFoundry(nn.Module):
    """llm-foundry's: [q|k|v], or separate Wq, Wk and Wv."""

    def __init__(self, groups: int, fused: bool = True) -> None:
        super().__init__()
        self.n_heads, self.kv_n_heads, self.head_dim = H, groups, D
        self.sizes = [H * D, groups * D, groups * D]
        self.out_proj = linear(W)
        if fused:
            self.Wqkv = linear(sum(self.sizes))
        else:
            self.Wq, self.Wk, self.Wv = (linear(size) for size in self.sizes)

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "Wqkv"):
            return self.out_proj(attended(*self.Wqkv(x).split(self.sizes, -1)))
        return self.out_proj(attended(self.Wq(x), self.Wk(x), self.Wv(x)))


@called("FusedAttentionV2", "olmo_core.nn.attention")
class OLMoCore(nn.Module):
    """OLMo-core's: [q|k|v], and a gate of the output."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = H, groups, D
        self.sizes = [H * D, groups * D, groups * D]
        self.w_qkv, self.w_out, self.w_g = linear(sum(self.sizes)), linear(W), linear(W)

    def forward(self, x: Tensor) -> Tensor:
        return self.w_out(attended(*self.w_qkv(x).split(self.sizes, -1)) * self.w_g(x).sigmoid())


MAKE: list[Callable[[], nn.Module]] = [
    LitGPTLatent,
    *(lambda g=g: OLMoBlock(g) for g in (1, 2, 4)),
    *(lambda g=g: OLMoCore(g) for g in (2, 4)),
    *(lambda g=g, fused=fused: LLMFoundry(g, fused) for g in (1, 2) for fused in (True, False)),
]


@pytest.mark.parametrize("make", MAKE)
def test_an_entry_for_a_projects_class_is_what_is_measured(make: Callable[[], nn.Module]) -> None:
    module = make()
    found = by_table(module)
    assert found is not None
    assert found.paths
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    assert not differences(found.paths, logit_paths(module, torch.randn(2, 5, W), rules=False), names)
