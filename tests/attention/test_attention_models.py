"""The monitor's statistics and QK clip's steps in tiny models of transformers and torch, written out by hand.

The judges are by_hand.py for logits and statistics, and kimi.py for the clip: Kimi K2's algorithm, head by head.
"""

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
from quacklr import LogitMonitor, QKClip
from tiny_models import tiny_config

BATCH, TOKENS, HEADS = 2, 11, 4
Batch = dict[str, Tensor]
Maxima = dict[str, list[float]]
Written = dict[str, tuple[by_hand.Written, Tensor]]  # an attention, and the pairs that may be looked at
Clip = Callable[[kimi.State, str, list[float], float], None]
SGD = (torch.optim.SGD, {"lr": 0.1})
ADAMW = (torch.optim.AdamW, {"lr": 1e-2, "eps": 1e-3})  # a larger eps: the rounding of a tiny gradient decides no sign


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


@dataclass(frozen=True)
class Kind:
    """A type of model, its attentions, how their logits are written by hand, and how kimi.py clips one of them."""

    model_type: str
    by_hand: Callable[[Any, dict[str, Any]], by_hand.Written] = by_hand.grouped
    clip: Clip = grouped
    names: tuple[str, ...] = ("model.layers.0.self_attn", "model.layers.1.self_attn")
    windows: tuple[int | None, ...] = (None, None)
    changes: dict[str, Any] = field(default_factory=dict)
    causal: bool = True


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


GPT2 = tuple(f"transformer.h.{i}.attn" for i in (0, 1))
NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
SLIDING = {"sliding_window": 4}
KINDS = {
    "Llama": Kind("llama", changes={"num_key_value_heads": 4}),
    "Llama, grouped": Kind("llama"),
    "Llama, one key": Kind("llama", changes={"num_key_value_heads": 1}),
    "GPT-2": Kind("gpt2", by_hand.fused, fused, GPT2, changes=NO_DROPOUT),
    "GPT-2, baddbmm": Kind("gpt2", by_hand.fused, fused, GPT2, changes={"reorder_and_upcast_attn": True}),
    "Gemma 2": Kind(
        "gemma2",
        windows=(4, None),
        changes={**SLIDING, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 9},
    ),
    "DeepSeek-V3": Kind("deepseek_v3", by_hand.latent, latent),
    "GPT-OSS": Kind("gpt_oss", windows=(4, None), changes=SLIDING),
    "nn.TransformerEncoder": Kind(
        "torch",
        lambda a, given: by_hand.multihead(a, given["hidden_states"]),
        packed,
        tuple(f"encoder.layers.{i}.self_attn" for i in (0, 1)),
        causal=False,
    ),
}


def build(kind: Kind, implementation: str = "sdpa") -> Any:
    """Tiny, with weights large enough that shares are uneven."""
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    if kind.model_type == "torch":
        return randomised(Encoder(), 0)
    config = tiny_config(kind.model_type, **kind.changes)
    return randomised(auto.from_config(config, attn_implementation=implementation), 0)


@torch.no_grad()
def randomised(model: nn.Module, seed: int, by: float = 0.2) -> Any:
    noise = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(by * torch.randn(parameter.shape, generator=noise))
    return model


def batches(step: int) -> list[Batch]:
    """With right padding, left padding and none."""
    draw, found = torch.Generator().manual_seed(step), list[Batch]()
    for padded in (slice(-3, None), slice(0, 3), slice(0)):
        tokens = torch.randint(0, 256, (BATCH, TOKENS), generator=draw)
        mask = torch.ones(BATCH, TOKENS, dtype=torch.long)
        mask[len(found) % BATCH, padded] = 0
        found.append({"input_ids": tokens, "attention_mask": mask, "labels": tokens})
    return found


RIGHT, LEFT, NONE = batches(0)


def written(model: Any, kind: Kind, batch: Batch, run: Callable[[Any, Batch], object]) -> Written:
    """Each attention by hand, checked against what the model's gives."""
    found = {}
    heard = by_hand.calls(model, [*kind.names], partial(run, model, batch))
    for name, window in zip(kind.names, kind.windows, strict=True):
        each = kind.by_hand(model.get_submodule(name), heard[name][0][0])
        pairs = by_hand.allowed(batch["attention_mask"], causal=kind.causal, window=window)
        each.check(pairs, heard[name][0][1])
        assert float((each.logits_BHIJ * pairs).std()) > 0.3
        found[name] = each, pairs
    return found


@torch.no_grad()
def evaluate(model: Any, batch: Batch) -> None:
    model(**batch)


def backward(model: Any, batch: Batch) -> None:
    model(**batch)["loss"].backward()


def assert_measured_as_by_hand(kind: Kind, implementation: str, batch: Batch) -> None:
    """Three measurements: the first, one after a random change that is not kept, and another since the first."""
    model = build(kind, implementation).eval()
    monitor, before = LogitMonitor(model, batch), None
    for keep in (True, False, True):
        now, stats = written(model, kind, batch, evaluate), monitor.measure(keep)
        assert list(stats) == [*kind.names]
        for name, (each, pairs) in now.items():
            expected = by_hand.statistics(each, pairs, before[name][0] if before else None)
            assert all(value.isfinite().all() for key, value in expected.items() if key != "mean_change" or before)
            by_hand.assert_measured(stats[name], expected, name)
        before = before or now
        randomised(model, seed=2 + keep, by=0.05)


@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize(
    ("kind", "implementation"),
    [
        *(("Llama, grouped", "eager"), ("Llama, grouped", "sdpa"), ("GPT-2, baddbmm", "eager"), ("Gemma 2", "eager")),
        *(("Gemma 2", "flex_attention"), ("DeepSeek-V3", "sdpa"), ("GPT-OSS", "eager")),
    ],
)
def test_the_four_statistics_are_those_of_the_attention_by_hand(kind: str, implementation: str) -> None:
    with torch.compiler.set_stance("force_eager"):  # compiling flex attention takes 15 seconds a model
        assert_measured_as_by_hand(KINDS[kind], implementation, LEFT)


@pytest.mark.parametrize("batch", [RIGHT, NONE], ids=["right padding", "no padding"])
def test_with_right_padding_and_without_padding_too(batch: Batch) -> None:
    assert_measured_as_by_hand(KINDS["Llama, grouped"], "sdpa", batch)


@torch.no_grad()
def test_alberts_shared_layer_is_measured_at_each_of_its_calls() -> None:
    import transformers

    auto: Any = transformers.AutoModel
    torch.manual_seed(0)
    model = auto.from_config(tiny_config("albert", num_hidden_layers=3), attn_implementation="eager")
    model, batch = randomised(model, 0).eval(), {name: LEFT[name] for name in ("input_ids", "attention_mask")}
    name = "encoder.albert_layer_groups.0.albert_layers.0.attention"
    monitor, before = LogitMonitor(model, batch), None
    pairs = by_hand.allowed(batch["attention_mask"], causal=False)
    for _ in range(2):
        attention, stats = model.get_submodule(name), monitor.measure()
        heard = by_hand.calls(model, [name, f"{name}.dense"], lambda: model(**batch))
        now = [by_hand.shared(attention, given) for given, _ in heard[name]]
        for each, (_, out) in zip(now, heard[f"{name}.dense"], strict=True):
            each.check(pairs, out)
        assert list(stats) == [name, f"{name}#2", f"{name}#3"]
        for i, measured in enumerate(stats.values()):
            expected = by_hand.statistics(now[i], pairs, before[i] if before else None)
            by_hand.assert_measured(measured, expected, f"call {i}")
        before = now
        randomised(model, seed=5, by=0.05)


@pytest.mark.parametrize("how", ["torch.compile(model)", "layers compiled", "gradient checkpointing"])
def test_a_changed_model_is_measured_as_the_plain_one(how: str) -> None:
    """Its names are those of the plain one too."""
    torch._dynamo.reset()
    kind = KINDS["Llama, grouped"]
    model = build(kind).eval()
    expected = LogitMonitor(model, LEFT).measure()
    changed: Any = model
    if how == "torch.compile(model)":
        changed = torch.compile(model, backend="aot_eager")
    elif how == "layers compiled":
        for layer in model.model.layers:
            layer.compile(backend="aot_eager")
    else:
        model.train().gradient_checkpointing_enable()
    for _ in ("cold", "warm"):
        stats = LogitMonitor(changed, LEFT).measure()
        assert list(stats) == [*kind.names]
        for name, each in stats.items():
            by_hand.assert_measured(each, {s: getattr(expected[name], s) for s in by_hand.STATISTICS}, how)
        evaluate(changed, LEFT)


def maxima_by_hand(model: Any, kind: Kind, micro: list[Batch]) -> Maxima:
    """Of each head over all micro-batches; gradients pile up on the way, as in the step this is the judge of."""
    found: dict[str, list[Tensor]] = {name: [] for name in kind.names}
    for batch in micro:
        for name, (each, pairs) in written(model, kind, batch, backward).items():
            found[name].append(each.logits_BHIJ.masked_fill(~pairs, -torch.inf).amax((0, 2, 3)))
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


def assert_trained_as_by_kimi(kind: Kind, optimizer: tuple[Any, dict[str, Any]], model: Any) -> None:
    twin = copy.deepcopy(model.train())
    make, options = optimizer
    mine, its = make(model.parameters(), **options), make(twin.parameters(), **options)
    threshold = middle(maxima_by_hand(twin, kind, batches(0)))
    clip = QKClip(model, mine, threshold)
    for step in range(3):
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


CLIPPED = ("Llama", "Llama, grouped", "Llama, one key", "GPT-2", "DeepSeek-V3", "nn.TransformerEncoder")


@pytest.mark.parametrize(
    ("kind", "implementation", "optimizer"),
    [*((kind, "sdpa", SGD) for kind in CLIPPED), ("Llama, grouped", "eager", SGD), ("GPT-2", "eager", ADAMW)],
)
def test_three_clipped_steps_are_those_of_kimi_k2(kind: str, implementation: str, optimizer: Any) -> None:
    assert_trained_as_by_kimi(KINDS[kind], optimizer, build(KINDS[kind], implementation))


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_with_gradient_checkpointing_too(reentrant: bool) -> None:
    model = build(KINDS["Llama, grouped"])
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_trained_as_by_kimi(KINDS["Llama, grouped"], SGD, model)
