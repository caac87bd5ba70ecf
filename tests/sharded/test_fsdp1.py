"""FSDP1 (use_orig_params=True): steps, rates and QK clip as in one process. Judge: the same model without FSDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor.debug import CommDebugMode
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import engine_runs as runs
from crew import Crew
from engine_runs import TAU, Result
from quacklr import Budget, Paper, QKClip, QuacK, logit_paths, spectral
from quacklr.core.norms import Norm, frobenius

WRAPPED: dict[str, Any] = {
    "layers": lambda module: isinstance(module, LlamaDecoderLayer),
    "linear": lambda module: isinstance(module, nn.Linear) and module.out_features != 61,  # not the tied output layer
}
HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


def wrapped(of: str = "layers", strategy: str = "FULL_SHARD", model: Any = None, **options: Any) -> Any:
    return FullyShardedDataParallel(
        model or runs.llama(),
        auto_wrap_policy=CustomPolicy(WRAPPED[of]),
        sharding_strategy=ShardingStrategy[strategy],
        device_id=torch.device("cpu"),
        **{"use_orig_params": True, **options},
    )


def replicated() -> dict[str, Any]:
    """Two replicas of a model in two shards, on four ranks."""
    return {"device_mesh": init_device_mesh("cpu", (2, 2))}


def name_of(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "")


def whole_weights(model: Any) -> dict[str, Tensor]:
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return {name_of(name): param.detach().clone() for name, param in model.named_parameters()}


def trained(_: int, of: str, strategy: str, kind: str, with_quack: bool, options: Any) -> Result:
    model = wrapped(of, strategy, **replicated() if strategy in HYBRID else {})
    optimizer = runs.optimizer_of(model, kind)
    quack = QuacK(model, optimizer, **options) if with_quack else None
    counts = []

    def step(number: int) -> None:
        runs.loss_of(model, number).backward()
        with CommDebugMode() as comm:
            optimizer.step()
        counts.append(comm.get_total_counts())
        optimizer.zero_grad()

    params = {name_of(name): param for name, param in model.named_parameters()}
    found = runs.trained(quack, step, lambda: whole_weights(model), params)
    found.counts = counts
    return found


@pytest.mark.parametrize(
    ("of", "strategy", "norm", "kind"),
    [
        ("linear", "FULL_SHARD", frobenius, "SGD"),
        ("linear", "FULL_SHARD", frobenius, "AdamW"),
        ("layers", "SHARD_GRAD_OP", frobenius, "AdamW"),
        ("linear", "FULL_SHARD", spectral, "SGD"),
    ],
)
def test_fsdp1_steps_as_one_process_does(of: str, strategy: str, norm: Norm, kind: str, two: Crew) -> None:
    options = {"rule": Paper(TAU, norm=norm)}
    wanted, plain = runs.alone(kind, True, rule=Paper(runs.TAU, norm=norm)), runs.alone(kind, False)
    found, control = two(trained, of, strategy, kind, True, options), two(trained, of, strategy, kind, False, {})
    for here, there in zip(found, control, strict=True):
        runs.assert_as_alone(here, there, wanted, plain)
        assert there.counts == [0] * 3
        assert here.counts == [2 if norm is spectral else 1] * 3  # rows are cut: W V is a sum over ranks too
        assert here.state.keys() == wanted.state.keys()
    starts = [here.layout["model.layers.1.self_attn.q"] for here in found]
    if of == "linear":  # both ranks have a part of each weight, and it ends in a row and a head
        assert starts == [(0, 774), (774, 738)]
        assert 774 % 42 != 0
    else:  # the second rank has no query or key at all
        assert starts == [(0, 1512), (0, 0)]


@pytest.mark.parametrize(("strategy", "kind"), [("HYBRID_SHARD", "AdamW"), ("_HYBRID_SHARD_ZERO2", "SGD")])
def test_hybrid_shards_step_as_one_process_does(strategy: str, kind: str, four: Crew) -> None:
    wanted, plain = runs.alone(kind, True), runs.alone(kind, False)
    found, control = (four(trained, "linear", strategy, kind, on, {"tau": TAU} if on else {}) for on in (True, False))
    for here, there in zip(found, control, strict=True):
        runs.assert_as_alone(here, there, wanted, plain)
        assert here.counts == [1] * 3
    layouts = [here.layout["model.layers.1.self_attn.q"] for here in found]
    assert layouts == [(0, 774), (774, 738)] * 2


def measured_before(_: int, of: str) -> Result:
    """The paths are measured in one process, before FSDP1 replaces the parameters."""
    inner = runs.llama()
    paths = logit_paths(inner, {"input_ids": runs.batch(0)}, rules=False)
    model = wrapped(of, model=inner)
    optimizer = runs.optimizer_of(model, "SGD")

    def step(number: int) -> None:
        runs.loss_of(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()

    return runs.trained(QuacK(paths, optimizer, TAU), step, lambda: whole_weights(model), {})


@pytest.mark.parametrize("of", WRAPPED)
def test_paths_measured_before_wrapping_give_the_rates_of_one_process(of: str, two: Crew) -> None:
    wanted = runs.alone("SGD", True)
    for found in two(measured_before, of):
        assert len(found.rates) == len(wanted.rates)
        for here, there in zip(found.rates, wanted.rates, strict=True):  # measured weights have other names
            torch.testing.assert_close([*here.values()], [*there.values()], rtol=1e-5, atol=1e-6)
        assert runs.difference(found.weights, wanted.weights) <= 1e-5


def in_bf16(_: int, with_quack: bool) -> Result:
    """Computed in bf16; FSDP1 steps fp32 ranges."""
    model = wrapped("linear", mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    optimizer = runs.optimizer_of(model, "SGD")
    quack = QuacK(model, optimizer, TAU) if with_quack else None

    def step(number: int) -> None:
        runs.loss_of(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()

    return runs.trained(quack, step, lambda: whole_weights(model), {})


def test_in_bf16_fsdp1_steps_as_one_process_does(two: Crew) -> None:
    """Up to the rounding of gradients: one process computes in fp32."""
    wanted, plain = runs.alone("SGD", True), runs.alone("SGD", False)
    effect = runs.mean_difference(wanted.weights, plain.weights)
    for found, control in zip(two(in_bf16, True), two(in_bf16, False), strict=True):
        assert runs.rates_difference(found, wanted) <= 0.1 * TAU * runs.moved(wanted.rates[-1])
        assert runs.mean_difference(found.weights, wanted.weights) < 0.25 * effect
        assert runs.mean_difference(control.weights, plain.weights) < 0.25 * effect


def test_a_budget_on_fsdp1_is_that_of_one_process(two: Crew) -> None:
    options = {"rule": Budget(0.02)}
    wanted, plain = runs.alone("AdamW", True, rule=Budget(0.02)), runs.alone("AdamW", False)
    for here in two(trained, "linear", "FULL_SHARD", "AdamW", True, options):
        assert runs.moved(wanted.rates[-1], 1.0) > 0.1
        assert runs.difference(wanted.weights, plain.weights) > 1e-3
        assert runs.rates_difference(here, wanted) <= 1e-5 * max(float(r.max()) for r in wanted.rates[-1].values())
        assert runs.difference(here.weights, wanted.weights) <= 1e-5


def resumed(_: int, state: Any, weights: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Rates after loading weights and QuacK's state; QuacK was attached to other weights."""
    model = wrapped("linear")
    with FullyShardedDataParallel.summon_full_params(model), torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
    quack = QuacK(model, runs.optimizer_of(model, "SGD"), TAU)
    with FullyShardedDataParallel.summon_full_params(model), torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(weights[name_of(name)])
    before = quack.rates()
    quack.load_state_dict(state)
    rates = quack.rates()
    quack.remove()
    return [before, rates]


def test_a_state_of_one_process_goes_on_under_fsdp1(two: Crew) -> None:
    wanted = runs.alone("SGD", True)
    factor = {name: weight * 1.5 for name, weight in wanted.weights.items()}
    for before, rates in two(resumed, wanted.state, factor):
        assert runs.difference(rates, {name: rate / 1.5 for name, rate in wanted.rates[-1].items()}) <= 2e-6
        assert runs.difference(rates, before) > 1e-3


def clipped(rank: int, of: str, strategy: str = "FULL_SHARD", different: bool = False) -> dict[str, Tensor]:
    """With `different`, each rank has batches of its own."""
    model = wrapped(of, strategy, **replicated() if strategy in HYBRID else {})
    optimizer = runs.optimizer_of(model, "SGD")
    clip = QKClip(model, optimizer, threshold=runs.THRESHOLD)
    for number in range(3):
        runs.loss_of(model, number + (10 * rank if different else 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    clip.remove()
    return whole_weights(model)


@pytest.mark.parametrize("of", ["linear", "layers"])
def test_qk_clip_on_fsdp1_scales_the_rows_of_one_process(of: str, two: Crew) -> None:
    wanted, free = runs.clipped_alone(runs.THRESHOLD), runs.clipped_alone(1e6)
    assert runs.difference(wanted, free) > 0.01
    for found in two(clipped, of):
        assert runs.difference(found, wanted) <= 1e-5


def test_qk_clip_on_hybrid_shards_scales_the_rows_of_one_process(four: Crew) -> None:
    wanted = runs.clipped_alone(runs.THRESHOLD)
    for found in four(clipped, "linear", "HYBRID_SHARD"):
        assert runs.difference(found, wanted) <= 1e-5
    first, *others = four(clipped, "linear", "HYBRID_SHARD", True)
    assert runs.difference(first, wanted) > 0.01
    for other in others:
        assert runs.difference(first, other) == 0, "replicas are clipped by the largest logits of all ranks"


def refused(_: int) -> None:
    model = wrapped(use_orig_params=False)
    for attach in (QuacK, QKClip):
        with pytest.raises(ValueError, match=r"use_orig_params=False, .*; wrap it with use_orig_params=True, or use"):
            attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model = wrapped("linear")
    quack = QuacK(model, runs.optimizer_of(model, "SGD"))
    with (
        FullyShardedDataParallel.summon_full_params(model),
        pytest.raises(RuntimeError, match="FSDP1 has gathered it"),
    ):
        quack.rates()
    quack.remove()


def test_flat_vectors_of_many_parameters_and_gathered_parameters_are_refused(two: Crew) -> None:
    two(refused)


def attached_early(_: int) -> None:
    model = runs.llama()
    optimizer = runs.optimizer_of(model, "SGD")
    quack = QuacK(model, optimizer, verify=False)
    sharded = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    runs.loss_of(sharded, 0).backward()
    with pytest.raises((RuntimeError, ValueError), match="attach"):
        optimizer.step()
    quack.remove()


def test_attaching_before_wrapping_is_an_error(two: Crew) -> None:
    two(attached_early)
