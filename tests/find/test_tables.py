"""Tables know the classes of reviewed packages; every other attention is pending until it is measured."""

from __future__ import annotations

import functools
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention

from quacklr import QKClip, QuacK, logit_paths
from quacklr.find.discover import found_by_table
from quacklr.find.finding import QK_NORM
from quacklr.find.tables import by_table
from quacklr.find.tables.facts import is_trusted
from quacklr.find.tables.naming import QUERY_AND_KEY
from stand_ins_kit import HF, Known, Model, Plain, called, linear


@called("LlamaAttention", "transformers.models.llama")
class Attention(nn.Module):
    """Separate projections under any two names."""

    def __init__(self, q: str = "q_proj", k: str = "k_proj", q_rows: int = 32, k_rows: int = 16, **sizes: int) -> None:
        super().__init__()
        self.names, self.d = (q, k), 8
        self.add_module(q, linear(q_rows))
        self.add_module(k, linear(k_rows))
        self.v_proj = linear(k_rows)
        for name, size in (sizes or {"head_dim": 8, "num_heads": 4}).items():
            setattr(self, name, size)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            self.get_submodule(n)(x).unflatten(-1, (-1, self.d)).transpose(1, 2) for n in (*self.names, "v_proj")
        )
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("names", QUERY_AND_KEY, ids=lambda names: names[0])
def test_all_the_usual_names_are_read(names: tuple[str, str]) -> None:
    groups = 4 if names[0] == "to_q" else 2
    finding = by_table(Attention(*names, k_rows=8 * groups))
    assert finding is not None
    (path,) = finding.paths
    assert [(weight.name, weight.blocks) for weight in path.weights] == [("q", 4), ("k", groups)]
    assert path.weights[1].block_of_row.tolist() == torch.arange(groups).repeat_interleave(8).tolist()


@pytest.mark.parametrize(
    "sizes",
    [
        *({"head_dim": 8}, {"num_heads": 4}, {"attention_head_size": 8, "num_attention_heads": 4}, {"n_head": 4}),
        *({"head_dim": 8, "num_key_value_heads": 2}, {"n_heads": 4, "n_kv_heads": 2}, {"key_value_proj_dim": 8}),
    ],
    ids=str,
)
def test_sizes_are_read_under_many_names(sizes: dict[str, int]) -> None:
    finding = by_table(Attention("q_proj", "k_proj", 32, 16, **sizes))
    assert finding is not None
    assert [(path.heads, path.weights[1].blocks) for path in finding.paths] == [(4, 2)]


def test_the_rows_of_a_gate_in_the_query_projection_are_on_no_path() -> None:
    config = Qwen3NextConfig(hidden_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    attention: Any = Qwen3NextAttention(config, layer_idx=0)
    attention.q_norm = attention.k_norm = nn.Identity()  # with its norms there is nothing to control
    finding = by_table(attention)
    assert finding is not None
    ((q, k),) = (path.weights for path in finding.paths)
    assert q.block_of_row.view(4, 2, 8)[:, 0].tolist() == [[head] * 8 for head in range(4)]
    assert q.block_of_row.view(4, 2, 8)[:, 1].eq(-1).all()
    assert k.block_of_row.tolist() == [0] * 8 + [1] * 8


@pytest.mark.parametrize(
    ("attention", "why"),
    [
        (Attention(head_dim=7), "queries have 32 rows, keys 16, and a head 7, which does not divide"),
        (Attention(head_dim=8, num_heads=8), r"a head 8, but it says it has \[8\] heads"),
        (Attention(head_dim=8, num_kv_heads=4), r"a head 8, but it says it has \[4\] heads"),
        (Attention(q_rows=48, k_rows=32, head_dim=8), "which does not divide"),
        (Attention(hidden_size=32), "does not say how many heads"),
        (Attention("to_q", "to_k"), "it may repeat each key for consecutive heads"),
    ],
    ids=["head size", "heads", "groups", "heads by groups", "nothing said", "tiled or not"],
)
def test_sizes_that_contradict_each_other_are_not_guessed(attention: nn.Module, why: str) -> None:
    with pytest.raises(ValueError, match=rf"{why}.*, so it has to be measured"):
        logit_paths(Model(HF, attention))


def test_a_config_that_does_not_mention_so_many_heads_is_not_believed() -> None:
    attention: Any = Attention(head_dim=8)
    attention.config = SimpleNamespace(num_attention_heads=3, swa_num_attention_heads=[5, 3])
    with pytest.raises(ValueError, match="so 4 heads, which its config does not mention"):
        logit_paths(Model(HF, attention))
    attention.config.swa_num_attention_heads = [5, 4]
    assert len(logit_paths(Model(HF, attention))) == 1


def known(**parts: nn.Module) -> Any:
    """An attention that a table has, with parts that the table does not expect."""
    attention = Known()
    for name, part in parts.items():
        setattr(attention, name, part)
    return attention


def hooked() -> nn.Module:
    attention = known()
    attention.q_proj.register_forward_hook(lambda _module, _args, out: F.normalize(out, dim=-1))
    return attention


@called("LlamaAttention", "transformers.models.llama")
class Unit(Plain):
    """Cosine attention, by a function."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return super().attend(F.normalize(query, dim=-1), F.normalize(key, dim=-1), value)


@called("LlamaAttention", "transformers.models.llama")
class Tiled(Plain):
    """Head h reads key group h % groups."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key.repeat(1, 2, 1, 1), value.repeat(1, 2, 1, 1))


@called("LlamaAttention", "transformers.models.llama")
class Elementwise(Plain):
    """Has the names, but no softmax."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.q_proj(x)) * x


@pytest.mark.parametrize(
    ("attention", "why"),
    [
        (known(k_conv=nn.Conv1d(8, 8, 3)), "besides q_proj and k_proj it has k_conv"),
        (known(norm=nn.RMSNorm(8)), "besides q_proj and k_proj it has norm"),
        (known(k_norm=nn.RMSNorm(8)), "only queries or only keys have a norm"),
        (hooked(), "q_proj is not a projection that we can read"),
        (Unit(), "its code calls normalize"),
        (Tiled(), "it may repeat each key for consecutive heads, or all keys one after another"),
        (Elementwise(), "its forward calls no softmax"),
    ],
    ids=lambda each: "" if isinstance(each, nn.Module) else each,
)
def test_a_form_of_a_class_that_its_table_does_not_have_is_pending_with_the_reason(
    attention: nn.Module, why: str
) -> None:
    model = Model(HF, Known(), attention)
    found = found_by_table(model)
    assert [finding.pending for finding in found.values()] == [False, True]
    assert found["model.layers.1.self_attn"].note == why
    with pytest.raises(ValueError, match=rf"^model\.layers\.1\.self_attn: {why}, so it has to be measured; give the"):
        logit_paths(model)


class CausalSelfAttention(nn.Module):
    """Has a class name that litgpt has too, and nanoGPT's names; but each head's q, k, v are together."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.n_head, self.n_embd = linear(96), 4, 32

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(x).unflatten(-1, (self.n_head, 3, -1)).transpose(1, 2).unbind(3)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def test_an_attention_that_no_table_has_is_pending_whatever_its_class_is_called() -> None:
    model = Model(HF, Known(), CausalSelfAttention())
    assert [finding.origin for finding in found_by_table(model).values()] == ["by table", "pending"]
    with pytest.raises(ValueError, match=r"no table has the class CausalSelfAttention, .*logit_paths\(model, batch\)"):
        logit_paths(model)


def test_the_cross_attention_of_gpt2_is_read_and_measured() -> None:
    """Its c_attn is [k | v], and a second projection makes queries."""
    config = GPT2Config(n_embd=48, n_layer=1, n_head=4, vocab_size=90, add_cross_attention=True)
    model: Any = GPT2LMHeadModel(config)  # type: ignore[no-untyped-call]
    batch = {"input_ids": torch.randint(90, (1, 6)), "encoder_hidden_states": torch.randn(1, 5, 48)}
    assert [path.weights[1].name for path in logit_paths(model, batch)] == [
        *("transformer.h.0.attn.k", "transformer.h.0.crossattention.k")
    ]


def user_forward(self: Any, hidden_states: Tensor) -> Tensor:
    return Plain.forward(self, hidden_states)


def test_a_forward_or_a_processor_of_the_user_is_not_trusted() -> None:
    attention: Any = Known()
    assert is_trusted(attention)
    attention.forward = MethodType(user_forward, attention)
    assert not is_trusted(attention)
    finding = by_table(attention)
    assert finding is not None
    assert finding.pending
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Known, "forward", user_forward)
        assert not is_trusted(Known())
    attention = Known()
    attention.processor = Model  # as in diffusers, an object of this class attends
    assert not is_trusted(attention)


def test_a_wrapped_forward_is_trusted() -> None:
    """As accelerate wraps it for a device_map, and QKClip to record logits."""

    def on_device(module: Any, *args: Any) -> Any:
        return module._old_forward(*args)

    attention: Any = Known()
    attention._old_forward = attention.forward
    attention.forward = functools.update_wrapper(functools.partial(on_device, attention), attention.forward)
    assert is_trusted(attention)
    model = Model(HF, Known())
    with QKClip(model, torch.optim.SGD(model.parameters(), lr=0.1)):
        assert is_trusted(model.get_submodule("model.layers.0.self_attn"))


def test_a_layer_with_qk_norm_is_left_alone_and_a_model_of_such_layers_needs_no_quack() -> None:
    normed = [known(q_norm=nn.RMSNorm(8), k_norm=nn.RMSNorm(8)) for _ in range(2)]
    model = Model(HF, Known(), *normed)
    assert logit_paths(model).left_alone == dict.fromkeys(map(HF.format, (1, 2)), QK_NORM)
    quack = QuacK(model, torch.optim.SGD(model.parameters(), lr=0.1), tau=1.0)
    assert repr(quack).endswith("left alone:\n  model.layers.{1-2}.self_attn: " + QK_NORM)
    with pytest.raises(ValueError, match=r"nothing for QuacK to control in its 2 .*QK norm.*; train it without"):
        logit_paths(Model(HF, *normed))


def test_what_has_nothing_to_do_with_attention_is_not_mentioned() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4), nn.Conv1d(4, 4, 3), nn.Embedding(4, 4))
    assert all(by_table(module) is None for module in model.modules())
