"""DeepSpeed, ZeRO stages 0 to 3: steps and rates as in one process. Judge: the same model without DeepSpeed.

`control` is DeepSpeed without QuacK: its weights differ from those of one process by rounding.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import deepspeed_runs as ds
import engine_runs as runs
from crew import Crew
from engine_runs import TAU, Result
from quacklr import QKClip, QuacK


@pytest.fixture(scope="module")
def ranks() -> Iterator[Crew]:
    """Two ranks of their own: DeepSpeed changes their environment."""
    crew = Crew(2)
    yield crew
    crew.stop()


@pytest.fixture(scope="module")
def three() -> Iterator[Crew]:
    """Another number of ranks, to load checkpoints."""
    crew = Crew(3)
    yield crew
    crew.stop()


ROUND_ROBIN: dict[str, Any] = {"zero": {"round_robin_gradients": True}}
OFFLOAD = {"zero": {"offload_optimizer": {"device": "cpu"}}}


def steps(engine: Any, rule: str) -> Result:
    quack = QuacK(engine.module, engine, rule=runs.RULES[rule](), verify=False) if rule else None
    params = dict(engine.module.named_parameters())
    backward, step = partial(ds.backward, engine), partial(ds.step, engine)
    return runs.trained(quack, backward, step, partial(ds.whole_weights, engine), params)


def trained(_: int, kind: str, stage: int, rule: str, dtype: str, settings: Any) -> Result:
    with ds.engine_of(kind, stage, dtype, **settings) as engine:
        return steps(engine, rule)


def both(
    ranks: Crew, kind: str, stage: int, rule: str = "frobenius", dtype: str = "float32", settings: Any = None
) -> list[tuple[Result, Result]]:
    """For each rank: with QuacK and without."""
    found, control = (ranks(trained, kind, stage, each, dtype, settings or {}) for each in (rule, ""))
    return list(zip(found, control, strict=True))


@pytest.mark.parametrize(
    ("stage", "kind", "rule", "settings"),
    [
        (0, "SGD", "frobenius", {}),
        (1, "SGD", "spectral", {}),
        (1, "SGD", "frobenius", OFFLOAD),
        (2, "AdamW", "frobenius", ROUND_ROBIN),
        (3, "AdamW", "frobenius", {}),
    ],
)
def test_every_stage_steps_as_one_process_does(stage: int, kind: str, rule: str, settings: Any, ranks: Crew) -> None:
    wanted, plain = runs.alone(kind, rule), runs.alone(kind, "")
    most = 0 if stage == 0 else 1 if rule == "frobenius" else 2
    pairs = both(ranks, kind, stage, rule, settings=settings)
    if (stage, rule) == (1, "frobenius"):  # the range of a rank ends in a row and a head of 6 rows, or it has none
        ranges = [[found.layout[f"model.layers.{x}"] for found, _ in pairs] for x in ("1.self_attn.k", "2.self_attn.q")]
        assert ranges[0] == [(0, 17 * 42 + 22), (736, 20)]
        assert ranges[1][0][1] == 0
    for found, control in pairs:
        runs.assert_as_alone(found, control, wanted, plain)
        extra = [here - there for here, there in zip(found.counts, control.counts, strict=True)]
        assert extra == [most] * 3, "whatever the number of param groups and sub-groups"


def test_a_budget_is_that_of_one_process(ranks: Crew) -> None:
    """If all weights of a head step together. Param groups and sub-groups share a budget, as several optimizers do."""
    together = {"zero": {"sub_group_size": 10**9}}
    for found in ranks(trained, "one group", 3, "budget", "float32", together):
        runs.assert_budget_as_alone(found, runs.alone("one group", "budget"), 1e-4)


@pytest.mark.parametrize(
    ("stage", "dtype", "reader", "settings"),
    [
        (0, "bfloat16", "FP16_UnfusedOptimizer", {}),
        (1, "bfloat16", "BF16_Optimizer", {"data_types": {"grad_accum_dtype": "fp32"}}),
        (2, "float16", "DeepSpeedZeroOptimizer", {}),
        (3, "bfloat16", "DeepSpeedZeroOptimizer_Stage3", {}),
    ],
)
def test_in_16_bits_the_fp32_copies_are_measured_and_scaled(
    stage: int, dtype: str, reader: str, settings: Any, ranks: Crew
) -> None:
    """A step is smaller than the rounding of the 16-bit weights, so rates of these would not change."""
    wanted, plain = (runs.alone_in_16_bits(rule, getattr(torch, dtype)) for rule in ("frobenius", ""))
    assert ranks(kind_of_optimizer, stage, dtype, settings) == [reader] * 2
    for found, control in both(ranks, "SGD", stage, "frobenius", dtype, settings):
        runs.assert_near_alone(found, control, wanted, plain)


def kind_of_optimizer(_: int, stage: int, dtype: str, settings: Any) -> str:
    with ds.engine_of("SGD", stage, dtype, **settings) as engine:
        return type(engine.optimizer).__name__


def accumulated(_: int, stage: int) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    settings: Any = {"gradient_accumulation_steps": 2}
    with ds.engine_of("SGD", stage, **settings) as engine, QuacK(engine.module, engine.optimizer, TAU) as quack:
        return [quack.rates() for _ in ds.train(engine, range(4))], ds.whole_weights(engine)


def test_rates_change_once_for_all_accumulated_gradients(ranks: Crew) -> None:
    model = runs.llama()
    optimizer = runs.optimizer_of(model, "SGD")
    wanted = []
    with QuacK(model, optimizer, TAU) as quack:
        for number in range(4):
            (runs.loss_of(model, number) / 2).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
            wanted.append(quack.rates())
    assert runs.difference(wanted[0], wanted[1]) > 1e-3
    for rates, weights in ranks(accumulated, 3):
        for here, there in zip(rates, wanted, strict=True):
            assert runs.difference(here, there) <= 2e-6
        assert runs.difference(weights, dict(model.named_parameters())) <= 1e-5


def saved(_: int, kind: str, stage: int, folder: Path, settings: Any) -> list[dict[str, Tensor]]:
    """Save after two steps, and take two more; the rates after these."""
    with ds.engine_of(kind, stage, **settings) as engine, QuacK(engine.module, engine, TAU) as quack:
        list(ds.train(engine, (0, 1)))
        ds.quietly(engine.save_checkpoint, folder, client_state={"quack": quack.state_dict()})
        return [quack.rates() for _ in ds.train(engine, (2, 3))]


def loaded(_: int, kind: str, stage: int, folder: Path, settings: Any) -> list[dict[str, Tensor]]:
    """Load into a new engine, and take the last two steps."""
    with ds.engine_of(kind, stage, **settings) as engine:
        with torch.no_grad():
            for param in engine.module.parameters():
                param.mul_(1.5)  # QuacK is attached to other weights than the saved run began with
        with QuacK(engine.module, engine, TAU) as quack:
            _, client = ds.quietly(engine.load_checkpoint, folder)
            quack.load_state_dict(client["quack"])
            return [quack.rates() for _ in ds.train(engine, (2, 3))]


@pytest.mark.parametrize(
    ("stage", "kind", "universal"),
    [(2, "AdamW", False), (3, "AdamW", False), (2, "AdamW", True), (3, "one group", True)],
)
def test_a_checkpoint_goes_on_with_the_same_rates_and_a_universal_one_with_another_number_of_processes(
    stage: int, kind: str, universal: bool, ranks: Crew, three: Crew, tmp_path: Path
) -> None:
    """Universal, stage 3 has one sub-group: DeepSpeed loads the first group's settings and one step counter for all."""
    settings: dict[str, Any] = {"zero": {"sub_group_size": 10**9}} if kind == "one group" else {}
    wanted = ranks(saved, kind, stage, tmp_path, settings)[0]
    assert runs.moved(wanted[-1]) > 0.02
    if universal:
        ranks(ds.make_universal, tmp_path)
        settings["checkpoint"] = {"load_universal": True}
    for found in (three if universal else ranks)(loaded, kind, stage, tmp_path, settings):
        for here, there in zip(found, wanted, strict=True):
            assert runs.difference(here, there) <= (2e-6 if universal else 0)


def forgotten(_: int, folder: Path) -> None:
    with ds.engine_of("AdamW", 2) as engine:
        list(ds.train(engine, (0,)))
        ds.quietly(engine.save_checkpoint, folder)
        with QuacK(engine.module, engine, TAU):
            ds.quietly(engine.load_checkpoint, folder)
            ds.backward(engine, 0)
            with warnings.catch_warnings(record=True) as seen:  # pytest.warns would raise torch's warnings
                warnings.simplefilter("always")
                engine.step()
            assert any("the optimizer's state was loaded but QuacK's was not" in str(each.message) for each in seen)


def test_a_checkpoint_without_the_state_triggers_a_warning(ranks: Crew, tmp_path: Path) -> None:
    ranks(forgotten, tmp_path)


def attached_early(_: int, stage: int) -> None:
    model = runs.llama()
    optimizer = runs.optimizer_of(model, "SGD")
    said = r"weights on the paths are no longer in .* as deepspeed\.initialize"
    with QuacK(model, optimizer, TAU, verify=False), ds.initialized(model, optimizer, stage) as engine:
        ds.backward(engine, 0)
        with pytest.raises(RuntimeError, match=said):
            ds.step(engine)


@pytest.mark.parametrize("stage", [2, 3])
def test_attaching_before_initialize_is_an_error(stage: int, ranks: Crew) -> None:
    ranks(attached_early, stage)


def not_read(_: int) -> None:
    with ds.engine_of("SGD", 3) as engine:
        zero = engine.optimizer
        for attribute, value, message in (
            ("swap_optimizer", True, "offload of the optimizer to NVMe"),
            ("backup_optimizer", object(), "partial offload"),
            ("zero_hpz_partition_size", 2, r"ZeRO\+\+"),
            ("zenflow", True, "ZenFlow"),
        ):
            with patch.object(zero, attribute, value, create=True):
                for attach in (QuacK, QKClip):
                    with pytest.raises(ValueError, match=rf"DeepSpeed's {message}.* cannot read, .*; (use|offload)"):
                        attach(engine.module, engine)
        kind = type(zero)
        zero.__class__ = type("MiCS_Optimizer", (kind,), {"__module__": kind.__module__})
        with pytest.raises(ValueError, match="DeepSpeed's MiCS_Optimizer keeps its weights"):
            QuacK(engine.module, zero, tau=1.0)
        zero.__class__ = kind
        with patch.object(engine, "optimizer", None), pytest.raises(ValueError, match="engine has no optimizer; pass"):
            QuacK(engine.module, engine, tau=1.0)
        with QuacK(engine.module, engine, tau=1.0):
            with pytest.raises(ValueError, match="another QuacK is attached"):
                QuacK(engine.module, zero, tau=1.0)
            zero.fp32_partitioned_groups_flat[0] = zero.fp32_partitioned_groups_flat[0].clone()
            ds.backward(engine, 0)
            with pytest.raises(RuntimeError, match="DeepSpeed has put other tensors into the param groups since QuacK"):
                ds.step(engine)


def test_what_cannot_be_read_is_refused_by_name(ranks: Crew) -> None:
    ranks(not_read)


def frozen_keys(_: int, stage: int) -> dict[str, Tensor]:
    """Sensitivities at the start with frozen keys, after two steps."""
    model = runs.llama()
    for name, param in model.named_parameters():
        param.requires_grad_("k_proj" not in name)
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=1.0)
    rule = runs.RULES["spectral"]()
    with ds.initialized(model, optimizer, stage) as engine, QuacK(engine.module, engine, rule=rule) as quack:
        list(ds.train(engine, (0, 1)))
        return {name: value.clone() for name, value in quack.state_dict()["sensitivity"].items()}


@pytest.mark.parametrize("stage", [2, 3])
def test_frozen_keys_count_in_the_rates_of_their_queries(stage: int, ranks: Crew) -> None:
    wanted = runs.alone("SGD", "spectral").state["sensitivity"]
    for found in ranks(frozen_keys, stage):
        assert any(name.endswith("q") for name in found)
        for name, value in found.items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=0)


def sharded_at_birth(_: int) -> Result:
    deepspeed = ds.deepspeed_module()
    config = {**ds.BASE, "zero_optimization": {"stage": 3}, "train_batch_size": 4}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = runs.llama()
    start = runs.llama().state_dict()
    for name, param in model.named_parameters():
        with deepspeed.zero.GatheredParameters([param], modifier_rank=0):
            param.data.copy_(start[name])
    with ds.initialized(model, runs.optimizer_of(model, "SGD"), 3) as engine:
        return steps(engine, "frobenius")


def test_a_model_made_under_zero_init_steps_as_one_process_does(ranks: Crew) -> None:
    wanted = runs.alone("SGD", "frobenius")
    for found in ranks(sharded_at_birth):
        assert runs.rates_difference(found, wanted) <= 2e-6
        assert runs.difference(found.weights, wanted.weights) <= 1e-5


def clipped(_: int, stage: int) -> dict[str, Tensor]:
    with ds.engine_of("SGD", stage) as engine, QKClip(engine.module, engine, threshold=runs.THRESHOLD):
        list(ds.train(engine, range(3)))
        return ds.whole_weights(engine)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_qk_clip_scales_the_flat_ranges(stage: int, ranks: Crew) -> None:
    wanted, free = runs.clipped_alone(runs.THRESHOLD), runs.clipped_alone(1e6)
    assert runs.difference(wanted, free) > 0.01
    for found in ranks(clipped, stage):
        assert runs.difference(found, wanted) <= 1e-5


def written_by_hand(_: int, stage: int) -> tuple[float, list[int]]:
    """The factor that is left, one step after a weight was halved; and how many weights DeepSpeed's own getter misses.

    The second is without and with round_robin_gradients.
    """
    from deepspeed.utils import safe_get_full_fp32_param  # type: ignore[import-untyped]

    with ds.engine_of("SGD", stage) as engine:
        for group in engine.optimizer.optimizer.param_groups:
            group["lr"] = 1e-9
        weight = engine.module.get_parameter("model.layers.0.self_attn.q_proj.weight")
        before = weight.detach().clone()
        weight.data.mul_(0.5)
        list(ds.train(engine, (0,)))
        left = float((weight.detach() / before).mean())
    wrong = []
    for settings in ({}, ROUND_ROBIN):
        with ds.engine_of("SGD", stage, **settings) as engine:
            read = [(param, safe_get_full_fp32_param(param)) for param in engine.module.parameters()]
            wrong.append(sum(whole is None or not torch.equal(param.detach(), whole) for param, whole in read))
    return left, wrong


def test_what_the_docs_say_of_weights_that_are_written_by_hand(ranks: Crew) -> None:
    """docs/qk_clip.md. If this fails with a new DeepSpeed, the page has to be changed."""
    for left, wrong in ranks(written_by_hand, 2):
        assert left == pytest.approx(1.0, abs=1e-6), "the step overwrote it"
        assert wrong[0] == 0
        assert wrong[1] > 0


def trained_by_trainer(_: int, stage: int, folder: Path, resume: bool) -> list[tuple[float, float]]:
    """Trainer with deepspeed= and the callback, four steps; the smallest and largest rates of the last two."""
    from accelerate.state import AcceleratorState, GradientState  # type: ignore[import-untyped]
    from transformers import Trainer, TrainingArguments

    from quacklr.integrations.transformers import QuacKCallback

    ds.deepspeed_module()
    tokens = torch.randint(61, (40, 12), generator=torch.Generator().manual_seed(1))
    config = {"train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True}
    quiet: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "dataloader_pin_memory": False, "logging_steps": 1}
    steps: dict[str, Any] = {"max_steps": 4, "save_steps": 2, "learning_rate": 0.03, "per_device_train_batch_size": 2}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", module="quacklr")
        args = TrainingArguments(
            output_dir=str(folder / f"resumed {resume}"),
            deepspeed=config | {"zero_optimization": {"stage": stage}},
            **quiet | steps,
        )
        rows: Any = [{"input_ids": row, "labels": row} for row in tokens]
        trainer = Trainer(model=runs.llama(), args=args, train_dataset=rows, callbacks=[QuacKCallback(tau=2.0)])
        trainer.train(resume_from_checkpoint=str(folder / "resumed False/checkpoint-2") if resume else None)
    assert type(trainer.optimizer).__name__ == "DeepSpeedOptimizerWrapper"
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    logged = [row for row in trainer.state.log_history if "loss" in row]
    return [(row["quack/rate_min"], row["quack/rate_max"]) for row in logged[2:]]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_training_resumed_by_trainer_has_the_rates_of_the_uninterrupted_one(
    stage: int, ranks: Crew, tmp_path: Path
) -> None:
    wanted = ranks(trained_by_trainer, stage, tmp_path, False)
    assert wanted[0][-1][0] < 0.9 * 2.0
    assert ranks(trained_by_trainer, stage, tmp_path, True) == wanted
