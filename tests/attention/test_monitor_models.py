"""The monitor's four numbers are those of transformers' attentions written out by hand, and the model is left alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import by_hand
from models import assert_equal
from quacklr import LogitMonitor
from tiny_models import build as tiny
from tiny_models import tiny_config

BATCH, TOKENS = 2, 11
LLAMA = ["model.layers.0.self_attn", "model.layers.1.self_attn"]


@dataclass(frozen=True)
class Kind:
    """A type of transformers, its attentions, and how they are written by hand."""

    model_type: str
    by_hand: Callable[[Any, dict[str, Any]], by_hand.Written]
    implementations: tuple[str, ...]
    names: list[str] = field(default_factory=lambda: LLAMA)
    windows: tuple[int | None, ...] = (None, None)
    changes: dict[str, Any] = field(default_factory=dict)


GPT2 = ["transformer.h.0.attn", "transformer.h.1.attn"]
KINDS = {
    "Llama, grouped": Kind("llama", by_hand.grouped, ("eager", "sdpa", "flex_attention")),
    "Llama, not grouped": Kind("llama", by_hand.grouped, ("sdpa",), changes={"num_key_value_heads": 4}),
    "Llama, one key": Kind("llama", by_hand.grouped, ("eager", "sdpa"), changes={"num_key_value_heads": 1}),
    "GPT-2": Kind("gpt2", by_hand.fused, ("eager", "sdpa"), GPT2),
    "GPT-2, baddbmm": Kind("gpt2", by_hand.fused, ("eager",), GPT2, changes={"reorder_and_upcast_attn": True}),
    "Gemma 2": Kind(
        "gemma2",
        by_hand.grouped,
        ("eager", "flex_attention"),
        windows=(4, None),
        changes={"sliding_window": 4, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 9},
    ),
    "DeepSeek-V3": Kind("deepseek_v3", by_hand.latent, ("eager", "sdpa", "flex_attention")),
    "GPT-OSS": Kind("gpt_oss", by_hand.grouped, ("eager",), windows=(4, None), changes={"sliding_window": 4}),
}
EAGER_OR_SDPA = [(k, i) for k, kind in KINDS.items() for i in kind.implementations if i != "flex_attention"]
FLEX = [k for k, kind in KINDS.items() if "flex_attention" in kind.implementations]


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


def probe(padding: str) -> dict[str, Tensor]:
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


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize(("kind", "implementation"), EAGER_OR_SDPA)
def test_the_four_statistics_are_those_of_the_attention_by_hand(kind: str, implementation: str, padding: str) -> None:
    assert_as_by_hand(KINDS[kind], implementation, padding)


@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("kind", FLEX)
def test_flex_attention_on_cpu_is_measured_too(kind: str) -> None:
    """Uncompiled, for compiling it takes 15 seconds a model."""
    with torch.compiler.set_stance("force_eager"):
        assert_as_by_hand(KINDS[kind], "flex_attention", "left")


def test_a_windows_first_key_is_the_sequences_and_not_each_querys_own() -> None:
    """Judge of the judge: in a sliding layer most queries cannot see the first token, so they give it nothing."""
    kind = KINDS["Gemma 2"]
    each, pairs = written(build(kind, "eager"), kind, probe("none"))[kind.names[0]]
    assert int(pairs[0, 0].sum(1).max()) == 4
    assert float(by_hand.statistics(each, pairs)["sink"].max()) < 0.5
    only_seen = [float(pairs[0, 0, i, 0]) for i in range(TOKENS)]
    assert sum(only_seen) == 4


def test_gpt_oss_sinks_are_in_the_shares_and_not_in_the_maximum() -> None:
    kind = KINDS["GPT-OSS"]
    model = build(kind, "eager")
    quiet = LogitMonitor(model, probe("none")).measure()
    with torch.no_grad():
        model.get_submodule(kind.names[0]).sinks.fill_(30.0)  # above every logit: nearly all of the share
    loud = LogitMonitor(model, probe("none")).measure()
    torch.testing.assert_close(loud[kind.names[0]].max, quiet[kind.names[0]].max)
    torch.testing.assert_close(loud[kind.names[0]].sink, torch.ones(4))
    assert float(loud[kind.names[0]].entropy.max()) < 1e-3


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("padding", ["none", "left", "right"])
@torch.no_grad()
def test_alberts_shared_layer_is_measured_at_each_of_its_calls(implementation: str, padding: str) -> None:
    import transformers

    auto: Any = transformers.AutoModel
    torch.manual_seed(0)
    model = auto.from_config(tiny_config("albert", num_hidden_layers=3), attn_implementation=implementation)
    model, batch = randomised(model, 0).eval(), probe(padding)
    name = "encoder.albert_layer_groups.0.albert_layers.0.attention"
    monitor, before = LogitMonitor(model, batch), None
    pairs = by_hand.allowed(batch.get("attention_mask", torch.ones(BATCH, TOKENS)), causal=False)
    for _ in range(2):
        attention, stats = model.get_submodule(name), monitor.measure()
        heard = by_hand.calls(model, [name, f"{name}.dense"], lambda: model(**batch))
        now = [by_hand.shared(attention, given) for given, _ in heard[name]]
        for each, (_, out) in zip(now, heard[f"{name}.dense"], strict=True):
            each.check(pairs, out)
        assert list(stats) == [name, f"{name}#2", f"{name}#3"]
        for i, measured in enumerate(stats.values()):
            expected = by_hand.statistics(now[i], pairs, before[i] if before else None)
            by_hand.assert_measured(measured, expected, f"{implementation} call {i}")
        before = now
        randomised(model, seed=5, by=0.05)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_measuring_leaves_every_bit_of_the_model_and_of_the_random_state(implementation: str) -> None:
    """GPT-2, whose dropout is on, in the middle of a step: gradients there, a part of it in eval mode."""
    model = build(KINDS["GPT-2"], implementation).train()
    model.transformer.h[1].eval()
    model(**probe("left"), labels=probe("left")["input_ids"]).loss.backward()
    twin, state = copy.deepcopy(model), torch.get_rng_state()
    grads = [each.grad.clone() for each in model.parameters()]
    monitor = LogitMonitor(model, probe("left"))
    for keep in (True, False):
        monitor.measure(keep)
    assert_equal(torch.get_rng_state(), state)
    assert_equal(dict(model.state_dict()), dict(twin.state_dict()))
    assert_equal(dict(model.named_buffers()), dict(twin.named_buffers()))
    assert_equal([each.grad for each in model.parameters()], grads)
    for module, other_module in zip(model.modules(), twin.modules(), strict=True):
        assert module.training == other_module.training
        assert len(module._forward_hooks) == len(other_module._forward_hooks)
        assert len(module._forward_pre_hooks) == len(other_module._forward_pre_hooks)
    assert model.config._attn_implementation == implementation


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_training_with_dropout_is_bitwise_the_same_when_watched(implementation: str, watched: bool) -> None:
    def trained(watched: bool) -> Any:
        model = build(KINDS["GPT-2"], implementation).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        monitor = LogitMonitor(model, probe("left"))
        torch.manual_seed(3)
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(**probe("none"), labels=probe("none")["input_ids"]).loss
            if watched:
                monitor.measure()
            loss.backward()
            optimizer.step()
        return dict(model.state_dict())

    assert_equal(trained(watched), trained(False))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_model_with_gradient_checkpointing_is_measured_once_and_as_without(reentrant: bool) -> None:
    kind = KINDS["Llama, grouped"]
    model = build(kind, "sdpa")
    plain = LogitMonitor(model, probe("left")).measure()
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    stats = LogitMonitor(model, probe("left")).measure()
    assert list(stats) == kind.names
    assert model.training
    for name in kind.names:
        torch.testing.assert_close(stats[name].max, plain[name].max)
        torch.testing.assert_close(stats[name].sink, plain[name].sink)


@pytest.mark.parametrize(
    ("how", "implementation"),
    [("torch.compile(model)", "eager"), ("model.compile()", "sdpa"), ("layers compiled", "sdpa")],
)
def test_a_compiled_model_is_measured_as_it_is_uncompiled(how: str, implementation: str) -> None:
    """Its names are those of named_modules(), but for torch.compile's _orig_mod, which may stand before them or not."""
    torch._dynamo.reset()
    kind = KINDS["Llama, grouped"]
    model = build(kind, implementation)
    expected = LogitMonitor(model, probe("left")).measure()
    compiled: Any = model
    if how == "torch.compile(model)":
        compiled = torch.compile(model, backend="aot_eager")
    elif how == "model.compile()":
        model.compile(backend="aot_eager")
    else:
        for layer in model.model.layers:
            layer.compile(backend="aot_eager")
    for when in ("cold", "warm"):
        stats = LogitMonitor(compiled, probe("left")).measure()
        assert [name.removeprefix("_orig_mod.") for name in stats] == kind.names
        for measured, name in zip(stats.values(), kind.names, strict=True):
            by_hand.assert_measured(measured, {s: getattr(expected[name], s) for s in by_hand.STATISTICS}, when)
        with torch.no_grad():
            compiled(**probe("left"))


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
