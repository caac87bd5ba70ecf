"""QuacK for all products of weights of a Llama: the logits, values times output projection, and those of the MLP.

The rule of QuacK is about products of weights. An attention has a second one, o[h] . v[h]; an MLP has two, down . up
and down . gate. In our study, rates for all of them gave a lower loss than rates for the logits alone (see the claim
"everywhere" in docs/choosing.md). In the output projection and in down, a block is a range of columns: `dim=1`.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quacklr import LogitPath, QuacK, Weight, logit_paths, packed

HEADS, GROUPS, SIZE = 4, 2, 8
CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=HEADS,
    num_key_value_heads=GROUPS,
    head_dim=SIZE,
)


def value_path(name: str, attention: Any) -> LogitPath:
    """o[h] . v[g(h)]: a group of heads reads the same rows of v."""
    (v,) = packed(attention.v_proj, (f"{name}.v", GROUPS, SIZE))
    o = Weight(f"{name}.o", attention.o_proj.weight, torch.arange(HEADS * SIZE) // SIZE, dim=1)
    return LogitPath((o, v), HEADS)


def mlp_paths(name: str, mlp: Any) -> list[LogitPath]:
    """down . up and down . gate, with one block each."""
    one_block = torch.zeros(mlp.up_proj.out_features, dtype=torch.long)
    down = Weight(f"{name}.down", mlp.down_proj.weight, one_block, dim=1)
    up, gate = (Weight(f"{name}.{role}", getattr(mlp, f"{role}_proj").weight, one_block) for role in ("up", "gate"))
    return [LogitPath((down, up), heads=1), LogitPath((down, gate), heads=1)]


def all_paths(model: Any) -> list[LogitPath]:
    paths = logit_paths(model)
    for number, layer in enumerate(model.model.layers):
        paths.append(value_path(f"layers.{number}", layer.self_attn))
        paths += mlp_paths(f"layers.{number}", layer.mlp)
    return paths


def main() -> None:
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(CONFIG)  # type: ignore[no-untyped-call]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    quack = QuacK(all_paths(model), optimizer, tau=1.0)
    for _ in range(10):
        tokens = torch.randint(64, (4, 16))
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(quack)

    before = quack.rates()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(10)
    after = quack.rates()
    changed = {name for name in before if not torch.allclose(before[name], after[name])}
    assert changed == {"layers.0.up", "layers.0.gate"}, "a larger down lowers the rates of up and gate"
    assert torch.allclose(after["layers.0.up"], before["layers.0.up"] / 10)


if __name__ == "__main__":
    main()
