"""FSDP1 (use_orig_params=True): steps, rates and QK clip as in one process. Judge: the same model without FSDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import engine_runs as runs
from crew import Crew
from engine_runs import Result
from quacklr import QKClip, QuacK, logit_paths

WRAPPED: dict[str, Any] = {
    "layers": lambda module: isinstance(module, LlamaDecoderLayer),
    "linear": lambda module: isinstance(module, nn.Linear) and module.out_features != 61,  # not the tied output layer
    "model": lambda _: False,  # one wrapper, around the whole model
}
HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
QUERY = "model.layers.1.self_attn.q"


def wrapped(of: str = "linear", strategy: str = "FULL_SHARD", model: Any = None, **options: Any) -> Any:
    """A model under FSDP1; with a hybrid strategy, two replicas of a model in two shards, on four ranks."""
    mesh = {"device_mesh": init_device_mesh("cpu", (2, 2))} if strategy in HYBRID else {}
    return FullyShardedDataParallel(
        model or runs.llama(),
        auto_wrap_policy=CustomPolicy(WRAPPED[of]),
        sharding_strategy=ShardingStrategy[strategy],
        device_id=torch.device("cpu"),
        **{"use_orig_params": True, **mesh, **options},
    )


def name_of(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "")


def whole_weights(model: Any) -> dict[str, Tensor]:
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return {name_of(name): param.detach().clone() for name, param in model.named_parameters()}


def steps(model: Any, kind: str, rule: str, paths: Any = None) -> Result:
    optimizer = runs.optimizer_of(model, kind)
    quack = QuacK(paths or model, optimizer, rule=runs.RULES[rule]()) if rule else None
    params = {name_of(name): param for name, param in model.named_parameters()}
    return runs.trained(
        quack,
        lambda number: runs.loss_of(model, number).backward(),
        runs.stepping(optimizer),
        lambda: whole_weights(model),
        params,
    )


def trained(_: int, of: str, strategy: str, kind: str, rule: str) -> Result:
    return steps(wrapped(of, strategy), kind, rule)


@pytest.mark.parametrize(
    ("of", "strategy", "rule", "kind"),
    [
        ("linear", "FULL_SHARD", "frobenius", "AdamW"),
        ("layers", "SHARD_GRAD_OP", "frobenius", "SGD"),
        ("linear", "FULL_SHARD", "spectral", "SGD"),
        ("linear", "HYBRID_SHARD", "frobenius", "AdamW"),
        ("linear", "_HYBRID_SHARD_ZERO2", "frobenius", "SGD"),
    ],
)
def test_fsdp1_steps_as_one_process_does(of: str, strategy: str, rule: str, kind: str, two: Crew, four: Crew) -> None:
    wanted, plain = runs.alone(kind, rule), runs.alone(kind, "")
    crew = four if strategy in HYBRID else two
    found, control = (crew(trained, of, strategy, kind, each) for each in (rule, ""))
    for here, there in zip(found, control, strict=True):
        runs.assert_as_alone(here, there, wanted, plain)
        assert there.counts == [0] * 3
        assert here.counts == [2 if rule == "spectral" else 1] * 3
        assert here.state.keys() == wanted.state.keys()
    starts = [here.layout[QUERY] for here in found]
    if of == "linear":  # both ranks have a part of each weight, and it ends in a row and a head
        assert starts == [(0, 774), (774, 738)] * (len(found) // 2)
        assert 774 % 42 != 0
    else:  # the second rank has no query or key at all
        assert starts == [(0, 1512), (0, 0)]


def test_a_budget_on_fsdp1_is_that_of_one_process(two: Crew) -> None:
    for found in two(trained, "linear", "FULL_SHARD", "AdamW", "budget"):
        runs.assert_budget_as_alone(found, runs.alone("AdamW", "budget"), 1e-5)


class Task(nn.Module):
    """A model as a part of another module, which is wrapped."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


def measured_before(_: int, of: str, strategy: str, inside: bool) -> Result:
    """The paths are measured in one process, before FSDP1 replaces the parameters."""
    inner = runs.llama()
    paths = logit_paths(inner, {"input_ids": runs.batch(0)}, rules=False)
    return steps(wrapped(of, strategy, model=Task(inner) if inside else inner), "SGD", "frobenius", list(paths))


@pytest.mark.parametrize(
    ("of", "strategy", "inside"),
    [
        ("linear", "FULL_SHARD", False),
        ("model", "FULL_SHARD", False),
        ("model", "FULL_SHARD", True),
        ("layers", "SHARD_GRAD_OP", True),
        ("model", "HYBRID_SHARD", False),
    ],
)
def test_paths_measured_before_wrapping_give_the_rates_of_one_process(
    of: str, strategy: str, inside: bool, two: Crew, four: Crew
) -> None:
    wanted = runs.alone("SGD", "frobenius")
    for found in (four if strategy in HYBRID else two)(measured_before, of, strategy, inside):
        for here, there in zip(found.rates, wanted.rates, strict=True):  # measured weights have other names
            torch.testing.assert_close([*here.values()], [*there.values()], rtol=1e-5, atol=1e-6)
        weights = {name.removeprefix("model.") if inside else name: each for name, each in found.weights.items()}
        assert runs.difference(weights, wanted.weights) <= 1e-5


def in_bf16(_: int, rule: str) -> Result:
    """Computed in bf16; FSDP1 steps fp32 ranges."""
    return steps(wrapped(mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)), "SGD", rule)


def test_in_bf16_fsdp1_steps_as_one_process_does(two: Crew) -> None:
    wanted, plain = runs.alone("SGD", "frobenius"), runs.alone("SGD", "")
    for found, control in zip(two(in_bf16, "frobenius"), two(in_bf16, ""), strict=True):
        runs.assert_near_alone(found, control, wanted, plain)


def resumed(_: int, state: Any, weights: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Rates before and after QuacK's state is loaded; QuacK was attached to other weights."""
    model = wrapped()
    for param in model.parameters():
        param.data.mul_(2)
    with QuacK(model, runs.optimizer_of(model, "SGD"), runs.TAU) as quack:
        with FullyShardedDataParallel.summon_full_params(model), torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(weights[name_of(name)])
        before = quack.rates()
        quack.load_state_dict(state)
        return [before, quack.rates()]


def test_a_state_of_one_process_goes_on_under_fsdp1(two: Crew) -> None:
    wanted = runs.alone("SGD", "frobenius")
    for before, after in two(resumed, wanted.state, wanted.weights):
        assert runs.difference(after, wanted.rates[-1]) <= 2e-6
        assert runs.difference(after, before) > 1e-3


def clipped(rank: int, of: str, strategy: str, different: bool) -> dict[str, Tensor]:
    """With `different`, each rank has batches of its own."""
    model = wrapped(of, strategy)
    step = runs.stepping(optimizer := runs.optimizer_of(model, "SGD"))
    with QKClip(model, optimizer, threshold=runs.THRESHOLD):
        for number in range(3):
            runs.loss_of(model, number + (10 * rank if different else 0)).backward()
            step()
    return whole_weights(model)


def test_qk_clip_on_fsdp1_scales_the_rows_of_one_process(two: Crew, four: Crew) -> None:
    wanted, free = runs.clipped_alone(runs.THRESHOLD), runs.clipped_alone(1e6)
    assert runs.difference(wanted, free) > 0.01
    for found in (*two(clipped, "layers", "FULL_SHARD", False), *four(clipped, "linear", "HYBRID_SHARD", False)):
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
    model = wrapped()
    quack = QuacK(model, runs.optimizer_of(model, "SGD"), tau=1.0)
    with (
        FullyShardedDataParallel.summon_full_params(model),
        pytest.raises(RuntimeError, match="FSDP1 has gathered it"),
    ):
        quack.rates()
    quack.remove()


def attached_early(_: int) -> None:
    model = runs.llama()
    optimizer = runs.optimizer_of(model, "SGD")
    quack = QuacK(model, optimizer, tau=1.0, verify=False)
    sharded = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    runs.loss_of(sharded, 0).backward()
    with pytest.raises((RuntimeError, ValueError), match="attach"):
        optimizer.step()
    quack.remove()


def test_flat_vectors_gathered_parameters_and_attaching_before_wrapping_are_errors(two: Crew) -> None:
    two(refused)
    two(attached_early)
