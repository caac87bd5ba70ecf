"""Megatron-core: its GPTModel and its optimizers step as one process does. Judge: the model with torch's optimizer.

There is no GPU, so Megatron's code runs on the CPU under `on_the_cpu` (tests/kit/megatron_runs.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine_runs as runs
import megatron_runs as mg
from crew import Crew
from engine_runs import TAU, Result
from quacklr import QKClip, QuacK, logit_paths

THRESHOLD = 1.0
SELF = "decoder.layers.{}.self_attention.{}"


@pytest.fixture(scope="module")
def ranks() -> Iterator[Crew]:
    """Two ranks of their own: Megatron keeps its process groups in globals."""
    crew = Crew(2)
    yield crew
    crew.stop()


def by_megatron(kind: str, with_quack: bool, options: Any, **model_options: Any) -> Result:
    model, optimizer = mg.megatron_optimizer(mg.gpt(**model_options), kind, **options)
    assert type(optimizer).__name__ == "ChainedOptimizer"
    quack = QuacK([model], optimizer, TAU, verify=False) if with_quack else None
    named = dict(model.module.named_parameters())
    return runs.trained(quack, partial(mg.backward, model, optimizer), optimizer.step, lambda: named, named)


def by_torch(kind: str, with_quack: bool, **model_options: Any) -> Result:
    model = mg.gpt(**model_options)
    optimizer = mg.torch_optimizer(model, kind)
    quack = QuacK(model, optimizer, TAU, verify=False) if with_quack else None
    named, step = dict(model.named_parameters()), runs.stepping(optimizer)
    return runs.trained(quack, lambda number: mg.loss_of(model, number).backward(), step, lambda: named, named)


def compared(_: int, kind: str, options: Any, model_options: Any) -> tuple[Result, Result, Result, Result]:
    """By Megatron with QuacK and without, and by torch with QuacK and without."""
    with mg.on_the_cpu():
        engine = [by_megatron(kind, with_quack, options, **model_options) for with_quack in (True, False)]
        alone = [by_torch(kind, with_quack, **model_options) for with_quack in (True, False)]
        return engine[0], engine[1], alone[0], alone[1]


@pytest.mark.parametrize(
    ("kind", "options", "model_options"),
    [("adam", {}, {}), ("sgd", {"distributed": False}, {}), ("adam", {}, {"mla": True})],
    ids=["DistributedOptimizer", "FP32Optimizer", "MLA"],
)
def test_megatrons_optimizers_step_as_one_process_does(
    kind: str, options: Any, model_options: Any, ranks: Crew
) -> None:
    """The DistributedOptimizer takes Adam only."""
    found = ranks(compared, kind, options, model_options)
    for engine, control, wanted, plain in found:
        runs.assert_as_alone(engine, control, wanted, plain)
        extra = [here - there for here, there in zip(engine.counts, control.counts, strict=True)]
        assert extra == [0 if options else 1] * 3
    if not options and not model_options:
        one, other = (engine.layout[SELF.format(1, "q")] for engine, *_ in found)
        assert one[1] + other[1] == 72 * 42
        assert min(one[1], other[1]) % 42 != 0, "a row is cut"
        assert {engine.layout[SELF.format(2, "q")][1] for engine, *_ in found} == {0, 72 * 42}, "a rank has none"


def in_bf16(_: int, distributed: bool) -> tuple[float, float]:
    """How far rates are from those of the 16-bit weights, and how far they moved."""
    with mg.on_the_cpu():
        kind = "adam" if distributed else "sgd"
        model, optimizer = mg.megatron_optimizer(mg.gpt(dtype=torch.bfloat16), kind, distributed)
        with QuacK(model, optimizer, TAU) as quack:
            for number in range(3):
                mg.backward(model, optimizer, number)
                optimizer.step()
            start, rates = quack.state_dict()["sensitivity"], quack.rates()
            ratios = []
            for number, layer in enumerate(model.module.decoder.layers):
                qkv, name = layer.self_attention.linear_qkv, SELF.format(number, "q")
                key = [each.detach()[12:18].float().flatten() for each in (qkv.weight, qkv.bias)]  # the first key
                ratios.append(float(torch.cat(key).norm() * rates[name][0] / TAU / start[name][0]))
            assert "verified" in repr(quack)
    return max(abs(ratio - 1) for ratio in ratios), runs.moved(rates)


@pytest.mark.parametrize("distributed", [True, False])
def test_in_bf16_rates_are_those_of_the_fp32_copies(distributed: bool, ranks: Crew) -> None:
    for rounding, moved in ranks(in_bf16, distributed):
        assert moved > 0.02
        assert 0 < rounding < 3e-3, "rates follow from the weights, up to the rounding to bf16"


def tensor_parallel(_: int) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Rates of this rank's heads with tensor parallel size 2, and those of all heads in one process."""
    with mg.on_the_cpu():
        wanted = by_torch("adam", True, query_groups=2).rates
    with mg.on_the_cpu(2):
        found = by_megatron("adam", True, {}, tensor_parallel=2, query_groups=2).rates
    return found, wanted


def test_under_tensor_parallelism_each_rank_has_the_rates_of_its_heads(ranks: Crew) -> None:
    for rank, (found, wanted) in enumerate(ranks(tensor_parallel)):
        assert runs.moved(wanted[-1]) > 0.02
        for here, there in zip(found, wanted, strict=True):
            for name, rates in here.items():
                torch.testing.assert_close(rates, there[name].chunk(2)[rank], rtol=3e-6, atol=0)


def clipped(_: int, model_options: Any) -> tuple[dict[str, Tensor], ...]:
    """Weights after three steps with QK clip: by Megatron, by torch, and by torch with a high threshold."""
    with mg.on_the_cpu():
        model, optimizer = mg.megatron_optimizer(mg.gpt(**model_options), "adam")
        with QKClip([model], optimizer, threshold=THRESHOLD):
            for number in range(3):
                mg.backward(model, optimizer, number)
                optimizer.step()
        found = [weights_of(model.module)]
        for threshold in (THRESHOLD, 1e6):
            alone = mg.gpt(**model_options | {"dtype": torch.float32})
            step = runs.stepping(plain := mg.torch_optimizer(alone, "adam"))
            with QKClip(alone, plain, threshold=threshold):
                for number in range(3):
                    mg.loss_of(alone, number).backward()
                    step()
            found.append(weights_of(alone))
    return tuple(found)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().float().clone() for name, param in model.named_parameters()}


@pytest.mark.parametrize("model_options", [{}, {"mla": True}])
def test_qk_clip_scales_the_weights_as_in_one_process(model_options: Any, ranks: Crew) -> None:
    for found, wanted, free in ranks(clipped, model_options):
        assert runs.difference(wanted, free) > 0.01
        assert runs.difference(found, wanted) <= 1e-5


def test_qk_clip_scales_the_fp32_copies_of_bf16_weights(ranks: Crew) -> None:
    """Where Megatron's own clip raises an error, see below. One process trains in fp32, so weights differ a little."""
    for found, wanted, free in ranks(clipped, {"dtype": torch.bfloat16}):
        for name in (f"decoder.layers.{layer}.self_attention.linear_qkv.weight" for layer in range(3)):
            effect = (wanted[name] - free[name]).abs().mean()
            assert (found[name] - wanted[name]).abs().mean() < 0.25 * effect


def clipped_by_megatron(_: int) -> list[str]:
    """What Megatron's own QK clip does: with fp32 copies in flat ranges, and with one logit above and one below 0."""
    found = []
    with mg.on_the_cpu():
        for dtype in (torch.bfloat16, torch.float32):
            model, _ = mg.megatron_optimizer(mg.gpt(dtype=dtype), "adam")
            for layer in model.module.decoder.layers:
                attention = layer.self_attention
                attention.config.qk_clip, attention.config.qk_clip_threshold = True, 1.0
                attention.core_attention.current_max_attn_logits = torch.tensor([4.0, 4.0, -4.0, -4.0, 0.5, 0.5])
                try:
                    attention.clip_qk()
                    found.append("nan" if attention.linear_qkv.weight.isnan().any() else "clipped")
                except (AttributeError, RuntimeError) as error:
                    found.append(type(error).__name__)
    return found


def test_what_the_docs_say_of_megatrons_own_qk_clip(ranks: Crew) -> None:
    """docs/qk_clip.md. If this fails with a new Megatron, the page has to be changed."""
    one, other = ranks(clipped_by_megatron)
    assert one == ["AttributeError", "RuntimeError", "RuntimeError", *["nan"] * 3]
    assert other == ["RuntimeError", "RuntimeError", "AttributeError", *["nan"] * 3]


def mla_in_parallel(_: int) -> None:
    with mg.on_the_cpu(2):
        model, optimizer = mg.megatron_optimizer(mg.gpt(mla=True, tensor_parallel=2), "adam")
        with pytest.raises(ValueError, match=r"all heads read it, and tensor parallelism divides the heads"):
            QuacK(model, optimizer, tau=1.0)
        model, optimizer = mg.megatron_optimizer(mg.gpt(tensor_parallel=2, query_groups=2), "adam")
        with pytest.raises(ValueError, match="cut by tensor parallelism, so no process has all heads, and QK clip"):
            QKClip(model, optimizer)


def test_a_weight_of_all_heads_is_refused_under_tensor_parallelism(ranks: Crew) -> None:
    ranks(mla_in_parallel)


def not_read(_: int) -> None:
    with mg.on_the_cpu():
        model, optimizer = mg.megatron_optimizer(mg.gpt(), "adam")
        config = optimizer.chained_optimizers[0].config
        for setting, name in (
            ("use_precision_aware_optimizer", "precision-aware optimizer"),
            ("optimizer_cpu_offload", "offload of the optimizer to the CPU"),
        ):
            setattr(config, setting, True)
            with pytest.raises(ValueError, match=f"Megatron's {name} .*; set {setting}=False"):
                QuacK(model, optimizer, tau=1.0)
            setattr(config, setting, False)
        optimizer.__class__ = type("LayerWiseDistributedOptimizer", (kind := type(optimizer),), {})
        with pytest.raises(ValueError, match="Megatron's LayerWiseDistributedOptimizer keeps"):
            QuacK(model, optimizer, tau=1.0)
        optimizer.__class__ = kind
        with pytest.raises(ValueError, match="a list of 2 modules, as with Megatron's virtual pipeline"):
            QuacK([model, model], optimizer, tau=1.0)
        with pytest.raises(ValueError, match="QK norm"):
            logit_paths(mg.gpt(qk_norm=True))


def test_what_cannot_be_read_is_refused_by_name(ranks: Crew) -> None:
    ranks(not_read)


def resumed(_: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Rates of a run of one process, and those after its weights and state are loaded into Megatron."""
    with mg.on_the_cpu():
        saved = by_torch("adam", True)
        model, optimizer = mg.megatron_optimizer(mg.gpt(), "adam")
        with QuacK(model, optimizer, TAU) as quack:
            model.module.load_state_dict(saved.weights, strict=False)
            optimizer.reload_model_params()
            quack.load_state_dict(saved.state)
            return saved.rates[-1], quack.rates()


def test_a_state_of_one_process_goes_on_under_megatron(ranks: Crew) -> None:
    for wanted, found in ranks(resumed):
        assert runs.moved(wanted) > 0.02
        assert runs.difference(wanted, found) <= 2e-6
