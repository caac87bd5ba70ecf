"""DeepSpeed, ZeRO stages 0 to 3: steps and rates as in one process. Judge: the same model without DeepSpeed.

`control` is DeepSpeed without QuacK: its weights differ from those of one process by rounding.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode

import deepspeed_runs as ds
import engine_runs as runs
from crew import Crew
from engine_runs import TAU, Result
from quacklr import Budget, Paper, QKClip, QuacK, spectral


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


def trained(_: int, kind: str, stage: int, with_quack: bool, dtype: str, settings: Any, options: Any) -> Result:
    engine = ds.engine_of(kind, stage, dtype, **settings)
    quack = QuacK(engine.module, engine, verify=False, **options) if with_quack else None
    counts = []  # CommDebugMode allows no forward in a step, so rules are not verified here

    def step(number: int) -> None:
        ds.backward(engine, number)
        with CommDebugMode() as comm:
            ds.step(engine)
        counts.append(comm.get_total_counts())

    found = runs.trained(quack, step, lambda: ds.whole_weights(engine), dict(engine.module.named_parameters()))
    found.counts = counts
    engine.destroy()
    return found


def both(
    ranks: Crew, kind: str, stage: int, dtype: str = "float32", settings: Any = None, options: Any = None
) -> list[tuple[Result, Result]]:
    """For each rank: with QuacK and without."""
    given = options or {"tau": TAU}
    found = ranks(trained, kind, stage, True, dtype, settings or {}, given)
    return list(zip(found, ranks(trained, kind, stage, False, dtype, settings or {}, {}), strict=True))


@pytest.mark.parametrize(
    ("stage", "kind", "settings"),
    [
        (0, "SGD", {}),
        (1, "AdamW", {}),
        (2, "SGD", {}),
        (2, "AdamW", ROUND_ROBIN),
        (3, "SGD", {}),
        (3, "AdamW", {}),
        (1, "SGD", OFFLOAD),
    ],
)
def test_every_stage_steps_as_one_process_does(stage: int, kind: str, settings: Any, ranks: Crew) -> None:
    wanted, plain = runs.alone(kind, True), runs.alone(kind, False)
    for found, control in both(ranks, kind, stage, settings=settings):
        runs.assert_as_alone(found, control, wanted, plain)
        extra = [here - there for here, there in zip(found.counts, control.counts, strict=True)]
        assert extra == [0 if stage == 0 else 1] * 3, "one collective for any number of param groups and sub-groups"


def test_ranges_end_in_a_row_and_a_head_and_a_rank_may_have_none(ranks: Crew) -> None:
    """The layouts that the test above judges."""
    name = "model.layers.{}.self_attn.{}"
    one, other = (found.layout for found, _ in both(ranks, "SGD", 1))
    assert one[name.format(1, "k")] == (0, 736)
    assert other[name.format(1, "k")] == (736, 20)
    row, column = divmod(736, 42)
    assert column != 0
    assert row % 6 != 0, "a head has 6 rows"
    assert one[name.format(2, "q")] == other[name.format(0, "q")] == (0, 0)


def test_the_spectral_norm_of_flat_ranges_is_that_of_one_process(ranks: Crew) -> None:
    wanted, plain = runs.alone("SGD", True, rule=Paper(runs.TAU, norm=spectral)), runs.alone("SGD", False)
    for found, control in both(ranks, "SGD", 1, options={"rule": Paper(TAU, norm=spectral)}):
        runs.assert_as_alone(found, control, wanted, plain)


def test_a_budget_is_that_of_one_process(ranks: Crew) -> None:
    """If all weights of a head step together. Param groups and sub-groups share a budget, as several optimizers do."""
    wanted = runs.alone("one group", True, rule=Budget(0.02))
    assert runs.moved(wanted.rates[-1], 1.0) > 0.1
    together = {"zero": {"sub_group_size": 10**9}}
    for found in ranks(trained, "one group", 3, True, "float32", together, {"rule": Budget(0.02)}):
        largest = max(float(rate.max()) for rate in wanted.rates[-1].values())
        assert runs.rates_difference(found, wanted) <= 1e-4 * largest
        assert runs.difference(found.weights, wanted.weights) <= 1e-4


@pytest.mark.parametrize(("stage", "dtype"), [(0, "bfloat16"), (1, "bfloat16"), (2, "float16"), (3, "bfloat16")])
def test_in_16_bits_the_fp32_copies_are_measured_and_scaled(stage: int, dtype: str, ranks: Crew) -> None:
    """A step is smaller than the rounding of the 16-bit weights, so rates of these would not change."""
    wanted = runs.alone_in_16_bits("SGD", True, getattr(torch, dtype))
    plain = runs.alone_in_16_bits("SGD", False, getattr(torch, dtype))
    for found, control in both(ranks, "SGD", stage, dtype):
        assert runs.moved(wanted.rates[-1]) > 0.02
        assert runs.rates_difference(found, wanted) <= 0.1 * TAU * runs.moved(wanted.rates[-1])
        effect = runs.mean_difference(wanted.weights, plain.weights)
        assert runs.mean_difference(found.weights, wanted.weights) < 0.25 * effect, "rounding in 16 bits differs"
        assert runs.mean_difference(control.weights, plain.weights) < 0.25 * effect


def accumulated(_: int, stage: int) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    engine = ds.engine_of("SGD", stage, gradient_accumulation_steps=2)
    with QuacK(engine.module, engine.optimizer, TAU) as quack:
        rates = []
        for number in range(4):
            ds.backward(engine, number)
            ds.step(engine)
            rates.append(quack.rates())
    weights = ds.whole_weights(engine)
    engine.destroy()
    return rates, weights


@pytest.mark.parametrize("stage", [2, 3])
def test_rates_change_once_for_all_accumulated_gradients(stage: int, ranks: Crew) -> None:
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
    for rates, weights in ranks(accumulated, stage):
        for here, there in zip(rates, wanted, strict=True):
            assert runs.difference(here, there) <= 2e-6
        assert runs.difference(weights, dict(model.named_parameters())) <= 1e-5


def saved(_: int, kind: str, stage: int, folder: Path, settings: Any) -> list[dict[str, Tensor]]:
    """Save after two steps, and take two more; the rates after these."""
    engine = ds.engine_of(kind, stage, **settings)
    rates = []
    with QuacK(engine.module, engine, TAU) as quack:
        for number in range(4):
            if number == 2:
                ds.quietly(engine.save_checkpoint, folder, client_state={"quack": quack.state_dict()})
            ds.backward(engine, number)
            ds.step(engine)
            rates.append(quack.rates())
    engine.destroy()
    return rates[2:]


def loaded(_: int, kind: str, stage: int, folder: Path, settings: Any) -> list[dict[str, Tensor]]:
    """Load into a new engine, and take the last two steps."""
    engine = ds.engine_of(kind, stage, **settings)
    with torch.no_grad():
        for param in engine.module.parameters():
            param.mul_(1.5)  # QuacK is attached to other weights than the saved run began with
    rates = []
    with QuacK(engine.module, engine, TAU) as quack:
        _, client = ds.quietly(engine.load_checkpoint, folder)
        quack.load_state_dict(client["quack"])
        for number in (2, 3):
            ds.backward(engine, number)
            ds.step(engine)
            rates.append(quack.rates())
    engine.destroy()
    return rates


@pytest.mark.parametrize("stage", [2, 3])
def test_a_checkpoint_of_deepspeed_goes_on_with_the_same_rates(stage: int, ranks: Crew, tmp_path: Path) -> None:
    wanted = ranks(saved, "AdamW", stage, tmp_path, {})[0]
    assert runs.moved(wanted[-1]) > 0.02
    for found in ranks(loaded, "AdamW", stage, tmp_path, {}):
        for here, there in zip(found, wanted, strict=True):
            assert runs.difference(here, there) == 0


@pytest.mark.parametrize(("stage", "kind"), [(1, "AdamW"), (2, "AdamW"), (3, "one group")])
def test_a_universal_checkpoint_goes_on_with_another_number_of_processes(
    stage: int, kind: str, ranks: Crew, three: Crew, tmp_path: Path
) -> None:
    """Stage 3 has one sub-group: DeepSpeed loads the settings of the first group and one step counter for all."""
    settings = {"zero": {"sub_group_size": 10**9}} if stage == 3 else {}
    wanted = ranks(saved, kind, stage, tmp_path, settings)[0]
    assert runs.moved(wanted[-1]) > 0.02
    ranks(ds.make_universal, tmp_path)
    for found in three(loaded, kind, stage, tmp_path, settings | {"checkpoint": {"load_universal": True}}):
        for here, there in zip(found, wanted, strict=True):
            assert runs.difference(here, there) <= 2e-6


def forgotten(_: int, folder: Path) -> None:
    engine = ds.engine_of("AdamW", 2)
    ds.backward(engine, 0)
    ds.step(engine)
    ds.quietly(engine.save_checkpoint, folder)
    with QuacK(engine.module, engine, TAU):
        ds.quietly(engine.load_checkpoint, folder)
        ds.backward(engine, 0)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            engine.step()
        assert any("the optimizer's state was loaded but QuacK's was not" in str(each.message) for each in seen)
    engine.destroy()


def test_a_checkpoint_without_the_state_triggers_a_warning(ranks: Crew, tmp_path: Path) -> None:
    ranks(forgotten, tmp_path)


def attached_early(_: int, stage: int) -> None:
    model = runs.llama()
    optimizer = runs.optimizer_of(model, "SGD")
    quack = QuacK(model, optimizer, TAU, verify=False)
    engine = ds.initialize(model, optimizer, stage)
    ds.backward(engine, 0)
    with pytest.raises(RuntimeError, match=r"weights on the paths are no longer in .* as deepspeed\.initialize"):
        ds.step(engine)
    quack.remove()
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_attaching_before_initialize_is_an_error(stage: int, ranks: Crew) -> None:
    ranks(attached_early, stage)


def not_read(_: int) -> None:
    engine = ds.engine_of("SGD", 3)
    zero = engine.optimizer
    for attribute, value, message in (
        ("swap_optimizer", True, "offload of the optimizer to NVMe"),
        ("backup_optimizer", object(), "partial offload"),
        ("zero_hpz_partition_size", 2, r"ZeRO\+\+"),
        ("zenflow", True, "ZenFlow"),
    ):
        kept = getattr(zero, attribute, None)
        setattr(zero, attribute, value)
        for attach in (QuacK, QKClip):
            with pytest.raises(ValueError, match=rf"DeepSpeed's {message}.* cannot read, .*; (use|offload)"):
                attach(engine.module, engine)
        delattr(zero, attribute) if kept is None else setattr(zero, attribute, kept)
    kind = type(zero)
    zero.__class__ = type("MiCS_Optimizer", (kind,), {"__module__": kind.__module__})
    with pytest.raises(ValueError, match="DeepSpeed's MiCS_Optimizer keeps its weights"):
        QuacK(engine.module, zero)
    zero.__class__ = kind
    quack = QuacK(engine.module, engine)
    with pytest.raises(ValueError, match="another QuacK is attached"):
        QuacK(engine.module, zero)
    zero.fp32_partitioned_groups_flat[0] = zero.fp32_partitioned_groups_flat[0].clone()
    ds.backward(engine, 0)
    with pytest.raises(RuntimeError, match="DeepSpeed has put other tensors into the param groups since QuacK was"):
        ds.step(engine)
    quack.remove()
    engine.destroy()


def test_what_cannot_be_read_is_refused_by_name(ranks: Crew) -> None:
    ranks(not_read)


def frozen_keys(_: int, stage: int) -> dict[str, Tensor]:
    """Rates after three steps in which the keys are frozen, and their norms count all the same."""
    model = runs.llama()
    for name, param in model.named_parameters():
        param.requires_grad_("k_proj" not in name)
    engine = ds.initialize(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0), stage)
    with QuacK(engine.module, engine, rule=Paper(TAU, norm=spectral)) as quack:
        for number in range(2):
            ds.backward(engine, number)
            ds.step(engine)
        state = {name: value.clone() for name, value in quack.state_dict()["sensitivity"].items()}
    engine.destroy()
    return state


@pytest.mark.parametrize("stage", [2, 3])
def test_frozen_keys_count_in_the_rates_of_their_queries(stage: int, ranks: Crew) -> None:
    wanted = QuacK(model := runs.llama(), runs.optimizer_of(model, "SGD"), rule=Paper(norm=spectral)).state_dict()[
        "sensitivity"
    ]
    for found in ranks(frozen_keys, stage):
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
    engine = ds.initialize(model, runs.optimizer_of(model, "SGD"), 3)
    quack = QuacK(engine.module, engine, TAU)
    params = dict(engine.module.named_parameters())

    def step(number: int) -> None:
        ds.backward(engine, number)
        ds.step(engine)

    found = runs.trained(quack, step, lambda: ds.whole_weights(engine), params)
    engine.destroy()
    return found


def test_a_model_made_under_zero_init_steps_as_one_process_does(ranks: Crew) -> None:
    wanted = runs.alone("SGD", True)
    for found in ranks(sharded_at_birth):
        assert runs.rates_difference(found, wanted) <= 2e-6
        assert runs.difference(found.weights, wanted.weights) <= 1e-5


def clipped(_: int, stage: int) -> tuple[dict[str, Tensor], int]:
    engine = ds.engine_of("SGD", stage)
    clip = QKClip(engine.module, engine, threshold=runs.THRESHOLD)
    for number in range(3):
        ds.backward(engine, number)
        with CommDebugMode() as comm:
            ds.step(engine)
    clip.remove()
    weights = ds.whole_weights(engine)
    engine.destroy()
    return weights, int(comm.get_total_counts())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_qk_clip_scales_the_flat_ranges(stage: int, ranks: Crew) -> None:
    wanted, free = runs.clipped_alone(runs.THRESHOLD), runs.clipped_alone(1e6)
    assert runs.difference(wanted, free) > 0.01
    for found, _ in ranks(clipped, stage):
        assert runs.difference(found, wanted) <= 1e-5


def written_by_hand(_: int, stage: int) -> tuple[float, list[int]]:
    """The factor that is left, one step after a weight was halved; and how many weights DeepSpeed's own getter misses.

    The second is without and with round_robin_gradients.
    """
    from deepspeed.utils import safe_get_full_fp32_param  # type: ignore[import-untyped]

    engine = ds.engine_of("SGD", stage)
    engine.optimizer.optimizer.param_groups[0]["lr"] = engine.optimizer.optimizer.param_groups[1]["lr"] = 1e-9
    weight = engine.module.get_parameter("model.layers.0.self_attn.q_proj.weight")
    before = weight.detach().clone()
    weight.data.mul_(0.5)
    ds.backward(engine, 0)
    ds.step(engine)
    left = float((weight.detach() / before).mean())
    engine.destroy()
    wrong = []
    for settings in ({}, ROUND_ROBIN):
        engine = ds.engine_of("SGD", stage, **settings)
        read = [(param, safe_get_full_fp32_param(param)) for param in engine.module.parameters()]
        wrong.append(sum(whole is None or not torch.equal(param.detach(), whole) for param, whole in read))
        engine.destroy()
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
