"""The monitor's four numbers are those of transformers' attentions written out by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import by_hand
from quacklr import LogitMonitor
from tiny_models import build as tiny
from tiny_models import tiny_config

BATCH, TOKENS = 2, 11
LLAMA = ["model.layers.0.self_attn", "model.layers.1.self_attn"]
GPT2 = ["transformer.h.0.attn", "transformer.h.1.attn"]


@dataclass(frozen=True)
class Kind:
    """A type of transformers, its attentions, and how they are written by hand."""

    model_type: str
    by_hand: Callable[[Any, dict[str, Any]], by_hand.Written]
    implementations: tuple[str, ...]
    names: list[str] = field(default_factory=lambda: LLAMA)
    windows: tuple[int | None, ...] = (None, None)
    changes: dict[str, Any] = field(default_factory=dict)


KINDS = {
    "Llama, grouped": Kind("llama", by_hand.grouped, ("eager", "sdpa")),
    "GPT-2, baddbmm": Kind("gpt2", by_hand.fused, ("eager",), GPT2, changes={"reorder_and_upcast_attn": True}),
    "Gemma 2": Kind(
        "gemma2",
        by_hand.grouped,
        ("eager", "flex_attention"),
        windows=(4, None),
        changes={"sliding_window": 4, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 9},
    ),
    "DeepSeek-V3": Kind("deepseek_v3", by_hand.latent, ("sdpa",)),
    "GPT-OSS": Kind("gpt_oss", by_hand.grouped, ("eager",), windows=(4, None), changes={"sliding_window": 4}),
}


def build(kind: Kind, implementation: str, seed: int = 0) -> Any:
    """Tiny, with weights large enough that shares are uneven."""
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    torch.manual_seed(seed)
    model = auto.from_config(tiny_config(kind.model_type, **kind.changes), attn_implementation=implementation)
    return randomised(model.eval(), seed)


@torch.no_grad()
def randomised(model: nn.Module, seed: int, by: float = 0.2) -> Any:
    noise = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(by * torch.randn(parameter.shape, generator=noise))
    return model


def probe(padding: str = "left") -> dict[str, Tensor]:
    mask = torch.ones(BATCH, TOKENS, dtype=torch.long)
    if padding == "left":
        mask[1, :3] = 0
    if padding == "right":
        mask[0, -4:] = 0
    tokens = torch.randint(0, 256, (BATCH, TOKENS), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens} | ({} if padding == "none" else {"attention_mask": mask})


@torch.no_grad()
def written(model: Any, kind: Kind, batch: dict[str, Tensor]) -> dict[str, tuple[by_hand.Written, Tensor]]:
    """Each attention by hand, checked against what the model's gives, and the pairs that may be looked at."""
    found = {}
    mask = batch.get("attention_mask", torch.ones(BATCH, TOKENS))
    heard = by_hand.calls(model, kind.names, lambda: model(**batch))
    for name, window in zip(kind.names, kind.windows, strict=True):
        ((given, out),) = heard[name]
        each, pairs = kind.by_hand(model.get_submodule(name), given), by_hand.allowed(mask, window=window)
        each.check(pairs, out)
        assert float((each.logits_BHIJ * pairs).std()) > 0.3
        found[name] = each, pairs
    return found


def assert_as_by_hand(kind: Kind, implementation: str, padding: str) -> None:
    """Three measurements: the first, one after a random change that is not kept, and another since the first."""
    model, batch = build(kind, implementation), probe(padding)
    monitor, before = LogitMonitor(model, batch), None
    for keep in (True, False, True):
        now, stats = written(model, kind, batch), monitor.measure(keep)
        assert list(stats) == kind.names
        for name, (each, pairs) in now.items():
            expected = by_hand.statistics(each, pairs, before[name][0] if before else None)
            assert all(value.isfinite().all() for key, value in expected.items() if key != "mean_change" or before)
            by_hand.assert_measured(stats[name], expected, name)
            for statistic in by_hand.STATISTICS:
                assert getattr(stats[name], statistic).dtype == torch.float32
        before = before or now
        randomised(model, seed=2 + keep, by=0.05)


@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize(
    ("kind", "implementation"), [(k, i) for k, kind in KINDS.items() for i in kind.implementations]
)
def test_the_four_statistics_are_those_of_the_attention_by_hand(kind: str, implementation: str) -> None:
    with torch.compiler.set_stance("force_eager"):  # compiling flex attention takes 15 seconds a model
        assert_as_by_hand(KINDS[kind], implementation, "left")


@pytest.mark.parametrize("padding", ["none", "right"])
def test_without_padding_and_with_right_padding_too(padding: str) -> None:
    assert_as_by_hand(KINDS["Llama, grouped"], "sdpa", padding)


@torch.no_grad()
def test_alberts_shared_layer_is_measured_at_each_of_its_calls() -> None:
    import transformers

    auto: Any = transformers.AutoModel
    torch.manual_seed(0)
    model = auto.from_config(tiny_config("albert", num_hidden_layers=3), attn_implementation="eager")
    model, batch = randomised(model, 0).eval(), probe()
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
    model = build(kind, "sdpa")
    expected = LogitMonitor(model, probe()).measure()
    changed: Any = model
    if how == "torch.compile(model)":
        changed = torch.compile(model, backend="aot_eager")
    elif how == "layers compiled":
        for layer in model.model.layers:
            layer.compile(backend="aot_eager")
    else:
        model.train().gradient_checkpointing_enable()
    for _ in ("cold", "warm"):
        stats = LogitMonitor(changed, probe()).measure()
        assert list(stats) == kind.names
        for name, each in stats.items():
            by_hand.assert_measured(each, {s: getattr(expected[name], s) for s in by_hand.STATISTICS}, how)
        with torch.no_grad():
            changed(**probe())


def four_examples(name: str) -> tuple[Any, dict[str, Tensor]]:
    model, batch = tiny(name)
    return model, {key: torch.cat([each, each.flip(1)]) if len(each) == 2 else each for key, each in batch.items()}


def test_heads_are_not_taken_for_as_many_examples() -> None:
    """Four examples, four heads, and chunks after the heads: larger queries of one head are that head's."""
    model, batch = four_examples("reformer")
    monitor = LogitMonitor(model, batch)
    before = monitor.measure()
    name = next(name for name, _ in model.named_parameters() if name.endswith(("query.weight", "query_key.weight")))
    weight = model.get_parameter(name)
    rows = slice(len(weight) // 4 * 2, len(weight) // 4 * 3)
    with torch.no_grad():
        weight[rows] *= 20
    after = monitor.measure()
    module = name.rpartition(".query")[0]
    moved = (after[module].max - before[module].max).abs() > 1e-5
    assert moved.tolist() == [False, False, True, False]


def test_four_heads_and_four_blocks_of_a_sequence_are_no_guess() -> None:
    model, batch = four_examples("big_bird")
    with pytest.raises(ValueError, match=r"attention.self#3: it cannot be seen which .* or of another length"):
        LogitMonitor(model, batch).measure()
