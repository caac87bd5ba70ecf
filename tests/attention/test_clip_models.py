"""QK clip in training tiny models of transformers and torch is Kimi K2's, written out head by head in kimi.py."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import by_hand
import kimi
from models import assert_equal
from quacklr import QKClip
from tiny_models import tiny_config

BATCH, TOKENS, HEADS = 2, 9, 4
Batch = dict[str, Tensor]
Maxima = dict[str, list[float]]
SGD = (torch.optim.SGD, {"lr": 0.1})
ADAMW = (torch.optim.AdamW, {"lr": 1e-2, "eps": 1e-3})  # a larger eps: the rounding of a tiny gradient decides no sign


@dataclass(frozen=True)
class Kind:
    """A type of model, its attentions, how their logits are written by hand, and how kimi.py clips one of them."""

    model_type: str
    by_hand: Callable[[Any, dict[str, Any]], by_hand.Written]
    clip: Callable[[kimi.State, str, list[float], float], None]
    names: tuple[str, ...] = ("model.layers.0.self_attn", "model.layers.1.self_attn")
    changes: dict[str, Any] = field(default_factory=dict)
    causal: bool = True


def grouped(state: kimi.State, name: str, maxima: list[float], threshold: float) -> None:
    q, k = (kimi.Rows((f"{name}.{role}_proj.weight",), size=16, stride=16) for role in "qk")
    group = HEADS // (len(state[k.names[0]]) // 16)
    if group == 1:
        kimi.mha(state, q, k, maxima, threshold)
    else:
        kimi.gqa(state, q, k, group, maxima, threshold)


def fused(state: kimi.State, name: str, maxima: list[float], threshold: float) -> None:
    names = (f"{name}.c_attn.weight", f"{name}.c_attn.bias")
    q, k = (kimi.Rows(names, size=16, stride=16, start=start, axis=1) for start in (0, 64))
    kimi.mha(state, q, k, maxima, threshold)


def latent(state: kimi.State, name: str, maxima: list[float], threshold: float) -> None:
    """A head of q_b is 12 rows without rotation, then 8 with; one of kv_b is 12 of the key, then 16 of the value."""
    qc = kimi.Rows((f"{name}.q_b_proj.weight",), size=12, stride=20)
    qr = kimi.Rows((f"{name}.q_b_proj.weight",), size=8, stride=20, start=12)
    kc = kimi.Rows((f"{name}.kv_b_proj.weight",), size=12, stride=28)
    kimi.mla(state, qc, qr, kc, maxima, threshold)


def packed(state: kimi.State, name: str, maxima: list[float], threshold: float) -> None:
    names = (f"{name}.in_proj_weight", f"{name}.in_proj_bias")
    q, k = (kimi.Rows(names, size=16, stride=16, start=start) for start in (0, 64))
    kimi.mha(state, q, k, maxima, threshold)


class Encoder(nn.Module):
    """torch's own, with an embedding, and a loss like those of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, 64), nn.Linear(64, 256)
        layer = nn.TransformerEncoderLayer(64, HEADS, 96, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.encoder(self.embedding(input_ids), src_key_padding_mask=attention_mask == 0)
        return {"loss": nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
KINDS = {
    "Llama": Kind("llama", by_hand.grouped, grouped, changes={"num_key_value_heads": 4}),
    "Llama, grouped": Kind("llama", by_hand.grouped, grouped),
    "Llama, one key": Kind("llama", by_hand.grouped, grouped, changes={"num_key_value_heads": 1}),
    "GPT-2": Kind("gpt2", by_hand.fused, fused, tuple(f"transformer.h.{i}.attn" for i in (0, 1)), NO_DROPOUT),
    "DeepSeek-V3": Kind("deepseek_v3", by_hand.latent, latent),
    "nn.TransformerEncoder": Kind(
        "torch",
        lambda a, given: by_hand.multihead(a, given["hidden_states"]),
        packed,
        tuple(f"encoder.layers.{i}.self_attn" for i in (0, 1)),
        causal=False,
    ),
}


def build(kind: Kind, implementation: str = "sdpa") -> Any:
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    if kind.model_type == "torch":
        model: Any = Encoder()
    else:
        model = auto.from_config(tiny_config(kind.model_type, **kind.changes), attn_implementation=implementation)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    return model.train()


def batches(step: int) -> list[Batch]:
    """With left padding, right padding and none."""
    draw, found = torch.Generator().manual_seed(step), []
    for padded in (slice(-3, None), slice(0, 3), slice(0)):
        tokens = torch.randint(0, 256, (BATCH, TOKENS), generator=draw)
        mask = torch.ones(BATCH, TOKENS, dtype=torch.long)
        mask[len(found) % BATCH, padded] = 0
        found.append({"input_ids": tokens, "attention_mask": mask, "labels": tokens})
    return found


def backward(model: Any, batch: Batch) -> None:
    model(**batch)["loss"].backward()


def maxima_by_hand(model: Any, kind: Kind, micro: list[Batch]) -> Maxima:
    """Of each head over all micro-batches; gradients pile up on the way, as in the step this is the judge of."""
    found: dict[str, list[Tensor]] = {name: [] for name in kind.names}
    for batch in micro:
        pairs = by_hand.allowed(batch["attention_mask"], causal=kind.causal)
        for name, heard in by_hand.calls(model, [*kind.names], partial(backward, model, batch)).items():
            written = kind.by_hand(model.get_submodule(name), heard[0][0])
            written.check(pairs, heard[0][1])
            found[name].append(written.logits_BHIJ.masked_fill(~pairs, -torch.inf).amax((0, 2, 3)))
    return {name: torch.stack(each).amax(0).tolist() for name, each in found.items()}


def assert_maxima(clip: QKClip, expected: Maxima) -> None:
    assert sorted(clip.max_logits()) == sorted(expected)
    for name, found in clip.max_logits().items():
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, torch.tensor(expected[name]), rtol=1e-4, atol=1e-4)


def middle(maxima: Maxima) -> float:
    """A threshold that some heads pass and others do not."""
    every = sorted(largest for each in maxima.values() for largest in each)
    return (every[len(every) // 2] + every[len(every) // 2 - 1]) / 2


def snapshot(model: nn.Module) -> kimi.State:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_trained_as_by_kimi(kind: Kind, optimizer: tuple[Any, dict[str, Any]], model: Any, steps: int = 3) -> None:
    twin = copy.deepcopy(model)
    make, options = optimizer
    mine, its = make(model.parameters(), **options), make(twin.parameters(), **options)
    threshold = middle(maxima_by_hand(twin, kind, batches(0)))
    clip = QKClip(model, mine, threshold)
    for step in range(steps):
        mine.zero_grad()
        its.zero_grad()
        expected = maxima_by_hand(twin, kind, batches(step))
        for batch in batches(step):
            backward(model, batch)
        assert_maxima(clip, expected)
        its.step()
        mine.step()
        assert_maxima(clip, expected)
        plain = snapshot(twin)
        with torch.no_grad():
            for name, maxima in expected.items():
                kind.clip(dict(twin.state_dict()), name, maxima, threshold)
        wanted, found = snapshot(twin), snapshot(model)
        assert step or any(max(each) > threshold for each in expected.values()), "nothing to clip"
        for name, value in found.items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-3, atol=1e-4, msg=f"{name} after step {step}")
            if step == 0:
                untouched = wanted[name] == plain[name]
                assert torch.equal(value[untouched], plain[name][untouched]), f"{name}: touched, and should not be"


@pytest.mark.parametrize(
    ("kind", "implementation", "optimizer"),
    [*((kind, "sdpa", SGD) for kind in KINDS), ("Llama, grouped", "eager", SGD), ("GPT-2", "eager", ADAMW)],
)
def test_three_steps_are_those_of_kimi_k2(kind: str, implementation: str, optimizer: Any) -> None:
    assert_trained_as_by_kimi(KINDS[kind], optimizer, build(KINDS[kind], implementation))


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_with_gradient_checkpointing_too(reentrant: bool) -> None:
    model = build(KINDS["Llama, grouped"])
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_trained_as_by_kimi(KINDS["Llama, grouped"], SGD, model)


@pytest.mark.parametrize("threshold", [float("inf"), 1e6])
def test_a_clip_that_scales_nothing_leaves_a_run_with_dropout_bitwise_as_it_was(threshold: float) -> None:
    def trained(watched: bool) -> kimi.State:
        model = build(Kind("gpt2", by_hand.fused, fused))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        torch.manual_seed(1)
        clip = QKClip(model, optimizer, threshold) if watched else None
        for step in range(3):
            optimizer.zero_grad()
            for batch in batches(step):
                backward(model, batch)
            optimizer.step()
            if clip and step == 1:
                assert all(bool((each > 0.1).all()) for each in clip.max_logits().values())
                clip.remove()
        for module in model.modules():
            assert not module._forward_hooks
            assert not module._forward_pre_hooks
        return snapshot(model) | {"random": torch.get_rng_state()}

    assert_equal(trained(True), trained(False))
