"""Source of a file of models, for the commands that take one: `quacklr inspect` and `quacklr check`."""

from __future__ import annotations

MODELS = '''
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from quacklr import mha, packed

class Attention(nn.Module):
    """Rows of qkv are each head's q, k, v."""
    def __init__(self, heads=4, width=16):
        super().__init__()
        self.num_heads, self.qkv = heads, nn.Linear(width, 3 * width, bias=False)
    def forward(self, x_BTD):
        heads = self.qkv(x_BTD).unflatten(2, (self.num_heads, 3, -1)).transpose(1, 2)
        return scaled_dot_product_attention(*heads.unbind(3)).transpose(1, 2).flatten(2)

class BoastfulAttention(nn.Module):
    """Has half as many heads as it says."""
    def __init__(self):
        super().__init__()
        self.num_heads = 4
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(16, 16, bias=False) for _ in range(3))
    def forward(self, x_BTD):
        heads = (of(x_BTD).unflatten(2, (2, 8)).transpose(1, 2) for of in (self.q_proj, self.k_proj, self.v_proj))
        return scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
for part in (BoastfulAttention, BoastfulAttention.forward):
    part.__module__ = "transformers.models.boastful"  # a package with tables

class UnheardOfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.kv, self.query_stream = nn.Linear(16, 32), nn.Linear(16, 16)
    def forward(self, x_BTD):
        qkv = self.query_stream(x_BTD), *self.kv(x_BTD).chunk(2, 2)
        heads = (part.unflatten(2, (2, 8)).transpose(1, 2) for part in qkv)
        return scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)

class Declared(nn.Module):
    """What is measured is within it."""
    def __init__(self):
        super().__init__()
        self.inner = Attention()
    def forward(self, x_BTD): return self.inner(x_BTD)
    def logit_paths(self):
        return mha(*packed(self.inner.qkv, ("q", 1, 4), ("k", 1, 4), (None, 1, 4), repeat=4))

class WronglyDeclared(Attention):
    def logit_paths(self):
        return mha(*packed(self.qkv, ("q", 1, 4), (None, 1, 4), ("k", 1, 4), repeat=4))

def stack(cls, **options): return nn.Sequential(*(cls(**options) for _ in range(3)))
def misread(): return stack(BoastfulAttention), torch.randn(2, 5, 16)
def unheard_of(): return stack(UnheardOfAttention), torch.randn(2, 5, 16)
def declared():
    print("made")
    return stack(Declared), torch.randn(2, 5, 16)
def wrongly_declared(): return stack(WronglyDeclared), torch.randn(2, 5, 16)
def half_frozen():
    model = stack(nn.MultiheadAttention, embed_dim=16, num_heads=2, add_bias_kv=True)
    model[0].requires_grad_(False)
    return model
def silent():
    model = stack(nn.MultiheadAttention, embed_dim=16, num_heads=2)
    nn.init.zeros_(model[1].in_proj_weight)
    return model
def without(): return nn.Linear(2, 2)
def raises(): raise RuntimeError("the disk is full")
def returns_text(): return "a model"
def half_known(): return nn.Sequential(nn.MultiheadAttention(16, 2), UnheardOfAttention())
def unheard_of_misfit(): return stack(UnheardOfAttention), torch.randn(2, 5, 17)
def misfit(): return stack(Declared), torch.randn(2, 5, 17)
'''
